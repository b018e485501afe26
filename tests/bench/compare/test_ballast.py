"""Models that are smaller than a call: every layer is told apart all the same, and where that cannot be nothing is claimed."""

import re
from collections import Counter
from itertools import pairwise
from statistics import median

import pytest
import torch
from torch import nn

from tests.bench.compare.floor_engine import seconds_of
from tilewright.bench.compare import engine, measure, run
from tilewright.bench.compare.fairness import by_variant
from tilewright.bench.compare.models import Model
from tilewright.bench.compare.results import Comparison, Point, Side
from tilewright.bench.compare.run import compare

ENDS = (16, 64, 64, 64, 1)
HOST = (16, *(512, 256, 512) * 12, 1)
HOST_WORK = sum(seconds_of(b, a) for a, b in pairwise(HOST))
FLOOR, EAGER = "floor:20,12,1", "floor:0,8,0.025"
"""Ours: 20 us a call however little it does. Eager: nothing is hidden, and a layer takes forty times as long."""


def over_seeds(count: int) -> pytest.MarkDecorator:
    """The noise of one seed, which is enough to see a layer that is told wrong, and, where there is time, that of others."""
    return pytest.mark.parametrize(
        "seeds", [range(1), pytest.param(range(1, count), marks=pytest.mark.long)], ids=["one", "more"]
    )


@pytest.fixture(autouse=True)
def _floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.ENGINES, "floor", "tests.bench.compare.floor_engine:Floor")
    monkeypatch.setitem(engine.ENGINES, "launching", "tests.bench.compare.floor_engine:Hosted")
    monkeypatch.setitem(engine.ENGINES, "replayed", "tests.bench.compare.floor_engine:Replayed")
    monkeypatch.setattr(measure, "_SETTLE_S", 0.0)  # nothing here has a clock that rises


def model(*ends: int) -> Model:
    torch.manual_seed(0)
    parts = [part for a, b in pairwise(ends) for part in (nn.Linear(a, b), nn.ReLU())]
    return Model("small", nn.Sequential(*parts[:-1]).eval().requires_grad_(False), (torch.randn(2, ends[0]),))


def ran(side: Side) -> set[str]:
    return {run.variant for run in side.runs}


def said(found: Comparison) -> Point:
    (point,) = (point for point in found.card if point.name == "a call")
    return point


def held(found: Comparison, ends: tuple[int, ...], speeds: tuple[float, float]) -> list[bool]:
    """Whether each interval, of both sides' times and of their ratios, holds the truth."""
    inside = []
    for segment, rows, columns in zip(found.segments, ends[1:], ends, strict=False):
        ours, baseline = (seconds_of(rows, columns) / speed for speed in speeds)
        known = ((segment.ours, ours), (segment.baseline, baseline), (segment.ratio, baseline / ours))
        inside += [got.low <= true <= got.high for got, true in known]
    return inside


@over_seeds(4)
@pytest.mark.parametrize("mirrored", [False, True], ids=["ours", "the baseline"])
def test_layers_hidden_in_a_call_are_told_apart(mirrored: bool, seeds: range) -> None:
    """On whichever side the floor is: each layer's time on both sides, and the whole model's, which is not their sum."""
    speeds, inside = (0.025, 1.0) if mirrored else (1.0, 0.025), []
    for seed in seeds:
        sides = [f"{side},{seed}" for side in ((EAGER, FLOOR) if mirrored else (FLOOR, EAGER))]
        found = compare(model(*ENDS), sides[0], sides[1], 1.5, budget_s=60, threads=1)
        assert [segment.layers for segment in found.segments] == [["0"], ["2"], ["4"], ["6"]]
        assert found.verdict == ("fail" if mirrored else "pass")
        inside += held(found, ENDS, speeds)
        work = sum(seconds_of(b, a) for a, b in pairwise(ENDS))
        calls = [20e-6, 8e-6 + 40 * work]
        assert found.ratio.value == pytest.approx(calls[not mirrored] / calls[mirrored], rel=0.03), "the whole model's own"
        captured, eager = (found.baseline, found.ours) if mirrored else (found.ours, found.baseline)
        programs = found.environment["variants"]
        assert all(max(Counter(programs[name]).values()) >= 16 for name in ran(captured) - {"whole"})
        assert {"with 2 x", "with 4 x"} <= {word for name in ran(captured) for word in re.findall(r"with \d x", name)}
        assert not any(" with " in name for name in ran(eager)), "it hides nothing"
        for segment in found.segments[1:3]:  # repeated 64 times, and so known to some per cent
            of = segment.baseline if mirrored else segment.ours
            assert of.value == pytest.approx(seconds_of(64, 64), rel=0.1)
        point = said(found)
        assert re.search(rf"A call of {'the baseline' if mirrored else 'ours'} takes (20|19\.\d|20\.\d) us with one", point.why)
        assert "32 copies of 2" in point.why
        assert not point.open
    assert sum(inside) >= 0.9 * len(inside)  # over 40 seeds 97 %: eight rounds say little of the noise


@over_seeds(3)
def test_what_goes_in_and_out_costs_what_it_costs(seeds: range) -> None:
    """Inputs are dear on ours, and layers enlarge what they are given: that is no time of theirs."""
    ends, inside = (16, 16, 64, 64, 32, 64, 64, 1), []
    for seed in seeds:
        found = compare(model(*ends), f"floor:0,8,1,{seed},5,12,2", f"floor:0,8,0.1,{seed}", 1.5, budget_s=60, threads=1)
        assert {"whole giving 2", "whole giving 6"} & ran(found.ours)
        assert len(found.segments) == len(ends) - 1
        inside += held(found, ends, (1.0, 0.1))
    assert sum(inside) >= 0.9 * len(inside)


@over_seeds(3)
@pytest.mark.parametrize("mirrored", [False, True], ids=["ours", "the baseline"])
def test_an_engine_that_its_host_paces(mirrored: bool, seeds: range) -> None:
    """Its device works on when a call is back, a time of its own for each last layer: layers are what they take the host."""
    inside = []
    for seed in seeds:
        sides = [f"launching:8,1,30,{seed}", f"floor:0,8,0.1,{seed}"]
        found = compare(model(*HOST), *(sides[::-1] if mirrored else sides), 1.5, budget_s=60, threads=1)
        paced = found.baseline if mirrored else found.ours
        inside += held(found, HOST, (0.1, 1.0) if mirrored else (1.0, 0.1))
        assert paced.whole.value == pytest.approx(8e-6 + HOST_WORK + 0.5 * 30e-6, rel=0.03), "a user waits for the device too"
        assert not any(max(Counter(found.environment["variants"][name]).values()) > 1 for name in ran(paced))
        side = "the baseline" if mirrored else "ours"
        assert re.search(rf"The host takes 9\d% of a call of {side}, so a layer's time is that of the host", said(found).why)
    assert sum(inside) >= 0.9 * len(inside)


@over_seeds(3)
def test_a_baseline_that_neither_paces(seeds: range) -> None:
    """Layers are what they take its device with the host ahead; the whole model is what its user waits."""
    inside = []
    for seed in seeds:
        found = compare(model(*HOST), f"floor:0,8,8,{seed}", f"launching:8,1,60,{seed}", 1.5, budget_s=60, threads=1)
        inside += held(found, HOST, (8.0, 2.0))
        assert found.verdict == "pass"
        assert found.baseline.whole.value == pytest.approx(8e-6 + HOST_WORK + 0.5 * 60e-6, rel=0.03), "a user waits for both"
        assert re.search(r"The host takes 8\d% of a call of the baseline, so .* at most what a user waits", said(found).why)
    assert sum(inside) >= 0.9 * len(inside)


def test_a_captured_engine_beside_it() -> None:
    """Timed as the baseline is, without ballast."""
    inside = []
    for seed in range(3):
        ours = f"replayed:0,8,8,{seed},1,0.1,0.1"
        found = compare(model(*HOST), ours, f"launching:8,1,60,{seed}", 1.5, budget_s=60, threads=1)
        inside += held(found, HOST, (8.0, 2.0))
        assert (said(found).ours, said(found).baseline) == ("the device's", "the device's")
        assert re.search(r"so a layer's time is that of the device, which is \d\d% of a call", said(found).why)
        assert not any(" with " in name for name in ran(found.ours))
        assert found.ours.whole.value == pytest.approx(10e-6 + HOST_WORK / 8, rel=0.04), "a call as its user has it"
        assert max(segment.ours.high - segment.ours.low for segment in found.segments) < 0.4e-6, "copies in and out are no part"
    assert sum(inside) >= 0.9 * len(inside)


def test_a_captured_engine_beside_one_that_its_host_paces() -> None:
    """Each by what sets its pace."""
    inside = []
    for seed in range(3):
        found = compare(model(*HOST), f"replayed:0,8,8,{seed}", f"launching:8,1,30,{seed}", 1.5, budget_s=60, threads=1)
        inside += held(found, HOST, (8.0, 1.0))
        assert (said(found).ours, said(found).baseline) == ("the device's", "the host's")
    assert sum(inside) >= 0.9 * len(inside)


def test_a_captured_engine_whose_host_takes_most_of_a_call() -> None:
    """It is not spared its host."""
    found = compare(model(*HOST), "replayed:100,8,8", "launching:8,1,60", 1.5, budget_s=5, threads=1)
    assert said(found).ours == "hides layers"


def test_no_layer_fails_by_less_than_a_user_waits() -> None:
    """Ours takes twice what the baseline's device does alone. What its user waits is more, nobody knows by how much."""
    found = compare(model(*HOST), "floor:0,8,1", "launching:8,1,60", 1.5, budget_s=6, threads=1)
    assert found.verdict == "undecided"
    assert {segment.verdict for segment in found.segments} == {"undecided"}
    assert median(segment.ratio.high for segment in found.segments) < 1.5


def test_an_engine_that_its_device_paces() -> None:
    found = compare(model(*HOST), "launching:8,1,60", "floor:0,8,0.1", 1.5, budget_s=5, threads=1)
    assert "a call" not in {point.name for point in found.card}
    assert any(max(Counter(found.environment["variants"][name]).values()) > 1 for name in ran(found.ours))


LONG = (16, *(64, 64, 48) * 9, 64, 64, 1)


def test_a_model_larger_than_a_call_whose_smallest_programs_are_hidden() -> None:
    """The floor is 16 us, the whole model 38: what takes less than 32 does not count, and no layer is pulled to 0 by it."""
    inside = []
    for seed in range(4):
        found = compare(model(*LONG), f"floor:16,5,1,{seed}", f"floor:0,8,0.1,{seed}", 1.5, budget_s=60, threads=1)
        usual = {name: median(seconds) for name, seconds in by_variant(found.ours.runs).items()}
        assert min(usual.values()) > 31e-6
        assert len(found.segments) == len(LONG) - 1
        inside += held(found, LONG, (1.0, 0.1))
        assert re.search(r"programs of 3[12](\.\d)? us or more, some of which contain 32 copies of", said(found).why)
    assert sum(inside) >= 0.9 * len(inside)  # 99 % over twelve seeds, but nine layers each share a time


def test_no_time_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not known whether calls hide layers, the card says so and the headline is withheld."""
    monkeypatch.setattr(run, "_PROBING", 0.0)
    found = compare(model(*ENDS), FLOOR, EAGER, 1.5, budget_s=2, threads=1)
    assert said(found).open
    assert "give more time" in said(found).why


@pytest.mark.parametrize(
    ("ends", "sides"),
    [(ENDS, ("floor:0,5,1", "floor:0,5,0.125")), ((16, 64, 24, 1), (FLOOR, EAGER))],
    ids=["nothing is hidden", "nothing can be repeated"],
)
def test_no_ballast_where_it_is_of_no_use(ends: tuple[int, ...], sides: tuple[str, str]) -> None:
    found = compare(model(*ends), *sides, 1.5, budget_s=2, threads=1)
    assert not any(" with " in name for name in ran(found.ours))
    assert "a call" not in {point.name for point in found.card}


def test_a_floor_that_no_ballast_leaves() -> None:
    """Ours takes the same whatever it is given: no layer has a time, so none is claimed to be faster."""
    found = compare(model(*ENDS), "floor:45,0,1000", EAGER, 1.5, budget_s=20, threads=1)
    assert not any(" with " in name for name in ran(found.ours))
    assert [segment.layers for segment in found.segments] == [["0", "2", "4", "6"]]
    assert found.segments[0].ratio == found.ratio
    assert "the whole model is one segment" in said(found).why
