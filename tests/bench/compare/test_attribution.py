"""Layers' times from run times whose truth is known: errors, coverage, merging, verdicts."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.bench.compare.simulated import Truth, chain_design, judge, own_ways, runs_of, truth_of
from tilewright.bench.compare.attribution import Border, Design, sample
from tilewright.bench.compare.results import Run
from tilewright.bench.compare.segments import Attribution, attribute, decided

SEEDS = 6


@cache
def studied(layers: int, rounds: int, fused: int | None, drift: float, spikes: float = 0.05) -> list[tuple[Attribution, dict]]:
    """Attributions on several seeds, and how far each is from the truth; ours is 1.7 times as fast, and not fused."""
    design, found = chain_design(layers), []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        ours = truth_of(design, rng, speed=1.7)
        baseline = replace(ours, layers=ours.layers * 1.7, overhead=2 * ours.overhead)
        if fused is not None:
            baseline.saved = {fused: 0.4 * float(baseline.layers[fused] + baseline.layers[fused + 1])}
        sides = [runs_of(design, truth, rng, rounds=rounds, drift=drift, spikes=spikes) for truth in (ours, baseline)]
        answer = attribute(*sides, design, 1.3, draws=300, seed=seed)
        found.append((answer, judge(answer, design, ours, baseline)))
    return found


@pytest.mark.parametrize(("layers", "rounds", "fused", "drift"), [(12, 40, None, 0.05), (12, 40, 5, 0.05), (12, 15, None, 0.2)])
def test_errors_and_coverage(layers: int, rounds: int, fused: int | None, drift: float) -> None:
    """The mean error is within 4 %, 95 % of the intervals hold the truth, and they are not wide because of it."""
    found = [judged for _, judged in studied(layers, rounds, fused, drift)]
    errors, inside = np.concatenate([f["errors"] for f in found]), np.concatenate([f["inside"] for f in found])
    wide = np.concatenate([f["half_widths"] for f in found])
    assert errors.mean() <= 0.04
    assert inside.mean() >= 0.95
    assert np.concatenate([f["ratio_inside"] for f in found]).mean() >= 0.95
    assert wide.mean() <= 6 * errors.mean() / 0.8, "intervals far wider than the errors: nothing would ever be decided"


def test_a_machine_that_is_disturbed_often() -> None:
    """Two runs of five take longer by up to their double: the fastest runs say more than the middle ones."""
    found = studied(12, 40, None, 0.05, 0.4)
    assert {answer.ours.located for answer, _ in found} == {"the faster third of its runs"}
    assert {answer.ours.located for answer, _ in studied(12, 40, None, 0.05)} == {"the middle half of its runs"}
    assert np.concatenate([judged["errors"] for _, judged in found]).mean() <= 0.04
    assert np.concatenate([judged["inside"] for _, judged in found]).mean() >= 0.95


def test_a_fused_pair_is_one_segment_and_nothing_else_is() -> None:
    names = chain_design(12).layers
    for answer, _ in studied(12, 40, 5, 0.05):
        (joined,) = [segment for segment in answer.segments if len(segment.layers) > 1]
        assert joined.layers == [names[5], names[6]]
        assert "the baseline takes" in joined.why
        assert "less for the two together" in joined.why
        assert answer.baseline.additive
    single = [len(segment.layers) for answer, _ in studied(12, 40, None, 0.05) for segment in answer.segments]
    assert single.count(1) >= len(single) - 1


@pytest.mark.parametrize("size", [0.005, 0.03])
def test_programs_that_are_each_off_in_their_own_way_are_not_fused(size: float) -> None:
    """Every program off additivity by a factor of its own: no pair is joined, the intervals hold; and a pair that the baseline
    fuses is found beside it where it is larger than that."""
    design, inside, ratios, pairs = chain_design(16), [], [], []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        ours = truth_of(design, rng, speed=1.7)
        ours.own = own_ways(design, rng, size)
        baseline = replace(ours, layers=ours.layers * 1.7, own=own_ways(design, rng, size))
        runs = [runs_of(design, truth, rng, rounds=40) for truth in (ours, baseline)]
        answer = attribute(*runs, design, 1.3, draws=300, seed=seed)
        assert all(len(segment.layers) == 1 for segment in answer.segments)
        judged = judge(answer, design, ours, baseline)
        inside.append(judged["inside"])
        ratios.append(judged["ratio_inside"])
        baseline.saved = {5: 0.4 * float(baseline.layers[5] + baseline.layers[6])}
        answer = attribute(runs[0], runs_of(design, baseline, rng, rounds=40), design, 1.3, draws=300, seed=seed)
        pairs.append([s.layers for s in answer.segments if len(s.layers) > 1])
    assert np.concatenate(inside).mean() >= 0.95
    assert np.concatenate(ratios).mean() >= 0.95
    right = [list(design.layers[5:7])]
    assert all(found in ([], right) for found in pairs)
    assert pairs.count(right) >= (SEEDS if size == 0.005 else SEEDS // 3)


CLAIMS = [(1.3, "pass"), (2.3, "fail"), (1.7, "undecided")]


@pytest.mark.parametrize(("claim", "verdict"), CLAIMS)
def test_verdicts(claim: float, verdict: str) -> None:
    """Every layer is 1.7 times as fast: that is proven of less, disproven of more, and open at 1.7."""
    design, rng = chain_design(8), np.random.default_rng(3)
    ours = truth_of(design, rng, speed=1.7)
    baseline = replace(ours, layers=ours.layers * 1.7, overhead=ours.overhead * 1.7)
    sides = [runs_of(design, truth, rng, rounds=60) for truth in (ours, baseline)]
    answer = attribute(*sides, design, claim)
    assert answer.verdict == verdict
    assert all(segment.ratio.low <= 1.7 <= segment.ratio.high for segment in answer.segments)
    assert answer.ratio.low <= 1.7 <= answer.ratio.high
    assert decided(*sides, design, claim) == (verdict != "undecided")
    assert answer.holds(claim, 0.05) == (verdict != "undecided")
    assert not answer.holds(claim, 0.5), "1.7 is less than half as much away from either claim"
    few = [[run for run in runs if run.at < max(r.at for r in runs) / 20] for runs in sides]
    assert not decided(*few, design, claim)


def flat(design: Design, seconds: Truth, rounds: int = 30, noise: float = 0.01) -> list[Run]:
    return runs_of(design, seconds, np.random.default_rng(1), rounds=rounds, noise=noise, drift=0.0, spikes=0.0)


def test_what_the_variants_do_not_tell_apart_is_joined() -> None:
    design = chain_design(6)
    names = ["whole", "only 0", "prefix 1", "prefix 3", "only 5", "prefix 5"]
    kept = replace(design, parts={n: design.parts[n] for n in names}, border=dict.fromkeys(names, Border(1.0, 1.0)))
    runs = flat(kept, Truth(np.full(6, 1e-3), 1e-4))
    answer = attribute(runs, runs, kept, 1.0)
    assert [segment.layers for segment in answer.segments] == [
        [kept.layers[i] for i in part] for part in ([0], [1, 2], [3, 4], [5])
    ]
    assert answer.segments[1].why == "the variants that were run do not distinguish them"
    assert answer.segments[1].ours.value == pytest.approx(2e-3, rel=0.05)


def test_a_layer_without_time_joins_its_module() -> None:
    design = chain_design(8)
    truth = Truth(np.array([1e-3, 1e-3, 1e-3, 0.0, 1e-3, 1e-3, 1e-3, 1e-3]), 1e-4)
    answer = attribute(flat(design, truth, 100, 0.005), flat(design, Truth(np.full(8, 1e-3), 1e-4), 100, 0.005), design, 1.0)
    (joined,) = [segment for segment in answer.segments if len(segment.layers) > 1]
    assert joined.layers == [design.layers[2], design.layers[3]]
    assert "on ours block0.layer3 takes no time of its own" in joined.why
    assert joined.ratio.low <= 2 <= joined.ratio.high


def test_a_time_below_nothing_proves_nothing() -> None:
    """Every program with a layer in it is faster for it: no engine is, so its segment neither passes nor fails."""
    design = chain_design(8)
    truth = Truth(np.array([1e-3, 1e-3, 1e-3, -4e-4, 1e-3, 1e-3, 1e-3, 1e-3]), 1e-3)
    baseline = flat(design, Truth(np.full(8, 2e-3), 1e-3), 100, 0.005)
    for claim in (1.5, 9.0):
        answer = attribute(flat(design, truth, 100, 0.005), baseline, design, claim)
        (joined,) = [segment for segment in answer.segments if len(segment.layers) > 1]
        assert joined.layers == [design.layers[2], design.layers[3]]
        assert joined.verdict == "undecided"
        assert "on ours block0.layer3 comes out at less than zero, by at least 5." in joined.why
        assert {segment.verdict for segment in answer.segments} == {"undecided", "pass" if claim == 1.5 else "fail"}


def test_layers_of_a_group_share_their_time() -> None:
    """Two blocks of four: what one of them measures holds for both, and fewer variants do."""
    design = chain_design(8, groups=(0, 1, 2, 3, 0, 1, 2, 3))
    names = ["whole", *(f"only {i}" for i in range(3)), "without 1", "repeat 3", "prefix 3", "prefix 6"]
    kept = replace(design, parts={n: design.parts[n] for n in names}, border=dict.fromkeys(names, Border(1.0, 1.0)))
    seconds = np.tile([1e-3, 2e-3, 5e-4, 3e-3], 2)
    runs = flat(kept, Truth(seconds, 1e-4))
    answer = attribute(runs, runs, kept, 1.0)
    assert [segment.ours.value for segment in answer.segments] == pytest.approx(seconds, rel=0.08)


def test_overlap_without_a_place_widens_the_intervals() -> None:
    """An engine whose whole is shorter than its parts by something that no boundary explains is called not additive."""
    design, rng = chain_design(8), np.random.default_rng(0)
    truth = truth_of(design, rng)
    runs = flat(design, truth)
    bent = [replace(run, seconds=run.seconds * (1 + 0.1 * np.sin(7 * len(run.variant) + ord(run.variant[-1])))) for run in runs]
    straight, crooked = (attribute(r, r, design, 1.0).ours for r in (runs, bent))
    assert straight.additive
    assert not crooked.additive
    assert crooked.residual > 5 * straight.residual
    assert "no single boundary" in crooked.why


WRONG = [
    (lambda runs: [r for r in runs if r.variant != "whole"], "ours has no run of the whole model"),
    (lambda runs: runs[:40], "every variant needs at least 3"),
    (lambda runs: [replace(runs[0], seconds=0.0), *runs[1:]], "a time above 0 seconds"),
    (lambda runs: [replace(runs[0], variant="other"), *runs[1:]], "variants other, which the design does not have"),
    (lambda runs: [], "each variant has 0 runs"),
]


@pytest.mark.parametrize(("spoil", "said"), WRONG, ids=[said for _, said in WRONG])
def test_runs_that_say_nothing(spoil, said: str) -> None:
    design = chain_design(6)
    runs = flat(design, Truth(np.full(6, 1e-3), 1e-4))
    with pytest.raises(ValueError, match=said):
        attribute(spoil(runs), runs, design, 1.0)


def test_drift_and_disturbed_runs_are_taken_out() -> None:
    """A clock that slows by a third, a run in ten disturbed: the locations stay within a run's noise over ten."""
    design, rng = chain_design(6), np.random.default_rng(5)
    truth = Truth(np.full(6, 1e-3), 1e-4)
    taken = sample(runs_of(design, truth, rng, rounds=60, drift=0.3, spikes=0.1), design)
    exact = np.array([truth.of(design, name) for name in taken.variants])
    ratio = taken.seconds_V / exact
    assert np.abs(ratio / ratio.mean() - 1).max() < 0.015
    assert ratio.mean() == pytest.approx(1, abs=0.01)
