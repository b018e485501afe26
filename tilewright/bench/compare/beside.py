"""Engines that are measured as a whole, in addition to the two that are compared layer by layer, and the claims about them.

A ratio means most if both sides compute in the same precision and start their work in the same way: a captured CUDA graph
against a captured CUDA graph, or calls from Python against calls from Python. If the baseline is a different kind of engine
(eager PyTorch in float32, say), an equivalent one is added: PyTorch's own calls in our precision, in a CUDA graph if ours uses
one. Claims are listed in this order: against equivalent engines, then against those with another launch mode, then with another
precision.

These engines are built and checked like the others and take part in every round, but only the whole model is timed.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from tilewright.bench.compare.engine import DTYPES, EngineError, Settings, engine_of
from tilewright.bench.compare.fairness import by_variant
from tilewright.bench.compare.measure import Contender
from tilewright.bench.compare.results import Claim, Interval

__all__ = ["beside", "claims", "equal_engine", "launch_mode"]

_DRAWS = 1000


def launch_mode(facts: dict[str, object]) -> str:
    """The way in which an engine starts its work, by its facts: "CUDA graph", "calls", or "not told"."""
    graph = facts.get("graph")
    return "not told" if graph is None else "CUDA graph" if graph else "calls"


def _precision(side: Contender) -> str:
    return str(side.engine.facts.get("precision", "not told"))


def _kind(side: Contender) -> tuple[str, str]:
    return _precision(side), launch_mode(side.engine.facts)


def equal_engine(ours: Contender, baseline: Contender) -> str | None:
    """PyTorch's engine with our precision and launch mode; None if the baseline has both, or if PyTorch has no such engine."""
    precision, launch = _kind(ours)
    if _kind(baseline) == (precision, launch):
        return None
    option = precision.partition(" ")[0]
    if option not in DTYPES or (launch == "CUDA graph" and ours.settings.device.type != "cuda"):
        return None
    return f"{'graph' if launch == 'CUDA graph' else 'eager'}:{option}"


def beside(
    ours: Contender, baseline: Contender, asked: Sequence[str], settings: Settings, ends: ExitStack,
    progress: Callable[[str], None],
) -> list[Contender]:  # fmt: skip
    """The engines to be measured as a whole: an equal one, if the baseline is not equal, and those that were requested.

    Raises EngineError if one is not available.
    """
    equal = equal_engine(ours, baseline)
    names = list(asked)
    if equal not in (None, ours.name, *asked):
        names.insert(0, equal)
    found = []
    for name in dict.fromkeys(names):
        if name in (ours.name, baseline.name):
            raise EngineError(f"engine {name} is already compared; leave it out of --beside")
        progress(f"starting {name}")
        side = Contender(name=name, engine=engine_of(name, settings), settings=settings)
        ends.callback(side.engine.close)
        found.append(side)
    return found


def claims(ours: Contender, others: Sequence[Contender], confidence: float, seed: int) -> list[Claim]:
    """The speed of the whole model relative to each engine, the fairest comparison first."""
    found = [_claim(ours, side, confidence, seed) for side in others]
    return sorted(found, key=lambda claim: (not claim.equal, claim.precision != _precision(ours)))


def _claim(ours: Contender, other: Contender, confidence: float, seed: int) -> Claim:
    (precision, launch), (own_precision, own_launch) = _kind(other), _kind(ours)
    differ = [f"{precision} against {own_precision}"] if precision != own_precision else []
    differ += [f"{launch} against {own_launch}"] if launch != own_launch else []
    seconds, ratio = _measured(ours, other, confidence, seed)
    return Claim(
        engine=other.name,
        precision=precision,
        launch=launch,
        seconds=seconds,
        ratio=ratio,
        equal=not differ and "not told" not in (precision, launch),
        words="equal precision and launch mode" if not differ else f"not equal: {', '.join(differ)}",
    )


def _measured(ours: Contender, other: Contender, confidence: float, seed: int) -> tuple[Interval, Interval]:
    """(seconds of the other engine, its time over ours): medians, with bootstrap intervals over whole rounds (Efron, 1979)."""
    a, b = (np.array(by_variant(side.runs)["whole"]) for side in (ours, other))
    rounds = min(len(a), len(b))
    drawn = np.random.default_rng(seed).integers(0, rounds, (_DRAWS, rounds))
    tails = 50 * (1 - confidence), 50 * (1 + confidence)

    def interval(value: float, draws: np.ndarray) -> Interval:
        low, high = np.percentile(draws, tails)
        return Interval(value, min(float(low), value), max(float(high), value))

    medians = np.median(a[drawn], axis=1), np.median(b[drawn], axis=1)
    seconds, own = float(np.median(b)), float(np.median(a))
    return interval(seconds, medians[1]), interval(seconds / own, medians[1] / medians[0])
