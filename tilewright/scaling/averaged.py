"""Laws whose floor is averaged over: one fit for each of 20 floors, and their mean weighted by likelihood.

The floor is the loss that no model can go below. Runs within one or two decades of compute do not determine it: a single fit
would choose one floor, and its intervals would be too narrow. Here a form (the formula of a law) is fitted once for each floor
between 0 and the lowest loss. A prediction is the mean of these fits, weighted by their likelihood (Bayesian model averaging:
Hoeting et al. 1999). Its interval covers the uncertainty of the floor and of the other parameters, and the noise of one run.

Shapes: M runs, F floors, P parameters of a form. All float64.
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
"""(expected standard deviation of log L between seeds, number of runs with which it enters the estimate of the noise). It is
included because few runs may fit a curve too well by chance."""
_HUBER = 0.005
"""The loss of the fit is linear for residuals of log L above this, and quadratic below."""
_ARRAYS = ("floors", "weights", "numbers", "covariances")

Form = Callable[[Array, float, Array], tuple[Array, Array]]
"""(parameters [P], floor, x [M, 2]) -> (log L [M], its derivatives with respect to the parameters [M, P])."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AveragedLaw:
    """F fits of one form, one for each floor.

    floors: [F]. weights: [F], with sum 1. numbers: [F, P], the parameters that the form defines. covariances: [F, P, P], those
    of the parameters. noise: the standard deviation of a run's log L around the law.
    """

    floors: Array
    weights: Array
    numbers: Array
    covariances: Array
    noise: float

    NAME: ClassVar[str]
    COUNT: ClassVar[int]
    """P, the number of parameters."""
    CENTERS: ClassVar[tuple[str, ...]] = ()
    """Names of further fields of a subclass that are plain numbers; they are saved with the others."""

    @staticmethod
    def form(p: Array, floor: float, x: Array) -> tuple[Array, Array]:
        """See `Form`."""
        raise NotImplementedError

    def averaged(self, x: Sequence[float]) -> tuple[float, tuple[float, float]]:
        """(predicted loss of a run at x [2], its 95 % interval: log L plus and minus 1.96 standard deviations)."""
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
        """The weighted mean of the floors."""
        return float(self.weights @ self.floors)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `from_json`."""
        plain = {name: getattr(self, name) for name in (*self.CENTERS, "noise")}
        return plain | {name: getattr(self, name).tolist() for name in _ARRAYS}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """The law from the values that `to_json` returned.

        Raises:
            ValueError: a number is missing or not finite, or the shapes disagree.
        """
        try:
            plain: dict[str, Any] = {name: float(saved[name]) for name in (*cls.CENTERS, "noise")}
            arrays: dict[str, Any] = {name: np.asarray(saved[name], np.float64) for name in _ARRAYS}
        except (KeyError, TypeError) as error:
            raise ValueError(f"a number is missing from the {cls.NAME} or has the wrong type: {error}") from None
        count, shapes = arrays["floors"].size, [arrays[name].shape for name in _ARRAYS]
        if not count or shapes != [(count,), (count,), (count, cls.COUNT), (count, cls.COUNT, cls.COUNT)]:
            raise ValueError(f"the arrays of the {cls.NAME} have shapes {shapes}, which do not fit together")
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
    """The fields of an `AveragedLaw`: the form fitted for each floor, and the weights of the floors.

    Args:
        form: the formula of the law.
        x: [M, 2], the inputs of the form for each run.
        y: [M], log L.
        starts: returns the parameters [P] from which the fits for a floor begin; the best fit is used. Its arguments are the
            floor and the fitted parameters of the next lower floor (None for the first floor).
        limits: the lowest and highest value of each parameter. They are wide; they only keep a fit to meaningless runs finite.

    Raises:
        MissingExtra: scipy is not installed; it is in the extra [scaling].
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
    """(the fitted parameters for one floor, twice the sum of the Huber losses, which takes the place of a sum of squares)."""
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
