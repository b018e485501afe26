"""Which form predicts best: every form is fitted to the smaller budgets alone and asked for the loss of the largest."""

from dataclasses import dataclass

import numpy as np

from tilewright.scaling.budget_law import fit_budget_law
from tilewright.scaling.fit import DELTA, fit
from tilewright.scaling.frontier import loss_trend
from tilewright.scaling.runs import FEWEST_BUDGETS, FEWEST_RUNS, Runs, budgets

__all__ = ["Backtest", "backtests"]

_LOWEST = 3
"""The runs of the largest budget that are predicted: those nearest to its minimum, where the next run will be."""
_MOST = 6


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """Predictions from `runs` runs of at most `flops` FLOPs, for a budget `factor` times as large.

    law, line, budget_law: relative error of the predicted loss, the mean of the three lowest runs (for the line, of the lowest
    one); line is None where there are too few budgets for it. reach: half of the budget law's 95 % interval, relative.
    """

    flops: float
    factor: float
    runs: int
    law: float
    line: float | None
    budget_law: float
    reach: float


def backtests(runs: Runs, *, delta: float = DELTA) -> list[Backtest]:
    """Leave out the largest budget, then the two largest, and so on, up to six and while three budgets are left."""
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
        law, by_budget, line = fit(kept, delta=delta, bootstrap=0).law, fit_budget_law(kept), loss_trend(kept)
        asked = [(float(runs.flops[i]), float(runs.params[i]), float(runs.tokens[i]), float(runs.loss[i])) for i in low]
        predicted = [by_budget.loss(c, n) for c, n, _, _ in asked]
        found.append(
            Backtest(
                flops=limit,
                factor=largest / limit,
                runs=len(kept),
                law=float(np.mean([law.loss(n, d) / y - 1 for _, n, d, y in asked])),
                line=None if line is None else line.loss(largest) / float(runs.loss[last].min()) - 1,
                budget_law=float(np.mean([said / y - 1 for (said, _), (*_, y) in zip(predicted, asked)])),
                reach=float(np.mean([high / said - 1 for said, (_, high) in predicted])),
            )
        )
    return found
