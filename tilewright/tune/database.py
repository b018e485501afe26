"""The tuning database: a file with one row per measurement, which several processes can write at once.

It is SQLite with a write-ahead log. Adding a row is one transaction, which is on disk when `add` returns; so a killed process
loses only the measurement in progress. Writers wait for each other. Rows are only ever added. After an upgrade of triton, torch
or the driver the old rows remain, and their best configs are the first to be measured again.

Each row is stored as JSON; the columns for searching are generated from it, so the two cannot disagree.

A file that is damaged, or was written by an older tilewright, is renamed (with the date) and reported, and a new one is
created; a file is never deleted. A file of a newer tilewright is refused. The schema must be identical to this one, so that
nothing in a foreign file is executed.
"""

import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tilewright.hw.env import cache_dir
from tilewright.tune.ranking import Entry, Stack, ranked
from tilewright.tune.record import Row, parse

__all__ = ["Database", "DatabaseError", "database_path"]

SCHEMA_VERSION = 1
_APPLICATION = 0x54574442  # "TWDB": distinguishes a database of an older tilewright from one of another program
_WAIT_S = 30.0
_ROOM_BYTES = 4 << 20
_LOG = logging.getLogger("tilewright.tune")


def _columns(names: str, kind: str = "TEXT", of: str = "") -> list[str]:
    return [f"{n} {kind} GENERATED ALWAYS AS (json_extract(row, '$.{of}{n}')) STORED" for n in names.split()]


_COLUMNS = (
    "key BLOB NOT NULL UNIQUE",
    *_columns("op problem impl config status source date"),
    *_columns("card driver torch triton", of="environment."),
    *_columns("sms", "INTEGER", of="environment."),
    *_columns("invariant verified", "INTEGER"),
    *_columns("us us_spread", "REAL"),
    "row TEXT NOT NULL",
)
_SCHEMA = f"CREATE TABLE rows ({', '.join(_COLUMNS)})"
_INDEX = "CREATE INDEX by_problem ON rows (op, sms, status, invariant, problem)"

_ENTRY = "op, card, problem, invariant, impl, config, us, us_spread, verified, source, driver, torch, triton, date, row"


class DatabaseError(OSError):
    """The database cannot be used; the message has the reason and a remedy."""


def database_path() -> Path:
    """The file with this user's measurements."""
    return cache_dir() / "tune.sqlite"


class Database:
    """An open database; a context manager. One thread at a time may use it, and only the process that opened it.

    Args:
        path: the file, by default `database_path()`; created, with its folder, if it does not exist.
        read_only: write nothing and create nothing; for readers, and for read-only media.

    Raises:
        DatabaseError: the file cannot be opened or written, or was written by a newer tilewright; with read_only also if it
            does not exist, is damaged, or was written by an older tilewright.
    """

    def __init__(self, path: Path | str | None = None, *, read_only: bool = False) -> None:
        self.path = Path(path) if path is not None else database_path()
        with _explained(self.path):
            if read_only:
                self._connection = _open_to_read(self.path)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = _open_to_write(self.path)

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._connection.close()

    def add(self, row: Row) -> bool:
        """Store a row; it is on disk when this returns. Returns False if it is stored already. Raises DatabaseError."""
        return self.add_all((row,)) == 1

    def add_all(self, rows: Iterable[Row]) -> int:
        """Store rows in one transaction, all or none; returns how many were new. Raises DatabaseError."""
        with _explained(self.path), self._transaction():
            before = self._connection.total_changes
            pairs = ((row.key, row.json()) for row in rows)
            self._connection.executemany("INSERT OR IGNORE INTO rows (key, row) VALUES (?, ?)", pairs)
            return self._connection.total_changes - before

    def require_room(self) -> None:
        """Raise DatabaseError unless rows can be added now and the disk has room for the thousands of rows of a search."""
        with _explained(self.path):
            # Not an empty transaction: on a read-only file SQLite starts one and fails only at the first write.
            with self._transaction():
                self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            with TemporaryFile(dir=self.path.parent) as probe:
                probe.write(bytes(_ROOM_BYTES))
                probe.flush()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:  # SQLite has rolled back itself if the disk is full
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def rows(self, **equal: Any) -> Iterator[Row]:
        """Rows ordered by op, problem and date; `rows(op="linear", status="ok")` selects by values.

        Possible names are the fields of `Row` with a column (op, problem, impl, status, source, invariant, verified) and of its
        environment (card, sms, driver, torch, triton). Raises ValueError for a row that tilewright did not write.
        """
        where, values = _where(equal)
        with _explained(self.path):
            query = f"SELECT row FROM rows WHERE 1 {where} ORDER BY op, problem, date, key"
            for (text,) in self._connection.execute(query, values):
                yield _parsed(text, self.path)

    def entries(self, **equal: Any) -> list[Entry]:
        """The rows that have a time, for `ranking.ranked`; selected as in `rows`."""
        where, values = _where(equal)
        with _explained(self.path):
            found = self._connection.execute(f"SELECT {_ENTRY} FROM rows WHERE status = 'ok' {where}", values).fetchall()
        return [
            Entry._make(
                (
                    *e[:3],
                    bool(e[3]),
                    *e[4:8],
                    bool(e[8]),
                    e[9],
                    Stack(*e[10:13]),
                    e[13],
                    "database",
                    partial(_parsed, e[14], self.path),
                )
            )
            for e in found
        ]

    def best(
        self,
        op: str,
        problem: str,
        *,
        card: str,
        invariant: bool = False,
        stack: Stack | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> Row | None:
        """The row that decides a problem by the rules of `ranking.ranked`; None if there is none.

        It has the given stack and sources if any row has; compare its `stack` and `source` to find out.
        """
        found = ranked(self.entries(op=op, problem=problem, card=card, invariant=invariant), stack, sources)
        return found[0].load() if found else None

    def stale_best(self, op: str, problem: str, *, card: str, invariant: bool = False, n: int = 3) -> list[Row]:
        """The `n` best different pairs (implementation, config), those of the latest versions first.

        After an upgrade of triton, torch, the driver or a kernel these are measured again, instead of a new search.
        """
        rest = self.entries(op=op, problem=problem, card=card, invariant=invariant)
        chosen: dict[tuple[str, str], Entry] = {}
        while rest and len(chosen) < n:
            group = ranked(rest)
            for entry in group:
                chosen.setdefault((entry.impl, entry.config), entry)
            rest = [entry for entry in rest if entry not in group]
        return [entry.load() for entry in list(chosen.values())[:n]]

    def problems(self, op: str, sms: int, invariant: bool) -> list[str]:
        """All problems with a row that has a time, on cards with this number of SMs."""
        query = "SELECT DISTINCT problem FROM rows WHERE op = ? AND sms = ? AND status = 'ok' AND invariant = ?"
        with _explained(self.path):
            return [problem for (problem,) in self._connection.execute(query, (op, sms, invariant))]

    def values(self, column: str) -> list[str]:
        """The different values of a column of `rows`, sorted, such as all measured cards or ops."""
        _where({column: None})
        with _explained(self.path):
            return [value for (value,) in self._connection.execute(f"SELECT DISTINCT {column} FROM rows ORDER BY 1")]


def _where(equal: dict[str, Any]) -> tuple[str, Sequence[Any]]:
    columns = ("op", "problem", "impl", "status", "source", "card", "sms", "driver", "torch", "triton", "invariant", "verified")
    for name in equal:
        if name not in columns:
            raise ValueError(f"rows cannot be selected by {name!r}, wanted one of {', '.join(columns)}")
    return "".join(f" AND {name} = ?" for name in equal), tuple(equal.values())


def _parsed(text: str, path: Path) -> Row:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(
            f"{path}: a row is not valid: {error}; export the valid rows and import them into a new database"
        ) from None


# ---- opening


class _Unusable(Exception):
    """The file has to be renamed and replaced: it is damaged, or has an older schema."""


def _open_to_write(path: Path) -> sqlite3.Connection:
    import fcntl  # not on Windows, where op.py is imported too but nothing is tuned

    # One process at a time: if two find a damaged file, the second must see the new file of the first.
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _begun(_connect(path, "mode=rwc"))
        except _Unusable as reason:
            aside = path.with_name(f"{path.name}.{datetime.now(UTC):%Y-%m-%dT%H-%M-%S-%f}")
            for suffix in ("", "-wal", "-shm"):
                if (old := path.with_name(path.name + suffix)).exists():
                    old.rename(aside.with_name(aside.name + suffix))
            _LOG.warning("%s %s: it was renamed to %s, and a new database is created", path, reason, aside)
            return _begun(_connect(path, "mode=rwc"))


def _begun(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection, with its table created if the file is new. Closed if that fails."""
    try:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")
            for statement in (
                _SCHEMA,
                _INDEX,
                f"PRAGMA user_version = {SCHEMA_VERSION}",
                f"PRAGMA application_id = {_APPLICATION}",
            ):
                connection.execute(statement)
            connection.execute("COMMIT")
        _check_schema(connection)
        connection.execute("PRAGMA synchronous = FULL")  # a measurement takes longer than a write to disk
        if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _Unusable(f"is damaged ({found})")
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.DatabaseError) and _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _Unusable(f"is damaged ({error})") from None
        raise
    return connection


def _open_to_read(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise DatabaseError("does not exist; `tilewright tune OP ...` or `tilewright tune import` creates it")
    # On read-only media the log's shared memory cannot be created; nobody writes there, so the file can be read without it.
    try:
        return _checked(_connect(path, "mode=ro"))
    except sqlite3.OperationalError as error:
        if _code(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
        return _checked(_connect(path, "mode=ro&immutable=1"))


def _checked(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection if it can be read; otherwise it is closed."""
    try:
        _check_schema(connection)
    except _Unusable as reason:
        connection.close()
        raise DatabaseError(f"{reason}; the next `tilewright tune` renames it and creates a new one") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path, options: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}", uri=True, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
    )


def _check_schema(connection: sqlite3.Connection) -> None:
    version, application = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id"))
    if application != _APPLICATION:
        raise DatabaseError("is a database of another program; choose another file")
    if version > SCHEMA_VERSION:
        raise DatabaseError(
            f"was written by a newer tilewright (schema {version}, wanted {SCHEMA_VERSION}): upgrade, or choose another file"
        )
    schema = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL ORDER BY type DESC")]
    if schema != [_SCHEMA, _INDEX]:
        raise _Unusable(f"has an older schema ({version}, wanted {SCHEMA_VERSION})")


def _code(error: BaseException) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the folder into messages that tell the user what to do."""
    try:
        yield
    except DatabaseError as error:
        raise DatabaseError(f"{path} {error}") from None
    except (sqlite3.Error, OSError) as error:
        advice = {
            sqlite3.SQLITE_FULL: "free disk space there, or choose another file",
            sqlite3.SQLITE_READONLY: "make it writable, or choose another file",
            sqlite3.SQLITE_CANTOPEN: "its folder must be writable, unless the file exists already",
            sqlite3.SQLITE_BUSY: f"another process has held it for {_WAIT_S:.0f} s; wait for it to end, or choose another file",
            sqlite3.SQLITE_CORRUPT: "it is damaged; the next `tilewright tune` renames it and creates a new one",
            sqlite3.SQLITE_NOTADB: "it is damaged; the next `tilewright tune` renames it and creates a new one",
        }.get(_code(error), "choose another file, or one on another disk")
        raise DatabaseError(f"database {path} cannot be used: {error}: {advice}") from error
