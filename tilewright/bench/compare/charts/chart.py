"""The data type of a chart: a Vega-Lite specification (https://vega.github.io/vega-lite/), and the same numbers as a table.

Colours are names of the page ("$ours", "$pass" ...), which replaces them by those of the light or dark theme. Because of this
replacement, no text of a model may be in a specification outside of `datasets`. The texts shown when a mark is pointed at are
made here. Legends belong to the page, because Vega's are cut off on narrow pages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ENGINES", "ROW_PX", "Chart", "log_axis", "rows_axis", "spec", "tips"]

ROW_PX = 19
"""Height of a segment's row: a line of text."""
ENGINES = {"domain": ["ours", "baseline"], "range": ["$ours", "$baseline"]}
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: `spec` draws it, `columns` and `rows` say it."""

    key: str
    title: str
    about: str
    """What is seen, in a sentence or two."""
    legend: list[tuple[str, str, str]]
    """Colour, shape and meaning of its marks."""
    spec: dict[str, Any]
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    """What is not in the drawing, or to be read with it."""


def spec(*, data: dict[str, list[dict[str, Any]]], height: float, layer: list[dict[str, Any]]) -> dict[str, Any]:
    """A layered specification as wide as its place on the page."""
    fit = {"type": "fit-x", "contains": "padding"}
    return {"$schema": _SCHEMA, "width": "container", "height": height, "autosize": fit, "datasets": data, "layer": layer}


def tips(**titles: str) -> list[dict[str, str]]:
    """What a mark tells when pointed at: fields and their titles."""
    return [{"field": field, "type": "nominal", "title": title} for field, title in titles.items()]


def rows_axis() -> dict[str, Any]:
    """One row for each value of "name", in the order of the data."""
    axis = {"title": None, "grid": True, "ticks": False, "domain": False, "labelPadding": 8}
    return {"field": "name", "type": "nominal", "sort": None, "axis": axis}


def log_axis(field: str, title: str, domain: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with a line for each power of ten, or more where there are few."""
    low, high = (math.log10(bound) for bound in domain)
    steps = (1,) if high - low > 2 else (1, 3) if high - low > 1 else (1, 2, 5)
    marks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    axis = {"title": title, "format": "~s", "values": [m for m in marks if domain[0] <= m <= domain[1]], "grid": True}
    return {
        "field": field,
        "type": "quantitative",
        "scale": {"type": "log", "domain": list(domain), "nice": False},
        "axis": axis,
    }
