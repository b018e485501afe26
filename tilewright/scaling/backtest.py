"""A test of which law predicts best: every law is fitted to the smaller budgets only and predicts the loss of the largest."""

from dataclasses import dataclass

import numpy as np

from tilewright.scaling.budget_law import fit_budget_law
from tilewright.scaling.fit import DELTA, fit
from tilewright.scaling.frontier import loss_trend
from tilewright.scaling.joint_law import fit_joint_law
from tilewright.scaling.runs import FEWEST_BUDGETS, FEWEST_RUNS, Array, Runs, budgets

__all__ = ["Backtest", "backtests"]

_LOWEST = 3
"""The number of runs of the largest budget that are predicted: those with the lowest losses, near the best size."""
_MOST = 6


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """Predictions from `runs` runs of at most `flops` FLOPs, for a budget `factor` times as large.

    law, line, budget_law, joint_law: the relative error of the predicted loss, as the mean over the three runs with the lowest
    losses (for the line: of the lowest one). line is None if there are too few budgets for it. reach, joint_reach: half the
    width of the 95 % interval of the budget law and of the joint law, relative to the loss.
    """

    flops: float
    factor: float
    runs: int
    law: float
    line: float | None
    budget_law: float
    reach: float
    joint_law: float
    joint_reach: float


def backtests(runs: Runs, *, delta: float = DELTA) -> list[Backtest]:
    """Leave out the largest budget, then the two largest, and so on: at most six, and at least three budgets remain."""
    groups = [group for group in budgets(runs) if len(group) >= _LOWEST]
    found: list[Backtest] = []
    if not groups:
        return found
    last = groups[-1]
    low = last[np.argsort(runs.loss[last], kind="stable")[:_LOWEST]]
    largest = float(np.exp(np.log(runs.flops[last]).mean()))
    for count in range(1, min(_MOST, len(groups) - 1) + 1):
        limit = float(runs.flops[groups[-count - 1]].max())
        kept = runs.where(runs.flops <= limit)
        if len(kept) < FEWEST_RUNS or len(budgets(kept)) < FEWEST_BUDGETS:
            break
        law, line = fit(kept, delta=delta, bootstrap=0).law, loss_trend(kept)
        by_budget, joint = fit_budget_law(kept), fit_joint_law(kept)
        asked = [(float(runs.flops[i]), float(runs.params[i]), float(runs.tokens[i]), float(runs.loss[i])) for i in low]
        budget_law, reach = _compared([by_budget.loss(c, n) for c, n, _, _ in asked], runs.loss[low])
        joint_law, joint_reach = _compared([joint.loss(n, d) for _, n, d, _ in asked], runs.loss[low])
        found.append(
            Backtest(
                flops=limit,
                factor=largest / limit,
                runs=len(kept),
                law=float(np.mean([law.loss(n, d) / y - 1 for _, n, d, y in asked])),
                line=None if line is None else line.loss(largest) / float(runs.loss[last].min()) - 1,
                budget_law=budget_law,
                reach=reach,
                joint_law=joint_law,
                joint_reach=joint_reach,
            )
        )
    return found


def _compared(predicted: list[tuple[float, tuple[float, float]]], loss: Array) -> tuple[float, float]:
    """(mean relative error, mean half width of the intervals relative to the loss) of predictions with 95 % intervals."""
    errors = [said / float(y) - 1 for (said, _), y in zip(predicted, loss, strict=True)]
    return float(np.mean(errors)), float(np.mean([high / said - 1 for said, (_, high) in predicted]))
