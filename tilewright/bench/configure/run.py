"""Configures a service: predicts all candidates, measures a few in separate servers, and writes a config file."""

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tilewright.bench.configure.machine import facts_of, this_machine
from tilewright.bench.configure.predict import Facts, Machine, Point, Workload, machines_around, predict
from tilewright.bench.configure.search import Found, Measured, search
from tilewright.bench.load.config import LoadConfig
from tilewright.bench.load.run import load
from tilewright.bench.load.slo import Slo

__all__ = ["Asked", "candidates", "configure", "measured_by_load", "toml"]

MACHINES = 64
SEQUENCES = (4, 8, 16, 32, 64, 128, 256, 512)
STEPS = (256, 512, 1024, 2048, 4096, 8192)
START_S = 600.0
END_S = 30.0
LIMITS = {
    "memory": "more would not fit into its memory",
    "max_seqs": "a larger number of answers at once would be the next to try",
    "objective": "more answers at once would miss the objective",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The task of a search. `replicas`, `quantize` and `kv_cache` are the values that may be chosen."""

    model: str
    slo: Slo
    workload: Workload
    replicas: tuple[int, ...] = (1,)
    quantize: tuple[str | None, ...] = (None,)
    kv_cache: tuple[str | None, ...] = (None,)
    points: int = 15
    seconds: float = 20.0
    """Seconds of a measurement, without its warm-up."""


def candidates(asked: Asked, machine: Machine) -> list[Point]:
    """All configurations that the engine would accept."""
    found = itertools.product(asked.replicas, SEQUENCES, STEPS, asked.quantize, asked.kv_cache)
    return [
        Point(replicas=r, max_seqs=s, max_tokens_per_step=t, quantize=q, kv_cache=k)
        for r, s, t, q, k in found
        if s <= min(t, machine.most_seqs) and t <= machine.most_tokens
    ]


def configure(
    asked: Asked,
    measure: Callable[[Point], float],
    *,
    facts: Facts | None = None,
    machine: Machine | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Found, list[str]]:
    """The best configuration, and the reasons in sentences.

    Raises:
        ValueError: no configuration is predicted to meet the objectives, or a request is longer than the model permits.
    """
    facts = facts or facts_of(asked.model)
    machine = machine or this_machine(facts.parameters * facts.dtype_bytes)
    longest = asked.workload.prompt + asked.workload.output
    if longest > facts.max_model_len:
        raise ValueError(f"a request has {longest} tokens, but the model allows at most {facts.max_model_len}")
    points = candidates(asked, machine)
    others = machines_around(machine, MACHINES)
    predicted = np.array([[predict(p, facts, one, asked.workload, asked.slo).goodput for p in points] for one in others])
    say(f"{len(points)} configurations; at most {asked.points} of them are measured, {asked.seconds:g} s each")

    def shown(one: Measured) -> None:
        say(f"{one.point}: {one.goodput:.2f} good requests/s, predicted {one.predicted:.2f} ({one.why})")

    found = search(points, predicted, measure, budget=asked.points, say=shown)
    return found, _why(found, facts, machine, asked)


def _why(found: Found, facts: Facts, machine: Machine, asked: Asked) -> list[str]:
    of_best = [one.goodput for one in found.measured if one.point == found.point]
    here = predict(found.point, facts, machine, asked.workload, asked.slo)
    lines = [
        f"{found.point}.",
        f"It served {np.mean(of_best):.2f} good requests a second where {asked.slo} is good, in {len(of_best)} of "
        f"{len(found.measured)} measurements.",
        f"Predicted: {here.goodput:.2f}, with {here.batch} answers at once; {LIMITS[here.limit]}.",
    ]
    for point, expected in found.ranked[:2]:
        tried = [one.goodput for one in found.measured if one.point == point]
        said = f"measured {np.mean(tried):.2f}" if tried else f"expected {expected:.2f}, not measured"
        lines.append(f"Next: {point}: {said}.")
    if found.point.quantize or found.point.kv_cache:
        lines.append("A format with fewer bits changes the model's answers: check their quality before you use it.")
    return lines


def toml(model: str, point: Point, why: Sequence[str]) -> str:
    """The file for `tilewright serve --config`. Strings and numbers are written as JSON, which is valid TOML."""
    values = {"model": model, **{name: value for name, value in asdict(point).items() if value is not None}}
    head = [f"# {line}" for line in ("Written by `tilewright configure`.", *why)]
    return "\n".join([*head, *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""])


def measured_by_load(asked: Asked, device: str | None = None) -> Callable[[Point], float]:
    """A function that measures the goodput of a configuration, in requests per second.

    It serves the configuration in a separate process, with as many users as it runs sequences at once. A configuration that
    does not start has a goodput of 0.
    """

    def measure(point: Point) -> float:
        users = point.max_seqs * point.replicas
        config = LoadConfig(
            concurrency=str(users),
            duration=asked.seconds * 1.25,
            warmup=asked.seconds / 4,
            prompt_tokens=str(asked.workload.prompt),
            output_tokens=str(asked.workload.output),
            slo=str(asked.slo) if asked.slo.bounds else None,
        )
        with tempfile.TemporaryDirectory(prefix="tilewright-configure-") as folder:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            path = Path(folder) / "serve.toml"
            more = [f"port = {port}", 'log_level = "error"', "drain_timeout = 1.0"]
            more += [f"device = {json.dumps(device)}"] if device else []
            path.write_text(toml(asked.model, point, ()) + "\n".join(more) + "\n")
            command = [sys.executable, "-m", "tilewright.cli", "serve", "--config", str(path)]
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
                try:
                    if not _ready(f"http://127.0.0.1:{port}/ready", server, point.replicas):
                        return 0.0
                    return asyncio.run(load(f"http://127.0.0.1:{port}", config)).summaries[0].goodput
                finally:
                    server.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        server.wait(END_S)
                    server.kill()

    return measure


def _ready(url: str, server: "subprocess.Popen[bytes]", replicas: int) -> bool:
    """Wait until all replicas of a server are ready; False if it ends instead."""
    end_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end_s:
        with suppress(urllib.error.URLError, OSError, ValueError), urllib.request.urlopen(url, timeout=5) as response:
            said = json.loads(response.read())
            if replicas == 1 or all(one["ready"] for one in said["replicas"]):
                return True
        time.sleep(0.2)
    return False
