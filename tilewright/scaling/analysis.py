"""The analysis of one table of runs: the law with intervals, the results of the other methods, and warnings.

`to_json` saves an analysis as JSON, which is all that `predict` needs.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.scaling.backtest import Backtest, backtests
from tilewright.scaling.budget_law import BudgetLaw, fit_budget_law
from tilewright.scaling.fit import DELTA, NAMES, Fit, fit, influence, leave_largest_out
from tilewright.scaling.frontier import METHODS, LossTrend, Minimum, Trend, envelope, loss_trend, minima, trend
from tilewright.scaling.joint_law import JointLaw, fit_joint_law
from tilewright.scaling.law import Law
from tilewright.scaling.objective import logs_and_shares
from tilewright.scaling.runs import Array, Runs

__all__ = ["Analysis", "Prediction", "analyse", "interval", "predict", "predict_loss", "read_analysis"]

_FORMAT = "tilewright-scaling-law"
_LARGEST_FILE = 64 << 20
_PULL = 0.5
"""A warning names a run whose removal moves alpha or beta by more than this many standard errors. Among the 240 Chinchilla runs
the largest shift is 0.4."""
_NOTHING = 1e-6
"""Relative to the smallest loss: a term of the law that is smaller than this for all runs has no influence on the law."""
_FAR = 8.0
"""A warning names a run whose residual is larger than this many robust standard deviations."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Analysis:
    """A fit, the minima and trends by method, and warnings, one sentence each."""

    runs: Runs
    fit: Fit
    points: dict[str, list[Minimum]]
    trends: dict[str, Trend | None]
    largest_out: dict[str, Any] | None
    warnings: list[str]
    losses: LossTrend | None = None
    budget_law: BudgetLaw | None = None
    joint_law: JointLaw | None = None
    backtests: list[Backtest] = field(default_factory=list[Backtest])

    def to_json(self) -> dict[str, Any]:
        """Plain values. "samples" has one row for each bootstrap fit, with its parameters in the order of "names"."""
        law = self.fit.law
        return {
            "format": _FORMAT,
            "version": 1,
            "law": asdict(law),
            "intervals": _intervals(self.fit),
            "objective": self.fit.objective,
            "delta": self.fit.delta,
            "starts": self.fit.starts,
            "agreeing": self.fit.agreeing,
            "runs": len(self.runs),
            "largest_flops": float(self.runs.flops.max()),
            "repeats": self.runs.repeats(),
            "flops_per_param_token": self.runs.flops_per_param_token,
            "points": {method: [asdict(point) for point in points] for method, points in self.points.items()},
            "trends": {method: None if t is None else asdict(t) for method, t in self.trends.items()},
            "loss_trend": None if self.losses is None else asdict(self.losses),
            "leave_largest_out": self.largest_out,
            "budget_law": None if self.budget_law is None else self.budget_law.to_json(),
            "joint_law": None if self.joint_law is None else self.joint_law.to_json(),
            "backtests": [asdict(test) for test in self.backtests],
            "warnings": self.warnings,
            "names": list(NAMES),
            "samples": self.fit.samples.tolist(),
        }


def interval(at: float, logs: Array) -> tuple[float, float] | None:
    """The 95 % interval of a positive number `at`: log(at) plus and minus 1.96 standard deviations of the resampled logarithms.

    None if there are no resampled logarithms.
    """
    if not len(logs):
        return None
    reach, most = _reach(logs), 700.0  # float64 overflows above e^709; a term that is 0 in a fit has a very negative logarithm
    return math.exp(max(math.log(at) - reach, -most)), math.exp(min(math.log(at) + reach, most))


def _reach(values: Array) -> float:
    """1.96 standard deviations, estimated from the middle 68 % of the values.

    The middle is used because a few resampled fits end at E = 0, far from the others. The interval between the 2.5th and 97.5th
    percentiles would be too wide: on 600 tables of 40 runs it contained the true value 97 to 98 % of the time.
    """
    low, high = np.percentile(values, [15.87, 84.13])
    return 1.96 * float(high - low) / 2


def _intervals(found: Fit) -> dict[str, tuple[float, float] | None]:
    law, (a, b, e, alpha, beta) = found.law, found.samples.T
    logs = {"E": (law.E, e), "A": (law.A, a), "B": (law.B, b)}
    plain = {"alpha": (law.alpha, alpha), "beta": (law.beta, beta), "exponent": (law.params_exponent, beta / (alpha + beta))}
    said: dict[str, tuple[float, float] | None] = {name: interval(at, values) for name, (at, values) in logs.items()}
    for name, (at, values) in plain.items():
        reach = _reach(values) if len(values) else 0.0
        said[name] = (at - reach, at + reach) if len(values) else None
    return said


def analyse(runs: Runs, *, delta: float = DELTA, bootstrap: int = 1000, seed: int = 0) -> Analysis:
    """Fit a law to runs, find the minima by every method, and write warnings.

    Raises:
        ValueError: there are too few runs or budgets.
        MissingExtra: scipy is not installed; it is in the extra [scaling].
    """
    found = fit(runs, delta=delta, bootstrap=bootstrap, seed=seed)
    points = {method: minima(runs, method) for method in METHODS} | {"envelope": envelope(runs)}
    trends = {method: trend(found) for method, found in points.items()}
    try:
        largest_out, refused = leave_largest_out(runs, delta=delta), None
    except ValueError as error:
        largest_out, refused = (
            None,
            f"the table cannot be fitted without its largest budget, so no prediction was tested: {error}",
        )
    warnings = list(_doubts(runs, found, points, trends)) + ([refused] if refused else [])
    return Analysis(
        runs=runs,
        fit=found,
        budget_law=fit_budget_law(runs),
        joint_law=fit_joint_law(runs),
        backtests=backtests(runs, delta=delta),
        points=points,
        trends=trends,
        losses=loss_trend(runs),
        largest_out=largest_out,
        warnings=warnings,
    )


def _doubts(runs: Runs, found: Fit, points: dict[str, list[Minimum]], trends: dict[str, Trend | None]) -> Iterator[str]:
    if found.stopped:
        yield f"the optimizer stopped early: {found.stopped}"
    if found.agreeing < 2:
        yield f"only {found.agreeing} of {found.starts} starts ended in the lowest minimum; there may be a lower one"
    if found.law.alpha <= 0 or found.law.beta <= 0:
        yield (
            f"alpha is {found.law.alpha:.3g} and beta is {found.law.beta:.3g}, which must both be above 0 for the law to "
            "have a best size"
        )
    for name, share in zip("EAB", (found.law.E, *_terms(runs, found.law)), strict=True):
        if share < _NOTHING * runs.loss.min():
            yield f"{name} is 0 in the best fit: these runs do not determine this term, and predictions lack it"
    for method in METHODS:
        for point in points[method]:
            if point.problem:
                yield f"budget {point.flops:.3g}, {method}: {point.problem}"
        if trends[method] is None:
            yield f"{method}: fewer than 3 budgets have a minimum between the sizes of five or more runs, so there is no trend"
    yield from _single_runs(runs, found)
    yield from _disagreements(found, trends)
    k = np.log(runs.flops / runs.params / runs.tokens)
    if np.ptp(k) > math.log(1.2):
        low, high = np.exp(k.min()), np.exp(k.max())
        yield (
            f"FLOPs are {low:.2f} N D to {high:.2f} N D, depending on the run; optima are computed for C = "
            f"{runs.flops_per_param_token:.2f} N D"
        )


def _terms(runs: Runs, law: Law) -> tuple[float, float]:
    """The largest A / N^alpha and B / D^beta of the runs."""
    return float((law.A * runs.params**-law.alpha).max()), float((law.B * runs.tokens**-law.beta).max())


def _single_runs(runs: Runs, found: Fit) -> Iterator[str]:
    n, d = np.log(runs.params), np.log(runs.tokens)
    residuals = np.log(runs.loss) - logs_and_shares(np.array([found.law.logs]), n, d)[0][0]
    spread = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    far = np.abs(residuals) > _FAR * max(spread, 1e-12)
    for i in np.flatnonzero(far)[:5]:
        yield f"{_run(runs, i)} is {residuals[i]:+.1%} off the law, {abs(residuals[i]) / spread:.0f} times the usual spread"
    if far.sum() > 5:
        yield f"{int(far.sum()) - 5} further runs are as far off the law"
    if len(found.samples):
        moves = np.abs(influence(runs, found)).max(axis=1)
        for i in np.argsort(-moves)[:5]:
            if moves[i] > _PULL:
                yield (
                    f"{_run(runs, i)} has a large influence: without it, an exponent changes by {moves[i]:.1f} of its "
                    "standard error"
                )


def _run(runs: Runs, i: Any) -> str:
    return f"the run of {runs.params[i]:.3g} parameters, {runs.tokens[i]:.3g} tokens, loss {runs.loss[i]:.4g}"


def _disagreements(found: Fit, trends: dict[str, Trend | None]) -> Iterator[str]:
    law = found.law
    if not len(found.samples) or law.alpha <= 0 or law.beta <= 0:
        return
    low, high = _intervals(found)["exponent"] or (0.0, 1.0)
    for method in METHODS:
        if (t := trends[method]) and (t.high < low or high < t.low):
            yield (
                f"the methods disagree on N* ~ C^a: the law says a = {law.params_exponent:.3f} ({low:.3f} to {high:.3f}), "
                f"iso-FLOP minima by {method} {t.exponent:.3f} ({t.low:.3f} to {t.high:.3f})"
            )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The best use of a budget according to a law, with 95 % intervals, and the distance of the budget from the runs."""

    flops: float
    params: float
    params_interval: tuple[float, float] | None
    tokens: float
    tokens_interval: tuple[float, float] | None
    loss: float
    loss_interval: tuple[float, float] | None
    frontier_loss: float | None
    """The loss predicted by the line through the lowest losses of the budgets; None if the analysis has no such line."""
    frontier_left_out: float | None
    """The relative error of that line for the largest budget, when fitted without it."""
    budget_law_params: float | None
    """The best size according to the budget law; None if the analysis has none."""
    budget_law_loss: float | None
    budget_law_interval: tuple[float, float] | None
    """The 95 % interval of the loss of a single run."""
    joint_law_params: float | None
    """The best size according to the joint law; None if the analysis has none."""
    joint_law_loss: float | None
    joint_law_interval: tuple[float, float] | None
    """The 95 % interval of the loss of a single run."""
    decades: float
    """log10(budget / FLOPs of the largest run); 0 or below: no extrapolation."""


def predict(saved: dict[str, Any], flops: float) -> Prediction:
    """The prediction for a budget from a saved analysis (the result of `to_json`).

    The interval of the loss comes from the losses of the resampled laws at the optimum of the fitted law.

    Raises:
        ValueError: the budget is not positive, or the law has no minimum.
    """
    law, k = Law(**saved["law"]), float(saved["flops_per_param_token"])
    best = law.optimum(flops, k)
    others = [Law.from_logs(*map(float, row)) for row in saved["samples"]]
    line = LossTrend(**saved["loss_trend"]) if saved.get("loss_trend") else None
    by_budget = BudgetLaw.from_json(saved["budget_law"]) if saved.get("budget_law") else None
    joint = JointLaw.from_json(saved["joint_law"]) if saved.get("joint_law") else None
    said, between = by_budget.loss(flops) if by_budget else (None, None)
    joint_said, joint_between = joint.best_loss(flops) if joint else (None, None)
    optima = [other.optimum(flops, k) for other in others if other.alpha > 0 and other.beta > 0]
    return Prediction(
        flops=flops,
        params=best.params,
        params_interval=interval(best.params, np.log([o.params for o in optima])),
        tokens=best.tokens,
        tokens_interval=interval(best.tokens, np.log([o.tokens for o in optima])),
        loss=best.loss,
        loss_interval=interval(best.loss, np.log([other.loss(best.params, best.tokens) for other in others])),
        frontier_loss=None if line is None else line.loss(flops),
        frontier_left_out=None if line is None else line.left_out,
        budget_law_params=by_budget.best_size(flops) if by_budget else None,
        budget_law_loss=said,
        budget_law_interval=between,
        joint_law_params=joint.best_size(flops) if joint else None,
        joint_law_loss=joint_said,
        joint_law_interval=joint_between,
        decades=math.log10(flops / float(saved["largest_flops"])),
    )


def predict_loss(saved: dict[str, Any], params: float, tokens: float) -> tuple[float, tuple[float, float] | None]:
    """(predicted loss of a model of this size after `tokens` tokens; its 95 % interval, None if the law was not resampled)."""
    loss = Law(**saved["law"]).loss(params, tokens)
    others = [Law.from_logs(*map(float, row)) for row in saved["samples"]]
    return loss, interval(loss, np.log([other.loss(params, tokens) for other in others]))


def read_analysis(path: Path) -> dict[str, Any]:
    """The JSON of an analysis, checked.

    Raises:
        ValueError: the file is not an analysis; the message states what is wrong.
    """
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(
            f"{path} is larger than {_LARGEST_FILE >> 20} MiB; wanted a file written by `tilewright scaling fit --out`"
        )
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["format"] != _FORMAT or saved["version"] != 1:
            raise ValueError(f"it has format {saved['format']!r} and version {saved['version']!r}, wanted {_FORMAT!r} and 1")
        Law(**{key: float(value) for key, value in saved["law"].items()})
        samples = np.asarray(saved["samples"], dtype=np.float64)
        whole = np.isfinite(samples).all() and (samples.size == 0 or samples.shape[1:] == (5,))
        if not whole or not 0 < saved["largest_flops"] < math.inf or not 0 < saved["flops_per_param_token"] < math.inf:
            raise ValueError("its numbers are not finite or out of range")
        if line := saved.get("loss_trend"):
            LossTrend(**line).loss(float(saved["largest_flops"]))
        if by_budget := saved.get("budget_law"):
            BudgetLaw.from_json(by_budget)
        if joint := saved.get("joint_law"):
            JointLaw.from_json(joint)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} is not a file that `tilewright scaling fit --out` wrote: {error}") from None
    return saved
