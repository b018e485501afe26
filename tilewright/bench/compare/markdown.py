"""A comparison as a short Markdown text for a pull request: verdict, table, fairness card."""

from collections.abc import Sequence

from tilewright.bench.compare.claims import WORTH, table
from tilewright.bench.compare.figures import between, claim_line, headline, ratio, seconds, subline, sums
from tilewright.bench.compare.results import Comparison

__all__ = ["markdown"]

_MARKS = {"pass": "✅ pass", "fail": "❌ fail", "undecided": "❔ undecided"}


def markdown(comparison: Comparison) -> str:
    """The text; what a model or an engine named itself cannot break out of its cell or become markup."""
    c = comparison
    sides = [f"{name} {seconds(side.whole.value)}" for name, side in (("ours", c.ours), ("baseline", c.baseline))]
    segments = []
    for s in c.segments:
        times = seconds(s.ours.value), seconds(s.baseline.value)
        segments.append([s.name, *times, ratio(s.ratio.value), between(s.ratio), _MARKS[s.verdict]])
        segments += [[f"... {layer}", "", "", "", "", "not shown by itself"] for layer in s.layers if len(s.layers) > 1]
    segments += [[name, seconds(a), seconds(b), "", "", ""] for name, a, b in sums(c)]
    card = [[p.name, "**open**" if p.open else "closed", p.ours, p.baseline, p.why] for p in c.card]
    said = table(c)
    claims = ["## What the engines say of themselves", "", f"**The engine's own claim, not measured here.** {WORTH}", ""]
    if said is not None and said.rows:
        claims += [*_table(said.columns, said.rows), ""]
    if said is not None and said.notes:
        claims += [*(f"- {_plain(note)}" for note in said.notes), ""]
    return "\n".join(
        [
            f"# {_plain(c.model)}: {_plain(headline(c))}",
            "",
            _plain(subline(c)),
            "",
            *(f"- {_plain(claim_line(claim))}" for claim in c.claims),
            *([""] if c.claims else []),
            f"Whole model {ratio(c.ratio.value)} ({between(c.ratio)}): {', '.join(sides)}.",
            "",
            *_table(["segment", "ours", "baseline", "speed-up", "interval", f"{c.claim:g}×"], segments),
            "",
            "## Fairness card",
            "",
            *_table(["point", "", "ours", "baseline", "why"], card, marked=1),
            "",
            *(claims if said is not None else []),
        ]
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], marked: int | None = None) -> list[str]:
    """Lines of a table; cells of the column `marked` are markup of our own."""
    lines = [list(header), ["---"] * len(header)]
    lines += [[cell if i == marked else _plain(cell) for i, cell in enumerate(row)] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _plain(text: str) -> str:
    """`text` without a meaning in Markdown or HTML, on one line."""
    escaped = "".join(f"\\{char}" if char in "\\`*_[]#|~" else char for char in " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
