"""The budget law: the lowest loss of a budget as a power of it above a floor, and a parabola over model sizes.

    log L(N, C) = log(E + K / C^gamma) + kappa (log N - log N*(C))^2,   N*(C) = k C^a

The parabola is approach 2 of Hoffmann et al. 2022, here with one curvature for all budgets; the power with a floor is the usual
form of the lowest loss (Henighan et al., Scaling Laws for Autoregressive Generative Modeling, 2020). Budgets within one or two
decades do not show the floor E. So the law is fitted once for each of 20 floors between 0 and the lowest loss, and a prediction
is the mean of these fits, weighted by their likelihood (Bayesian model averaging: Hoeting et al. 1999). Its interval covers the
uncertainty of the floor and of the other numbers, and the noise of a single run.

Shapes: M runs, F floors. All float64.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.extras import MissingExtra
from tilewright.scaling.runs import Array, Runs

__all__ = ["BudgetLaw", "fit_budget_law"]

_FLOORS = 20
_NOISE, _NOISE_RUNS = 0.002, 5
"""Expected scatter of log L between seeds, and the number of runs it counts as, because few runs may fit a curve by chance."""
_HUBER = 0.005
"""Residuals of log L above this count linearly."""
_NUMBERS = 5
_LIMITS = ((-20.0, 20.0), (0.0, 5.0), (-20.0, 100.0), (-3.0, 3.0), (-20.0, 3.0))
"""Of the five numbers: wide, so that a fit to meaningless runs stays finite."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BudgetLaw:
    """F fits, one for each floor.

    numbers [F, 5]: log K, gamma, log k, a, log kappa, in budgets divided by e^center. covariances [F, 5, 5] of these.
    weights [F]: sum 1. noise: scatter of a run's log L around the law.
    """

    center: float
    floors: Array
    weights: Array
    numbers: Array
    covariances: Array
    noise: float

    def best_size(self, flops: float) -> float:
        """N* of a budget: the geometric mean over floors."""
        c = math.log(flops) - self.center
        return float(np.exp(self.weights @ (self.numbers[:, 2] + self.numbers[:, 3] * c)))

    def loss(self, flops: float, params: float | None = None) -> tuple[float, tuple[float, float]]:
        """(predicted loss of a run, its 95 % interval) for a budget spent on `params` parameters; None: on the best size.

        The interval is for one run: 1.96 standard deviations of log L to both sides.
        """
        n = np.array([math.log(params if params is not None else self.best_size(flops))])
        c = np.array([math.log(flops) - self.center])
        means, variances = [], []
        for floor, p, covariance in zip(self.floors, self.numbers, self.covariances):
            logs, slopes = _law(p, float(floor), n, c)
            means.append(float(logs[0]))
            variances.append(float(slopes[0] @ covariance @ slopes[0]))
        at = float(self.weights @ means)
        spread = self.weights @ (np.square(np.array(means) - at) + variances) + self.noise**2
        reach = 1.96 * math.sqrt(float(spread))
        return math.exp(at), (math.exp(at - reach), math.exp(at + reach))

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `from_json` reads them."""
        arrays = {name: getattr(self, name).tolist() for name in ("floors", "weights", "numbers", "covariances")}
        return {"center": self.center, "noise": self.noise, **arrays}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "BudgetLaw":
        """The law that `to_json` wrote.

        Raises:
            ValueError: a number is missing or not finite, or the shapes disagree.
        """
        try:
            arrays = {name: np.asarray(saved[name], np.float64) for name in ("floors", "weights", "numbers", "covariances")}
            made = cls(center=float(saved["center"]), noise=float(saved["noise"]), **arrays)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the budget law lacks a number: {error}") from None
        count = made.floors.size
        shapes = [made.floors.shape, made.weights.shape, made.numbers.shape, made.covariances.shape]
        if not count or shapes != [(count,), (count,), (count, _NUMBERS), (count, _NUMBERS, _NUMBERS)]:
            raise ValueError(f"the budget law has arrays of shapes {shapes}")
        if not all(np.isfinite(value).all() for value in (*arrays.values(), made.center, made.noise)):
            raise ValueError("the budget law has numbers that are not finite")
        return made


def fit_budget_law(runs: Runs) -> BudgetLaw:
    """Fit the law to runs for each floor, and weigh the floors.

    Raises:
        ValueError: too few runs or budgets.
        MissingExtra: scipy is missing; the extra [scaling] brings it.
    """
    runs.check_enough()
    n, y = np.log(runs.params), np.log(runs.loss)
    center = float(np.log(runs.flops).mean())
    c = np.log(runs.flops) - center
    floors = float(runs.loss.min()) * np.arange(_FLOORS) / _FLOORS
    fits = [_fit(float(floor), n, c, y) for floor in floors]
    slopes = [_law(p, float(floor), n, c)[1] for floor, (p, _) in zip(floors, fits)]
    freedom = len(n) - _NUMBERS + _NOISE_RUNS
    variances = (np.array([squares for _, squares in fits]) + _NOISE_RUNS * _NOISE**2) / freedom
    likelihoods = np.exp(-freedom / 2 * np.log(variances / variances.min()))
    weights = likelihoods / likelihoods.sum()
    return BudgetLaw(
        center=center,
        floors=floors,
        weights=weights,
        numbers=np.array([p for p, _ in fits]),
        covariances=np.array([v * np.linalg.pinv(s.T @ s) for v, s in zip(variances, slopes)]),
        noise=float(np.sqrt(weights @ variances)),
    )


def _fit(floor: float, n: Array, c: Array, y: Array) -> tuple[Array, float]:
    """(the five numbers for one floor, the sum of squares that the Huber loss amounts to)."""
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise MissingExtra(f"fitting a scaling law needs scipy: pip install 'tilewright[scaling]' ({error})") from None
    slope, height = np.polyfit(c, np.log(np.exp(y) - floor), 1)
    lowest = np.argsort(y - np.polyval(np.polyfit(c, y, 1), c))[: max(3, len(n) // 4)]
    low, high = np.array(_LIMITS).T
    start = np.clip([height, -slope, n[lowest].mean(), 0.5, math.log(0.03)], low + 1e-3, high - 1e-3)

    def residuals(p: Array) -> Array:
        return _law(p, floor, n, c)[0] - y

    def jacobian(p: Array) -> Array:
        return _law(p, floor, n, c)[1]

    solve: Any = least_squares
    solved = solve(residuals, start, jacobian, bounds=(low, high), x_scale="jac", loss="huber", f_scale=_HUBER)
    return solved.x, 2 * float(solved.cost)


def _law(p: Array, floor: float, n: Array, c: Array) -> tuple[Array, Array]:
    """log L, [M], and its slopes by the five numbers, [M, 5]."""
    power = np.exp(p[0] - p[1] * c)
    lowest = floor + power
    x = n - p[2] - p[3] * c
    curvature = np.exp(p[4])
    share, bent = power / lowest, 2 * curvature * x
    slopes = np.stack([share, -c * share, -bent, -bent * c, curvature * x * x], axis=1)
    return np.log(lowest) + curvature * x * x, slopes
