"""Selects which of several measured rows of one problem count, and by how much the best one is faster.

Times can be compared only if they were taken under the same conditions: in one place (a frozen table, the user's database),
with the same driver, torch and triton, and with the same source of the kernel. So rows are grouped by place and versions, and
one group decides:

    a group that was measured with this process's versions, if there is any; of several, the one measured last.

Within the group, each implementation counts with rows of its present source. If there are none, because it has been edited
since, it counts with rows of its latest measured source. Each config counts with its last measurement. Rows that were timed
alternately with their rivals come first (also among rows of one config); then faster rows come before slower ones.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tilewright.tune.record import Row

__all__ = ["Entry", "Stack", "Verdict", "ranked", "verdict"]


class Stack(NamedTuple):
    """The versions under which rows can be compared."""

    driver: str
    torch: str
    triton: str


class Entry(NamedTuple):
    """The parts of a measured row that matter for choosing."""

    op: str
    card: str
    problem: str
    invariant: bool
    impl: str
    config: str
    """Canonical JSON."""
    us: float
    us_spread: float
    verified: bool
    source: str
    stack: Stack
    date: str
    place: str
    """Where the row is: "database" or "frozen table"."""
    load: Callable[[], "Row"]
    """Returns the whole row."""


def ranked(entries: Iterable[Entry], stack: Stack | None = None, sources: Mapping[str, str] | None = None) -> list[Entry]:
    """The entries of one problem that count, best first; empty if there are none.

    Args:
        entries: all known entries of the problem.
        stack: the versions of this process; None if no versions are preferred.
        sources: implementation -> hash of its present source.
    """
    groups: dict[tuple[str, Stack], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.place, entry.stack), []).append(entry)
    if not groups:
        return []
    group = max(groups.values(), key=lambda g: (g[0].stack == stack, max(e.date for e in g)))
    sources = sources or {}
    newest: dict[str, tuple[bool, str, str]] = {}
    for e in group:
        newest[e.impl] = max(newest.get(e.impl, (False, "", "")), (sources.get(e.impl) == e.source, e.date, e.source))
    last: dict[tuple[str, str], Entry] = {}
    for e in sorted(group, key=lambda e: (e.verified, e.date)):
        if newest[e.impl][2] == e.source:
            last[e.impl, e.config] = e
    return sorted(last.values(), key=lambda e: (not e.verified, e.us, e.impl, e.config))


class Verdict(NamedTuple):
    """How far the best entry is ahead of a rival."""

    margin: float
    """How much longer the rival takes, as a fraction of the best time."""
    noise: float
    """The part of the margin that both spreads together can explain, as a fraction of the best time."""

    @property
    def clear(self) -> bool:
        """Whether the margin is larger than the noise."""
        return self.margin > self.noise

    def __str__(self) -> str:
        return f"by {self.margin:.1%}, noise {self.noise:.1%}" + ("" if self.clear else ": a tie")


def verdict(entries: Sequence[Entry]) -> tuple[Entry, Verdict] | None:
    """The best entry of another implementation than the first entry's, and how far the first is ahead; None without a rival."""
    rival = next((e for e in entries if e.impl != entries[0].impl), None)
    if rival is None:
        return None
    first = entries[0]
    return rival, Verdict(rival.us / first.us - 1, math.hypot(first.us_spread, rival.us_spread) / first.us)
