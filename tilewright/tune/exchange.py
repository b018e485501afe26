"""Rows as JSONL, one a line, to and from a database: for other machines, for a repository, for reading.

Rows that are there already are not added again, so an import may be repeated and two databases may be merged both ways. A file
is taken whole or not at all. Text is parsed, checked and stored; nothing in it is run.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from tilewright.tune.database import Database
from tilewright.tune.record import MAX_ROW_BYTES, Row, parse

__all__ = ["Added", "export_rows", "import_rows", "merge"]

MAX_ROWS = 1_000_000
"""Of one file; an exhaustive search over 30 shapes is about 20,000."""


class Added(NamedTuple):
    """What came of an import."""

    rows: int
    new: int


def export_rows(database: Database, file: TextIO, **equal: Any) -> int:
    """Write the rows with these values (`Database.rows`), one a line, in the order of op, problem and date; how many."""
    count = 0
    for row in database.rows(**equal):
        file.write(row.json() + "\n")
        count += 1
    return count


def import_rows(database: Database, file: BinaryIO, name: str) -> Added:
    """Add the rows of a JSONL file; blank lines are skipped.

    Raises:
        ValueError: a line is no row (the text has its number), or the file is too large; nothing was added.
        DatabaseError: the database cannot be written.
    """
    return _add(database, _lines(file, name))


def merge(database: Database, other: Path) -> Added:
    """Add the rows of another database, which is only read.

    Raises:
        ValueError: a row of it is none; nothing was added.
        DatabaseError: the one cannot be read, or the other not written.
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
            raise ValueError(f"{name} has more than {MAX_ROWS} lines: import it in parts")
        if len(line) > MAX_ROW_BYTES + 1:
            raise ValueError(f"{name}, line {number}: longer than {MAX_ROW_BYTES} bytes, no row is; nothing was imported")
        if line.strip():
            try:
                yield parse(line.rstrip(b"\r\n"))
            except ValueError as error:
                raise ValueError(f"{name}, line {number}: {error}; nothing was imported") from None
