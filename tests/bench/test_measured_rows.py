"""What measures on a GPU, run on a CPU with a stopwatch that is told its times: every row, through the whole command."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tilewright import op as ops_of
from tilewright.bench import layers, op, ops, results
from tilewright.bench.harness import sets_for
from tilewright.bench.provenance import environment
from tilewright.cli import bench
from tilewright.cli.root import app
from tilewright.hw.device import device_named

US = (10.0, 20.0, 40.0, 5.0, 8.0, 9.0, 11.0)


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every timing. Tensors that would be on a GPU are on the CPU; each call is made, so that it is one."""
    asked: list[dict[str, Any]] = []

    def timed(calls: Sequence[Callable[[int], Any]], *, sets: int, **options: Any) -> list[tuple[float, float]]:
        for call in calls:
            call(0)
            call(sets - 1)
        asked.append({"sets": sets, **options})
        return [(us, 0.1) for us in US[: len(calls)]]

    class Here(ops_of.Inputs):
        def __init__(self, device: str, seed: int = 0, *, here: bool = False) -> None:
            super().__init__("meta" if device == "meta" else "cpu", seed)

    for module in (op, ops, layers):
        monkeypatch.setattr(module, "interleaved_us", timed)
    for module in (op, ops):
        monkeypatch.setattr(module, "Inputs", Here)
    for module in (op, layers):
        monkeypatch.setattr(module, "device_of", lambda index: device_named("h100"))
    for module in (ops, layers):  # of tiny tensors there would be 64 sets
        monkeypatch.setattr(module, "sets_for", lambda size: min(2, sets_for(size)))
    randn, rand, randint, arange = torch.randn, torch.rand, torch.randint, torch.arange
    for name, draw in (("randn", randn), ("rand", rand), ("randint", randint), ("arange", arange)):
        monkeypatch.setattr(torch, name, lambda *a, draw=draw, **o: draw(*a, **{**o, "device": o.get("device") and "cpu"}))
    monkeypatch.setattr(layers, "_library", lambda *_: None)
    monkeypatch.setattr(bench, "need_gpu", lambda what: None)
    return asked


def run(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    out = tmp_path / "it.json"
    found = CliRunner().invoke(app, ["bench", *words, "--out", str(out), "--resume"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    content = json.loads(out.read_text())
    assert "incomplete" not in content
    assert content["environment"]["source"] == environment()["source"]
    return results.rows_in(out)[0]


def test_an_op_against_torch(tmp_path: Path, stopwatch: list[dict[str, Any]]) -> None:
    rows = run(tmp_path, "linear", "--shapes", "M=4,N=16,K=32;M=5,N=16,K=24,activation=silu_mul", "--settle", "0.5")
    assert [(row["dims"], row["us"], row["their_us"], row["ratio"]) for row in rows] == [
        ("M=4 N=16 K=32", 10.0, 20.0, 2.0),
        ("M=5 N=16 K=24 activation=silu_mul", 10.0, 20.0, 2.0),
    ]
    assert all(row["kernels"] == {} for row in rows), "on a CPU the definitions run"
    assert all(0 < asked["call_us"] < 1 for asked in stopwatch)
    assert [asked["settle"] for asked in stopwatch] == [0.5, 0.5]
    assert [asked["rounds"] for asked in stopwatch] == [20, 20]


def test_an_op_beside_its_aligned_neighbour(tmp_path: Path, stopwatch: list[dict[str, Any]]) -> None:
    (row,) = run(tmp_path, "linear", "M=4", "N=15", "K=31", "--aligned")
    assert (row["beside"], row["beside_us"], row["of_beside"]) == ("M=4 N=16 K=32", 40.0, 0.25)


def test_layers(tmp_path: Path, stopwatch: list[dict[str, Any]]) -> None:
    rows = run(tmp_path, "layers", "int8", "int4", "--shapes", "1x64x128;4x64x128")
    assert [(row["format"], row["M"], row["us"], row["bf16_us"]) for row in rows] == [
        ("int8", 1, 20.0, 10.0), ("int4", 1, 40.0, 10.0), ("int8", 4, 20.0, 10.0), ("int4", 4, 40.0, 10.0),
    ]  # fmt: skip
    assert all("kernels" in row for row in rows)


def test_operators_that_bytes_limit(tmp_path: Path, stopwatch: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = [("softmax", "4x8", lambda inputs: (torch.randn(4, 8),)), ("softmax", "2x8", lambda inputs: (torch.randn(2, 8),))]
    monkeypatch.setattr(ops, "CASES", tuple(tiny))
    monkeypatch.setattr(ops, "dispatch_overhead_us", lambda device: {"op_us": 1.0})
    rows = run(tmp_path, "ops")
    figures = [(row["shape"], row["us"], row["copy_us"], row["of_copy"]) for row in rows]
    assert figures == [("4x8", 10.0, 20.0, 2.0), ("2x8", 10.0, 20.0, 2.0)]
    again = CliRunner().invoke(app, ["bench", "ops", "--out", str(tmp_path / "it.json"), "--resume"])
    assert again.exit_code == 0, again.output
    assert len(stopwatch) == 2, "what is there is not measured again"
