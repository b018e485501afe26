"""The chart of all timed calls over time, which shows drift, disturbances and the order of measurements."""

import math
from statistics import median

from tilewright.bench.compare.charts.chart import ENGINES, Chart, spec, tips
from tilewright.bench.compare.fairness import by_variant
from tilewright.bench.compare.figures import seconds
from tilewright.bench.compare.results import Comparison, Run

__all__ = ["runs"]

_MOST = 1500
"""Points: each is an element of the page."""
_HIGHEST = 1.5
"""Times the usual: what took longer is drawn here, or it would flatten all others."""


def runs(c: Comparison) -> Chart:
    """The chart; its table has a row for each variant."""
    data, rows, notes = [], [], []
    for which in ("ours", "baseline"):
        taken: list[Run] = getattr(c, which).runs
        variants = by_variant(taken)
        usual = {name: median(times) for name, times in variants.items()}
        step = math.ceil(len(taken) / (_MOST // 2)) or 1
        if step > 1:
            notes.append(f"Drawn is one in {step} of the {len(taken)} runs of {which}; all are in the data below.")
        for run in taken[::step]:
            if usual[run.variant] > 0:
                share = run.seconds / usual[run.variant]
                told = {"engine": which, "variant": run.variant, "time": seconds(run.seconds), "relative": f"{share:.3f}"}
                data.append({"at": run.at, "share": min(share, _HIGHEST), **told})
        rows += [
            [which, name, str(len(times)), seconds(usual[name]), seconds(min(times)), seconds(max(times))]
            for name, times in variants.items()
        ]
    at = {"title": "seconds since measuring began", "grid": False, "tickCount": 8}
    share = {"title": "time / usual", "grid": True, "format": ".2~f", "tickCount": 5}
    encoding = {
        "x": {"field": "at", "type": "quantitative", "axis": at},
        "y": {"field": "share", "type": "quantitative", "scale": {"zero": False}, "axis": share},
        "color": {"field": "engine", "scale": ENGINES, "legend": None},
        "tooltip": tips(variant="variant", engine="engine", time="time", relative="of its usual time"),
    }
    mark = {"type": "point", "filled": True, "size": 18, "opacity": 0.75}
    return Chart(
        key="runs",
        title="Measuring runs",
        about="Every timed call over the median of its variant, at the time it ran: a slope is drift, a gap between the "
        f"colours is a side measured at another time, single points high up are disturbances (at most {_HIGHEST:g} is drawn).",
        legend=[("ours", "circle", "ours"), ("baseline", "circle", "baseline")],
        spec=spec(data={"runs": data}, height=210, layer=[{"data": {"name": "runs"}, "mark": mark, "encoding": encoding}]),
        columns=["engine", "variant", "runs", "median", "fastest", "slowest"],
        rows=rows,
        notes=notes,
    )
