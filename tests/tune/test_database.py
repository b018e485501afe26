"""The tuning database: nothing is lost, nothing is doubled, and every way in which a file can be unusable is said."""

import io
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source import ROOT
from tests.tune.rows import CARD, problem, row
from tilewright.tune import exchange
from tilewright.tune.database import Database, DatabaseError
from tilewright.tune.exchange import export_rows, import_rows, merge
from tilewright.tune.ranking import Stack, ranked, verdict
from tilewright.tune.record import Row

OLD = {"triton": "3.6.0"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "tune.sqlite"


def filled(path: Path, *rows: Row) -> Path:
    with Database(path) as database:
        database.add_all(rows)
    return path


def held(path: Path) -> list[Row]:
    with Database(path, read_only=True) as database:
        return list(database.rows())


# ---- rows in, rows out


def test_rows_come_back_and_are_not_doubled(path: Path) -> None:
    with Database(path) as database:
        assert database.add(row(1.0))
        assert not database.add(row(1.0))
        assert database.add(row(None, config={"BLOCK": 32}, error="died"))
        assert [r.us for r in database.rows()] == [None, 1.0] or [r.us for r in database.rows()] == [1.0, None]
        assert [r.status for r in database.rows(status="crash")] == ["crash"]
        assert list(database.rows(op="linear", card="another")) == []
        assert database.values("card") == [CARD]
        with pytest.raises(ValueError, match="rows cannot be selected by 'nonsense', wanted one of op"):
            list(database.rows(nonsense=1))


def test_the_last_measurement_of_a_config_counts_and_finalists_go_first(path: Path) -> None:
    filled(
        path,
        row(5.0, second=1, config={"BLOCK": 1}),
        row(9.0, second=2, config={"BLOCK": 1}),
        row(8.0, second=1, config={"BLOCK": 2}),
        row(7.0, second=1, impl="vendor", config={}),
        row(None, second=3, config={"BLOCK": 3}),
    )
    with Database(path) as database:
        ranks = [(e.impl, e.us) for e in ranked(database.entries())]
        assert ranks == [("vendor", 7.0), ("triton", 8.0), ("triton", 9.0)]
        assert database.best("linear", problem(), card=CARD) == row(7.0, second=1, impl="vendor", config={})
        database.add(row(8.1, second=4, config={"BLOCK": 2}, verified=True))
        best = database.best("linear", problem(), card=CARD)
        assert best is not None
        assert best.us == 8.1, "7.0 was not timed beside it"
        assert database.best("linear", problem(), card=CARD, invariant=True) is None
        assert database.best("linear", problem(k=1), card=CARD) is None


def test_rows_of_two_tritons_live_together(path: Path) -> None:
    filled(
        path,
        row(1.0, second=1, versions=OLD, config={"BLOCK": 1}),
        row(2.0, second=2, versions=OLD, config={"BLOCK": 2}),
        row(3.0, second=3, versions=OLD, impl="vendor", config={}),
        row(4.0, second=4, config={"BLOCK": 2}),
    )
    with Database(path) as database:
        stacks = {r.environment.triton: r.stack for r in database.rows()}

        def best(stack: Stack | None) -> float | None:
            found = database.best("linear", problem(), card=CARD, stack=stack)
            return found and found.us

        assert best(stacks["3.7.1"]) == 4.0
        assert best(stacks["3.6.0"]) == 1.0
        assert best(None) == 4.0, "the latest measured"
        again = database.stale_best("linear", problem(), card=CARD, n=3)
        assert [r.config.get("BLOCK") for r in again] == [2, 1, None], "different configs, the latest versions first"
        assert len(database.stale_best("linear", problem(), card=CARD, n=2)) == 2


def test_an_edited_kernels_old_rows_do_not_compete(path: Path) -> None:
    filled(path, row(1.0, second=1), row(2.0, second=2, source="f" * 16), row(1.5, impl="vendor", config={}))
    with Database(path) as database:
        entries = database.entries()
    assert [e.us for e in ranked(entries)] == [1.5, 2.0], "the later source counts"
    assert [e.us for e in ranked(entries, None, {"triton": "0123456789abcdef"})] == [1.0, 1.5], "the present one counts"


@pytest.mark.parametrize(("second", "clear"), [(10.1, False), (12.0, True)])
def test_a_margin_within_noise_is_a_tie(path: Path, second: float, clear: bool) -> None:
    filled(path, row(10.0), row(10.05, config={"BLOCK": 2}), row(second, impl="vendor", config={}))
    with Database(path) as database:
        decided = verdict(ranked(database.entries()))
    assert decided is not None
    assert decided[0].impl == "vendor"
    assert decided[1].margin == pytest.approx(second / 10 - 1)
    assert decided[1].noise == pytest.approx(0.1 * 2**0.5 / 10)
    assert decided[1].clear is clear
    assert verdict(ranked(database_of_one(path.with_name("one.sqlite")))) is None


def database_of_one(path: Path) -> list:
    with Database(filled(path, row()), read_only=True) as database:
        return database.entries()


# ---- several processes

WRITER = """
import sys
from pathlib import Path
from tests.tune.rows import row
from tilewright.tune.database import Database
with Database(Path(sys.argv[1])) as database:
    for i in range(int(sys.argv[3])):
        database.add(row(1.0 + i, impl=sys.argv[2]))
        print(i, flush=True)
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_processes_that_write_at_once_lose_nothing(path: Path) -> None:
    writers = [writer(path, f"w{i}", 100) for i in range(3)]
    for process in writers:
        process.communicate(timeout=60)
        assert process.returncode == 0
    rows = held(path)
    assert len(rows) == 300
    assert {r.impl for r in rows} == {"w0", "w1", "w2"}


@pytest.mark.parametrize("after", [1, 17, 60])
def test_a_killed_process_loses_at_most_the_row_in_flight(path: Path, after: int) -> None:
    process = writer(path, "killed", 1_000_000)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) + 1 == after:
            process.send_signal(signal.SIGKILL)
            break
    said = after + len(process.stdout.readlines())
    process.wait(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert said <= len(held(path)) <= said + 1
    filled(path, row(0.5))
    assert len(held(path)) >= said + 1, "and the next process goes on with the file"


# ---- files that cannot be used


def aside(path: Path) -> list[Path]:
    return [p for p in path.parent.iterdir() if re.fullmatch(r"tune\.sqlite\.\d{4}-\d\d-\d\dT[\d-]+", p.name)]


def garbage(path: Path) -> None:
    path.write_bytes(b"not a database, but a text of some length\n" * 100)


def overwritten(path: Path) -> None:
    """Pages in the middle are gone, the header is good."""
    filled(path, *(row(1.0 + i) for i in range(200)))
    data = bytearray(path.read_bytes())
    data[8192:40960] = os.urandom(40960 - 8192)
    path.write_bytes(data)


def truncated(path: Path) -> None:
    filled(path, *(row(1.0 + i) for i in range(200)))
    os.truncate(path, path.stat().st_size // 2)


def older(path: Path) -> None:
    filled(path, row())
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE rows ADD COLUMN more TEXT")
        connection.execute("PRAGMA user_version = 0")


@pytest.mark.parametrize("spoil", [garbage, overwritten, truncated, older], ids=lambda f: f.__name__)
def test_a_damaged_or_older_file_is_set_aside(path: Path, spoil, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    spoil(path)
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING), Database(path) as database:
        assert list(database.rows()) == []
        database.add(row())
    assert len(held(path)) == 1
    (kept,) = aside(path)
    assert kept.read_bytes() == before, "nothing is deleted"
    assert str(kept) in caplog.text
    assert re.search("is damaged|older schema", caplog.text)


def test_a_reader_sets_nothing_aside(path: Path) -> None:
    path.parent.mkdir()
    for spoil, words in ((garbage, "is damaged; the next `tilewright tune` renames it"), (older, "older schema")):
        path.unlink(missing_ok=True)
        spoil(path)
        with pytest.raises(DatabaseError, match=words):
            Database(path, read_only=True)
    assert aside(path) == []


def test_a_newer_file_and_another_programs_are_refused(path: Path) -> None:
    filled(path, row())
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    foreign = path.with_name("mail.sqlite")
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE mail (text)")
    for file, words in ((path, "newer tilewright .schema 99, wanted 1.: upgrade"), (foreign, "of another program")):
        for read_only in (False, True):
            with pytest.raises(DatabaseError, match=words):
                Database(file, read_only=read_only)
    assert aside(path) == []


def test_a_schema_that_brings_a_trigger_along_is_not_ours(path: Path) -> None:
    filled(path, row())
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END")
    with pytest.raises(DatabaseError, match="schema"):
        Database(path, read_only=True)


def test_no_file_to_read(path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"does not exist; `tilewright tune OP"):
        Database(path, read_only=True)
    assert not path.parent.exists(), "a reader makes nothing"


def test_a_full_disk_is_said_and_the_file_stays_good(path: Path) -> None:
    with Database(filled(path, row(1.0))) as database:
        pages = database._connection.execute("PRAGMA page_count").fetchone()[0]
        database._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(DatabaseError, match="full: free disk space there"):
            database.add_all(row(2.0 + i) for i in range(1000))
        assert [r.us for r in held(path)] == [1.0], "all or none, and readers go on"
        assert database.add(row(3.0)), "one more fits"


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(os.name != "posix", reason="needs Unix permissions")
def test_a_read_only_place_is_said_to_a_writer_and_can_be_read(public: Path) -> None:
    path = filled(public / "tune.sqlite", row(1.0))
    for p in (*public.iterdir(), public):
        p.chmod(0o555 if p.is_dir() else 0o444)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # root may write everywhere: be nobody for a while
    try:
        with pytest.raises(
            DatabaseError, match=r"cannot be used: .*([Pp]ermission|read-?only|unable to open).*: .*choose another file"
        ):
            filled(path, row(2.0))
        with pytest.raises(DatabaseError, match="choose another file"):
            filled(public / "new" / "tune.sqlite", row(2.0))
        assert [r.us for r in held(path)] == [1.0]
    finally:
        if root:
            os.seteuid(0)
        public.chmod(0o755)


def test_a_database_that_is_held_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, row())
    monkeypatch.setattr("tilewright.tune.database._WAIT_S", 0.05)
    with Database(path) as holder, Database(path) as other:
        holder._connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match="locked: another process has held it"):
            other.add(row(2.0))
        assert len(held(path)) == 1, "readers do not wait"
        holder._connection.execute("ROLLBACK")
        assert other.add(row(2.0))


# ---- export, import, merge


def test_export_and_import_are_idempotent(path: Path) -> None:
    rows = [row(1.0 + i, second=i) for i in range(20)] + [row(None, error="line\nline")]
    filled(path, *rows)
    copy = path.with_name("copy.sqlite")
    text = io.StringIO()
    with Database(path) as database:
        assert export_rows(database, text) == 21
    with Database(copy) as database:
        assert import_rows(database, io.BytesIO(text.getvalue().encode() + b"\n\r\n"), "x") == (21, 21)
        assert import_rows(database, io.BytesIO(text.getvalue().encode()), "x") == (21, 0)
        assert merge(database, path) == (21, 0)
        again = io.StringIO()
        export_rows(database, again)
    assert again.getvalue() == text.getvalue()
    with Database(path) as database:
        assert merge(database, copy) == (21, 0)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (b"{}", "x.jsonl, line 2: .* nothing was imported"),
        (b"\x00\xff", "line 2: not JSON"),
        (b"{" + b" " * 40000 + b"}", "line 2: not a row, which has at most 32768 bytes"),
        (row().json().replace('"us":10.0', '"us":-3').encode(), "line 2: us is -3, wanted microseconds"),
    ],
    ids=range(4),
)
def test_a_file_with_a_bad_line_is_not_imported_at_all(path: Path, second: bytes, words: str) -> None:
    with Database(path) as database:
        with pytest.raises(ValueError, match=words):
            import_rows(database, io.BytesIO(row(1.0).json().encode() + b"\n" + second + b"\n"), "x.jsonl")
        assert list(database.rows()) == []
        assert database.add(row())


def test_a_file_of_too_many_lines_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_ROWS", 3)
    text = "".join(row(1.0 + i).json() + "\n" for i in range(4))
    with Database(path) as database, pytest.raises(ValueError, match="more than 3 lines: split it and import the parts"):
        import_rows(database, io.BytesIO(text.encode()), "x")
