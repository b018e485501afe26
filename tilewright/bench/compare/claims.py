"""The table of what engines state about themselves next to what was measured, for the HTML report and its Markdown version."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.bench.compare.figures import ratio, seconds
from tilewright.bench.compare.results import Comparison, Segment, Side

__all__ = ["WORTH", "Table", "table"]

WORTH = (
    "Collected once, after all measurements, because profiling slows an engine down. These times prove nothing and "
    "enter no interval, no verdict and no point of the fairness card. Where one is outside the estimated interval, "
    "the two measure different things, or one of them is wrong, so this is where to look. Names that exist only in "
    "the engine belong to no segment."
)
"""The explanation that precedes the numbers."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The engines' own times next to the measured ones, as text."""

    columns: list[str]
    rows: list[list[str]]
    """Rows for segments, for times without a segment, and for the sum against the measured whole model."""
    notes: list[str]
    """Notes about engines without counters."""
    listed: list[tuple[str, list[list[str]]]]
    """Engine, and each of its counters: name, kind, time, share of all, layers; the longest first."""


def table(c: Comparison) -> Table | None:
    """The table; None if no counters were requested."""
    both = [("ours", c.ours), ("baseline", c.baseline)]
    telling = [(name, side) for name, side in both if side.counters]
    notes = [f"{name}: {side.counters_note}." for name, side in both if side.counters_note]
    if not telling and not notes:
        return None
    columns, cells = ["segment"], [[segment.name] for segment in c.segments]
    last = [["of no segment"], ["whole model, measured; sum of all"]]
    for name, side in telling:
        columns += [name, f"{name} says", "ratio"]
        sums, rest = _sums(side, c.segments)
        for row, segment, said in zip(cells, c.segments, sums, strict=True):
            interval = getattr(segment, name)
            row += _beside(interval.value, said)
            row[-1] += ", outside" if said is not None and not interval.low <= said <= interval.high else ""
        last[0] += ["", seconds(rest) if rest else "none", ""]
        last[1] += _beside(side.whole.value, sum(counter.seconds for counter in side.counters))
    if all(side.counters_exact for _, side in both):
        columns.append("speed-up by their kernels")
        sums = [_sums(side, c.segments)[0] for _, side in both]
        for row, ours, baseline in zip(cells, *sums, strict=True):
            row.append(ratio(baseline / ours) if ours and baseline else "not known")
        totals = [sum(counter.seconds for counter in side.counters) for _, side in both]
        for row in last:
            row.append("")
        last[1][-1] = ratio(totals[1] / totals[0]) if totals[0] else "not known"
    listed = [(f"{name}: {side.engine}", _listed(side)) for name, side in telling]
    return Table(columns=columns, rows=[*cells, *last] if telling else [], notes=notes, listed=listed)


def _sums(side: Side, segments: Sequence[Segment]) -> tuple[list[float | None], float]:
    """Seconds that the engine says of each segment, None where no counter is of it; and of what is of no segment alone."""
    at = {layer: i for i, segment in enumerate(segments) for layer in segment.layers}
    sums: list[float | None] = [None] * len(segments)
    rest = 0.0
    for counter in side.counters:
        places = {at.get(layer) for layer in counter.layers}
        place = places.pop() if len(places) == 1 else None
        if place is None:
            rest += counter.seconds
        else:
            sums[place] = (sums[place] or 0.0) + counter.seconds
    return sums, rest


def _beside(estimate: float, said: float | None) -> list[str]:
    if said is None:
        return [seconds(estimate), "none told", ""]
    return [seconds(estimate), seconds(said), ratio(said / estimate if estimate > 0 else math.inf if said else 1.0)]


def _listed(side: Side) -> list[list[str]]:
    total = sum(counter.seconds for counter in side.counters)
    return [
        [one.name, one.kind, seconds(one.seconds), f"{one.seconds / total:.1%}" if total else "", ", ".join(one.layers)]
        for one in sorted(side.counters, key=lambda counter: -counter.seconds)
    ]
