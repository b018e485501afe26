"""Models that are smaller than a call: where a layer more or less changes nothing that can be seen, until a call is heavy.

A call of a captured model costs what the host takes to copy inputs in, to launch and to copy out, and the device works
meanwhile: seconds = max(host, device). With little to do the device is done first, and a layer costs nothing (H100, four
products of 256 x 256: 45 us a call, 10 of them work; with one of them as well). So the programs of such an engine get ballast:
one layer K times in a row, each copy with weights of its own, K as large as makes the call twice that of a layer alone. Then
each layer adds what it takes, and the fit is the same as ever, with the whole model left out of it: that one is timed for its
own sake. Each engine is asked by the same rule; one that hides nothing (PyTorch eager, where each layer is the host's) needs no
ballast, and gets none: it would only hide its layers in the noise of a long call.

What a layer's time then means: what a model that keeps its engine busy takes longer because of it. Where the host is the slower
one that is the host's time a layer, where the device is, the device's: what a user pays in a long model. In the small model
itself a layer of ours may be free; that shows in the whole model's ratio alone.

Not done: models none of whose layers, or runs of layers, give out what they take. They stay one segment.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tilewright.bench.compare.attribution import Design
from tilewright.bench.compare.layers import Chain
from tilewright.bench.compare.measure import Contender, build_everywhere
from tilewright.bench.compare.plan import Plan, guesses, plan_of
from tilewright.bench.compare.specs import Edit, label, repeatable
from tilewright.bench.compare.variants import Variant, candidates

__all__ = ["Ballast", "merged", "only_whole", "plans_of"]

_COPIES = (16, 32, 64, 128, 256)
_HEAVY = 2.0
"""A call that takes this many times as long as one of a layer alone. The host's part is then less than half of it."""
_BATCHES, _CALLS = 7, 16


@dataclass(frozen=True)
class Ballast:
    """What was put into every program of a side."""

    layers: str
    copies: int
    """0: not even the most made a call heavy."""
    alone_s: float
    """A call of one layer."""
    whole_s: float

    def words(self, side: str) -> str:
        """For the fairness card."""
        then = (
            f"A layer's time is what it adds to a program with {self.copies} copies of {self.layers}."
            if self.copies
            else f"{_COPIES[-1]} copies of {self.layers} are too: the whole model is one segment."
        )
        calls = [f"{1e6 * s:.3g}" for s in (self.alone_s, self.whole_s)]
        return f"A call of {side} is {calls[0]} us with one layer and {calls[1]} with all: layers are hidden in it. {then}"


def plans_of(
    sides: Sequence[Contender], planned: Plan, until: float, progress: Callable[[str], None]
) -> tuple[list[Plan], list[Ballast | None]]:
    """The plan of each side: of programs with ballast where the model is smaller than a call, else `planned` as it is.

    "whole" must be built. What was built to find out, and is in no plan, is closed. After `until` (`time.monotonic()`) nothing
    is built for it. EngineError: see `Contender.build`.
    """
    plans: list[Plan] = [planned for _ in sides]
    chosen: list[Ballast | None] = [None for _ in sides]
    probes = _probes(planned.chain, planned)
    for variant in probes:
        if time.monotonic() > until:
            return plans, chosen
        progress("looking whether a call is more than its layers")
        build_everywhere(sides, variant, planned.variants, planned.design, progress)
    for i, side in enumerate(sides):
        if not probes:
            break
        whole, one, many = (_seconds(side, name) for name in ("whole", probes[0].name, probes[1].name))
        if whole < _HEAVY * one and many < _HEAVY * one:
            edit = _heavy_enough(side, planned, one, until, progress)
            if edit is None:
                break
            chosen[i] = Ballast(label(planned.chain, edit), edit.times, one, whole)
            plans[i] = plan_of(planned.chain, None, edit) if edit.times else only_whole(planned)
    if any(ballast is not None and not ballast.copies for ballast in chosen):
        plans = [only_whole(planned) for _ in sides]
    for side, plan in zip(sides, plans, strict=True):
        side.forget(set(side.built) - {variant.name for variant in plan.variants})
    return plans, chosen


def only_whole(planned: Plan) -> Plan:
    """The whole model as one segment."""
    only = [variant for variant in planned.variants if variant.name == "whole"]
    return replace(planned, variants=only, needed=only)


def merged(plans: Sequence[Plan]) -> Design:
    """One design for what any side runs."""
    design = plans[0].design
    for other in (plan.design for plan in plans[1:]):
        heavy = tuple(dict.fromkeys((*design.heavy, *other.heavy)))
        design = replace(design, parts=design.parts | other.parts, border=design.border | other.border, heavy=heavy)
    return design


def _probes(chain: Chain, planned: Plan) -> list[Variant]:
    """A layer alone, once and repeated; nothing where no single layer can be."""
    known = {v.part: v for v in (*planned.variants, *planned.rest) if len(set(v.part)) == 1}
    pairs = [(known[part[:1]], v) for part, v in known.items() if len(part) == 16 and part[:1] in known]
    guess = guesses(chain)
    return list(min(pairs, key=lambda pair: guess[pair[0].part[0]])) if pairs else []


def _heavy_enough(side: Contender, planned: Plan, alone_s: float, until: float, progress: Callable[[str], None]) -> Edit | None:
    """The ballast with as few copies as do, with none where the most are too few; None where time was."""
    chain, guess = planned.chain, guesses(planned.chain)
    edit = max(repeatable(chain), key=lambda e: guess[e.start : e.stop].sum())
    for copies in _COPIES:
        if time.monotonic() > until:
            return None
        edit = replace(edit, times=copies)
        (variant,) = (v for v in candidates(chain, edit) if v.name == f"whole with {label(chain, edit)} x{copies}")
        build_everywhere([side], variant, planned.variants, planned.design, progress)
        if _seconds(side, variant.name) >= _HEAVY * alone_s:
            return edit
        side.forget({variant.name})
    return replace(edit, times=0)


def _seconds(side: Contender, name: str) -> float:
    """Of a call, of several batches' median."""
    return median(side.seconds(name, _CALLS) for _ in range(_BATCHES))
