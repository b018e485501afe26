"""The fit against a known law, other optimizers, and what was published about the points of the Chinchilla paper."""

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import approx_fprime, least_squares

from tests.scaling.tables import CHINCHILLA, TRUTH, needs_chinchilla, synthetic
from tilewright.scaling import Law, fit, read_runs
from tilewright.scaling.analysis import Analysis, analyse, predict
from tilewright.scaling.fit import Fit, influence, leave_largest_out, rejection, resample
from tilewright.scaling.law import HOFFMANN
from tilewright.scaling.objective import logs_and_shares, minimise, objective_and_gradient
from tilewright.scaling.runs import Array, Runs


@pytest.fixture(scope="module")
def chinchilla() -> Analysis:
    return analyse(read_runs(CHINCHILLA).without_highest(5), bootstrap=600)


def test_the_gradient_is_the_objectives() -> None:
    runs = synthetic(0.02, np.random.default_rng(0))
    n, d, y = np.log(runs.params), np.log(runs.tokens), np.log(runs.loss)
    point = np.array(TRUTH.logs) + 0.05
    value, gradient = objective_and_gradient(point, n, d, y, 1e-3)
    assert value == pytest.approx(1e-3 * np.abs(logs_and_shares(point[None], n, d)[0][0] - y).sum(), rel=0.05)
    numeric = approx_fprime(point, lambda p: objective_and_gradient(p, n, d, y, 1e-3)[0], 1e-7)
    assert gradient == pytest.approx(numeric, rel=1e-4)


def test_without_noise_the_law_comes_back() -> None:
    found = fit(synthetic(0.0, np.random.default_rng(0)), bootstrap=0)
    assert found.stopped is None
    assert found.law.logs == pytest.approx(TRUTH.logs, rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_no_other_optimizer_finds_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = synthetic(0.01, rng)
    found = fit(runs, bootstrap=0)
    n, d, y = np.log(runs.params), np.log(runs.tokens), np.log(runs.loss)
    for _ in range(5):
        start = np.array(TRUTH.logs) * rng.uniform(0.9, 1.1, 5)
        other = least_squares(
            lambda p: logs_and_shares(p[None], n, d)[0][0] - y, start, loss="huber", f_scale=1e-3, x_scale="jac", max_nfev=3000
        )
        assert found.objective <= other.cost * (1 + 1e-6)


def test_weights_are_repetitions() -> None:
    rng = np.random.default_rng(1)
    runs = synthetic(0.01, rng)
    n, d, y = np.log(runs.params), np.log(runs.tokens), np.log(runs.loss)
    counts = rng.integers(0, 4, len(y))
    start = np.array(TRUTH.logs)[None]
    weighted = minimise(start, n, d, y[None], counts[None].astype(float), 1e-3, steps=500, tolerance=1e-13)
    again = np.repeat(np.arange(len(y)), counts)
    repeated = minimise(start, n[again], d[again], y[again][None], np.ones((1, len(again))), 1e-3, steps=500, tolerance=1e-13)
    assert weighted[1] == pytest.approx(repeated[1], rel=1e-9)


def held(analysis: Analysis) -> Array:
    """Whether the 95 % intervals of E, A, B, alpha, beta and of the loss at 1e22 FLOPs hold the truth."""
    saved = analysis.to_json()
    truth = {"E": TRUTH.E, "A": TRUTH.A, "B": TRUTH.B, "alpha": TRUTH.alpha, "beta": TRUTH.beta}
    inside = [saved["intervals"][name][0] <= value <= saved["intervals"][name][1] for name, value in truth.items()]
    said = predict(saved, 1e22)
    assert said.loss_interval is not None
    low, high = said.loss_interval
    return np.array([*inside, low <= TRUTH.loss(said.params, said.tokens) <= high], dtype=np.float64)


def test_intervals_cover_in_a_few_draws() -> None:
    rng = np.random.default_rng(0)
    inside = []
    for seed in range(4):
        runs = synthetic(0.01, rng)
        found = fit(runs, bootstrap=100, seed=seed)
        inside.append(held(Analysis(runs=runs, fit=found, points={}, trends={}, largest_out=None, warnings=[])))
    # Four draws of six intervals that hold the truth 19 times in 20, and lie together: fewer than 14 of 24 is no accident.
    assert int(np.sum(inside)) >= 14


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_95_percent_intervals_cover_in_93_to_97_percent_of_600_draws() -> None:
    truth, draws = np.array(TRUTH.logs), 600
    rng = np.random.default_rng(1)
    inside = np.zeros(6)
    for seed in range(draws):
        runs = synthetic(0.01, rng)
        n, d, y = np.log(runs.params), np.log(runs.tokens), np.log(runs.loss)
        # From the truth: the minimum that `fit` finds from its grid (as tested above), in a tenth of its time.
        best, _ = minimise(truth[None], n, d, y[None], np.ones((1, len(y))), 1e-3, steps=400, tolerance=1e-12)
        law = Law.from_logs(*best[0].tolist())
        samples = resample(runs, law, count=200, seed=seed)
        found = Fit(law=law, objective=1.0, delta=1e-3, agreeing=1, starts=1, stopped=None, samples=samples)
        inside += held(Analysis(runs=runs, fit=found, points={}, trends={}, largest_out=None, warnings=[]))
    print(inside / draws)
    assert (inside / draws >= 0.93).all()
    assert (inside / draws <= 0.97).all()


@needs_chinchilla
def test_the_published_fit_is_found(chinchilla: Analysis) -> None:
    law = chinchilla.fit.law
    assert chinchilla.fit.objective <= 0.0010183
    assert chinchilla.fit.stopped is None
    assert chinchilla.fit.agreeing > 1
    # Besiroglu et al. 2024, table 1, with the standard errors printed there.
    assert law.alpha == pytest.approx(0.348, abs=0.015)
    assert law.beta == pytest.approx(0.366, abs=0.021)
    assert abs(law.E - 1.817) < 0.026
    spread = chinchilla.fit.samples[:, 3:].std(axis=0)
    assert spread == pytest.approx([0.015, 0.021], rel=0.3)


@needs_chinchilla
def test_the_original_parameters_are_rejected_and_the_replications_are_not(chinchilla: Analysis) -> None:
    original = rejection(chinchilla.runs, chinchilla.fit, HOFFMANN, resamples=200)
    assert original.p_value == pytest.approx(1 / 201)
    assert original.statistic > 10 * original.largest
    replicated = Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
    assert rejection(chinchilla.runs, chinchilla.fit, replicated, resamples=200).p_value > 0.2


@needs_chinchilla
def test_the_largest_runs_are_predicted(chinchilla: Analysis) -> None:
    left = chinchilla.largest_out
    assert left is not None
    assert left["held_out"] == 24
    assert left["decades"] > 1
    assert left["rms"] < 0.02


@needs_chinchilla
def test_the_highest_losses_are_named_where_they_are_kept() -> None:
    found = analyse(read_runs(CHINCHILLA), bootstrap=200)
    said = "\n".join(found.warnings)
    assert "loss 5.006" in said
    assert "loss 4.665" in said
    assert "has a large influence" in said


@pytest.mark.parametrize("seed", range(3))
def test_a_true_law_is_rarely_rejected_and_a_wrong_one_is(seed: int) -> None:
    runs = synthetic(0.01, np.random.default_rng(seed))
    found = fit(runs, bootstrap=0)
    assert rejection(runs, found, TRUTH, resamples=99).p_value > 0.01
    assert rejection(runs, found, HOFFMANN, resamples=99).p_value == pytest.approx(0.01)


SCATTERED = [
    (3728928, 19780608, 1.3026),
    (4360160, 26989568, 1.2765),
    (2264160, 32959488, 1.2626),
    (2458560, 56978432, 1.2674),
    (6114048, 31374336, 1.2420),
    (1261952, 79684608, 1.2809),
    (3728928, 57164800, 1.1899),
    (1946400, 25155584, 1.3814),
    (2901312, 15054848, 1.3530),
    (1475200, 97014784, 1.1992),
    (897312, 114917376, 1.2898),
    (897312, 67598336, 1.3255),
    (897312, 39763968, 1.3757),
    (1261952, 27572224, 1.3877),
    (2264160, 11404288, 1.4055),
    (1946400, 123590656, 1.2110),
    (577728, 106848256, 1.3164),
    (577728, 62852096, 1.3481),
    (897312, 195359744, 1.2486),
    (1261952, 230287360, 1.2033),
]
"""(parameters, tokens, loss) of models of one to five layers, trained on one H100; they scatter by some per cent."""


def test_runs_whose_best_law_has_no_floor_are_fitted_and_the_missing_term_is_named() -> None:
    params, tokens, loss = np.array(SCATTERED, dtype=np.float64).T
    found = analyse(Runs(params=params, tokens=tokens, flops=6 * params * tokens, loss=loss), bootstrap=20)
    assert found.fit.law.E < 1e-6
    assert any(warning.startswith("E is 0 in the best fit") for warning in found.warnings)
    assert np.isfinite(found.fit.samples).all()


def test_a_run_that_pulls_is_found() -> None:
    runs = synthetic(0.002, np.random.default_rng(0))
    clean = influence(runs, fit(runs, bootstrap=200))
    runs.loss[7] *= 1.5
    bad = analyse(runs, bootstrap=200)
    assert np.abs(clean).max() < 1.5
    assert any(f"loss {runs.loss[7]:.4g}" in warning for warning in bad.warnings)


def test_leaving_the_largest_out_says_how_wrong_another_law_is() -> None:
    rng = np.random.default_rng(0)
    runs = synthetic(0.0, rng)
    assert abs(leave_largest_out(runs)["worst"]) < 1e-4
    runs.loss[-8:] *= 1.05
    assert leave_largest_out(runs)["mean"] == pytest.approx(1 / 1.05 - 1, abs=1e-3)


def test_an_optimizer_that_stopped_early_is_said(tmp_path: Path) -> None:
    runs = synthetic(0.01, np.random.default_rng(3))
    found = fit(runs, bootstrap=0, max_steps=2)
    assert found.stopped is not None
    assert "lowered the objective further" in found.stopped
    assert fit(runs, bootstrap=0).stopped is None
