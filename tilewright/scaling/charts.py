"""The plots of an analysis, as Vega-Lite specifications (https://vega.github.io/vega-lite/) and as SVG files."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.extras import MissingExtra
from tilewright.scaling.analysis import Analysis
from tilewright.scaling.frontier import FEWEST_SIZES, METHODS
from tilewright.scaling.objective import logs_and_shares
from tilewright.scaling.runs import budgets

__all__ = ["charts", "write_charts"]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_MOST_POINTS = 5000
"""If there are more runs than this, only every n-th is drawn, because an SVG has an element for each point."""


def charts(found: Analysis) -> dict[str, dict[str, Any]]:
    """Name -> specification: "isoflop", "frontier", "residuals"."""
    return {"isoflop": _isoflop(found), "frontier": _frontier(found), "residuals": _residuals(found)}


def write_charts(found: Analysis, folder: Path) -> list[Path]:
    """Write each chart as NAME.svg into `folder`; returns the files.

    Raises:
        MissingExtra: vl-convert-python is not installed; it is in the extra [scaling].
    """
    try:
        draw = importlib.import_module("vl_convert")
    except ImportError as error:
        raise MissingExtra(f"plots need vl-convert-python: pip install 'tilewright[scaling]' ({error})") from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, spec in charts(found).items():
        path = folder / f"{name}.svg"
        path.write_text(draw.vegalite_to_svg(spec), encoding="utf-8")
        paths.append(path)
    return paths


def _spec(title: str, data: dict[str, list[dict[str, Any]]], layer: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "$schema": _SCHEMA,
        "title": title,
        "width": 560,
        "height": 380,
        "background": "white",
        "datasets": data,
        "layer": layer,
    }


def _axis(field: str, title: str, *, log: bool = True) -> dict[str, Any]:
    scale = {"type": "log", "nice": False, "padding": 12} if log else {"zero": False}
    axis = {"format": ".0e", "tickCount": 6, "labelOverlap": True} if log else {}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def _layer(data: str, mark: dict[str, Any], **encoding: Any) -> dict[str, Any]:
    return {"data": {"name": data}, "mark": mark, "encoding": encoding}


def _isoflop(found: Analysis) -> dict[str, Any]:
    """Loss by model size, with one colour for each budget: the runs, the curve of the law, and the minima."""
    runs, law = found.runs, found.fit.law
    points, curves = [], []
    for group in budgets(runs):
        if len(group) < FEWEST_SIZES:
            continue
        flops = float(np.exp(np.log(runs.flops[group]).mean()))
        points += [{"N": runs.params[i], "loss": runs.loss[i], "C": flops} for i in group]
        low, high = runs.params[group].min(), runs.params[group].max()
        for size in np.geomspace(low, high, 60):
            loss = law.loss(float(size), flops / runs.flops_per_param_token / float(size))
            curves.append({"N": float(size), "loss": loss, "C": flops})
    lowest = [{"N": p.params, "loss": p.loss, "method": m} for m in METHODS for p in found.points[m] if not p.problem]
    x, y = _axis("N", "parameters"), _axis("loss", "loss", log=False)
    color = {
        "field": "C",
        "type": "quantitative",
        "scale": {"type": "log", "scheme": "viridis"},
        "title": "FLOPs",
        "legend": {"format": ".0e"},
    }
    shape = {"field": "method", "type": "nominal", "title": "minimum by"}
    return _spec(
        "Loss by size at each budget: runs, the fitted law (lines), minima",
        {"points": points[:_MOST_POINTS], "curves": curves, "lowest": lowest},
        [
            _layer("curves", {"type": "line", "opacity": 0.6}, x=x, y=y, color=color, detail={"field": "C"}),
            _layer("points", {"type": "circle", "size": 28}, x=x, y=y, color=color),
            _layer("lowest", {"type": "point", "color": "crimson", "size": 70}, x=x, y=y, shape=shape),
        ],
    )


def _frontier(found: Analysis) -> dict[str, Any]:
    """The best size by budget: the result of each method, and the line of the law with its interval."""
    runs, k = found.runs, found.runs.flops_per_param_token
    points = [
        {"C": p.flops, "N": p.params, "method": method} for method, got in found.points.items() for p in got if not p.problem
    ]
    laws = [law for law in found.fit.laws() if law.alpha > 0 and law.beta > 0]
    line = []
    for flops in np.geomspace(runs.flops.min(), runs.flops.max() * 10, 40):
        if found.fit.law.alpha <= 0 or found.fit.law.beta <= 0:
            break
        row = {"C": float(flops), "N": found.fit.law.optimum(float(flops), k).params, "method": "law"}
        if laws:
            sizes = [math.log(law.optimum(float(flops), k).params) for law in laws]
            row |= dict(zip(("low", "high"), map(float, np.exp(np.percentile(sizes, [2.5, 97.5])))))
        line.append(row)
    x, y = _axis("C", "training FLOPs"), _axis("N", "best parameters")
    color = {"field": "method", "type": "nominal", "title": None}
    band = {**_axis("low", "best parameters")}
    return _spec(
        "The best size for a budget, by every method; the law with its 95 % interval",
        {"points": points[:_MOST_POINTS], "line": line},
        [
            _layer("line", {"type": "area", "opacity": 0.2, "color": "gray"}, x=x, y=band, y2={"field": "high"}),
            _layer("line", {"type": "line"}, x=x, y=y, color=color),
            _layer("points", {"type": "point", "size": 36}, x=x, y=y, color=color),
        ],
    )


def _residuals(found: Analysis) -> dict[str, Any]:
    """The residual of each run from the law, by its FLOPs."""
    runs = found.runs
    logs = logs_and_shares(np.array([found.fit.law.logs]), np.log(runs.params), np.log(runs.tokens))[0][0]
    off = 100 * (runs.loss / np.exp(logs) - 1)
    every = -(-len(runs) // _MOST_POINTS)
    points = [{"C": runs.flops[i], "off": off[i], "ratio": runs.tokens[i] / runs.params[i]} for i in range(0, len(runs), every)]
    color = {
        "field": "ratio",
        "type": "quantitative",
        "scale": {"type": "log", "scheme": "viridis"},
        "title": "tokens per parameter",
        "legend": {"format": ".1~g"},
    }
    x, y = _axis("C", "training FLOPs"), _axis("off", "loss above the law, %", log=False)
    zero = {"data": {"values": [{"off": 0}]}, "mark": {"type": "rule", "color": "gray"}, "encoding": {"y": y}}
    return _spec(
        "What the law leaves: loss of each run against it",
        {"points": points},
        [zero, _layer("points", {"type": "circle"}, x=x, y=y, color=color)],
    )
