"""Iso-FLOP minima and the envelope against the law that made the runs."""

import numpy as np
import pytest

from tests.scaling.tables import TRUTH, synthetic
from tilewright.scaling import Law, Runs
from tilewright.scaling.analysis import analyse, predict
from tilewright.scaling.charts import charts
from tilewright.scaling.frontier import METHODS, envelope, loss_trend, minima, trend
from tilewright.scaling.runs import budgets


@pytest.mark.parametrize("method", METHODS)
def test_minima_are_where_the_law_has_them(method: str) -> None:
    runs = synthetic(0.0, np.random.default_rng(0), sizes=9)
    found = minima(runs, method)
    assert [point.problem for point in found] == [None] * 5
    for point in found:
        best = TRUTH.optimum(point.flops)
        assert point.params == pytest.approx(best.params, rel=0.08)
        assert point.loss == pytest.approx(best.loss, rel=2e-3)
    line = trend(found)
    assert line is not None
    assert line.exponent == pytest.approx(TRUTH.params_exponent, abs=0.01)
    assert line.params(1e22) == pytest.approx(TRUTH.optimum(1e22).params, rel=0.1)


def test_scattered_flops_of_a_budget_do_not_move_its_minimum() -> None:
    rng = np.random.default_rng(0)
    exact = synthetic(0.0, rng, sizes=15)
    tokens = exact.tokens * np.exp(rng.uniform(-0.1, 0.1, len(exact)))
    loss = np.array([TRUTH.loss(float(n), float(d)) for n, d in zip(exact.params, tokens)])
    runs = Runs(params=exact.params, tokens=tokens, flops=6 * exact.params * tokens, loss=loss)
    assert [len(group) for group in budgets(runs)] == [15] * 5
    for point in minima(runs, "parabola"):
        assert point.params == pytest.approx(TRUTH.optimum(point.flops).params, rel=0.12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kept", "words"), [(slice(0, 6), "add larger"), (slice(9, 15), "add smaller")])
def test_a_minimum_at_the_edge_is_said(method: str, kept: slice, words: str) -> None:
    runs = synthetic(0.0, np.random.default_rng(0), sizes=15)
    mask = np.zeros((5, 15), bool)
    mask[:, kept] = True
    found = minima(runs.where(mask.ravel()), method)
    assert len(found) == 5
    assert all(point.problem and words in point.problem for point in found)
    assert trend(found) is None


def test_nearly_equal_sizes_do_not_make_the_curve_swing() -> None:
    runs = synthetic(0.0, np.random.default_rng(0))
    twice = Runs(
        **{
            name: np.concatenate([getattr(runs, name), getattr(runs, name) * factor])
            for name, factor in (("params", 1.0001), ("tokens", 1.0), ("flops", 1.0001), ("loss", 0.97))
        }
    )
    for point in minima(twice, "interpolation"):
        assert point.loss > 0.95 * TRUTH.optimum(point.flops).loss


def test_the_envelope_is_what_nothing_beats() -> None:
    rng = np.random.default_rng(5)
    runs = synthetic(0.02, rng)
    found = {point.loss for point in envelope(runs)}
    for flops, loss in zip(runs.flops, runs.loss):
        beaten = any(other < loss for c, other in zip(runs.flops, runs.loss) if c <= flops)
        first = flops == runs.flops.min()
        assert (loss in found) == (not beaten and not first)


def test_methods_that_disagree_are_said() -> None:
    # The law cannot follow a floor that falls with the budget; the minima can.
    runs = synthetic(0.001, np.random.default_rng(0))
    assert not any("disagree" in warning for warning in analyse(runs, bootstrap=200).warnings)
    params = runs.params / runs.flops**0.3 * 1e18**0.3
    bent = Runs(params=params, tokens=runs.tokens, flops=runs.flops, loss=runs.loss)
    assert any("disagree" in warning or "FLOPs are" in warning for warning in analyse(bent, bootstrap=200).warnings)


def test_a_prediction_says_how_far_it_reaches() -> None:
    saved = analyse(synthetic(0.001, np.random.default_rng(0)), bootstrap=200).to_json()
    said = predict(saved, 1e21)
    assert said.decades == pytest.approx(1.0)
    assert said.loss == pytest.approx(TRUTH.optimum(1e21).loss, rel=0.01)
    assert said.loss_interval is not None
    assert said.params_interval is not None
    assert said.loss_interval[0] < said.loss < said.loss_interval[1]
    assert said.params_interval[0] < TRUTH.optimum(1e21).params < said.params_interval[1]
    near = predict(saved, 1e19)
    assert near.loss_interval is not None
    assert near.loss_interval[1] - near.loss_interval[0] < said.loss_interval[1] - said.loss_interval[0]


def test_the_line_through_lowest_losses() -> None:
    """Exact where there is no floor; too low beyond the runs where there is one; none for too few budgets."""
    for law in (Law(E=1e-9, A=480.0, B=2100.0, alpha=0.35, beta=0.37), TRUTH):
        runs = synthetic(0.0, np.random.default_rng(0), law=law)
        line = loss_trend(runs)
        assert line is not None
        assert line.budgets == 5
        beyond = line.loss(1e23) / law.optimum(1e23).loss - 1
        if law is TRUTH:
            assert beyond < -0.1
            assert line.left_out == pytest.approx(-0.024, abs=0.002)
        else:
            assert beyond == pytest.approx(0.0, abs=0.01)
            assert line.left_out == pytest.approx(0.0, abs=0.002)
    assert loss_trend(synthetic(0.0, np.random.default_rng(0), budgets=3)) is None
    said = predict(analyse(synthetic(0.001, np.random.default_rng(0)), bootstrap=50).to_json(), 1e23)
    assert said.frontier_loss is not None
    assert said.loss_interval is not None
    assert said.frontier_loss < said.loss_interval[0]


def test_charts_hold_the_runs() -> None:
    drawn = charts(analyse(synthetic(0.001, np.random.default_rng(0)), bootstrap=50))
    assert len(drawn["isoflop"]["datasets"]["points"]) == 40
    assert len(drawn["residuals"]["datasets"]["points"]) == 40
    assert {row["method"] for row in drawn["frontier"]["datasets"]["points"]} == {"parabola", "interpolation", "envelope"}


def test_a_law_without_a_minimum_is_refused() -> None:
    with pytest.raises(ValueError, match="the law has no minimum"):
        Law(E=1.0, A=1.0, B=1.0, alpha=-0.1, beta=0.3).optimum(1e20)
