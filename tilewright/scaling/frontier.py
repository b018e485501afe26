"""The best size for each budget without a parametric law: iso-FLOP minima by two methods, and the lower envelope of the runs.

These are approaches 2 and 1 of Hoffmann et al. 2022. They assume less than the parametric law, so they are used to check it. A
power law N* = k C^a is fitted to the results of each method.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.extras import MissingExtra
from tilewright.scaling.runs import Array, Runs, budgets

__all__ = ["METHODS", "LossTrend", "Minimum", "Trend", "envelope", "loss_trend", "minima", "trend"]

METHODS = ("parabola", "interpolation")
_SAME_SIZE = 0.05
"""Sizes whose logarithms differ by less than this count as one size."""
FEWEST_SIZES = 5
"""The fewest sizes of a budget for which a minimum is computed; the parabola alone has three coefficients."""


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """The best size of one budget by one method. problem: why this minimum is not used; None if it is used."""

    flops: float
    params: float
    loss: float
    runs: int
    problem: str | None = None


def minima(runs: Runs, method: str) -> list[Minimum]:
    """The minimum of every budget with at least five runs of different sizes, smallest budget first.

    "parabola": a least-squares fit of the loss over log N. "interpolation": the lowest point of an Akima interpolation through
    the runs, on which runs far from the minimum have no influence; runs of nearly the same size are averaged. If the FLOPs
    within a budget vary, the losses are first adjusted to the mean budget, with a slope that is fitted together with the
    parabola.

    Raises:
        ValueError: the method is unknown.
        MissingExtra: the method is "interpolation", and scipy is not installed.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, wanted one of {', '.join(METHODS)}")
    found = []
    for group in budgets(runs):
        x, c = np.log(runs.params[group]), np.log(runs.flops[group])
        if len(np.unique(np.round(x, 6))) < FEWEST_SIZES:
            continue
        center = float(x.mean())
        curve, loss = _parabola(x - center, c - c.mean(), runs.loss[group])
        finder = _lowest_of_parabola if method == "parabola" else _lowest_between
        at, lowest, problem = finder(x - center, loss, curve)
        flops, params = float(np.exp(c.mean())), float(np.exp(center + at))
        found.append(Minimum(flops=flops, params=params, loss=lowest, runs=len(group), problem=problem))
    return found


def _parabola(x: Array, c: Array, loss: Array) -> tuple[Array, Array]:
    """(coefficients of 1, x and x^2; the losses adjusted to the mean budget)."""
    columns = [np.ones_like(x), x, x * x]
    if np.ptp(c) > 1e-3 and len(x) > FEWEST_SIZES:
        columns.append(c)
    solved = np.asarray(np.linalg.lstsq(np.stack(columns, axis=1), loss, rcond=None)[0], dtype=np.float64)
    return solved[:3], loss - (solved[3] * c if len(solved) > 3 else 0.0)


def _lowest_of_parabola(x: Array, loss: Array, curve: Array) -> tuple[float, float, str | None]:
    if curve[2] <= 0:
        at = float(x[np.argmin(loss)])
        return at, float(loss.min()), "the fitted parabola opens downwards, so the losses have no minimum within these sizes"
    at = float(-curve[1] / (2 * curve[2]))
    lowest = float(curve[0] + curve[1] * at + curve[2] * at * at)
    return at, lowest, _edge(at, x)


def _lowest_between(x: Array, loss: Array, curve: Array) -> tuple[float, float, str | None]:
    try:
        from scipy.interpolate import Akima1DInterpolator
    except ImportError as error:
        raise MissingExtra(f"interpolated minima need scipy: pip install 'tilewright[scaling]' ({error})") from None
    # One point per size, because the interpolation needs increasing sizes and would oscillate between two nearly equal ones.
    order = np.argsort(x, kind="stable")
    where = np.concatenate([[0], np.cumsum(np.diff(x[order]) > _SAME_SIZE)])
    count = np.bincount(where)
    sizes, means = np.bincount(where, x[order]) / count, np.bincount(where, loss[order]) / count
    if len(sizes) < FEWEST_SIZES:
        at = int(np.argmin(means))
        return (
            float(sizes[at]),
            float(means[at]),
            f"there are {len(sizes)} distinct sizes, but at least {FEWEST_SIZES} are needed",
        )
    fine = np.linspace(sizes[0], sizes[-1], 2001)
    values = Akima1DInterpolator(sizes, means)(fine)
    at = int(np.argmin(values))
    return float(fine[at]), float(values[at]), _edge(float(fine[at]), sizes)


def _edge(at: float, x: Array) -> str | None:
    if at >= x.max() - 1e-9:
        return "the minimum is at the largest size or beyond it; add larger models"
    if at <= x.min() + 1e-9:
        return "the minimum is at the smallest size or below it; add smaller models"
    return None


def envelope(runs: Runs) -> list[Minimum]:
    """The runs with a lower loss than every run with the same or fewer FLOPs, smallest first. The first one is left out,
    because there is no smaller run to compare it with."""
    order = np.lexsort((runs.loss, runs.flops))
    best = np.minimum.accumulate(runs.loss[order])
    kept = [i for place, i in enumerate(order) if place and runs.loss[i] <= best[place] and best[place] < best[place - 1]]
    return [Minimum(flops=float(runs.flops[i]), params=float(runs.params[i]), loss=float(runs.loss[i]), runs=1) for i in kept]


@dataclass(frozen=True, kw_only=True)
class Trend:
    """N* = factor C^exponent, with the 95 % interval of the exponent."""

    exponent: float
    low: float
    high: float
    factor: float
    points: int

    def params(self, flops: float) -> float:
        """The best size for a budget according to the trend."""
        return self.factor * flops**self.exponent


def trend(points: list[Minimum]) -> Trend | None:
    """A least-squares fit of log N* over log C to the points without a problem; None if there are fewer than three."""
    used = [p for p in points if p.problem is None]
    if len(used) < 3:
        return None
    import scipy.stats

    line: Any = scipy.stats.linregress(np.log([p.flops for p in used]), np.log([p.params for p in used]))
    reach = float(scipy.stats.t.ppf(0.975, len(used) - 2)) * float(line.stderr)
    slope = float(line.slope)
    return Trend(exponent=slope, low=slope - reach, high=slope + reach, factor=float(np.exp(line.intercept)), points=len(used))


@dataclass(frozen=True, kw_only=True)
class LossTrend:
    """The lowest loss for a budget: factor C^-exponent, without a floor.

    It assumes nothing about sizes and tokens. It is valid as long as losses are far above the floor: for one decade beyond the
    runs, not for three.
    left_out: the relative error for the largest budget if the line is fitted to the other budgets.
    """

    exponent: float
    factor: float
    budgets: int
    left_out: float

    def loss(self, flops: float) -> float:
        """The lowest loss for a budget."""
        return self.factor * flops**-self.exponent


FEWEST_BUDGETS = 4
"""The fewest points for a line; with fewer, it could not be tested on one of them."""


def loss_trend(runs: Runs) -> LossTrend | None:
    """A least-squares fit of log(lowest loss) over log(budget); None for fewer than four budgets with three sizes each.

    The lowest loss of a budget is the minimum of its parabola if there is one, otherwise the lowest measured loss.
    """
    parabolas = [p for p in minima(runs, "parabola") if p.problem is None]
    x, y = [], []
    for group in budgets(runs):
        if len(np.unique(np.round(np.log(runs.params[group]), 6))) < 3:
            continue
        flops = float(np.exp(np.log(runs.flops[group]).mean()))
        near = [p.loss for p in parabolas if abs(np.log(p.flops / flops)) < 1e-6]
        x.append(np.log(flops))
        y.append(np.log(near[0] if near else float(runs.loss[group].min())))
    if len(x) < FEWEST_BUDGETS:
        return None
    slope, intercept = map(float, np.polyfit(x, y, 1))
    others = np.polyfit(x[:-1], y[:-1], 1)
    left_out = float(np.exp(np.polyval(others, x[-1]) - y[-1])) - 1
    return LossTrend(exponent=-slope, factor=float(np.exp(intercept)), budgets=len(x), left_out=left_out)
