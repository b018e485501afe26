"""The whole way against a closed engine in a process of its own: traced, exported, run, attributed, compared with the truth."""

import sys
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from tests.bench.compare.fake_engine import FUSED_SHARE, seconds_of
from tilewright.bench.compare.attribution import Design
from tilewright.bench.compare.engine import Settings, engine_of
from tilewright.bench.compare.measure import Contender, race
from tilewright.bench.compare.plan import plan
from tilewright.bench.compare.results import Run
from tilewright.bench.compare.segments import Attribution, attribute

ENGINE = Path(__file__).with_name("fake_engine.py")
SPEED = 1.7
ROUNDS = 32

LAYERS = {
    "0": ("linear", (32, 32)),
    "2": ("layer_norm", (32,)),
    "3": ("linear", (64, 32)),
    "5": ("linear", (64, 64)),
    "6": ("linear", (8, 64)),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8)
    ).eval()  # fmt: skip


def measured(rounds: int, within_s: float, seed: int) -> tuple[list[list[Run]], Design]:
    """Runs of both engines: ours 1.7 times as fast, the baseline with its last two layers fused."""
    module, inputs = model(), (torch.randn(4, 32),)
    planned = plan(module, inputs)
    settings = Settings(device=torch.device("cpu"), threads=1)
    names = [f"cmd:{sys.executable} {ENGINE} {SPEED}", f"cmd:{sys.executable} {ENGINE} 1.0 64x64+8x64"]
    sides = [Contender(name=name, engine=engine_of(name, settings), settings=settings) for name in names]
    try:
        for variant in planned.variants:
            program = torch.export.export(variant.module, variant.inputs)  # once for both
            for side in sides:
                with mock.patch.object(torch.export, "export", lambda module, inputs, program=program: program):
                    built = side.engine.build(variant.module, variant.inputs, variant.name)
                side.built[variant.name], side.call_s[variant.name] = built, built.time(1)
        started = time.monotonic()
        enough = rounds * len(planned.variants)
        race(sides, lambda: len(sides[0].runs) >= enough, started + within_s, seed, started, lambda words: None)
    finally:
        for side in sides:
            side.engine.close()
    return [side.runs for side in sides], planned.design


def judged(found: Attribution) -> tuple[list[float], list[bool]]:
    """Relative errors of every segment's times and ratio, and whether their intervals hold the truth."""
    errors, inside = [], []
    for segment in found.segments:
        true = sum(seconds_of(*LAYERS[name]) for name in segment.layers)
        ours, baseline = true / SPEED, true * (FUSED_SHARE if segment.layers == ["5", "6"] else 1)
        for got, seconds in ((segment.ours, ours), (segment.baseline, baseline), (segment.ratio, baseline / ours)):
            errors.append(abs(got.value / seconds - 1))
            inside.append(got.low <= seconds <= got.high)
    return errors, inside


def test_layers_of_a_closed_engine() -> None:
    """Times within 6 % on average, 90 % of the intervals hold them; what the baseline fuses is one segment on both sides."""
    sides, design = measured(ROUNDS, 8, 0)
    found = attribute(*sides, design, 1.3, draws=400)
    assert [segment.layers for segment in found.segments] == [["0"], ["2"], ["3"], ["5", "6"]]
    assert "the baseline takes" in found.segments[-1].why
    assert found.ours.additive
    assert found.baseline.additive
    errors, inside = judged(found)
    assert sum(errors) / len(errors) <= 0.06
    assert sum(inside) >= 0.9 * len(inside)
    assert [segment.verdict for segment in found.segments] == ["pass", "pass", "pass", "fail"]
    assert found.verdict == "fail"
