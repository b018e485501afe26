"""The waterfall chart: how the time of one call is composed in both engines, including overhead and unexplained time."""

from collections.abc import Iterator
from itertools import accumulate, pairwise

from tilewright.bench.compare.charts.chart import ENGINES, ROW_PX, Chart, rows_axis, spec, tips
from tilewright.bench.compare.figures import between, seconds
from tilewright.bench.compare.results import Comparison, Interval, Side

__all__ = ["waterfall"]

Step = tuple[str, float, float, str, Interval | None]
"""Name, start and end in seconds, "segment", "rest" or "whole", interval."""


def waterfall(c: Comparison) -> Chart:
    """The chart."""
    unit, scale = _unit(max(c.ours.whole.value, c.baseline.whole.value))
    both = [("ours", c.ours, list(_steps(c, "ours"))), ("baseline", c.baseline, list(_steps(c, "baseline")))]
    data = [
        {
            "name": name,
            "engine": engine,
            "start": start / scale,
            "end": end / scale,
            "kind": kind,
            "time": seconds(end - start),
            "interval": between(interval, seconds) if interval else "a difference",
            "share": f"{(end - start) / side.whole.value:.1%}" if side.whole.value else "not known",
        }
        for engine, side, steps in both
        for name, start, end, kind, interval in steps
    ]
    axis = {"title": f"{unit} since the call", "grid": True, "tickCount": 8, "orient": "top"}
    encoding = {
        "x": {"field": "start", "type": "quantitative", "axis": axis},
        "x2": {"field": "end"},
        "y": rows_axis(),
        "yOffset": {"field": "engine", "scale": {"domain": ["ours", "baseline"]}},
        "color": {"field": "engine", "scale": ENGINES, "legend": None},
        "stroke": {"field": "engine", "scale": ENGINES, "legend": None},
        "opacity": {"condition": {"test": "datum.kind === 'rest'", "value": 0.45}, "value": 1},
        "tooltip": tips(name="step", engine="engine", time="time", interval="interval", share="share of the model"),
    }
    # The edge keeps a layer visible that is thinner than a pixel.
    mark = {"type": "bar", "cornerRadius": 1.5, "strokeWidth": 0.8}
    return Chart(
        key="waterfall",
        title="Waterfall",
        about="Where the time of one call goes in each engine: every bar begins where the one before it ended. The overhead is "
        "what a call costs with no layer in it; not explained is the measured time of the whole model less their sum.",
        legend=[("ours", "square", "ours"), ("baseline", "square", "baseline"), ("faint", "square", "overhead, not explained")],
        spec=spec(
            data={"steps": data},
            height=ROW_PX * (len(c.segments) + 3),
            layer=[{"data": {"name": "steps"}, "mark": mark, "encoding": encoding}],
        ),
        columns=["step", "ours", "baseline", "ours, interval", "baseline, interval"],
        rows=[
            [a[0], seconds(a[2] - a[1]), seconds(b[2] - b[1]), *(between(s[4], seconds) if s[4] else "" for s in (a, b))]
            for a, b in zip(both[0][2], both[1][2])
        ],
        notes=[_additivity(name, side) for name, side, _ in both],
    )


def _steps(c: Comparison, which: str) -> Iterator[Step]:
    """The overhead, the segments, what is left, the whole."""
    side: Side = getattr(c, which)
    yield "overhead", 0.0, side.overhead.value, "rest", side.overhead
    times: list[Interval] = [getattr(segment, which) for segment in c.segments]
    ends = list(accumulate((time.value for time in times), initial=side.overhead.value))
    for segment, time, (start, end) in zip(c.segments, times, pairwise(ends)):
        yield segment.name, start, end, "segment", time
    yield "not explained", ends[-1], side.whole.value, "rest", None
    yield "whole model", 0.0, side.whole.value, "whole", side.whole


def _additivity(name: str, side: Side) -> str:
    """How well the layers explain the variants, in the words of the fit where it left some."""
    found = "the layers add up to the model" if side.additive else "nothing shows that the layers add up to the model"
    why = f" ({side.facts['additivity']})" if side.facts.get("additivity") else ""
    return f"{name}: {found}{why}; the fit is off by {side.residual:.1%} of it (root mean square over the variants)."


def _unit(longest: float) -> tuple[str, float]:
    return ("s", 1.0) if longest >= 1 else ("ms", 1e-3) if longest >= 1e-3 else ("µs", 1e-6)
