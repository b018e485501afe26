"""`tilewright compare` from end to end, on engines whose layers' times are made up: verdicts, exit codes, what is written."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tilewright.bench.compare import measure
from tilewright.bench.compare.engine import ENGINES, Settings, flat_outputs
from tilewright.bench.compare.results import Comparison, Counter
from tilewright.cli import app

SECONDS = {6: 2e-4, 8: 5e-4}
"""Of a linear layer, by its number of outputs."""


def build() -> tuple[nn.Module, Tensor]:
    """A user's model: three layers."""
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), torch.randn(3, 6)


class Fake:
    """`fake:FACTOR`: every layer takes FACTOR of its time; outputs are right. `fake:wrong` answers with another sign."""

    def __init__(self, option: str, settings: Settings):
        self.wrong = option == "wrong"
        self.factor = 1.0 if self.wrong else float(option)
        self.noise = random.Random(option)
        self.facts: dict[str, Any] = {
            "precision": "fp32", "device": "cpu", "versions": {"fake": "1"}, "threads": settings.threads, "graph": False,
            "copies": "none", "clock": "wall clock",
        }  # fmt: skip

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> Any:
        engine = self
        seconds = 5e-5 + self.factor * sum(SECONDS[m.out_features] for m in module.modules() if isinstance(m, nn.Linear))

        class Built:
            facts: dict[str, Any] = {  # noqa: RUF012
                "inputs": [f"float32[{','.join(map(str, x.shape))}]" for x in inputs],
                "report": {
                    "decisions": [{"anchor": "0", "kind": "bias", "node": "b", "taken": True, "reason": "", "bytes_saved": 8}]
                },
            }

            def time(self, calls: int) -> float:
                return calls * seconds * engine.noise.lognormvariate(0, 0.01)

            operations = ()

            def counters(self) -> list[Counter]:
                found = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
                return [Counter(name=name, seconds=engine.factor * SECONDS[m.out_features]) for name, m in found.items()]

            def outputs(self) -> list[Tensor]:
                return [-x if engine.wrong else x for x in flat_outputs(module(*inputs))]

            def close(self) -> None:
                pass

        return Built()

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ENGINES, "fake", f"{__name__}:Fake")
    monkeypatch.setattr(measure, "_SETTLE_S", 0.0)  # nothing here has a clock that rises
    monkeypatch.chdir(tmp_path)


def compare(*arguments: str) -> Any:
    """The command on the fakes' model, in this process."""
    words = ["compare", "--model", f"{__name__}:build", "--device", "cpu", *arguments]
    result = CliRunner().invoke(app, words, prog_name="tilewright")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("ours", "baseline", "claim", "budget", "code", "words"),
    [
        ("fake:1", "fake:2", "1.5", "20", 0, "✓ pass"),
        ("fake:1", "fake:1.2", "1.5", "20", 1, "✗ fail"),
        ("fake:1", "fake:1.00", "1", "2", 3, "? undecided"),
        ("fake:1", "fake:2", "1.5", "1e-6", 3, "The budget ended before all variants were built"),
    ],
    ids=["pass", "fail", "undecided", "not enough built"],
)
def test_verdicts_are_exit_codes(ours: str, baseline: str, claim: str, budget: str, code: int, words: str) -> None:
    done = compare("--ours", ours, "--baseline", baseline, "--claim", claim, "--budget", budget)
    assert done.exit_code == code, done.stdout + done.stderr
    assert words in " ".join(done.stdout.split())
    assert "whole model" in done.stdout
    if budget == "1e-6":  # one segment is the model as it was measured
        (segment,) = [line.split("│")[3:] for line in done.stdout.splitlines() if "layers)" in line]
        (whole,) = [line.split("│")[3:] for line in done.stdout.splitlines() if "whole model  " in line]
        assert segment[2] == whole[2]
    assert "measuring" in done.stderr


def test_the_whole_model_alone() -> None:
    done = compare("--ours", "fake:1", "--baseline", "fake:2", "--json", "--budget", "20", "--whole", "--no-counters")
    found = Comparison.from_json(json.loads(done.stdout))
    assert done.exit_code == 0
    assert [(side.counters, side.counters_note) for side in (found.ours, found.baseline)] == [([], "")] * 2
    assert set(found.environment["variants"]) == {"whole"}
    assert [s.layers for s in found.segments] == [["0", "2", "4"]]
    assert found.segments[0].ratio == found.ratio
    assert found.ratio.value == pytest.approx(2, rel=0.05)  # a call costs something beside its layers


def test_engines_beside_are_measured_in_the_same_rounds() -> None:
    done = compare("--ours", "fake:1", "--baseline", "fake:2", "--beside", "fake:3", "--budget", "20", "--whole", "--json")
    found = Comparison.from_json(json.loads(done.stdout))
    assert [(claim.engine, claim.equal) for claim in found.claims] == [("fake:2", True), ("fake:3", True)]
    assert [claim.ratio.value for claim in found.claims] == pytest.approx([2, 3], rel=0.05)
    assert all(claim.ratio.low <= claim.ratio.value <= claim.ratio.high for claim in found.claims)


def test_json_is_one_object_and_has_the_truth() -> None:
    done = compare("--ours", "fake:1", "--baseline", "fake:2", "--json", "--budget", "20", "--seed", "3")
    found = Comparison.from_json(json.loads(done.stdout))
    assert (found.claim, found.verdict) == (1.5, "pass")
    assert [s.layers for s in found.segments] == [["0"], ["2"], ["4"]]
    for segment, true in zip(found.segments, (2e-4, 5e-4, 2e-4), strict=True):
        assert segment.ours.low <= true <= segment.ours.high
        assert segment.baseline.value == pytest.approx(2 * true, rel=0.05)
        assert segment.ratio.low <= 2 <= segment.ratio.high
    assert found.ours.engine == "fake:1"
    assert found.ours.output_error < 1e-6
    assert found.ours.precision == "fp32"
    assert found.fusions[0]["anchor"] == "0"
    assert found.environment["seed"] == 3
    assert found.environment["ended"] == "decided"
    counted = {run.variant for run in found.ours.runs}
    assert counted == set(found.environment["variants"]) == {run.variant for run in found.baseline.runs}
    assert {point.name for point in found.card} >= {"precision", "variants", "threads"}
    assert [(one.layers, one.seconds) for one in found.baseline.counters] == [(["0"], 4e-4), (["2"], 1e-3), (["4"], 4e-4)]


@pytest.mark.parametrize(
    ("name", "begins"), [("a.html", "<!doctype html>"), ("a.json", "{"), ("a.md", "#"), ("a.trace.json", "{")]
)
def test_a_report_is_written(name: str, begins: str) -> None:
    done = compare("--ours", "fake:1", "--baseline", "fake:2", "--budget", "2", "--report", name)
    assert f"Wrote {name}" in done.stderr
    text = Path(name).read_text(encoding="utf-8")
    assert text.lower().startswith(begins)
    assert ("traceEvents" in text) == (name == "a.trace.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--ours", "fake:wrong"],
            "fake:wrong, whole: wrong numbers, with an error of 2, while rounding explains at most 0.1; output 0, element",
        ),
        (["--ours", "magic"], "no engine 'magic'; wanted one of eager"),
        (["--ours", "graph"], "engine graph needs a GPU"),
        (["--ours", "fake:1", "--claim", "0"], "wanted both above 0"),
        (["--ours", "fake:1", "--threads", "0"], "threads is 0, wanted 1 to 1024"),
        (["--ours", "fake:1", "--report", "out.pdf"], "ending in .html, .json, .md"),
        (["--ours", "fake:1", "--report", "no/such/out.html"], "wanted a file in an existing folder"),
        (["--ours", "fake:1", "--model", "resnet5000"], "no model 'resnet5000'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_goes_wrong_is_one_line(arguments: list[str], words: str) -> None:
    before = torch.get_num_threads()
    done = compare("--baseline", "fake:1", "--budget", "2", *arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert re.fullmatch(r"error: .+", done.stderr.splitlines()[-1]), done.stderr
    assert words in done.stderr.splitlines()[-1]
    assert torch.get_num_threads() == before
