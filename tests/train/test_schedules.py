"""Schedules as tables: steps that can be computed by hand, and what no schedule may do."""

import math

import pytest

from tilewright.train.schedules import SCHEDULES, constant, cosine, linear, warmup_stable_decay


@pytest.mark.parametrize(
    ("schedule", "options", "table"),
    [
        (constant, {"warmup": 4}, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 99: 1.0, 500: 1.0}),
        (linear, {}, {0: 1.0, 50: 0.5, 99: 0.01, 100: 0.0, 500: 0.0}),
        (linear, {"warmup": 20, "floor": 0.2}, {0: 0.05, 19: 1.0, 20: 1.0, 60: 0.6, 100: 0.2, 101: 0.2}),
        (cosine, {}, {0: 1.0, 50: 0.5, 25: (1 + math.sqrt(0.5)) / 2, 100: 0.0, 500: 0.0}),
        (cosine, {"warmup": 20, "floor": 0.1}, {0: 0.05, 19: 1.0, 20: 1.0, 60: 0.55, 100: 0.1}),
        (warmup_stable_decay, {"warmup": 10, "decay": 20}, {0: 0.1, 9: 1.0, 10: 1.0, 80: 1.0, 90: 0.5, 99: 0.05, 100: 0.0}),
        (warmup_stable_decay, {"floor": 0.5}, {0: 1.0, 90: 1.0, 95: 0.75, 100: 0.5}),
        (warmup_stable_decay, {"decay": 0}, {0: 1.0, 99: 1.0}),
        (warmup_stable_decay, {"warmup": 100, "decay": 0}, {0: 0.01, 99: 1.0}),
    ],
)
def test_values(schedule, options, table) -> None:
    for step, want in table.items():
        assert schedule(step, steps=100, peak=1.0, **options) == pytest.approx(want, abs=1e-12), step
        assert schedule(step, steps=100, peak=3e-4, **options | {"floor": 3e-4 * options.get("floor", 0)}) == pytest.approx(
            3e-4 * want, abs=1e-15
        )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_rises_to_its_peak_then_never_rises_again(name: str, steps: int) -> None:
    for warmup in {0, 1, steps // 3}:
        rates = [SCHEDULES[name](step, steps=steps, warmup=warmup, peak=2.0, floor=0.1) for step in range(steps + 2)]
        top = max(warmup - 1, 0)
        assert rates[: top + 1] == sorted(rates[: top + 1])
        assert rates[top:] == sorted(rates[top:], reverse=True)
        assert rates[top] == 2.0
        assert min(rates) > 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cosine(-1, steps=10, peak=1.0), "step is -1 and steps is 10"),
        (lambda: cosine(0, steps=0, peak=1.0), "step is 0 and steps is 0"),
        (lambda: linear(0, steps=10, warmup=11, peak=1.0), "warmup is 11, wanted 0 to"),
        (lambda: linear(0, steps=10, peak=1.0, floor=2.0), "wanted 0 <= floor <= peak"),
        (lambda: constant(0, steps=10, peak=math.inf), "the peak learning rate is inf"),
        (lambda: warmup_stable_decay(0, steps=10, warmup=6, decay=5, peak=1.0), "do not fit into a run of 10"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
