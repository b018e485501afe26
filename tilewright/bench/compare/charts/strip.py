"""The verdict chart: the speed-up of every segment with its interval, and the claim as a line."""

import math
from typing import Any

from tilewright.bench.compare.charts.chart import ROW_PX, Chart, rows_axis, spec, tips
from tilewright.bench.compare.figures import between, ratio
from tilewright.bench.compare.results import MOST_RATIO, Comparison

__all__ = ["strip"]

_SHAPES = {"pass": "circle", "fail": "triangle-down", "undecided": "diamond", "whole model": "square"}
_COLOURS = {"pass": "$pass", "fail": "$fail", "undecided": "$undecided", "whole model": "$ink"}
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100)


def strip(c: Comparison) -> Chart:
    """The chart; a bound at nothing or infinity ends at the frame."""
    every = [("whole model", c.ratio, "whole model"), *((s.name, s.ratio, s.verdict) for s in c.segments)]
    # An interval from nothing to infinity is no drawing.
    entries = [entry for entry in every if entry[1].low > 0 or entry[1].high < MOST_RATIO]
    boundless = [name for name, r, _ in every if r.low <= 0 and r.high >= MOST_RATIO]
    shown = [x for _, r, _ in entries for x in (*r, c.claim) if 0 < x < MOST_RATIO]
    low, high = max(min(shown), c.claim / 30) / 1.12, min(max(shown), c.claim * 60) * 1.08
    data = [
        {
            "name": name,
            "value": _inside(r.value, low, high),
            "low": _inside(r.low, low, high),
            "high": _inside(r.high, low, high),
            "verdict": verdict,
            "ratio": ratio(r.value),
            "interval": between(r),
        }
        for name, r, verdict in entries
    ]
    named = {verdict: [s.name for s in c.segments if s.verdict == verdict] for verdict in ("fail", "undecided")}
    notes = [
        f"{word} {', '.join(named[key])}."
        for key, word in (("fail", "Short of the claim:"), ("undecided", "Undecided:"))
        if named[key]
    ]
    if any(r.low <= 0 or r.high >= MOST_RATIO for _, r, _ in entries):
        notes.append("An interval that reaches the frame has no bound on that side.")
    if boundless:
        notes.append(f"Not drawn, because their intervals have no bounds: {', '.join(boundless)}.")
    return Chart(
        key="strip",
        title="Verdict strip",
        about="How many times as fast each segment is as in the baseline, with its interval. A segment passes when the whole "
        "interval is right of the claim, fails when it is left of it, and is undecided when the claim lies inside.",
        legend=[(_COLOURS[v].removeprefix("$"), _SHAPES[v], v) for v in _SHAPES if any(v == each for _, _, each in entries)]
        + [("ink", "dashes", f"claim, {c.claim:g}×")],
        spec=spec(data={"segments": data, "claim": [{"value": c.claim}]}, height=ROW_PX * len(data), layer=_layers(low, high)),
        columns=["segment", "speed-up", "interval", "verdict"],
        rows=[row for name, r, verdict in every for row in _rows(c, name, ratio(r.value), between(r), verdict)],
        notes=notes,
    )


def _rows(c: Comparison, name: str, speed: str, interval: str, verdict: str) -> list[list[str]]:
    """A segment, and below it each of its layers, if they are several."""
    layers = next((s.layers for s in c.segments if s.name == name), [])
    inside = [[f"... {layer}", "", "", "not shown by itself"] for layer in layers if len(layers) > 1]
    return [[name, speed, interval, "" if verdict == "whole model" else verdict], *inside]


def _layers(low: float, high: float) -> list[dict[str, Any]]:
    y = rows_axis()
    axis = {"title": "speed-up", "values": [t for t in _TICKS if low <= t <= high], "labelExpr": "datum.label + '×'"}
    axis |= {"grid": True, "orient": "top", "format": "~r"}
    x = {"field": "value", "type": "quantitative", "scale": {"type": "log", "domain": [low, high], "nice": False}, "axis": axis}
    color = {"field": "verdict", "scale": {"domain": list(_COLOURS), "range": list(_COLOURS.values())}, "legend": None}
    shape = {"field": "verdict", "scale": {"domain": list(_SHAPES), "range": list(_SHAPES.values())}, "legend": None}
    size = {"condition": {"test": "datum.verdict === 'fail'", "value": 130}, "value": 82}
    told = tips(name="segment", verdict="verdict", ratio="speed-up", interval="interval")
    return [
        {
            "data": {"name": "claim"},
            "mark": {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 1.5, "color": "$ink"},
            "encoding": {"x": x},
        },
        {
            "data": {"name": "segments"},
            "mark": {"type": "rule", "strokeWidth": 2.2, "opacity": 0.75},
            "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": color, "tooltip": told},
        },
        {
            "data": {"name": "segments"},
            "mark": {"type": "point", "filled": True, "opacity": 1, "stroke": "$paper", "strokeWidth": 0.8},
            "encoding": {"x": x, "y": y, "color": color, "shape": shape, "size": size, "tooltip": told},
        },
    ]


def _inside(x: float, low: float, high: float) -> float:
    return high if math.isnan(x) else min(max(x, low), high)
