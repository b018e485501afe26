"""The charts of the report, in the order of the page."""

from tilewright.bench.compare.charts.chart import Chart
from tilewright.bench.compare.charts.roofline import roofline
from tilewright.bench.compare.charts.runs import runs
from tilewright.bench.compare.charts.strip import strip
from tilewright.bench.compare.charts.waterfall import waterfall
from tilewright.bench.compare.results import Comparison

__all__ = ["Chart", "charts"]


def charts(comparison: Comparison) -> list[Chart]:
    """All of them."""
    return [strip(comparison), waterfall(comparison), roofline(comparison), runs(comparison)]
