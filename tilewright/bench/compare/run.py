"""Runs a whole comparison: starts engines, builds and checks variants, times them, estimates layers, fills the fairness card.

Everything that is measured is part of the result; nothing is printed or written here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tilewright.bench.compare.attribution import Design
from tilewright.bench.compare.ballast import Looked, look, merged, only_whole, without_hidden
from tilewright.bench.compare.beside import beside as engines_beside
from tilewright.bench.compare.beside import claims
from tilewright.bench.compare.counters import counted
from tilewright.bench.compare.engine import Settings, engine_of, is_stepwise
from tilewright.bench.compare.fairness import DRIFT, card, drifted_apart, precision_of, yardsticks
from tilewright.bench.compare.measure import Contender, build_all, race, truth_of
from tilewright.bench.compare.models import Model
from tilewright.bench.compare.plan import only_needed, plan, refined
from tilewright.bench.compare.results import Comparison, Interval, Point, Side, Verdict
from tilewright.bench.compare.segments import Attribution, SideFit, attribute, decided
from tilewright.bench.compare.watch import Watch
from tilewright.bench.provenance import environment
from tilewright.hw.ceilings import ceilings
from tilewright.hw.cpu import cpu
from tilewright.hw.device import device_of
from tilewright.hw.state import State, state

__all__ = ["compare"]

CONFIDENCE = 0.95
_MULTIPLY = ("conv", "linear", "matmul", "attention", "embedding")
_PROBING = 0.3
"""Share of the budget after which nothing more is built to find out whether a call hides its layers."""
_NO_EVENTS = ("cmd", "onnxruntime")
"""Engines whose work does not go through PyTorch's stream."""


def compare(
    model: Model,
    ours: str,
    baseline: str,
    claim: float,
    *,
    budget_s: float = 120.0,
    seed: int = 0,
    threads: int | None = None,
    whole: bool = False,
    beside: Sequence[str] = (),
    counters: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Comparison:
    """Test whether every layer of `model` is at least `claim` times faster on engine `ours` than on engine `baseline`.

    Args:
        model: the model, on the device where both engines run.
        ours, baseline: NAME or NAME:OPTION, see `tilewright.bench.compare.engine`.
        claim: the ratio that every layer must reach, above 0.
        budget_s: seconds for building variants (at most 80 % of it) and measuring together, from the time at which the whole
            model is built on both engines. Eight rounds are run however long they take.
        seed: seed of the order of runs.
        threads: threads of a call on a CPU; default: PyTorch's number.
        whole: treat the whole model as one segment and build nothing else, for engines that take minutes to build.
        beside: further engines, for which only the whole model is measured (`tilewright.bench.compare.beside`).
        counters: request the counters of both engines after all measurements.
        progress: called with a short text at each stage.

    Raises EngineError (a ValueError) if an engine is not available, crashes, hangs or gives wrong answers. Raises ValueError if
    the claim or the budget is not positive. Ctrl-C during measuring ends the measurement; before that, it raises
    KeyboardInterrupt.
    """
    if not claim > 0 or not budget_s > 0:
        raise ValueError(f"claim is {claim} and the budget is {budget_s} s, wanted both above 0")
    began, device = time.monotonic(), model.inputs[0].device
    apart = any(name.partition(":")[0] in _NO_EVENTS for name in (ours, baseline))
    with _threads(threads) as count, ExitStack() as ends:
        settings = Settings(device=device, threads=count, host_clock=apart)
        sides = [_started(name, settings, ends, progress) for name in (ours, baseline)]
        others = engines_beside(sides[0], sides[1], beside, settings, ends, progress)
        progress("looking for layers")
        planned = plan(model.module, model.inputs, whole=whole)
        only = only_whole(planned)
        _, began_at = build_all([*sides, *others], [only] * (2 + len(others)), budget_s, progress)
        looked = look(sides, only if whole else planned, began_at + _PROBING * budget_s, progress)
        looked, ready = _built(sides, looked, budget_s, began_at, progress)
        design = merged(looked, [is_stepwise(side.engine) for side in sides])
        before, started = _look(device), time.monotonic()
        watch = Watch(cuda=(device.index or 0) if device.type == "cuda" else None)

        enough = partial(_enough, sides, design, claim)
        ended = race([*sides, *others], enough, began_at + budget_s, seed, started, progress, watch.look)
        after = _look(device)
        progress("fitting")
        found = attribute(sides[0].runs, sides[1].runs, design, claim, confidence=CONFIDENCE, seed=seed)
        found, run = _measured_whole(found, claim), _Run(model, design, sides, others, looked, ready, before, after, watch)
        answer = run.comparison(found, claim, {"seed": seed, "budget_s": budget_s, "ended": ended}, time.monotonic() - began)
        return counted(answer, sides, planned.chain, progress) if counters else answer


def _enough(sides: list[Contender], design: Design, claim: float) -> bool:
    """Whether the claim is decided, even if every ratio were wrong by the drift between the two sides."""
    ours, baseline = sides[0].runs, sides[1].runs
    if not decided(ours, baseline, design, claim):
        return False
    apart, found = drifted_apart(ours, baseline), _measured_whole(attribute(ours, baseline, design, claim), claim)
    return found.verdict != "undecided" and (apart <= DRIFT or found.holds(claim, apart))


def _started(name: str, settings: Settings, ends: ExitStack, progress: Callable[[str], None]) -> Contender:
    """An engine, closed with `ends`."""
    progress(f"starting {name}")
    side = Contender(name=name, engine=engine_of(name, settings), settings=settings)
    ends.callback(side.engine.close)
    return side


def _built(
    sides: list[Contender], looked: Looked, budget_s: float, since: float, progress: Callable[[str], None]
) -> tuple[Looked, list[list[str]]]:
    """Build variants as far as the budget allows; return the final plans, and the names of the variants of each side."""
    first = True
    while True:
        short = only_needed(looked.plans[0])
        needed = [short if plan is looked.plans[0] else only_needed(plan) for plan in looked.plans]
        ready, _ = build_all(sides, needed if first else looked.plans, budget_s, progress, since)
        better = without_hidden(looked, sides)
        if better is not None:
            looked, first = better, True
        elif first:
            seen = [refined(plan, side.call_s) for plan, side in zip(looked.plans, sides, strict=True)]
            looked, first = replace(looked, plans=seen), False
        else:
            return looked, ready


@dataclass(frozen=True)
class _Run:
    """The measurements from which the result is made. In lists of two, the first item is for ours."""

    model: Model
    design: Design
    sides: list[Contender]
    others: list[Contender]
    """Further engines, for which only the whole model was timed."""
    looked: Looked
    ready: list[list[str]]
    before: State
    after: State
    watch: Watch

    @property
    def short(self) -> bool:
        """Whether the budget ended before all variants were built that are needed to tell layers apart."""
        return any(len(ready) < len(plan.needed) for ready, plan in zip(self.ready, self.looked.plans, strict=True))

    def comparison(self, found: Attribution, claim: float, asked: dict[str, Any], seconds: float) -> Comparison:
        """The complete result."""
        depth = sum(layer.kind in _MULTIPLY for layer in self.looked.plans[0].chain.layers)
        ours, baseline = (_side(side, fit, depth) for side, fit in zip(self.sides, (found.ours, found.baseline)))
        names = dict.fromkeys(name for ready in self.ready for name in ready)
        despite = found.holds(claim, drifted_apart(*(side.runs for side in self.sides)))
        return Comparison(
            model=self.model.name,
            claim=claim,
            confidence=CONFIDENCE,
            # Layers that were not told apart prove nothing about single layers.
            verdict="undecided" if found.verdict == "pass" and self.short else found.verdict,
            ratio=found.ratio,
            segments=found.segments,
            ours=ours,
            baseline=baseline,
            card=[*self._card(ours, baseline, depth, despite), self._told_apart(len(found.segments))],
            fusions=_reported(self.sides[0], "decisions"),
            tuning=_reported(self.sides[0], "launches"),
            claims=claims(self.sides[0], [self.sides[1], *self.others], CONFIDENCE, asked["seed"]),
            ceilings=_ceilings(self.model.inputs[0].device),
            environment={
                **environment(),
                "processor": cpu().name,
                "clocks while measuring": self.watch.summary(),
                **asked,
                "variants": {name: [self.design.layers[i] for i in self.design.parts[name]] for name in names},
            },
            seconds=seconds,
        )

    def _card(self, ours: Side, baseline: Side, depth: int, despite: bool) -> list[Point]:
        module, inputs = self.model.module, self.model.inputs
        measured, looks = yardsticks(module, inputs, truth_of(module, inputs)), {"before": self.before, "after": self.after}
        clocks = self.watch.summary()
        found = card(ours, baseline, depth=depth, **looks, measured=measured, despite=despite, clocks=clocks)
        calls = self.looked.point()
        return found if calls is None else [*found, calls]

    def _told_apart(self, segments: int) -> Point:
        """The point of the fairness card that says whether the budget was enough to tell every layer apart."""
        why = (
            "The budget ended before all variants were built, so some layers are joined; give more time."
            if self.short
            else "The whole model alone is one segment."
            if len(self.looked.plans[0].needed) == 1
            else f"Enough to tell {segments} segments apart."
        )
        shown = [f"{len(ready)}, needed {len(plan.needed)}" for ready, plan in zip(self.ready, self.looked.plans, strict=True)]
        return Point(name="variants", ours=shown[0], baseline=shown[1], open=self.short, why=why)


def _look(device: torch.device) -> State:
    return state((device.index or 0) if device.type == "cuda" else None)


@contextmanager
def _threads(wanted: int | None) -> Iterator[int]:
    """Set PyTorch's number of threads inside the block, and restore it afterwards."""
    before = torch.get_num_threads()
    if wanted is not None and not 1 <= wanted <= 1024:
        raise ValueError(f"threads is {wanted}, wanted 1 to 1024")
    torch.set_num_threads(wanted or before)
    try:
        yield wanted or before
    finally:
        torch.set_num_threads(before)


def _side(side: Contender, fit: SideFit, depth: int) -> Side:
    of_whole = {key: value for key, value in side.built["whole"].facts.items() if key != "report"}
    error = side.errors["whole"]
    return Side(
        engine=side.name,
        facts={
            **side.engine.facts, **of_whole, "clock of layers": side.clock, "additivity": fit.why, "noise of a run": fit.noise,
            "variants": len(side.built), "all builds_s": side.build_s, "calls of a batch": side.calls["whole"],
        },
        whole=fit.whole,
        layers=fit.layers,
        overhead=fit.overhead,
        residual=fit.residual,
        additive=fit.additive,
        output_error=error,
        precision=precision_of(error, depth),
        runs=side.runs,
    )  # fmt: skip


def _measured_whole(found: Attribution, claim: float) -> Attribution:
    """If all layers are one segment, give it the measured time of the whole model instead of that of the fit."""
    if len(found.segments) > 1:
        return found
    ratio, name = found.ratio, found.segments[0].name
    verdict: Verdict = "pass" if ratio.low >= claim else "fail" if ratio.high < claim else "undecided"
    ours, baseline = (
        replace(s, layers={name: s.whole}, overhead=Interval(0.0, 0.0, 0.0)) for s in (found.ours, found.baseline)
    )
    only = replace(found.segments[0], ours=ours.whole, baseline=baseline.whole, ratio=ratio, verdict=verdict)
    return Attribution(segments=[only], verdict=verdict, ratio=ratio, ours=ours, baseline=baseline)


def _reported(side: Contender, what: str) -> list[dict[str, Any]]:
    """A list that `optimize` reports for the whole model; empty for other engines."""
    return list(side.built["whole"].facts.get("report", {}).get(what, []))


def _ceilings(device: torch.device) -> dict[str, float]:
    """The measured ceilings, or none: a data sheet's values were not reached by any measurement."""
    if device.type != "cuda":
        return {}
    try:
        found = ceilings(device_of(device.index or 0))
    except ValueError:  # an unknown card
        return {}
    if not found.measured:
        return {}
    return {"bytes_per_s": found.copy} | {f"flops_per_s.{unit}": rate for unit, rate in found.flops.items()}
