"""From run times of both engines to segments, their speed-ups, and which part of the claim is proven.

A segment is a layer, or several neighbours that cannot be separated: because the variants do not determine each alone, because
the engine takes another time for both together than for the two alone (fused, overlapped, a conversion between them), or
because one takes no time of its own. Layers that are merged on one side are merged on both, so that a ratio compares the same
work; the reason is kept.

A ratio's interval is Fieller's: all r for which baseline - r * ours is within its error of zero. So a layer passes exactly if
baseline - claim * ours is positive at the requested confidence, simultaneously over all segments.

The confidence does not depend on the outcome. `decided`, which is called repeatedly while measuring, is stricter than the final
test.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tilewright.bench.compare.attribution import (
    FIRST,
    TRIMS,
    Design,
    Fit,
    Sample,
    columns,
    critical,
    fit,
    interval,
    sample,
)
from tilewright.bench.compare.fusion import ADDITIVE, Kind, joint
from tilewright.bench.compare.results import MOST_RATIO, Interval, Run, Segment, Verdict

__all__ = ["Attribution", "SideFit", "attribute", "decided"]

Floats = NDArray[np.float64]

_SIDES = ("ours", "the baseline")
_REJECTED = 0.01  # probability below which the residuals are not noise
_SMALLEST_JOINT = 0.02  # of the pair's time: a smaller gain of two neighbours is left where it is
_NOTHING = 0.005  # of the whole model: a layer whose upper bound is below and whose lower bound is 0 has no time of its own
_MUCH_BETTER = 0.5  # in variance; by noise alone the middle is the better one by 1.5
_LOOK = 0.99  # confidence of `decided`: it looks some five times, each time the runs have doubled
_LOOK_DRAWS = 400


@dataclass(frozen=True, kw_only=True)
class SideFit:
    """One engine's times, in the form of results.Side."""

    whole: Interval
    layers: dict[str, Interval]
    overhead: Interval
    residual: float
    additive: bool
    why: str
    """One sentence on additivity."""
    noise: float
    """Relative noise of one run."""
    located: str
    """The statistic that is used as a variant's time, as text."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The result of both sides' run times."""

    segments: list[Segment]
    verdict: Verdict
    ratio: Interval
    ours: SideFit
    baseline: SideFit

    def holds(self, claim: float, apart: float) -> bool:
        """Whether the verdict stays the same if every ratio is wrong by a share of `apart`, in the worse direction."""
        if self.verdict == "pass":
            return min(segment.ratio.low for segment in self.segments) >= claim * (1 + apart)
        return self.verdict == "fail" and min(segment.ratio.high for segment in self.segments) * (1 + apart) < claim


@dataclass(frozen=True)
class _Taken:
    """One side's sample: the variants to which the layers are fitted, and the whole model."""

    side: str
    fitted: Sample
    stepwise: bool
    """`Design.stepwise` of the side."""
    bare: bool
    """`Design.bare` of it."""
    draws_DV: Floats
    """Deviations of the fitted variants."""
    whole_s: float
    whole_D: Floats
    """Its relative deviations, in the same draws."""

    @staticmethod
    def of(number: int, taken: Sample, design: Design, draws: int, seed: int) -> "_Taken":
        drawn, whole, kept = taken.draws(draws, seed), taken.at("whole"), taken.fitted(design.silent[number])
        known = _SIDES[number], taken.of(kept), design.stepwise[number], design.bare[number]
        return _Taken(*known, drawn[:, kept], float(taken.seconds_V[whole]), drawn[:, whole])


@dataclass
class _Cut:
    """A segmentation: where neighbours are joined, and why."""

    design: Design
    kinds: dict[Kind, str] = field(default_factory=dict)
    """Boundary -> reason."""
    below: set[Kind] = field(default_factory=set)
    """Boundaries that join a layer whose fitted time is below 0: the fit contradicts itself there."""
    joint: dict[str, list[Kind]] = field(default_factory=lambda: defaultdict(list))
    """Side -> those of them, and of a layer with its own copy, at which two take another time together than apart: unknowns of
    that side's fit. Of the other's they would be in the way: what says nothing of them there says less of the layers."""

    def segments(self) -> list[list[int]]:
        found = [[0]]
        for i in range(1, len(self.design.layers)):
            if self.kind(i - 1) in self.kinds:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def kind(self, i: int) -> Kind:
        return self.design.groups[i], self.design.groups[i + 1]

    def contrasts(self, segments: list[list[int]], one: "_Taken") -> Floats:
        """[S, P]: each segment's time in terms of one side's unknowns."""
        groups, merged = max(self.design.groups) + 1, {kind: k for k, kind in enumerate(self.joint[one.side])}
        c = np.zeros((len(segments), FIRST + groups + len(merged)))
        for s, segment in enumerate(segments):
            for i in segment:
                c[s, FIRST + self.design.groups[i]] += 1
            for i in segment[:-1]:
                if self.kind(i) in merged:
                    c[s, FIRST + groups + merged[self.kind(i)]] += 1
        return c

    def fit(self, one: _Taken) -> Fit:
        x_VP = columns(self.design, one.fitted.variants, self.joint[one.side])
        if one.bare:
            x_VP[:, 1:FIRST] = 0
        return fit(one.fitted, x_VP, self.design.dear)


def _join_unknown(cut: _Cut, sides: Sequence[_Taken]) -> None:
    """Join layers that the variants do not tell apart, each with the neighbour that makes it known soonest."""
    while True:
        segments = cut.segments()
        if len(segments) == 1:
            return
        known = np.all([cut.fit(one).estimable(cut.contrasts(segments, one)) for one in sides], axis=0)
        if known.all():
            return
        first = int(np.flatnonzero(~known)[0])
        # The one behind, unless this is the last: unknown runs then grow to the right until a variant ends one.
        at = segments[first][-1] if first + 1 < len(segments) else segments[first][0] - 1
        cut.kinds[cut.kind(at)] = "the variants that were run do not distinguish them"


def _join_fused(cut: _Cut, one: "_Taken") -> bool:
    """Join boundaries of one side until its fit is additive or no boundary explains the rest; return whether any was joined."""
    if one.stepwise:
        return False
    side, draws_DV = one.side, one.draws_DV
    joined, own = False, set(pairwise(cut.design.groups))
    while len(cut.segments()) > 1:
        found = cut.fit(one)
        if _additive(found, draws_DV):
            return joined
        best = joint(cut.design, cut.joint[side], found)
        if best is None or best.probability >= _REJECTED:
            return joined
        pair = min(sum(abs(float(found.unknowns_P[FIRST + g])) for g in kind) for kind in best.kinds)
        if abs(best.seconds) < _SMALLEST_JOINT * pair:
            return joined
        how = "less" if best.seconds < 0 else "more"
        where = "the two together than for the two apart" if len(best.kinds) == 1 else "some of these together than apart"
        for kind in best.kinds:
            if kind not in own:
                continue  # copies of a layer that fuse with each other, or find their data in a cache: nothing to join
            cut.kinds[kind] = f"{side} takes {abs(best.seconds):.3g} s {how} for {where}"
        cut.joint[side] += best.kinds
        joined = True
    return joined


def _join_nothing(cut: _Cut, sides: Sequence["_Taken"], confidence: float) -> bool:
    """Join the first layer that takes no time of its own with the neighbour of its module, else with the one before it."""
    segments = cut.segments()
    if len(segments) == 1:
        return False
    names = cut.design.layers
    for one in sides:
        contrasts = cut.contrasts(segments, one)
        found, whole = cut.fit(one), one.whole_s
        error, factor = critical(found.drawn(contrasts, one.draws_DV, 1), confidence)
        times = contrasts @ found.unknowns_P
        for s in np.flatnonzero((times <= factor * error) & (times + factor * error < _NOTHING * whole)):
            kind, bound = cut.kind(_beside(cut, segments[s])), (times + factor * error)[s] / whole
            how = f"takes no time of its own: below {bound:.2%} of the model"
            if bound < 0:
                cut.below.add(kind)
                how = f"comes out at less than zero, by at least {-bound:.2%} of the model, so its layers prove nothing"
            cut.kinds[kind] = f"on {one.side} {names[segments[s][0]]} {how}"
            return True
    return False


def _beside(cut: _Cut, segment: list[int]) -> int:
    """The boundary at which a segment joins its neighbour: one in the same module if there is one, else the one before."""
    names = cut.design.layers
    before = segment[0] > 0 and (
        segment[-1] == len(names) - 1 or _parent(names[segment[-1]]) != _parent(names[segment[-1] + 1])
        or _parent(names[segment[0]]) == _parent(names[segment[0] - 1])
    )  # fmt: skip
    return segment[0] - 1 if before else segment[-1]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _additive(found: Fit, draws_DV: Floats) -> bool:
    if found.freedom < 1:
        return False
    return found.model_error < ADDITIVE or found.misfit(draws_DV) >= _REJECTED


def _side(cut: _Cut, one: _Taken, confidence: float, located: str, seed: int) -> tuple[SideFit, Floats, Floats]:
    """Intervals of one side, and its segments' times and deviations for the ratios; the whole model's are the last column."""
    segments = cut.segments()
    found = cut.fit(one)
    contrasts = cut.contrasts(segments, one)
    overhead = np.zeros((1, contrasts.shape[1]))
    overhead[0, 0] = 1
    known = bool(found.estimable(overhead)[0])
    all_SP = np.concatenate([contrasts, overhead]) if known else contrasts
    times = np.append(all_SP @ found.unknowns_P, one.whole_s)
    moved = np.column_stack([found.drawn(all_SP, one.draws_DV, seed), one.whole_D * one.whole_s])
    error, factor = critical(moved, confidence)
    shown = [interval(t, e, factor) for t, e in zip(times.tolist(), error.tolist(), strict=True)]
    names = [_name(cut.design, segment) for segment in segments]
    additive = _additive(found, one.draws_DV)
    answer = SideFit(
        whole=shown[-1],
        layers=dict(zip(names, shown, strict=False)),
        overhead=shown[len(segments)] if known else Interval(0.0, 0.0, shown[-1].high),
        residual=float(np.sqrt((found.residual_V**2).mean()) / one.whole_s),
        additive=additive,
        why=_why(found, additive, found.misfit(one.draws_DV)),
        noise=one.fitted.single,
        located=located,
    )
    keep = [*range(len(segments)), len(times) - 1]
    return answer, times[keep], moved[:, keep]


def _why(found: Fit, additive: bool, probability: float) -> str:
    if found.freedom < 1:
        return f"not tested, because {len(found.sample.variants)} variants with as many unknowns leave nothing to compare"
    what = f"model error {found.model_error:.2%} of a variant's time, lack of fit p = {probability:.3f}"
    left = "" if additive else "; no single boundary explains it, so every interval is wider"
    return f"{what}, {found.freedom:.0f} degrees of freedom{left}"


def _name(design: Design, segment: list[int]) -> str:
    names = [design.layers[i] for i in segment]
    return " + ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]} ({len(names)} layers)"


def _ratios(times: tuple[Floats, Floats], moved: tuple[Floats, Floats], confidence: float) -> list[Interval]:
    """Baseline over ours with Fieller's bounds, simultaneously."""
    (a, b), (da, db) = times, moved
    least = 1e-9 * float(np.abs(a).max())
    ratio = np.clip(np.maximum(b, 0.0) / np.maximum(a, least), 0, MOST_RATIO)
    _, factor = critical(db - ratio * da, confidence)
    va, vb = (da**2).mean(0), (db**2).mean(0)
    found = []
    for s, r in enumerate(ratio.tolist()):
        # (b - r a)^2 <= factor^2 (vb + r^2 va): a quadratic in r; its roots are the bounds where a is surely positive.
        p, q, c = a[s] ** 2 - factor**2 * va[s], a[s] * b[s], b[s] ** 2 - factor**2 * vb[s]
        root = np.sqrt(max(q * q - p * c, 0.0))
        if p > 0 and a[s] > 0:
            low, high = (q - root) / p, (q + root) / p
        elif p > 0:  # ours is surely below nothing, which no time is: the fit contradicts itself
            low, high = 0.0, MOST_RATIO
        else:  # ours may take no time at all: no upper bound; a lower one where the baseline's is surely positive
            low, high = (c / (q + root) if c > 0 and q + root > 0 else 0.0), MOST_RATIO
        low, high = (min(max(float(x), 0.0), MOST_RATIO) for x in (low, high))
        found.append(Interval(min(max(r, low), high), low, high))
    return found


def _located(sides: Sequence[Sequence[Run]], design: Design) -> tuple[list[Sample], str]:
    """Both sides' samples with the same statistic: the middle of the runs, unless the fastest runs agree much better."""
    found = {name: [sample(runs, design, trim) for runs in sides] for name, trim in TRIMS.items()}
    noise = {name: sum(one.single**2 for one in samples) for name, samples in found.items()}
    middle, fastest = TRIMS
    chosen = fastest if noise[fastest] < _MUCH_BETTER * noise[middle] else middle
    return found[chosen], chosen


def _verdict(ratio: Interval, claim: float, *, contradicted: bool, spared: bool) -> Verdict:
    if contradicted:
        return "undecided"
    return "pass" if ratio.low >= claim else "fail" if ratio.high < claim and not spared else "undecided"


def attribute(
    runs_ours: Sequence[Run],
    runs_baseline: Sequence[Run],
    design: Design,
    claim: float,
    *,
    confidence: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> Attribution:
    """Segments with their times, ratios and verdicts, and the verdict on "every layer is at least `claim` times faster".

    The i-th run of a variant belongs to round i. The two sides may have run different variants, but both must have run "whole".
    Raises ValueError if there is no "whole", if a variant is not in the design, or if one has fewer than 3 runs.
    """
    taken, where = _located((runs_ours, runs_baseline), design)
    for side, one in zip(_SIDES, taken, strict=True):
        if "whole" not in one.variants:
            raise ValueError(f"{side} has no run of the whole model; wanted runs of the variant 'whole'")
    sides = [_Taken.of(k, one, design, draws, seed + k) for k, one in enumerate(taken)]
    cut = _Cut(design)
    _join_unknown(cut, sides)
    while any(_join_fused(cut, one) for one in sides) or _join_nothing(cut, sides, confidence):
        _join_unknown(cut, sides)
    ours, a, da = _side(cut, sides[0], confidence, where, seed + 2)
    baseline, b, db = _side(cut, sides[1], confidence, where, seed + 3)
    ratios = _ratios((a, b), (da, db), confidence)
    segments = [
        Segment(
            name=name,
            layers=[design.layers[i] for i in segment],
            ours=ours.layers[name],
            baseline=baseline.layers[name],
            ratio=ratio,
            verdict=_verdict(
                ratio, claim, contradicted=any(cut.kind(i) in cut.below for i in segment[:-1]), spared=design.spared
            ),
            flops=sum(design.flops[i] for i in segment),
            bytes=sum(design.bytes[i] for i in segment),
            why="; ".join(dict.fromkeys(cut.kinds[cut.kind(i)] for i in segment[:-1])),
        )
        for segment, name, ratio in zip(cut.segments(), ours.layers, ratios, strict=False)
    ]
    verdicts = {segment.verdict for segment in segments}
    verdict: Verdict = "fail" if "fail" in verdicts else "pass" if verdicts == {"pass"} else "undecided"
    return Attribution(segments=segments, verdict=verdict, ratio=ratios[-1], ours=ours, baseline=baseline)


def decided(runs_ours: Sequence[Run], runs_baseline: Sequence[Run], design: Design, claim: float) -> bool:
    """Whether more runs would change nothing: the claim passes, or a segment fails, at 99 % instead of 95 %.

    Call this when the number of runs has doubled. Calling it more often makes false verdicts likelier than the confidence says.
    """
    fewest = min((sum(r.variant == "whole" for r in runs) for runs in (runs_ours, runs_baseline)), default=0)
    if fewest < 5:
        return False
    found = attribute(runs_ours, runs_baseline, design, claim, confidence=_LOOK, draws=_LOOK_DRAWS)
    return found.verdict != "undecided"
