"""`scripts/measure_images.py` and `measure_fronts.py` from their server to their last line, with small models on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

NETWORK = """
import torch
from torch import nn
def build():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return net, torch.randn(1, 3, 16, 16)
"""
WORDS = ("--device", "cpu", "--model", "small_net:build", "--size", "16", "--sizes", "1,4", "--offline-sizes", "4")


@pytest.mark.long
def test_the_server_alone_with_fronts(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--model", "first", "--size", "16", "--sizes", "8", "--cases", "1:8:2,2:4:1:bytes,1:8:2:light"]
    words += [
        "--fronts",
        "1",
        "--sleep-ms",
        "2",
        "--seconds",
        "4",
        "--total",
        "200",
        "--offline-seconds",
        "0",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, str(ROOT / "scripts" / "measure_images.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr + (tmp_path / "server.log").read_text()
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    served = [one for one in found if one["what"] == "served"]
    assert [(one["rows"], one["tensors"], one["client"]) for one in served] == [
        (1, "shared memory", "tilewright load"),
        (2, "binary", "tilewright load"),
        (1, "shared memory", "light"),
    ], found
    for one in served:
        assert {"server", "fronts", "model", "clients"} <= set(one["middle"]["cpu"])
        assert 0 < one["rows_per_s"] <= 8 / 0.002
        assert one["p99_ms"] >= one["p50_ms"] >= 2
        assert not one["failed"]


@pytest.mark.long
def test_what_a_request_costs_each_process() -> None:
    words = ["--size", "16", "--connections", "8", "--fronts", "1", "--seconds", "2"]
    command = [sys.executable, str(ROOT / "scripts" / "measure_fronts.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["requests_per_s"] > 0
    assert all(found[role]["us"] > 0 for role in ("server", "fronts", "model", "client"))


@pytest.mark.long
def test_a_small_network(tmp_path: Path) -> None:
    (tmp_path / "small_net.py").write_text(NETWORK)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    words = [*WORDS, "--input", "uint8", "--seconds", "2", "--total", "400", "--out", str(tmp_path / "out")]
    command = [sys.executable, str(ROOT / "scripts" / "measure_images.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=450, check=False)
    log = (tmp_path / "out" / "server.log").read_text()
    assert done.returncode == 0, done.stderr + log
    found = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [one["what"] for one in found] == ["ready", *["served"] * 3, "environment", *["offline"] * 2], (found, log)
    served = [one for one in found if one["what"] == "served"]
    assert [(one["rows"], one["in_flight"], one["tensors"]) for one in served] == [
        (1, 1, "shared memory"),
        (1, 256, "shared memory"),
        (1, 64, "shared memory"),
    ]
    assert all(one["rows_per_s"] > 0 and one["p50_ms"] > 0 and not one["failed"] for one in served), served
    assert all(one["middle"]["cpu"]["server"]["us_per_row"] > 0 for one in served), served
    assert [(one["rows"], one["tensors_in"]) for one in found[-2:]] == [(4, "device"), (4, "host")]
    assert all(one["rows_per_s"] > 0 for one in found[-2:])
