"""Charts of the lab. Gradient flow: a grid of panels with one row per quantity and one column per norm placement. Coordinate
check: one panel per place in the network, with the movement against the width."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from tilewright.train.lab.coordinates import Coordinates
from tilewright.train.lab.gradient_flow import Flow

__all__ = ["coordinates_specification", "specification", "svg"]

QUANTITIES = {
    "activations": "mean square of the residual stream",
    "gradients": "norm of a layer's gradient",
    "per_token": "gradient of one token, second matrix",
    "updates": "change of a layer in a step, relative",
}


def _points(flows: Sequence[Flow]) -> Iterator[dict[str, Any]]:
    for flow in flows:
        ends = flow.snapshots[:1] + flow.snapshots[1:][-1:]
        for snapshot in ends:
            when = "at initialisation" if snapshot.step == 0 else f"step {snapshot.step + 1}"
            for name, title in QUANTITIES.items():
                for i, value in enumerate(getattr(snapshot, name)):
                    # The axis is logarithmic. Values beyond the range of float32 cannot be shown.
                    if 0 < value < 1e30:
                        place = {"norm": flow.config.norm, "layers": flow.config.layers, "layer": i + 1, "when": when}
                        yield place | {"quantity": title, "value": value}


def specification(flows: Sequence[Flow]) -> dict[str, Any]:
    """The chart in Vega-Lite (https://vega.github.io/vega-lite/): lines over the layers, one colour per depth."""
    norms = list(dict.fromkeys(flow.config.norm for flow in flows))
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "background": "white",
        "data": {"values": list(_points(flows))},
        "facet": {
            "row": {"field": "quantity", "title": None, "sort": list(QUANTITIES.values())},
            "column": {"field": "norm", "title": None, "sort": norms},
        },
        "resolve": {"scale": {"y": "independent"}},
        "spec": {
            "width": 180,
            "height": 130,
            "mark": {"type": "line", "point": {"size": 12}},
            "encoding": {
                "x": {"field": "layer", "type": "quantitative", "title": "layer"},
                "y": {
                    "field": "value",
                    "type": "quantitative",
                    "scale": {"type": "log"},
                    "title": None,
                    "axis": {"format": "~g"},
                },
                "color": {"field": "layers", "type": "ordinal", "title": "layers"},
                "strokeDash": {"field": "when", "type": "nominal", "title": "", "sort": ["at initialisation"]},
            },
        },
    }


def coordinates_specification(checks: Sequence[Coordinates]) -> dict[str, Any]:
    """The chart in Vega-Lite: movement against width, both axes logarithmic, one line per step."""
    values = [
        {"place": place, "width": width, "step": step + 1, "moved": moved, "rules": _rules(check)}
        for check in checks for place, by_width in check.moved.items()
        for width, steps in by_width.items() for step, moved in enumerate(steps) if moved > 0
    ]  # fmt: skip
    places = list(dict.fromkeys(place for check in checks for place in check.moved))
    width = {"values": sorted({value["width"] for value in values}), "format": "d"}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "background": "white",
        "data": {"values": values},
        "facet": {
            "row": {"field": "place", "title": None, "sort": places},
            "column": {"field": "rules", "title": None},
        },
        "resolve": {"scale": {"y": "independent"}},
        "spec": {
            "width": 180,
            "height": 110,
            "mark": {"type": "line", "point": {"size": 12}},
            "encoding": {
                "x": {"field": "width", "type": "quantitative", "scale": {"type": "log", "base": 2}, "axis": width},
                "y": {
                    "field": "moved",
                    "type": "quantitative",
                    "scale": {"type": "log"},
                    "title": "moved (RMS)",
                    "axis": {"format": "~g"},
                },
                "color": {"field": "step", "type": "ordinal", "title": "step"},
            },
        },
    }


def _rules(check: Coordinates) -> str:
    return "muP" if check.config.mup else "usual"


def svg(specification: dict[str, Any]) -> str:
    """A chart as SVG.

    Raises:
        ValueError: vl-convert-python is not installed.
    """
    try:
        vl_convert = importlib.import_module("vl_convert")
    except ImportError:
        raise ValueError("writing an SVG needs vl-convert-python: pip install 'tilewright[lab]', or leave out --svg") from None
    return vl_convert.vegalite_to_svg(specification)
