"""The joint law against laws that made the runs, against differences, and on the project's own series."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scaling.tables import TRUTH
from tilewright.scaling import Law, Runs, read_runs
from tilewright.scaling.analysis import analyse, predict
from tilewright.scaling.fit import fit
from tilewright.scaling.joint_law import JointLaw, fit_joint_law

BOOKS = Path(__file__).resolve().parents[2] / "benchmarks/results/h200/studies/scaling-books-3"


def table(law: Callable[[Any, Any], Any], noise: float, rng: np.random.Generator) -> Runs:
    """Five budgets, a factor 16 in all, six sizes each, about the size that 20 tokens a parameter would give."""
    flops = np.repeat(np.geomspace(1e19, 1.6e20, 5), 6)
    params = np.sqrt(flops / 120) * np.tile(np.geomspace(1 / 3, 3, 6), 5)
    tokens = flops / 6 / params
    return Runs(params=params, tokens=tokens, flops=flops, loss=law(params, tokens) * np.exp(rng.normal(0, noise, len(params))))


def kaplan(n: Any, d: Any) -> Any:
    """Equation 1.5 of Kaplan et al. 2020, with the paper's numbers."""
    return ((8.8e13 / n) ** (0.076 / 0.095) + 5.4e13 / d) ** 0.095


def hoffmann(n: Any, d: Any) -> Any:
    """The law of tests/scaling/tables.py."""
    return TRUTH.E + TRUTH.A / n**TRUTH.alpha + TRUTH.B / d**TRUTH.beta


def test_the_law_of_kaplan_is_found() -> None:
    found = fit_joint_law(table(kaplan, 0.0, np.random.default_rng(0)))
    assert found.loss(3e9, 6e10)[0] == pytest.approx(kaplan(3e9, 6e10), rel=2e-3)
    assert found.floor < 0.5
    budgets = np.geomspace(1e8, 1e11, 3001)
    for flops in (1e20, 1e21):
        best = budgets[np.argmin(kaplan(budgets, flops / 6 / budgets))]
        assert found.best_size(flops) == pytest.approx(best, rel=0.05)


@pytest.mark.parametrize("law", [kaplan, hoffmann])
def test_eight_times_the_largest_budget_is_predicted_within_one_per_cent(law: Callable[[Any, Any], Any]) -> None:
    rng = np.random.default_rng(7)
    errors, inside = [], []
    flops = 8 * 1.6e20
    for _ in range(6):
        found = fit_joint_law(table(law, 0.002, rng))
        params = found.best_size(flops)
        said, (low, high) = found.best_loss(flops)
        truth = law(params, flops / 6 / params)
        errors.append(abs(said / truth - 1))
        inside.append(low < truth < high)
    assert np.mean(errors) < 0.01
    assert sum(inside) >= 5


def test_the_slopes_are_those_of_the_form() -> None:
    rng = np.random.default_rng(1)
    x, p, step = rng.normal(size=(7, 2)), np.array([0.3, -0.9, 0.1, -0.5, -0.7]), 1e-6
    logs, slopes = JointLaw.form(p, 0.4, x)
    for i in range(5):
        moved = p + step * (np.arange(5) == i)
        assert (JointLaw.form(moved, 0.4, x)[0] - logs) / step == pytest.approx(slopes[:, i], rel=1e-4, abs=1e-5)


def test_the_best_size_is_the_minimum_of_the_budget() -> None:
    found = fit_joint_law(table(hoffmann, 0.0, np.random.default_rng(0)))
    best = found.best_size(1e20)
    assert best == pytest.approx(Law(**vars(TRUTH)).optimum(1e20).params, rel=0.1)
    assert all(found.loss(best * f, 1e20 / 6 / best / f)[0] >= found.best_loss(1e20)[0] - 1e-4 for f in (0.8, 1.25))


def test_our_series_predicts_its_largest_budget_better_by_this_law() -> None:
    """Twelve runs of the largest budget from the 36 of at most half of it: each within 1 %, and closer than by two powers."""
    runs = read_runs(BOOKS / "fitted.csv")
    largest = runs.flops > 2e14
    kept, out = runs.where(~largest), runs.where(largest)
    joint, powers = fit_joint_law(kept), fit(kept, bootstrap=0).law
    at = list(zip(out.params, out.tokens, strict=True))
    errors = np.array([joint.loss(n, d)[0] for n, d in at]) / out.loss - 1
    others = np.array([powers.loss(n, d) for n, d in at]) / out.loss - 1
    assert len(errors) == 12
    assert np.abs(errors).max() < 0.01
    assert abs(errors.mean()) < 0.001
    assert np.sqrt((errors**2).mean()) < 0.004 < 0.006 < np.sqrt((others**2).mean())


def test_it_is_saved_and_read() -> None:
    runs = table(hoffmann, 0.002, np.random.default_rng(2))
    found = fit_joint_law(runs)
    again = JointLaw.from_json(json.loads(json.dumps(found.to_json())))
    assert again.loss(1e9, 1e10) == found.loss(1e9, 1e10)
    saved = analyse(runs, bootstrap=0).to_json()
    said = predict(saved, 1e21)
    assert said.joint_law_loss == again.best_loss(1e21)[0]
    assert said.joint_law_params == again.best_size(1e21)
    assert predict({**saved, "joint_law": None}, 1e21).joint_law_loss is None
    with pytest.raises(ValueError, match="a number is missing from the joint law"):
        JointLaw.from_json({name: value for name, value in found.to_json().items() if name != "size"})


def test_runs_without_any_trend_stay_finite() -> None:
    runs = table(hoffmann, 0.5, np.random.default_rng(3))
    rising = Runs(params=runs.params, tokens=runs.tokens, flops=runs.flops, loss=np.sort(runs.loss))
    for each in (runs, rising):
        loss, (low, high) = fit_joint_law(each).best_loss(1e22)
        assert 0 < low < loss < high < np.inf
