"""Sets of results: folders of benchmarks/results, each of one card, and what their files say of where they come from.

A set made by `tilewright bench all` is of one commit, one card and one set of versions, and every row has the hashes of its
kernels. Older sets do not say; their tables do.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewright.bench.provenance import SAME, changed, shared_by
from tilewright.bench.results import joined

__all__ = ["CHANGED", "LEGEND", "UNKNOWN", "ResultSet", "changed_mark", "day", "mark", "mark_of", "sets", "shown"]

UNKNOWN, CHANGED = "†", "‡"
LEGEND = {
    UNKNOWN: f"{UNKNOWN} The file names neither its commit nor its kernels: they are of that date and may have changed since.",
    CHANGED: f"{CHANGED} Kernels of this row have changed since it was measured.",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class ResultSet:
    """One folder.

    Raises:
        SystemExit: when it is read, for what is no set: an incomplete result, two cards, two commits, two sets of versions.
    """

    folder: Path

    @property
    def name(self) -> str:
        """ "h100"."""
        return self.folder.name

    @cached_property
    def results(self) -> dict[str, dict[str, Any]]:
        """Name of the file -> content, for files with rows."""
        try:
            found = joined(self.folder)
        except ValueError as error:
            raise SystemExit(f"{self.name}: {error}") from None
        _check_one(self.name, {name: content["environment"] for name, content in (found | self.programs).items()})
        return found

    @cached_property
    def programs(self) -> dict[str, dict[str, Any]]:
        """The same for comparisons of whole models."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.folder.glob("compare-*.json"))}

    def rows(self, name: str) -> list[Row]:
        """Of one file; [] without it."""
        return self.results.get(name, {}).get("rows", [])

    @property
    def days(self) -> list[str]:
        """On which days it was measured, in order."""
        return sorted({day(content) for content in self.results.values()})

    @property
    def known(self) -> bool:
        """Whether it says which code it is of."""
        return all(content["environment"].get("commit") for content in self.results.values())

    def machine(self) -> str:
        """Card, versions, commit and dates, in a sentence or two."""
        facts = next(iter(self.results.values()))["environment"]
        versions = f"driver {facts['driver']}, torch {facts['torch']}, triton {facts['triton']}, ptxas {facts['ptxas']}"
        dates = self.days[0] if len(self.days) == 1 else f"{self.days[0]} to {self.days[-1]}"
        changes = ", with changes that are not committed" if facts.get("dirty") else ""
        code = f"commit {facts['commit'][:12]}{changes}" if self.known else "commits not recorded"
        return f"One {facts['device']}, {versions}. Measured {dates}, {code}."

    def legend(self, text: str) -> list[str]:
        """What the marks in a text mean."""
        return [words for sign, words in LEGEND.items() if sign in text]


def _check_one(name: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise SystemExit unless all files are of one card, and of one code where one of them names its code."""
    for what in SAME if any(facts.get("commit") for facts in files.values()) else ("device",):
        values: dict[Any, str] = {}
        for file, facts in files.items():
            if what in shared_by(file):
                values.setdefault(facts.get(what), file)
        if len(values) > 1:
            told = " and ".join(f"{value} ({file}.json)" for value, file in values.items())
            raise SystemExit(f"{name} is of more than one {what}: {told}; one folder is one set: move what is of another one")


def day(content: Mapping[str, Any]) -> str:
    """On which day a file was measured."""
    return content["environment"]["date"][:10]


def mark(row: Row) -> str:
    """What is to be said of a row's kernels: nothing, that they are not known, or that they have changed."""
    if "kernels" not in row:
        return UNKNOWN
    return CHANGED if changed(row["kernels"]) else ""


def mark_of(rows: Iterable[Row]) -> str:
    """The same for several rows at once: the worst."""
    return max((mark(row) for row in rows), default="")


def changed_mark(rows: Iterable[Row]) -> str:
    """The mark beside a figure: that a file does not name its kernels is said once, beside its date."""
    return CHANGED if mark_of(rows) == CHANGED else ""


def sets(results: Path) -> list[ResultSet]:
    """Every folder that tables are made of: those with results of the engine or of the operators that bytes limit."""
    folders = {path.parent for pattern in ("*/ops.json", "*/engine-*.json") for path in results.glob(pattern)}
    return [ResultSet(folder) for folder in sorted(folders)]


def shown(found: list[ResultSet]) -> ResultSet:
    """The one for docs/results.md: of those that name their code the newest, else the newest."""
    return max(found, key=lambda each: (each.known, each.days[-1]))
