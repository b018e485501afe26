"""The report of a run: a table for the terminal, and one self-contained HTML page."""

import json
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

__all__ = ["table", "write_html"]

_MEANINGS = {
    "read": "Documents as they stood in the files.",
    "extract": "The main text of web pages, without menus, comments and advertisements.",
    "language": "The language of the text, and how sure that is.",
    "exact-documents": "Texts that came before, apart from white space and case.",
    "exact-lines": "Lines that came before, in any document.",
    "exact-substrings": "Long runs of words that came before, in any document.",
    "near-duplicates": "Texts that are nearly equal to an earlier one.",
    "gopher-quality": "Rules of Gopher (arXiv 2112.11446) about words and symbols.",
    "gopher-repetition": "Rules of Gopher (arXiv 2112.11446) about repetition.",
    "c4": "Rules of C4 (JMLR 21(140)): lines without an end of sentence go.",
    "fineweb": "Rules of FineWeb (arXiv 2406.17557) about lines.",
    "quality": "A classifier that was trained on good and bad texts.",
    "pii": "E-mail addresses, IP addresses and telephone numbers are masked.",
    "decontaminate": "Documents that hold texts of evaluation sets.",
}


def table(report: dict[str, Any]) -> str:
    """The number of documents after each step, as text: a line per step, and below it the most frequent reasons for removal."""
    rows = [f"{'step':24}{'documents':>12}{'MB':>10}{'removed':>10}{'MB/s a core':>13}"]
    for step in report["steps"]:
        removed = step["documents_in"] - step["documents_out"]
        speed = step["bytes_in"] / 1e6 / step["seconds"] if step["seconds"] else 0.0
        rows.append(f"{step['name']:24}{step['documents_out']:12,}{step['bytes_out'] / 1e6:10.2f}{removed:10,}{speed:13.1f}")
        rows += [f"    {reason:42}{count:>10,}" for reason, count in list(step["reasons"].items())[:8]]
        rows += [f"    {reason:42}{count:>10,}" for reason, count in step.get("damage", {}).items()]
    return "\n".join(rows)


def write_html(report: dict[str, Any], path: Path) -> None:
    """Write the page. All its text is escaped, and it loads nothing from other places."""
    template = (Path(__file__).parent / "page" / "report.html").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(template)
    steps = report["steps"]
    path.write_text(
        page.render(
            title="What became of the documents", report=report, first=steps[0], last=steps[-1], meanings=_MEANINGS,
            size=_size, bars=_bars, lengths=_lengths, recipe=json.dumps(report["recipe"], indent=1, ensure_ascii=False),
        ),
        encoding="utf-8",
    )  # fmt: skip


def _size(count: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"


def _lengths(counts: dict[str, int]) -> dict[str, int]:
    """Convert counts by the bit length of a document's size to counts by text labels, shortest first, without gaps."""
    present = sorted(map(int, counts))
    return {f"under {_size(2**bits)}": counts.get(str(bits), 0) for bits in range(present[0], present[-1] + 1)}


def _bars(counts: dict[str, int], most: int) -> Markup:
    """A bar chart as SVG: one row for each name, with a length proportional to its count."""
    rows = list(counts.items())[:most]
    top = max((count for _, count in rows), default=1) or 1
    parts = [
        Markup('<text x="118" y="{}" text-anchor="end">{}</text><rect x="126" y="{}" width="{:.1f}" height="13"/>').format(
            20 * i + 15, name, 20 * i + 4, 420 * count / top
        )
        + Markup('<text x="{:.1f}" y="{}">{:,}</text>').format(132 + 420 * count / top, 20 * i + 15, count)
        for i, (name, count) in enumerate(rows)
    ]
    return Markup('<svg viewBox="0 0 640 {}" width="640" style="max-width: 100%">{}</svg>').format(
        20 * len(rows) + 4, Markup("").join(parts)
    )
