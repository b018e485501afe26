"""The report of a comparison as one self-contained HTML file: no network, no other file, any recent browser.

The page is a template (page/report.html, filled by jinja2 with escaping). Charts are Vega-Lite specifications, drawn by the
Vega libraries bundled in the package vl-convert-python; everything is inlined. All names given by a model or an engine are
treated as text: the template escapes them, the data is JSON without `<`, and the page's security policy allows only the two
scripts whose hashes it lists, and no requests.

The headline is withheld, also in the title, while the fairness card has an open point.
"""

import base64
import hashlib
import importlib
import json
from collections import Counter
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from tilewright.bench.compare.charts import charts
from tilewright.bench.compare.claims import WORTH, table
from tilewright.bench.compare.figures import amount, between, headline, ratio, seconds, shown_alone, subline, sums
from tilewright.bench.compare.markdown import markdown
from tilewright.bench.compare.results import Comparison
from tilewright.bench.compare.timeline import timeline

__all__ = ["html", "write_html", "write_json", "write_markdown", "write_trace"]

_PAGE = Path(__file__).with_name("page")
_MARKS = {"pass": "✓", "fail": "✕", "undecided": "?", "withheld": "!"}
_SHAPES = {
    "circle": '<circle r="5"/>',
    "square": '<rect x="-4.5" y="-4.5" width="9" height="9"/>',
    "diamond": '<path d="M0-6L5 0L0 6L-5 0z"/>',
    "triangle-down": '<path d="M-5.5-4.5h11L0 5.5z"/>',
    "line": '<rect x="-7" y="-1" width="14" height="2"/>',
    "dashes": '<rect x="-7" y="-1" width="6" height="2"/><rect x="1" y="-1" width="6" height="2"/>',
}
"""Marks of the legends, filled with the colour of their meaning."""
_LEADING = ("layer", "op", "implementation", "config", "source")
"""Columns of the tuning table that come first, where there are such."""


def write_html(comparison: Comparison, path: Path) -> None:
    """Write the report. Raises ImportError where vl-convert-python is not installed, saying how to install it."""
    path.write_text(html(comparison), encoding="utf-8")


def write_json(comparison: Comparison, path: Path) -> None:
    """Write what `Comparison.from_json` reads."""
    path.write_text(json.dumps(comparison.to_json(), allow_nan=False, indent=1) + "\n", encoding="utf-8")


def write_markdown(comparison: Comparison, path: Path) -> None:
    """Write verdict, table and card."""
    path.write_text(markdown(comparison), encoding="utf-8")


def write_trace(comparison: Comparison, path: Path) -> None:
    """Write a timeline for chrome://tracing or ui.perfetto.dev."""
    path.write_text(json.dumps(timeline(comparison), allow_nan=False) + "\n", encoding="utf-8")


def html(comparison: Comparison) -> str:
    """The report's text."""
    c = comparison
    drawn = charts(c)
    js, library = (_PAGE / "report.js").read_text(encoding="utf-8"), _library()
    open_points = [point for point in c.card if point.open]
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string((_PAGE / "report.html").read_text(encoding="utf-8")).render(
        c=c,
        policy=_policy(library, js),
        css=(_PAGE / "report.css").read_text(encoding="utf-8"),
        js=js,
        library=library,
        data=_inert(c.to_json()),
        specs=_inert({chart.key: chart.spec for chart in drawn}),
        charts={chart.key: chart for chart in drawn},
        marks=_MARKS,
        shapes=_SHAPES,
        state=c.verdict if c.card and not open_points else "withheld",
        headline=headline(c),
        subline=subline(c),
        open_points=open_points,
        tiles=_tiles(c),
        tuning=_tuning(c.tuning),
        said=table(c),
        worth=WORTH,
        facts=_facts(c),
        environment=[[key, _cut(_text(value))] for key, value in c.environment.items()],
        version=version("tilewright"),
        took=seconds(c.seconds),
        **_fusions(c.fusions, [str(row["layer"]) for row in c.tuning if "layer" in row]),
    )


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    try:
        vl_convert = importlib.import_module("vl_convert")
    except ImportError as error:
        raise ImportError(f"the report's charts need vl-convert-python: pip install 'tilewright[compare]' ({error})") from error
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")


def _policy(*scripts: str) -> str:
    """A content security policy under which exactly these scripts run and nothing is fetched."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # Vega writes style attributes.
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


def _inert(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _tiles(c: Comparison) -> list[tuple[str, str, str]]:
    counts = Counter(segment.verdict for segment in c.segments)
    others = [f"{counts[verdict]} {verdict}" for verdict in ("fail", "undecided") if counts[verdict]]
    joined = shown_alone(c)[1]
    others += [f"{joined} layers not shown by themselves"] if joined else []
    layers = sums(c)[0]
    whole = [
        (f"Whole model, {claim.engine}", ratio(claim.ratio.value), f"{claim.words}; {between(claim.ratio)}")
        for claim in c.claims
    ]
    return [
        *(whole or [("Whole model", ratio(c.ratio.value), between(c.ratio))]),
        (f"Ours: {c.ours.engine}", seconds(c.ours.whole.value), f"the layers add up to {seconds(layers[1])}"),
        (f"Baseline: {c.baseline.engine}", seconds(c.baseline.whole.value), f"the layers add up to {seconds(layers[2])}"),
        (f"Segments that pass at {c.claim:g}×", f"{counts['pass']} of {len(c.segments)}", " · ".join(others)),
    ]


def _fusions(decisions: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    """The fusion map: launches with what went into them, in `order` as far as it goes; what was refused; all as a table."""
    anchors = {str(decision.get("anchor", "")) for decision in decisions}
    launches: dict[str, dict[str, Any]] = {name: {"chips": [], "bytes": 0.0} for name in order if name in anchors}
    for decision in decisions:
        launch = launches.setdefault(str(decision.get("anchor", "")), {"chips": [], "bytes": 0.0})
        taken = bool(decision.get("taken"))
        launch["bytes"] += _bytes(decision) if taken else 0.0
        if decision.get("kind") != "anchor":
            node, kind = str(decision.get("node", "")), str(decision.get("kind", ""))
            text = kind if taken else f"{kind}: {node}"
            launch["chips"].append({"text": text, "taken": taken, "reason": f"{node}: {decision.get('reason', '')}"})
    taken, refused = ([d for d in decisions if bool(d.get("taken")) == which] for which in (True, False))
    joined = sum(d.get("kind") != "anchor" for d in taken)
    saved = sum(map(_bytes, taken))
    return {
        "launches": [
            {"anchor": anchor, "chips": launch["chips"], "saved": f"−{amount(launch['bytes'], 'B')}" if launch["bytes"] else ""}
            for anchor, launch in launches.items()
        ],
        "fusion_summary": f"{joined} nodes went into {len(launches)} launches, which saves {amount(saved, 'B')} of memory "
        f"traffic a call; {len(refused)} {'was' if len(refused) == 1 else 'were'} refused. Point at a chip for the reason.",
        "refused": [
            [str(d.get("node", "")), str(d.get("anchor", "")), str(d.get("kind", "")), _saved(d), str(d.get("reason", ""))]
            for d in refused
        ],
        "decisions": [
            [str(d.get(key, "")) for key in ("anchor", "kind", "node")]
            + ["yes" if d.get("taken") else "no", _saved(d) if d.get("taken") else "", str(d.get("reason", ""))]
            for d in decisions
        ],
    }


def _bytes(decision: dict[str, Any]) -> float:
    value = decision.get("bytes_saved", 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _saved(decision: dict[str, Any]) -> str:
    return amount(_bytes(decision), "B") if _bytes(decision) else ""


def _tuning(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tables of the provenance, one for each kind of row: what was launched, what was measured to choose it."""
    kinds: dict[frozenset[str], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(frozenset(row), []).append(row)
    tables = []
    for alike in kinds.values():
        columns = sorted(alike[0], key=lambda name: _LEADING.index(name) if name in _LEADING else len(_LEADING))
        tables.append({"columns": columns, "rows": [[_cut(_text(row[column])) for column in columns] for row in alike]})
    return tables


def _facts(c: Comparison) -> list[list[str]]:
    shown: dict[str, list[str]] = {}
    for i, side in enumerate((c.ours, c.baseline)):
        for key, value in {**side.facts, "output error": f"{side.output_error:.2e}", "typical of": side.precision}.items():
            shown.setdefault(key, ["", ""])[i] = _cut(_text(value))
    return [[key, *values] for key, values in shown.items()]


def _cut(text: str, most: int = 400) -> str:
    """The beginning of a long text; all of it is in the data."""
    return text if len(text) <= most else f"{text[:most]} ..."


def _text(value: Any) -> str:
    """A value of a JSON object on one line."""
    if isinstance(value, dict):
        nested = any(isinstance(item, dict | list | tuple) for item in value.values())
        return ("; " if nested else ", ").join(f"{key}{':' if nested else ''} {_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
