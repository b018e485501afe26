"""The report of a load test as one self-contained HTML file: no network, no script, any recent browser.

The charts are Vega-Lite specifications that vl-convert-python draws into the page as SVG, in the page's own colours.
"""

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from tilewright import __version__
from tilewright.bench.load.run import Outcome
from tilewright.bench.load.sample import OK, Sample
from tilewright.bench.load.slo import METRICS
from tilewright.bench.load.summary import Summary
from tilewright.extras import needed

__all__ = ["html", "write_html", "write_json"]

_PAGE = Path(__file__).parent / "page" / "report.html"
_STYLE = Path(__file__).parents[1] / "compare" / "page" / "report.css"
_COLOURS = ["var(--ours)", "var(--pass)", "var(--undecided)", "var(--fail)", "var(--baseline)"]
_CONFIG: dict[str, Any] = {
    "background": None,
    "view": {"stroke": None},
    "font": "system-ui",
    "range": {"category": _COLOURS},
    "axis": {
        "labelColor": "var(--soft)",
        "titleColor": "var(--soft)",
        "titleFontWeight": "normal",
        "gridColor": "var(--grid)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
    },
    "legend": {"labelColor": "var(--soft)", "titleColor": "var(--soft)", "orient": "top", "title": None},
    "text": {"color": "var(--soft)"},
}
MOST_POINTS = 200
"""Number of points with which the line of a distribution is drawn."""


def write_json(outcome: Outcome, path: Path) -> None:
    """Write `Outcome.to_json` to a file."""
    path.write_text(json.dumps(outcome.to_json(), allow_nan=False, indent=1) + "\n", encoding="utf-8")


def write_html(outcome: Outcome, path: Path) -> None:
    """Write the report. Raises MissingExtra if vl-convert-python is not installed; the message says how to install it."""
    path.write_text(html(outcome), encoding="utf-8")


def html(outcome: Outcome) -> str:
    """The report's text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    rows = [_row(summary) for summary in outcome.summaries]
    page = environment.from_string(_PAGE.read_text(encoding="utf-8"))
    config = {name: value for name, value in outcome.to_json()["config"].items() if value is not None}
    return page.render(
        o=outcome,
        css=_STYLE.read_text(encoding="utf-8"),
        version=__version__,
        headline=_headline(outcome),
        tiles=_tiles(outcome),
        charts=_charts(outcome),
        columns=list(rows[0]) if rows else [],
        rows=rows,
        latencies=[_latency_rows(summary) for summary in outcome.summaries],
        config=config,
        data=json.dumps(outcome.to_json(), indent=1),
    )


def ms(seconds: float | None) -> str:
    """Milliseconds as text with about three digits."""
    if seconds is None:
        return "–"
    value = seconds * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _headline(outcome: Outcome) -> str:
    slo = outcome.config.objective
    if slo.bounds:
        best = max(outcome.summaries, key=lambda one: one.goodput)
        return f"at most {best.goodput:.2f} good requests per second, at {best.label}, where good means {slo}"
    best = max(outcome.summaries, key=lambda one: one.token_rate or one.request_rate)
    if best.token_rate:
        return f"at most {best.token_rate:,.0f} output tokens per second, at {best.label}"
    return f"at most {best.request_rate:,.2f} answers per second, at {best.label}"


def _tiles(outcome: Outcome) -> list[tuple[str, str, str]]:
    found = outcome.summaries
    asked = sum(one.requests for one in found)
    lost = sum(one.rejected for one in found), sum(one.failed for one in found)
    lightest = min(found, key=lambda one: one.offered_rate)
    first = lightest.latencies.get("ttft") or lightest.latencies.get("e2e") or {}
    name = "Time to first token" if "ttft" in lightest.latencies else "Time to the answer"
    lag = max(one.lag_p99_s for one in found)
    return [
        ("Requests in the measured windows", f"{asked:,}", f"{lost[0]:,} rejected, {lost[1]:,} failed"),
        (f"{name}, lightest load", f"{ms(first.get('p50'))} ms", f"p99 {ms(first.get('p99'))} ms, {lightest.label}"),
        ("Most answers a second", f"{max(one.request_rate for one in found):.2f}", f"over {len(found)} stages"),
        ("This client's own lateness, p99", f"{ms(lag)} ms", "from intended to real sending; part of every latency"),
    ]


def _row(one: Summary) -> dict[str, str]:
    row = {
        "load": one.label,
        "asked /s": f"{one.offered_rate:.2f}",
        "answered /s": f"{one.request_rate:.2f}",
        "rows /s": "–" if one.row_rate is None else f"{one.row_rate:,.0f}",
        "tokens /s": f"{one.token_rate:,.0f}",
        "tokens /s a user": f"{one.user_token_rate:.1f}" if one.user_token_rate else "–",
        "good /s": f"{one.goodput:.2f}",
        "good": f"{one.good_share:.1%}",
        "rejected": str(one.rejected),
        "failed": str(one.failed),
        "cached": f"{one.cached_share:.0%}",
        "windows differ by": "–" if one.spread is None else f"{one.spread:.0%}",
    }
    return row


def _latency_rows(one: Summary) -> tuple[str, list[list[str]]]:
    names = ("p50", "p90", "p99", "mean", "max")
    return one.label, [[name.upper(), *(ms(found[p]) for p in names)] for name, found in one.latencies.items()]


# Charts --------------------------------------------------------------------------------------------------------------


def _charts(outcome: Outcome) -> list[tuple[str, str, str]]:
    """(title, what it shows, SVG)."""
    found = []
    curve = [
        {"user": one.user_token_rate, "rate": one.token_rate, "load": one.label}
        for one in outcome.summaries
        if one.user_token_rate
    ]
    if curve:
        about = "Higher is more throughput, further right is faster for each user. The best service is in the upper right."
        found.append(("Throughput against speed for a user", about, _curve(curve)))
    several = len(outcome.summaries) > 1
    if several:
        points = [
            {"load": number, "label": one.label, "percentile": p, "ms": values[p] * 1000, "metric": name.upper()}
            for number, one in enumerate(outcome.summaries)
            for name, values in one.latencies.items()
            for p in ("p50", "p90", "p99")
        ]
        order = [one.label for one in outcome.summaries]
        found.append(("Latency by load", "Milliseconds, on a logarithmic scale.", _by_load(points, order)))
    for name, words in (("ttft", "Time to first token"), ("e2e", "Time to the whole answer")):
        points = [point for one, part in zip(outcome.summaries, outcome.samples) for point in _distribution(one, part, name)]
        if points:
            found.append((words, "Share of the answers that came within a time.", _shares(points)))
    return [(title, about, _svg(spec)) for title, about, spec in found]


def _svg(spec: dict[str, Any]) -> str:
    needed("vl_convert", "load")
    full = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "config": _CONFIG, **spec}
    return import_module("vl_convert").vegalite_to_svg(full)


def _curve(points: list[dict[str, Any]]) -> dict[str, Any]:
    x = {"field": "user", "type": "quantitative", "title": "tokens/s of the median user", "scale": {"zero": True}}
    y = {"field": "rate", "type": "quantitative", "title": "tokens/s of the service"}
    return {
        "width": 900,
        "height": 340,
        "data": {"values": points},
        "encoding": {"x": x, "y": y},
        "layer": [
            {"mark": {"type": "line", "color": "var(--ours)"}, "encoding": {"order": {"field": "rate"}}},
            {"mark": {"type": "circle", "size": 70, "color": "var(--ours)", "opacity": 1}},
            {"mark": {"type": "text", "dy": -12, "align": "center"}, "encoding": {"text": {"field": "load"}}},
        ],
    }


def _by_load(points: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    x = {"field": "label", "type": "ordinal", "sort": order, "title": None, "axis": {"labelAngle": 0, "labelLimit": 90}}
    y = {"field": "ms", "type": "quantitative", "scale": {"type": "log"}, "title": "ms"}
    colour = {"field": "percentile", "type": "nominal"}
    return {
        "data": {"values": points},
        "facet": {
            "field": "metric",
            "title": None,
            "sort": [name.upper() for name in METRICS],
            "header": {"labelColor": "var(--soft)"},
        },
        "columns": 2,
        "resolve": {"scale": {"y": "independent"}},
        "spec": {
            "width": 410,
            "height": 210,
            "mark": {"type": "line", "point": True},
            "encoding": {"x": x, "y": y, "color": colour},
        },
    }


def _shares(points: list[dict[str, Any]]) -> dict[str, Any]:
    x = {"field": "ms", "type": "quantitative", "title": "ms", "scale": {"type": "symlog", "constant": 10}}
    y = {"field": "share", "type": "quantitative", "title": None, "axis": {"format": "%"}}
    colour = {"field": "load", "type": "nominal", "sort": None}
    return {
        "width": 900,
        "height": 240,
        "data": {"values": points},
        "mark": {"type": "line", "interpolate": "step-after"},
        "encoding": {"x": x, "y": y, "color": colour},
    }


def _distribution(one: Summary, samples: list[Sample], metric: str) -> list[dict[str, Any]]:
    values = sorted(value for s in samples if s.status == OK and (value := getattr(s, metric)) is not None)
    if not values:
        return []
    shares = np.linspace(0, 1, min(MOST_POINTS, len(values)))
    return [
        {"ms": values[math.floor(share * (len(values) - 1))] * 1000, "share": float(share), "load": one.label}
        for share in shares
    ]
