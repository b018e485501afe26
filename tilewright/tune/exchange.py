"""Export and import of rows as JSONL, one row per line: for other machines, for a repository, for reading.

Rows that are stored already are not added again, so an import can be repeated, and two databases can be merged in both
directions. A file is imported completely or not at all. Text is parsed, checked and stored; nothing in it is executed.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from tilewright.tune.database import Database
from tilewright.tune.record import MAX_ROW_BYTES, Row, parse

__all__ = ["Added", "export_rows", "import_rows", "merge"]

MAX_ROWS = 1_000_000
"""In one file; an exhaustive search over 30 shapes gives about 20,000."""


class Added(NamedTuple):
    """The result of an import."""

    rows: int
    new: int


def export_rows(database: Database, file: TextIO, **equal: Any) -> int:
    """Write the rows with these values (`Database.rows`), one per line, ordered by op, problem and date; returns how many."""
    count = 0
    for row in database.rows(**equal):
        file.write(row.json() + "\n")
        count += 1
    return count


def import_rows(database: Database, file: BinaryIO, name: str) -> Added:
    """Add the rows of a JSONL file; blank lines are skipped.

    Raises:
        ValueError: a line is not a valid row (the message has its number), or the file is too large; nothing was added.
        DatabaseError: the database cannot be written.
    """
    return _add(database, _lines(file, name))


def merge(database: Database, other: Path) -> Added:
    """Add the rows of another database, which is opened read-only.

    Raises:
        ValueError: it has an invalid row; nothing was added.
        DatabaseError: the other database cannot be read, or this one not written.
    """
    with Database(other, read_only=True) as source:
        return _add(database, source.rows())


def _add(database: Database, rows: Iterable[Row]) -> Added:
    count = 0

    def counted() -> Iterator[Row]:
        nonlocal count
        for row in rows:
            count += 1
            yield row

    new = database.add_all(counted())
    return Added(count, new)


def _lines(file: BinaryIO, name: str) -> Iterator[Row]:
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 2):
        number += 1
        if number > MAX_ROWS:
            raise ValueError(f"{name} has more than {MAX_ROWS} lines: split it and import the parts")
        if len(line) > MAX_ROW_BYTES + 1:
            raise ValueError(f"{name}, line {number}: not a row, which has at most {MAX_ROW_BYTES} bytes; nothing was imported")
        if line.strip():
            try:
                yield parse(line.rstrip(b"\r\n"))
            except ValueError as error:
                raise ValueError(f"{name}, line {number}: {error}; nothing was imported") from None
