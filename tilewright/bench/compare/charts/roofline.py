"""The roofline chart (Williams, Waterman, Patterson: Roofline, CACM 2009): rates of segments against measured ceilings."""

from collections.abc import Iterator, Sequence
from typing import Any

from tilewright.bench.compare.charts.chart import ENGINES, Chart, log_axis, spec, tips
from tilewright.bench.compare.figures import amount, seconds
from tilewright.bench.compare.results import Comparison, Segment, Side

__all__ = ["roofline"]

_TOOLTIP = {
    "name": "segment",
    "engine": "engine",
    "achieved": "achieved",
    "traffic": "traffic",
    "of": "of its ceiling",
    "time": "time",
    "share": "share of the model",
}


def roofline(c: Comparison) -> Chart:
    """The chart. Segments without operations are named under it: they have no place on logarithmic axes."""
    drawn = [s for s in c.segments if s.flops > 0 and s.bytes > 0 and s.ours.value > 0 and s.baseline.value > 0]
    points = [_point(c, segment, which) for which in ("baseline", "ours") for segment in drawn]
    xs = [p["intensity"] for p in points] or [1.0]
    # The room on the right is for the names of the roofs.
    span = [min(xs) / 1.6, max(xs) * 6]
    roofs = list(_roofs(c, span))
    ys = [p["rate"] for p in points] or [1.0]
    heights = [min(ys) / 2, max([*ys, *(roof["y"] for roof in roofs)]) * 1.8]
    links = [{"x": a["intensity"], "y": a["rate"], "y2": b["rate"]} for a, b in zip(points, points[len(drawn) :])]
    notes = [
        "A segment's bytes are counted once and in the precision of ours on both sides, so the height between its two points "
        "is its speed-up."
    ]
    if not roofs:
        notes.append(
            "The ceilings of this machine have not been measured, so no roof is drawn (`tilewright hw --measure` "
            "measures them)."
        )
    if left := [s.name for s in c.segments if s not in drawn]:
        notes.append(f"Not drawn, because the number of operations or the time is missing: {', '.join(left)}.")
    data = {"points": points, "roofs": roofs, "links": links, "names": [roof for roof in roofs if roof["name"]]}
    return Chart(
        key="roofline",
        title="Roofline",
        about="What each segment achieves against what the machine was measured to do at most, for both engines. A point's "
        "area is its share of its engine's time; a thin line joins the two points of a segment.",
        legend=[
            ("ours", "circle", "ours"),
            ("baseline", "square", "baseline"),
            *([("ink", "line", "measured ceiling")] if roofs else []),
        ],
        spec=spec(data=data, height=430, layer=_layers(span, heights)),
        columns=list(_TOOLTIP.values()),
        rows=[[p[key] for key in _TOOLTIP] for p in points],
        notes=notes,
    )


def _layers(span: list[float], heights: list[float]) -> list[dict[str, Any]]:
    x, y = log_axis("x", "operations per byte", span), log_axis("y", "operations per second", heights)
    shape = {"field": "engine", "scale": {"domain": ["ours", "baseline"], "range": ["circle", "square"]}, "legend": None}
    return [
        {
            "data": {"name": "roofs"},
            "mark": {"type": "line", "strokeWidth": 1.5, "color": "$ink", "opacity": 0.7, "clip": True},
            "encoding": {"x": x, "y": y, "detail": {"field": "roof"}},
        },
        {
            "data": {"name": "names"},
            "mark": {"type": "text", "align": "right", "baseline": "bottom", "dy": -3, "color": "$soft"},
            "encoding": {"x": x, "y": y, "text": {"field": "name"}},
        },
        {
            "data": {"name": "links"},
            "mark": {"type": "rule", "color": "$soft", "opacity": 0.3},
            "encoding": {"x": x, "y": y, "y2": {"field": "y2"}},
        },
        {
            "data": {"name": "points"},
            "mark": {"type": "point", "filled": True, "opacity": 0.72, "stroke": "$paper", "strokeWidth": 0.8},
            "encoding": {
                "x": {**x, "field": "intensity"},
                "y": {**y, "field": "rate"},
                "size": {
                    "field": "weight",
                    "type": "quantitative",
                    "scale": {"domainMin": 0, "range": [14, 560]},
                    "legend": None,
                },
                "color": {"field": "engine", "scale": ENGINES, "legend": None},
                "shape": shape,
                "tooltip": tips(**_TOOLTIP),
            },
        },
    ]


def _point(c: Comparison, segment: Segment, which: str) -> dict[str, Any]:
    time, side = getattr(segment, which).value, getattr(c, which)
    share = time / side.whole.value if side.whole.value else 0.0
    return {
        "name": segment.name,
        "engine": which,
        "intensity": segment.flops / segment.bytes,
        "rate": segment.flops / time,
        "weight": share,
        "achieved": amount(segment.flops / time, "FLOP/s"),
        "traffic": amount(segment.bytes / time, "B/s"),
        "of": _of_ceiling(c, segment, time, side),
        "time": seconds(time),
        "share": f"{share:.1%}",
    }


def _of_ceiling(c: Comparison, segment: Segment, time: float, side: Side) -> str:
    """The least time for its bytes and operations, in the fastest type that its engine names, over its time."""
    rates = [rate for unit, rate in _units(c) if unit in _named(side)]
    if not rates or "bytes_per_s" not in c.ceilings:
        return "not known"
    return f"{max(segment.flops / max(rates), segment.bytes / c.ceilings['bytes_per_s']) / time:.0%}"


def _named(side: Side) -> str:
    """Text with the types that an engine computes in: its word, or else what its error is typical of."""
    return str(side.facts.get("precision") or side.precision).lower()


def _units(c: Comparison) -> list[tuple[str, float]]:
    return [(key.partition(".")[2], rate) for key, rate in c.ceilings.items() if key.startswith("flops_per_s.") and rate > 0]


def _roofs(c: Comparison, span: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Corners of the roof of each type that one of the engines computes in; of all types where neither names one."""
    bandwidth = c.ceilings.get("bytes_per_s", 0.0)
    start, end = span[0], span[1] / 1.15
    for unit, rate in [(u, r) for u, r in _units(c) if u in _named(c.ours) + " " + _named(c.baseline)] or _units(c):
        corner = rate / bandwidth if bandwidth else start
        corners = [(start, min(rate, start * bandwidth) if bandwidth else rate)]
        corners += [(corner, rate)] if start < corner < end else []
        corners += [(end, min(rate, end * bandwidth) if bandwidth else rate)]
        for i, (x, y) in enumerate(corners):
            last = i == len(corners) - 1 and y == rate
            yield {"roof": unit, "x": x, "y": y, "name": f"{unit} {amount(rate, '')}" if last else ""}
