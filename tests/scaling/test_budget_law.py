"""The budget law against laws that made the runs, the points of the Chinchilla paper, and what leaving budgets out says."""

import json

import numpy as np
import pytest

from tests.scaling.tables import CHINCHILLA, TRUTH, needs_chinchilla, synthetic
from tilewright.scaling import Law, Runs, read_runs
from tilewright.scaling.analysis import analyse, predict
from tilewright.scaling.backtest import backtests
from tilewright.scaling.budget_law import BudgetLaw, fit_budget_law


def narrow(noise: float, rng: np.random.Generator, *, law: Law = TRUTH) -> Runs:
    """Five budgets, a factor 16 in all: no fit can see the floor."""
    flops = np.repeat(np.geomspace(1e19, 1.6e20, 5), 6)
    best = np.array([law.optimum(float(c)).params for c in flops])
    params = best * np.tile(np.geomspace(1 / 3, 3, 6), 5)
    tokens = flops / 6 / params
    loss = np.array([law.loss(float(n), float(d)) for n, d in zip(params, tokens)])
    return Runs(params=params, tokens=tokens, flops=flops, loss=loss * np.exp(rng.normal(0, noise, len(loss))))


def test_a_law_of_this_form_is_found() -> None:
    c, x = np.repeat(np.linspace(-3, 3, 7), 5), np.tile(np.linspace(-1, 1, 5), 7)
    flops = 1e20 * np.exp(c)
    params = 1e9 * np.exp(0.5 * c + x)
    loss = (2.0 + 1.5 * np.exp(-0.3 * c)) * np.exp(0.03 * x * x)
    found = fit_budget_law(Runs(params=params, tokens=flops / params / 6, flops=flops, loss=loss))
    assert found.weights @ found.floors == pytest.approx(2.0, abs=0.1)
    assert found.best_size(8e21) == pytest.approx(1e9 * 80**0.5, rel=0.01)
    assert found.loss(8e21)[0] == pytest.approx(2.0 + 1.5 * 80**-0.3, rel=0.01)
    there = found.loss(8e21, 2e10)[0] / found.loss(8e21)[0]
    assert there == pytest.approx(np.exp(0.03 * np.log(20 / 80**0.5) ** 2), rel=1e-3)


@pytest.mark.parametrize("floor", [0.5, 1.8, 2.4])
def test_eight_times_the_largest_budget_is_predicted_within_one_per_cent(floor: float) -> None:
    law = Law(E=floor, A=TRUTH.A, B=TRUTH.B, alpha=TRUTH.alpha, beta=TRUTH.beta)
    rng = np.random.default_rng(7)
    errors, inside = [], []
    for _ in range(10):
        runs = narrow(0.002, rng, law=law)
        said, (low, high) = fit_budget_law(runs).loss(8 * float(runs.flops.max()))
        truth = law.optimum(8 * float(runs.flops.max())).loss
        errors.append(abs(said / truth - 1))
        inside.append(low < truth < high)
    assert np.mean(errors) < 0.01
    assert sum(inside) >= 8


def test_the_interval_says_that_the_floor_is_not_known() -> None:
    runs = narrow(0.002, np.random.default_rng(1))
    found = fit_budget_law(runs)
    widths = [np.log(high / low) for _, (low, high) in (found.loss(factor * float(runs.flops.max())) for factor in (1, 8, 64))]
    assert widths[0] < widths[1] < widths[2]
    assert widths[0] > 2 * 1.96 * found.noise


def test_leaving_budgets_out_compares_the_forms() -> None:
    tests = backtests(synthetic(0.0, np.random.default_rng(0)))
    assert [round(test.factor, 1) for test in tests] == [3.2, 10.0]
    assert [test.runs for test in tests] == [32, 24]
    for test in tests:
        assert abs(test.law) < 1e-4
        assert abs(test.budget_law) < 0.015
    assert tests[0].line is not None
    assert tests[1].line is None
    assert tests[0].line < -0.005


@needs_chinchilla
def test_published_runs_six_times_larger_are_predicted_no_worse_than_by_the_law() -> None:
    for test in backtests(read_runs(CHINCHILLA).without_highest(5)):
        assert abs(test.budget_law) < abs(test.law)
        assert test.line is not None
        assert abs(test.budget_law) < abs(test.line)
        assert abs(test.budget_law) < 0.015


def test_it_is_saved_and_read() -> None:
    found = fit_budget_law(narrow(0.002, np.random.default_rng(2)))
    again = BudgetLaw.from_json(json.loads(json.dumps(found.to_json())))
    assert again.loss(1e22, 1e10) == found.loss(1e22, 1e10)
    saved = analyse(narrow(0.002, np.random.default_rng(2)), bootstrap=0).to_json()
    said = predict(saved, 1e22)
    assert said.budget_law_loss == again.loss(1e22)[0]
    assert predict({**saved, "budget_law": None}, 1e22).budget_law_loss is None


@pytest.mark.parametrize(
    ("change", "words"),
    [({"noise": "x"}, "could not convert"), ({"weights": [1.0]}, "shapes"), ({"center": float("nan")}, "not finite")],
)
def test_a_damaged_one_is_refused(change: dict[str, object], words: str) -> None:
    saved = fit_budget_law(narrow(0.002, np.random.default_rng(2))).to_json()
    with pytest.raises(ValueError, match=words):
        BudgetLaw.from_json(saved | change)
    with pytest.raises(ValueError, match="a number is missing"):
        BudgetLaw.from_json({name: value for name, value in saved.items() if name != "floors"})


def test_runs_without_any_trend_stay_finite() -> None:
    rng = np.random.default_rng(3)
    runs = narrow(0.5, rng)
    rising = Runs(params=runs.params, tokens=runs.tokens, flops=runs.flops, loss=np.sort(runs.loss))
    for each in (runs, rising):
        loss, (low, high) = fit_budget_law(each).loss(1e22)
        assert 0 < low < loss < high < np.inf


def test_the_scatter_of_repeats_is_that_of_their_noise() -> None:
    rng = np.random.default_rng(4)
    first, second = narrow(0.003, rng), narrow(0.003, rng)
    assert first.repeats() is None
    names = ("params", "tokens", "flops", "loss")
    both = Runs(**{name: np.concatenate([getattr(first, name), getattr(second, name)[:20]]) for name in names})
    found = both.repeats()
    assert found is not None
    assert found[0] == 40
    assert found[1] == pytest.approx(np.std(np.log(first.loss[:20] / second.loss[:20]), ddof=0) / 2**0.5, rel=0.2)
    assert found[1] == pytest.approx(0.003, rel=0.5)
