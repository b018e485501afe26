"""`scripts/light_client.py`: what it counts, and that it notices wrong outputs, refusals and a server that ends."""

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tests.host.fakes import Makes
from tests.server.v2.running import Server, double, serving
from tilewright.host.config import ModelConfig

SCRIPT = Path(__file__).parents[3] / "scripts" / "light_client.py"


def asked(server: Server, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a client with four connections."""
    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, str(SCRIPT), url, "m", "--connections", "4", "--seconds", "0.6", "--warmup", "0.2", *words]
    return subprocess.run(command, input="\n", capture_output=True, text=True, timeout=60, check=False)


def stage(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    ready, line = done.stdout.splitlines()
    assert ready == "ready"
    found = json.loads(line)
    assert found["tensors"] == "shared memory"
    return found["stages"][0]


def served(makes: Makes, *words: str, **config: Any) -> tuple[dict[str, Any], Server]:
    model = ModelConfig(**{"source": "a:b", "max_batch": 8, **config})
    with serving({"m": model}, makes=makes, shared_memory=True) as server:
        return stage(asked(server, *words)), server


def test_it_counts_answers_after_the_warm_up() -> None:
    found, server = served(Makes(double, 0.01), "--rows", "2")
    assert found["rejected"] == found["failed"] == 0
    assert not found["problems"]
    # Two batches of four requests with two rows at most in each hundredth of a second, for 0.4 s.
    assert 0 < found["row_rate"] <= 8 / 0.01
    assert 0.01 <= found["latencies"]["e2e"]["p50"] <= found["latencies"]["e2e"]["p99"]
    version = server.host.models["m"].versions[1]
    assert version.stats.inferences >= 0.4 * found["row_rate"] + 2 * 4


def test_it_notices_outputs_of_other_inputs() -> None:
    calls = count()

    def drifts(x: np.ndarray) -> np.ndarray:
        return 2 * x + (next(calls) > 20)

    found, _ = served(Makes(drifts))
    assert found["rejected"] == 0
    assert found["failed"] == 4, "the last answer of each connection"
    assert found["problems"] == {"output 'y' is not that of the same inputs in the body of a request": 4}


def test_it_counts_refusals_apart() -> None:
    found, _ = served(Makes(double, 0.02), max_batch=1, max_waiting=1)
    assert found["rejected"] > 0
    assert found["failed"] == 0
    assert found["problems"] == {"status 429": found["rejected"]}
    assert found["row_rate"] > 0


def test_without_the_model_it_fails() -> None:
    with serving({"other": ModelConfig(source="a:b")}, shared_memory=True) as server:
        done = asked(server)
    assert done.returncode != 0
    assert "404" in done.stderr
