"""Programs for engines whose calls hide work: so short that one layer more or less changes nothing measurable.

In a call of a captured model the host copies inputs in, launches, and copies results out, while the device works: seconds =
max(host, device). With little work the device finishes first, and an additional layer costs nothing (H100, four products of 256
x 256: 45 us per call, of which 10 are work; with one product it takes the same). Such a program says nothing about its layers,
and would bias their estimates towards 0. So each engine is tested first. Its calls have a floor if a call of one layer takes
longer than extrapolated from 8 and 32 copies of it, or if 32 copies take hardly more than 8. For such an engine

- a program counts only if it takes twice as long as that layer alone; then the host's part is certainly less than the device's;
- there are also programs with *ballast*: one layer repeated K times, each copy with its own weights, with K so large that these
copies
  alone take that long. Each further layer then adds its own time, wherever it is in the program. Short programs consist of one
  layer of the neighbourhood, repeated, and up to four others, because the error of a program is proportional to its time.

An engine that hides nothing (PyTorch eager, in which each layer takes host time) gets no ballast, which would only hide its
layers in the noise of a long call. If it runs operators one by one on a GPU and the host takes 90 % of a call, a layer's time
is its host time, until the call returns. Waiting for the device would add the time of the last kernel, which differs between
programs (H100: two linear layers that take the host equally long take 70 us alone and 130). It gets no repeated layers either,
because a host is faster at what it has just done (ResNet-50's layer2.1.conv2: 126 us alone, 16 of them for the call itself;
sixteen in a row 84 each).

If the host takes less, sometimes the host and sometimes the device limits the speed, and programs do not add up (H100,
ViT-B/16, one
image: 5 to 9 %). A baseline's programs are then timed with the host ahead (`Behind`, clocks.py), which gives the time of the
device alone. That is at most what a user waits. So a layer may pass by this clock, but none may fail.

If the baseline is timed by its host or its device, ours is timed by its device, provided that its host replays a captured graph
and the device takes most of a call. The host's part, and copies into and out of the graph's tensors, belong to the call and not
to its layers; they are in the whole model's ratio. No ballast is needed then, and programs agree to 0.3 %, where complete calls
differ by 3 % (H100, ViT-B/16). For other engines of ours, host time counts.

A model whose weights exceed every cache reads each weight from memory; its small programs, when repeated, find theirs in the
cache. By the device's clock, programs of such a model therefore start with empty caches, on both sides (H100, ViT-B/16, one
image, 19 programs: errors of 6.0 % for eager and 2.5 % for ours with a warm L2; 1.2 % and 1.0 % with a cold one).

The time of a layer then means: the additional time of a model that keeps its engine busy. It is the host's time per layer if
the host is slower, and the device's if the device is. In a small model a layer of ours may cost nothing; this shows only in the
whole model's ratio, which is then not the sum of the layers.

Not supported: models without any layer that can be repeated.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tilewright.bench.compare.attribution import Design
from tilewright.bench.compare.layers import Chain
from tilewright.bench.compare.measure import Clock, Contender, build_everywhere
from tilewright.bench.compare.plan import Plan, guesses, plan_of
from tilewright.bench.compare.results import Point
from tilewright.bench.compare.specs import Edit, alone, label, repeatable
from tilewright.bench.compare.variants import Variant, candidates, variants_of
from tilewright.hw.device import device_of

__all__ = ["Ballast", "Looked", "look", "merged", "only_whole", "without_hidden"]

_PROBES = (1, 8, 32)
_COPIES = (16, 32, 64, 128, 256)
_HEAVY = 2.0
"""A program counts if it takes this many times as long as a layer alone. The host's part is then less than half of it."""
_EXPECTED = 1.3
"""A program is built if its expected time is this many times the limit."""
_NEAR_EXPECTED = 1.6
"""The same factor for the copies in a short program, because guesses for small layers are less accurate."""
_FLAT, _EXCESS = 1.5, 0.1
"""Calls hide work if 32 copies take less than `_FLAT` times as long as 8, or if one takes longer by a share of `_EXCESS` than
the line through both predicts."""
_BATCHES, _CALLS = 9, 16
_PACED = 0.9
"""The share of a call from which on the host sets the pace; the device then finishes soon after the host."""
_MOSTLY = 0.5
"""The share of one of our calls that the device must take, so that the device is timed alone."""
_MEANT: dict[Clock, str] = {
    "host": "a layer's time is that of the host",
    "device": "a layer's time is that of the device, with the host ahead, which is at most what a user waits",
}


@dataclass(frozen=True)
class Ballast:
    """An engine whose calls have a floor, and the repeated layer (ballast) that is used against it."""

    edit: Edit
    """The layer that is repeated, and how often; 0: not even the most were seen."""
    layers: str
    """Its name."""
    alone_s: float
    """A call of the layer that was asked about."""
    whole_s: float
    copies_s: float
    """A call of the copies alone."""
    known: bool = True
    """False: the time was up before a number of copies was found."""
    hidden: frozenset[str] = frozenset()
    """Variants that were built and lie below the limit."""

    @property
    def limit_s(self) -> float:
        """The shortest time in seconds at which a program counts."""
        return _HEAVY * self.alone_s

    def words(self, side: str) -> str:
        """A text for the fairness card."""
        calls = [f"{1e6 * s:.3g}" for s in (self.alone_s, self.whole_s)]
        begin = (
            f"A call of {side} takes {calls[0]} us with one layer and {calls[1]} us with all, so single layers do not "
            "show in the time of a call."
        )
        if not self.known:
            return begin
        if not self.edit.times:
            return f"{begin} Nor do {_COPIES[-1]} copies of {self.layers}, so the whole model is one segment."
        return (
            f"{begin} So a layer's time is the time that it adds to programs of {1e6 * self.limit_s:.3g} us or more, "
            f"some of which contain {self.edit.times} copies of {self.layers}."
        )


@dataclass(frozen=True)
class Looked:
    """Facts about both sides' calls. In lists of two, the first item is for ours."""

    plans: list[Plan]
    ballast: list[Ballast | None]
    known: bool
    """False: the time was up before it was known."""
    paces: Sequence[float] = (0.0, 0.0)
    """The host's share of a call of the whole model, on an engine that starts operators one by one."""
    clocks: Sequence[Clock] = ("call", "call")
    """The clocks by which layers are timed."""
    share: float = 0.0
    """The device's share of a call of ours, if that was asked."""

    def point(self) -> Point | None:
        """A point of the fairness card; None if there is nothing to report."""
        found = [b.words(side) for b, side in zip(self.ballast, ("ours", "the baseline"), strict=True) if b is not None]
        for pace, clock, side in zip(self.paces, self.clocks, ("ours", "the baseline"), strict=True):
            if clock != "call" and pace:
                found.append(f"The host takes {pace:.0%} of a call of {side}, so {_MEANT[clock]}.")
        if self.clocks[0] == "device":
            found.append(
                "On our side, the host replays a graph, so a layer's time is that of the device, which is "
                f"{self.share:.0%} of a call."
            )
        if "device" in self.clocks and _outgrows_caches(self.plans[0].chain):
            found.append("The weights are larger than the caches, so each program begins with empty caches.")
        if not self.known:
            found.append("The time ran out before it was known whether single layers show in a call; give more time.")
        if not found:
            return None
        plain = "hides nothing" if self.known else "not known"
        shown = [
            "hides layers" if b is not None else plain if clock == "call" else f"the {clock}'s"
            for b, clock in zip(self.ballast, self.clocks, strict=True)
        ]
        return Point(name="a call", ours=shown[0], baseline=shown[1], open=not self.known, why=" ".join(found))


def look(sides: Sequence[Contender], planned: Plan, until: float, progress: Callable[[str], None]) -> Looked:
    """Whether calls hide layers, and the plan of each side: of programs that do not, with ballast too, or `planned` as it is.

    "whole" must be built. What was built to find out, and is in no plan, is closed. After `until` (`time.monotonic()`) nothing
    is built for it. EngineError: see `Contender.build`.
    """
    chain = planned.chain
    plans, paces, share = [planned for _ in sides], [0.0 for _ in sides], 0.0
    clocks: list[Clock] = ["call" for _ in sides]
    ballast: list[Ballast | None] = [None for _ in sides]
    probes = _probes(chain) if len(planned.needed) > 1 else []
    for variant in probes:
        if time.monotonic() > until:
            return _settled(sides, Looked(plans, ballast, False))
        progress("checking whether layers show in the time of a call")
        build_everywhere(sides, variant, planned.variants, planned.design, progress)
    for i in (1, 0) if probes else ():  # the baseline first: ours may have to be timed as it is
        share = sides[i].share() if i == 0 and clocks[1] != "call" else 0.0
        if share >= _MOSTLY:
            clocks[i] = "device"
            continue
        ballast[i] = _ballast(sides[i], planned, probes, until, progress)
        paces[i] = sides[i].pace() if ballast[i] is None else 0.0
        clocks[i] = _clock(paces[i], baseline=i == 1)
    if any(b is not None and not b.edit.times for b in ballast):
        plans, paces = [only_whole(planned) for _ in sides], [0.0 for _ in sides]
        clocks = ["call" for _ in sides]
    else:
        plain, cold = {"call": planned}, _outgrows_caches(chain)
        for side, clock in zip(sides, clocks, strict=True):
            if clock != "call":
                silent = (_copied(chain) if clock == "host" else frozenset()) | {"whole"}
                plain.setdefault(clock, plan_of(chain, silent=silent, alike=True))
                side.take(clock, cold=cold)
        plans = [plain[clock] if b is None else _plan(chain, b) for clock, b in zip(clocks, ballast, strict=True)]
    known = all(b is None or b.known for b in ballast)
    return _settled(sides, Looked(plans, ballast, known, paces, clocks, share))


def _outgrows_caches(chain: Chain) -> bool:
    """Whether the weights, in 16 bits, are larger than the GPU's L2."""
    device = chain.inputs[0].device
    weights = sum(p.numel() for p in chain.model.parameters())
    return device.type == "cuda" and 2 * weights > device_of(device.index or 0).l2_bytes


def _clock(pace: float, *, baseline: bool) -> Clock:
    """The clock for the layers of an engine whose host takes this share of a call."""
    return "host" if pace >= _PACED else "device" if pace and baseline else "call"


def without_hidden(looked: Looked, sides: Sequence[Contender]) -> Looked | None:
    """`looked` after variants were built: those that turned out to be hidden are closed and replaced. None: there are none."""
    ballast, plans = list(looked.ballast), list(looked.plans)
    for i, (side, one) in enumerate(zip(sides, looked.ballast, strict=True)):
        if one is None or not one.edit.times:
            continue
        hidden = {name for name, seconds in side.call_s.items() if seconds < one.limit_s and name != "whole"}
        if hidden:
            side.forget(hidden)
            less = replace(one, hidden=one.hidden | hidden)
            ballast[i], plans[i] = less, _plan(looked.plans[i].chain, less)
    return None if ballast == looked.ballast else replace(looked, plans=plans, ballast=ballast)


def only_whole(planned: Plan) -> Plan:
    """The whole model as one segment."""
    only = [variant for variant in planned.variants if variant.name == "whole"]
    others = [variant for variant in planned.variants if variant.name != "whole"]
    return replace(planned, variants=only, needed=only, rest=[*others, *planned.rest])


def merged(looked: Looked, stepwise: Sequence[bool] = (False, False)) -> Design:
    """One design with the variants of both sides; `stepwise` (engine.py): a value for each side."""
    ours, baseline = looked.plans
    parts, border = ours.design.parts | baseline.design.parts, ours.design.border | baseline.design.border
    silent, (first, second) = (ours.silent, baseline.silent), stepwise
    spared, bare = looked.clocks[1] == "device", (first or looked.clocks[0] == "device", second)
    found = replace(ours.design, parts=parts, border=border, silent=silent, stepwise=(first, second))
    return replace(found, bare=bare, spared=spared)


def _copied(chain: Chain) -> frozenset[str]:
    """The programs in which a layer is repeated."""
    return frozenset(v.name for v in candidates(chain) if any(edit.times > 1 for edit in v.spec.edits))


def _settled(sides: Sequence[Contender], looked: Looked) -> Looked:
    for side, plan in zip(sides, looked.plans, strict=True):
        side.forget(set(side.built) - {variant.name for variant in plan.variants})
    return looked


def _probes(chain: Chain) -> list[Variant]:
    """The cheapest layer that can stand behind itself, alone: once and often; nothing where there is none."""
    guess = guesses(chain)
    single = [edit for edit in repeatable(chain) if edit.stop - edit.start == 1]
    if not single:
        return []
    edit = min(single, key=lambda e: guess[e.start])
    found = variants_of(chain, (alone(chain, replace(edit, times=times)) for times in _PROBES))
    return found if len(found) == len(_PROBES) else []


def _ballast(
    side: Contender, planned: Plan, probes: Sequence[Variant], until: float, progress: Callable[[str], None]
) -> Ballast | None:
    """The ballast for this side; None if its calls hide nothing."""
    names = [variant.name for variant in probes]
    batches = [[side.seconds(name, _CALLS) for name in names] for _ in range(_BATCHES)]
    first, some, many = (median(batch[k] for batch in batches) for k in range(len(_PROBES)))
    one, few, most = _PROBES
    beyond = [a - (b - (c - b) * (few - one) / (most - few)) for a, b, c in batches]
    if many >= _FLAT * some and min(beyond) <= _EXCESS * first:
        return None
    chain, guess = planned.chain, guesses(planned.chain)
    edit = max(repeatable(chain), key=lambda e: guess[e.start : e.stop].sum())
    whole_s = median(side.seconds("whole", _CALLS) for _ in range(_BATCHES))
    found = Ballast(replace(edit, times=0), label(chain, edit), first, whole_s, 0.0)
    for copies in _COPIES:
        if time.monotonic() > until:
            return replace(found, known=False)
        edit = replace(edit, times=copies)
        (variant,) = variants_of(chain, [alone(chain, edit)])
        build_everywhere([side], variant, planned.variants, planned.design, progress)
        seconds = median(side.seconds(variant.name, _CALLS) for _ in range(_BATCHES))
        if variant.name not in names:
            side.forget({variant.name})
        if seconds >= found.limit_s:
            return replace(found, edit=edit, copies_s=seconds)
    return found


def _plan(chain: Chain, ballast: Ballast) -> Plan:
    """Of the programs that hold the copies, and of those that are expected to count all the same.

    Layers are guessed in units of the copies that were timed, or of the whole model.
    """
    guess, edit = guesses(chain), ballast.edit
    unit = min(
        ballast.copies_s / (edit.times * float(guess[edit.start : edit.stop].sum())), ballast.whole_s / float(guess.sum())
    )
    near = _near(chain, unit, ballast)
    silent = {
        variant.name
        for variant in candidates(chain, edit, near)
        if variant.part.count(edit.start) < edit.times
        and unit * float(guess[list(variant.part)].sum()) < _EXPECTED * ballast.limit_s
    }
    if ballast.whole_s >= ballast.limit_s:
        silent.discard("whole")
    return plan_of(chain, None, edit, near, frozenset(silent) | ballast.hidden)


def _near(chain: Chain, unit: float, ballast: Ballast) -> list[Edit]:
    """Layers that can stand behind themselves, but that of the ballast: so often that the copies are expected to count."""
    found = []
    for edit in repeatable(chain):
        seconds = unit * float(guesses(chain)[edit.start : edit.stop].sum())
        enough = [copies for copies in _COPIES if copies * seconds >= _NEAR_EXPECTED * ballast.limit_s]
        if enough and edit.start != ballast.edit.start:
            found.append(replace(edit, times=enough[0]))
    return found
