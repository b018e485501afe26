"""Finds the measured row that decides a choice in a running program: of the same problem, or else of a similar one.

It never searches for configs. Rows come from two places: the frozen table for this card that ships with the package, and the
user's own database. `ranking` defines which rows count: rows with this process's versions come before others, and of the two
places the one that was measured last. A row counts only if its implementation accepts the problem in the active scope, and if
its config is in today's config space; other rows are skipped. Rows that are skipped because of their config are counted.

A similar problem has the same op and the same strings, bools and dtypes. The logarithms of its integers differ only a little
(LIMIT), and each integer is a multiple of 8 in both problems or in neither, because rows of 4095 numbers do not have the
alignment that TMA or a library needs.

Nothing is read before the first choice on a CUDA device. A process that has called `use_table` reads only that table, so ranks
with the same table (by hash) make the same choices. If the database cannot be read, a warning is logged once.
"""

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, Protocol

from tilewright.hw.device import Device, card_slug
from tilewright.tune.database import Database, DatabaseError, database_path
from tilewright.tune.frozen import TABLES, FrozenTable
from tilewright.tune.ranking import Entry, Stack, ranked
from tilewright.tune.record import Row, problem_json, versions
from tilewright.tune.source import source_hash
from tilewright.tune.space import Config, Space

__all__ = [
    "LIMIT",
    "Candidate",
    "Found",
    "NoRecord",
    "count_default",
    "counters",
    "find",
    "measured",
    "missing",
    "refresh",
    "use_table",
]

LIMIT = 0.6
"""The highest distance of a similar problem: the Euclidean distance between the base-2 logarithms of the integers. If one
integer is 1.5 times as large, the distance is 0.58. Twice as many rows have distance 1, and need other configs."""

_LOG = logging.getLogger("tilewright.tune")


class NoRecord(ValueError):
    """Raised in the strict scope for a problem that was not measured on this card."""


class Candidate(Protocol):
    """The part of `tilewright.op.Impl` that is needed here."""

    @property
    def name(self) -> str: ...
    @property
    def launch(self) -> Callable[..., Any]: ...
    @property
    def space(self) -> Space: ...


class Found(NamedTuple):
    """A measured row that decides a choice."""

    impl: str
    config: Config
    source: str
    """"exact" or "bucket"."""
    stale: bool
    """Measured with another driver, torch or triton, or before the kernel's last change."""
    entry: Entry

    @property
    def row(self) -> Row:
        """The whole row."""
        return self.entry.load()


def find(op_name: str, problem: Any, device: Device, invariant: bool, impls: Sequence[Candidate]) -> Found | None:
    """The row that decides a problem on a card, or None. The kind of result is counted.

    Args:
        op_name: as in `Op.name`.
        problem: the result of `Op.problem`.
        device: the card.
        invariant: use rows of the invariant scope, not the others.
        impls: the implementations that accept the problem in the active scope, after refusals and preferences.
    """
    text = problem_json(problem)
    by_name = {impl.name: impl for impl in impls}
    with _LOCK:
        for source, entries in _candidates(op_name, text, device, invariant):
            if not entries:
                continue
            stack, sources = _stack(), {impl.name: source_hash(impl.launch.__module__) for impl in impls}
            for entry in ranked(entries, stack, sources):
                impl = by_name.get(entry.impl)
                if impl is None:
                    continue
                config = json.loads(entry.config)
                if not _in_space(impl.space, device, problem, config):
                    _COUNTS["ignored"] += 1
                    continue
                stale = entry.stack != stack or sources[entry.impl] != entry.source
                _COUNTS.update([source, "stale"] if stale else [source])
                return Found(entry.impl, config, source, stale, entry)
    return None


def measured(op_name: str, problem: Any, device: Device, invariant: bool) -> dict[str, Entry]:
    """Implementation -> its best row for exactly this problem on this card, in any scope; used by `explain`."""
    with _LOCK:
        entries = _RECORDS.of(op_name, problem_json(problem), device, invariant)
    best: dict[str, Entry] = {}
    for entry in ranked(entries, _stack()):
        best.setdefault(entry.impl, entry)
    return best


def missing(op_name: str, problem: Any, device: Device) -> NoRecord:
    """The error in the strict scope for a problem that has no measured row itself."""
    return NoRecord(
        f"{op_name}: the strict scope needs a measurement of {problem_json(problem)} on {device.name}, and there is none: "
        f"run `tilewright tune {op_name}` with these dimensions on that card, or leave the strict scope"
    )


def counters() -> dict[str, int]:
    """The number of choices in this process since its start, by source.

    exact, bucket, default: together these are all choices. stale: how many of the first two were measured with other versions.
    ignored: rows that were skipped because their config is outside today's space.
    """
    return {name: _COUNTS[name] for name in ("exact", "bucket", "default", "stale", "ignored")}


def count_default() -> None:
    """Count a choice without a row."""
    with _LOCK:
        _COUNTS["default"] += 1


def use_table(path: Path | str, device: Device) -> str:
    """From now on read only this frozen table. Returns the SHA-256 of its bytes, to compare between ranks; it is logged, too.

    Raises:
        ValueError: it is not a table, or it is for another card.
        RuntimeError: the process has already chosen from other rows; call this before the first op runs.
        OSError: it cannot be read.
    """
    table = FrozenTable(path, check=True)
    if not _is_for(table, device):
        names = sorted(p.stem for p in TABLES.glob("*.json"))
        near = get_close_matches(card_slug(device.name), names, n=3, cutoff=0.3) or names
        raise ValueError(
            f"{path} is the table of {table.card} with {table.sms} SMs; wanted one for {device.name} with {device.sms} SMs. "
            f"Shipped tables: {', '.join(near) or 'none'}; `tilewright tune freeze` on that card writes one"
        )
    with _LOCK:
        if _RECORDS.only is not None and _RECORDS.only.sha256 == table.sha256:
            return table.sha256
        if any(_COUNTS.values()):
            raise RuntimeError(
                f"use_table({str(path)!r}): {sum(_COUNTS.values())} choices were made already; call it before the first op"
            )
        _RECORDS.only = table
    _LOG.info("tuning table %s of %s: sha256 %s", path, table.card, table.sha256)
    return table.sha256


def refresh() -> None:
    """Read the database again, because rows were added to it. `Op.forget` clears the choices that ops have made."""
    with _LOCK:
        _RECORDS.reopen()


# ---- where rows come from


class _Records:
    """The places that contain rows, opened when they are first needed."""

    def __init__(self) -> None:
        self.only: FrozenTable | None = None
        """The only place after `use_table`; None before."""
        self._tables: dict[Device, FrozenTable | None] = {}
        self._database: Database | None = None
        self._opened_by: int | None = None
        self.near: dict[Any, dict[Any, list[tuple[tuple[float, ...], str]]]] = {}

    def reopen(self) -> None:
        """Look for the database again, which may not have existed before."""
        self._opened_by = None
        self.near.clear()

    def of(self, op: str, problem: str, device: Device, invariant: bool) -> list[Entry]:
        """All rows of a problem on a card."""
        table = self._table(device)
        found = table.of(op, problem, invariant) if table else []
        where = {"op": op, "problem": problem, "sms": device.sms, "invariant": invariant}
        rows = self._read(lambda database: database.entries(**where))
        return found + [row for row in rows if card_slug(row.card) == card_slug(device.name)]

    def problems(self, op: str, device: Device, invariant: bool) -> list[str]:
        """All problems that may have rows on a card."""
        table = self._table(device)
        found = table.problems(op, invariant) if table else []
        return sorted({*found, *self._read(lambda database: database.problems(op, device.sms, invariant))})

    def _table(self, device: Device) -> FrozenTable | None:
        if self.only is not None:
            return self.only
        if device not in self._tables:
            path = TABLES / f"{card_slug(device.name)}.json"
            table = FrozenTable(path) if path.is_file() else None
            self._tables[device] = table if table and _is_for(table, device) else None
        return self._tables[device]

    def _read(self, query: Callable[[Database], list[Any]]) -> list[Any]:
        """The result of a query to the database; empty if there is no database, or if `use_table` excludes it."""
        if self.only is not None:
            return []
        try:
            if self._opened_by != os.getpid():  # a connection does not survive a fork
                self._opened_by = os.getpid()
                self._database = Database(path, read_only=True) if (path := database_path()).exists() else None
            return query(self._database) if self._database else []
        except DatabaseError as error:
            _LOG.warning("%s; choices are made without it", error)
            self._database = None
            return []


_LOCK = RLock()
_RECORDS = _Records()
_COUNTS: Counter[str] = Counter()


def _is_for(table: FrozenTable, device: Device) -> bool:
    # The same chip is sold with different numbers of SMs, and the size of a grid depends on them.
    return card_slug(table.card) == card_slug(device.name) and table.sms == device.sms


def _stack() -> Stack:
    now = versions()
    return Stack(now["driver"], now["torch"], now["triton"])


def _candidates(op: str, problem: str, device: Device, invariant: bool) -> Iterator[tuple[str, list[Entry]]]:
    """(source, rows of one problem), the best fitting problem first."""
    yield "exact", _RECORDS.of(op, problem, device, invariant)
    for near in _nearby(op, problem, device, invariant):
        yield "bucket", _RECORDS.of(op, near, device, invariant)


def _nearby(op: str, problem: str, device: Device, invariant: bool) -> list[str]:
    """Other problems with rows within LIMIT, the nearest first."""
    key = (op, device, invariant)
    if key not in _RECORDS.near:
        # Cells have side LIMIT, so near problems are in the same cell or in a neighbouring one.
        cells = _RECORDS.near[key] = {}
        for known in _RECORDS.problems(op, device, invariant):
            words, point = _place(json.loads(known))
            cells.setdefault((words, *_cell(point)), []).append((point, known))
    words, here = _place(json.loads(problem))
    cells, near = _RECORDS.near[key], []
    home = _cell(here)
    if 3 ** len(home) <= len(cells):
        beside = [(words, *cell) for cell in product(*((i - 1, i, i + 1) for i in home))]
    else:  # a problem of many integers has more neighbours than there are cells
        beside = [
            cell for cell in cells if cell[0] == words and all(abs(a - b) < 2 for a, b in zip(cell[1:], home, strict=True))
        ]
    for cell in beside:
        near += [(math.dist(point, here), known) for point, known in cells.get(cell, ())]
    return [known for distance, known in sorted(near) if distance <= LIMIT and known != problem]


def _cell(point: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(math.floor(x / LIMIT) for x in point)


def _place(problem: Any) -> tuple[Any, tuple[float, ...]]:
    """(everything that must be equal, the logarithms of the integers)."""
    words, point = [], []
    for path, value in _leaves(problem, ()):
        size = isinstance(value, int) and not isinstance(value, bool)
        words.append((path, type(value).__name__, value % 8 == 0 if size else value))
        if size:
            point.append(math.log2(max(value, 0.5)))
    return tuple(words), tuple(point)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _in_space(space: Space, device: Device, problem: Any, config: Mapping[str, Any]) -> bool:
    """Whether a config may be launched for a problem today."""
    if config.keys() == space.axes.keys() and all(config[name] in values for name, values in space.axes.items()):
        return space.refusal(device, problem, config) is None
    return config == space.default(device, problem)
