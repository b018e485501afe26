"""Which of several measured rows of one problem count, and who won by how much.

Times compare only if they were taken by the same rules: in one place (a frozen table, the user's database), with one driver,
torch and triton, with one source of the kernel. So rows fall into groups by place and those versions, and one group decides:

    one that was measured with this process's versions, if there is any; of several, the one measured last.

In it, each implementation counts with rows of its present source, or of its latest one where it has been edited since, and
each config with its last measurement. Rows timed in turns with their rivals go before others (of one config too), then the
faster goes before the slower.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tilewright.tune.record import Row

__all__ = ["Entry", "Stack", "Verdict", "ranked", "verdict"]


class Stack(NamedTuple):
    """The versions by which rows compare."""

    driver: str
    torch: str
    triton: str


class Entry(NamedTuple):
    """What choosing looks at of a measured row."""

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
    """Where it was found: "database" or "frozen table"."""
    load: Callable[[], "Row"]
    """Gives the whole row."""


def ranked(entries: Iterable[Entry], stack: Stack | None = None, sources: Mapping[str, str] | None = None) -> list[Entry]:
    """The entries of one problem that count, best first; empty when there are none.

    Args:
        entries: all that are known of the problem.
        stack: the versions in force, None when no stack goes before another.
        sources: implementation -> hash of its source as it is now.
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
    """How far ahead the first of two is."""

    margin: float
    """By what fraction the second takes longer than the first."""
    noise: float
    """What the two spreads together explain of it, as such a fraction."""

    @property
    def clear(self) -> bool:
        """Whether the margin is more than noise."""
        return self.margin > self.noise

    def __str__(self) -> str:
        return f"by {self.margin:.1%}, noise {self.noise:.1%}" + ("" if self.clear else ": a tie")


def verdict(entries: Sequence[Entry]) -> tuple[Entry, Verdict] | None:
    """The best entry of another implementation than the first one's, and how far that is ahead; None without a rival."""
    rival = next((e for e in entries if e.impl != entries[0].impl), None)
    if rival is None:
        return None
    first = entries[0]
    return rival, Verdict(rival.us / first.us - 1, math.hypot(first.us_spread, rival.us_spread) / first.us)
