"""A law with a floor that few budgets cannot show: one fit for each of 20 floors, and their mean weighted by likelihood.

Runs within one or two decades of compute do not show the loss below which no model goes. A single fit picks one floor and is
then too sure of it. Here a form is fitted once for each floor between 0 and the lowest loss. A prediction is the mean of these
fits, weighted by their likelihood (Bayesian model averaging: Hoeting et al. 1999). Its interval covers the uncertainty of the
floor and of the other numbers, and the noise of a single run.

Shapes: M runs, F floors, P numbers of a form. All float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from tilewright.extras import MissingExtra
from tilewright.scaling.runs import Array

__all__ = ["AveragedLaw", "Form", "fit_floors"]

_FLOORS = 20
_NOISE, _NOISE_RUNS = 0.002, 5
"""Expected scatter of log L between seeds, and the number of runs it counts as, because few runs may fit a curve by chance."""
_HUBER = 0.005
"""Residuals of log L above this count linearly."""
_ARRAYS = ("floors", "weights", "numbers", "covariances")

Form = Callable[[Array, float, Array], tuple[Array, Array]]
"""(numbers [P], floor, x [M, 2]) -> (log L [M], its slopes by the numbers [M, P])."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AveragedLaw:
    """F fits of one form, one for each floor.

    floors [F]. weights [F]: sum 1. numbers [F, P] and covariances [F, P, P]: as the form defines them. noise: scatter of a
    run's log L around the law.
    """

    floors: Array
    weights: Array
    numbers: Array
    covariances: Array
    noise: float

    NAME: ClassVar[str]
    COUNT: ClassVar[int]
    """P."""
    CENTERS: ClassVar[tuple[str, ...]] = ()
    """Fields of a subclass that are plain numbers, saved with the rest."""

    @staticmethod
    def form(p: Array, floor: float, x: Array) -> tuple[Array, Array]:
        """See `Form`."""
        raise NotImplementedError

    def averaged(self, x: Sequence[float]) -> tuple[float, tuple[float, float]]:
        """(loss of a run at x [2], its 95 % interval: 1.96 standard deviations of log L to both sides)."""
        means, variances = [], []
        for floor, p, covariance in zip(self.floors, self.numbers, self.covariances):
            logs, slopes = self.form(p, float(floor), np.array([x], np.float64))
            means.append(float(logs[0]))
            variances.append(float(slopes[0] @ covariance @ slopes[0]))
        at = float(self.weights @ means)
        spread = self.weights @ (np.square(np.array(means) - at) + variances) + self.noise**2
        reach = 1.96 * math.sqrt(float(spread))
        return math.exp(at), (math.exp(at - reach), math.exp(at + reach))

    @property
    def floor(self) -> float:
        """The mean of the floors."""
        return float(self.weights @ self.floors)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `from_json` reads them."""
        plain = {name: getattr(self, name) for name in (*self.CENTERS, "noise")}
        return plain | {name: getattr(self, name).tolist() for name in _ARRAYS}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """The law that `to_json` wrote.

        Raises:
            ValueError: a number is missing or not finite, or the shapes disagree.
        """
        try:
            plain: dict[str, Any] = {name: float(saved[name]) for name in (*cls.CENTERS, "noise")}
            arrays: dict[str, Any] = {name: np.asarray(saved[name], np.float64) for name in _ARRAYS}
        except (KeyError, TypeError) as error:
            raise ValueError(f"the {cls.NAME} lacks a number: {error}") from None
        count, shapes = arrays["floors"].size, [arrays[name].shape for name in _ARRAYS]
        if not count or shapes != [(count,), (count,), (count, cls.COUNT), (count, cls.COUNT, cls.COUNT)]:
            raise ValueError(f"the {cls.NAME} has arrays of shapes {shapes}")
        if not all(np.isfinite(value).all() for value in (*arrays.values(), *plain.values())):
            raise ValueError(f"the {cls.NAME} has numbers that are not finite")
        return cls(**plain, **arrays)


def fit_floors(
    form: Form,
    x: Array,
    y: Array,
    starts: Callable[[float, Array | None], list[Array]],
    limits: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    """The fields of an `AveragedLaw`: the form fitted for each floor, and the floors' weights.

    Args:
        form: the law.
        x: [M, 2], where the runs are.
        y: [M], log L.
        starts: the numbers [P] from which the fit for a floor begins, of which the best end counts. It is given the floor and
            the end of the fit for the floor below, None for the first.
        limits: lowest and highest value of each number. They are wide, so that a fit to meaningless runs stays finite.

    Raises:
        MissingExtra: scipy is missing; the extra [scaling] brings it.
    """
    floors = float(np.exp(y.min())) * np.arange(_FLOORS) / _FLOORS
    fits: list[tuple[Array, float]] = []
    for floor in floors:
        begin = starts(float(floor), fits[-1][0] if fits else None)
        fits.append(min((_fit(form, float(floor), x, y, p, limits) for p in begin), key=lambda end: end[1]))
    slopes = [form(p, float(floor), x)[1] for floor, (p, _) in zip(floors, fits)]
    freedom = len(y) - len(limits) + _NOISE_RUNS
    variances = (np.array([squares for _, squares in fits]) + _NOISE_RUNS * _NOISE**2) / freedom
    likelihoods = np.exp(-freedom / 2 * np.log(variances / variances.min()))
    weights = likelihoods / likelihoods.sum()
    return {
        "floors": floors,
        "weights": weights,
        "numbers": np.array([p for p, _ in fits]),
        "covariances": np.array([v * np.linalg.pinv(s.T @ s) for v, s in zip(variances, slopes)]),
        "noise": float(np.sqrt(weights @ variances)),
    }


def _fit(
    form: Form, floor: float, x: Array, y: Array, start: Array, limits: Sequence[tuple[float, float]]
) -> tuple[Array, float]:
    """(the numbers for one floor, the sum of squares that the Huber loss amounts to)."""
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise MissingExtra(f"fitting a scaling law needs scipy: pip install 'tilewright[scaling]' ({error})") from None
    low, high = np.array(limits).T

    def residuals(p: Array) -> Array:
        return form(p, floor, x)[0] - y

    def jacobian(p: Array) -> Array:
        return form(p, floor, x)[1]

    solve: Any = least_squares
    begin = np.clip(start, low + 1e-3, high - 1e-3)
    solved = solve(residuals, begin, jacobian, bounds=(low, high), x_scale="jac", loss="huber", f_scale=_HUBER)
    return solved.x, 2 * float(solved.cost)
