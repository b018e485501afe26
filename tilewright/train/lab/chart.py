"""A picture of runs of the gradient-flow lab: a row of panels for each quantity, a column for each place of the norms."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from tilewright.train.lab.gradient_flow import Flow

__all__ = ["specification", "svg"]

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
                    # The axis is logarithmic, and what is beyond float32 has no place on it.
                    if 0 < value < 1e30:
                        place = {"norm": flow.config.norm, "layers": flow.config.layers, "layer": i + 1, "when": when}
                        yield place | {"quantity": title, "value": value}


def specification(flows: Sequence[Flow]) -> dict[str, Any]:
    """The picture in Vega-Lite (https://vega.github.io/vega-lite/): lines over the layers, one colour for each depth."""
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


def svg(flows: Sequence[Flow]) -> str:
    """The picture as SVG.

    Raises:
        ValueError: vl-convert-python is not installed.
    """
    try:
        vl_convert = importlib.import_module("vl_convert")
    except ImportError:
        raise ValueError(
            "the picture is drawn by vl-convert-python: pip install 'tilewright[lab]', or leave out --svg"
        ) from None
    return vl_convert.vegalite_to_svg(specification(flows))
