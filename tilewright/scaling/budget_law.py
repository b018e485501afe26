"""The budget law: the lowest loss is a floor plus a power of the budget; over model sizes, the loss is a parabola.

    log L(N, C) = log(E + K / C^gamma) + kappa (log N - log N*(C))^2,   N*(C) = k C^a

N: parameters. C: FLOPs. N*(C): the best size for a budget. The parabola is approach 2 of Hoffmann et al. 2022, here with one
curvature for all budgets. A power with a floor is the usual form of the lowest loss (Henighan et al., Scaling Laws for
Autoregressive Generative Modeling, 2020). Predictions are averaged over values of the floor E (averaged.py).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tilewright.scaling.averaged import AveragedLaw, fit_floors
from tilewright.scaling.runs import Array, Runs

__all__ = ["BudgetLaw", "fit_budget_law"]

_LIMITS = ((-20.0, 20.0), (0.0, 5.0), (-20.0, 100.0), (-3.0, 3.0), (-20.0, 3.0))


@dataclass(frozen=True, eq=False, kw_only=True)
class BudgetLaw(AveragedLaw):
    """numbers [F, 5]: log K, gamma, log k, a, log kappa, for budgets divided by e^center."""

    center: float

    NAME: ClassVar = "budget law"
    COUNT: ClassVar = 5
    CENTERS: ClassVar = ("center",)

    def best_size(self, flops: float) -> float:
        """N* of a budget: the geometric mean over the floors."""
        c = math.log(flops) - self.center
        return float(np.exp(self.weights @ (self.numbers[:, 2] + self.numbers[:, 3] * c)))

    def loss(self, flops: float, params: float | None = None) -> tuple[float, tuple[float, float]]:
        """(predicted loss of a run, its 95 % interval) for a budget and a model of `params` parameters; None: the best size."""
        return self.averaged((math.log(params or self.best_size(flops)), math.log(flops) - self.center))

    @staticmethod
    def form(p: Array, floor: float, x: Array) -> tuple[Array, Array]:
        """x [M, 2]: log N, log C - center."""
        n, c = x.T
        power = np.exp(p[0] - p[1] * c)
        lowest = floor + power
        off = n - p[2] - p[3] * c
        curvature = np.exp(p[4])
        share, bent = power / lowest, 2 * curvature * off
        slopes = np.stack([share, -c * share, -bent, -bent * c, curvature * off * off], axis=1)
        return np.log(lowest) + curvature * off * off, slopes


def fit_budget_law(runs: Runs) -> BudgetLaw:
    """Fit the law to runs for each floor, and compute the weights of the floors.

    Raises:
        ValueError: there are too few runs or budgets.
        MissingExtra: scipy is not installed; it is in the extra [scaling].
    """
    runs.check_enough()
    n, y = np.log(runs.params), np.log(runs.loss)
    center = float(np.log(runs.flops).mean())
    c = np.log(runs.flops) - center

    def starts(floor: float, _: Array | None) -> list[Array]:
        slope, height = np.polyfit(c, np.log(np.exp(y) - floor), 1)
        lowest = np.argsort(y - np.polyval(np.polyfit(c, y, 1), c))[: max(3, len(n) // 4)]
        return [np.array([height, -slope, n[lowest].mean(), 0.5, math.log(0.03)])]

    fields = fit_floors(BudgetLaw.form, np.stack([n, c], axis=1), y, starts, _LIMITS)
    return BudgetLaw(center=center, **fields)
