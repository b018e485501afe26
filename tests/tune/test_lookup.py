"""Which measured row decides a choice in a running program, and that nothing is read that need not be."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.source import ROOT
from tests.tune.rows import CARD, NOW, row
from tilewright.hw.device import Device
from tilewright.tune import lookup
from tilewright.tune.database import Database
from tilewright.tune.frozen import freeze, write_table
from tilewright.tune.lookup import Found, counters, find, use_table
from tilewright.tune.record import Row, problem_json
from tilewright.tune.space import NO_CHOICES, Space

H100 = Device(kind="cuda", name=CARD, arch=90, sms=132, smem_bytes=232448)
OLD = {"triton": "3.6.0"}
SPACE = Space(
    default=lambda device, problem: {"BLOCK": 24},
    axes={"BLOCK": (16, 32, 64)},
    refusal=lambda device, problem, c: "wider than the row" if c["BLOCK"] > problem.k else None,
)


class Problem(NamedTuple):
    dtype: str
    m: int
    k: int
    bias: bool = False


class Impl(NamedTuple):
    name: str
    space: Space = SPACE
    launch: Any = json.dumps  # any function of a module with a file


IMPLS = (Impl("triton"), Impl("vendor", NO_CHOICES))
HERE = Problem("bf16", 64, 4096)


class Places:
    """A database and a folder of shipped tables, read by nobody so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "tune.sqlite"

    def measured(self, *rows: Row) -> None:
        with Database(self.database) as database:
            database.add_all(rows)

    def table(self, *rows: Row, name: str = "tables/h100") -> Path:
        scratch = self.folder / f"{os.urandom(4).hex()}.sqlite"
        with Database(scratch) as database:
            database.add_all(rows)
            path = self.folder / f"{name}.json"
            write_table(path, freeze(database.entries()))
        return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    places = Places(tmp_path)
    monkeypatch.setattr(lookup, "_RECORDS", lookup._Records())
    monkeypatch.setattr(lookup, "_COUNTS", Counter())
    monkeypatch.setattr(lookup, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(lookup, "database_path", lambda: places.database)
    monkeypatch.setattr(lookup, "versions", lambda: NOW)
    monkeypatch.setattr(lookup, "source_hash", lambda module: "0123456789abcdef")
    return places


def at(problem: Problem = HERE, us: float = 10.0, block: int | None = 64, **changes: Any) -> Row:
    """A measurement of a problem; without a block it is the vendor's."""
    of = {"impl": "triton", "config": {"BLOCK": block}} if block else {"impl": "vendor", "config": {}}
    return row(us, **{"op": "linear", "problem": problem_json(problem), **of, **changes})


def found(problem: Problem = HERE, impls: tuple[Impl, ...] = IMPLS, invariant: bool = False, device: Device = H100) -> Any:
    """(implementation, BLOCK, source), None without a row."""
    result = find("linear", problem, device, invariant, impls)
    return result and (result.impl, result.config.get("BLOCK"), result.source)


def test_without_rows_there_is_none(places: Places) -> None:
    assert found() is None
    assert sum(counters().values()) == 0
    assert not places.database.exists(), "looking makes no file"


# ---- exact

TRITON, VENDOR = ("triton", 64, "exact"), ("vendor", None, "exact")

# (rows in the database, rows in the shipped table, what decides)
EXACT: dict[str, tuple[tuple[Row, ...], tuple[Row, ...], Any]] = {
    "the faster": ((at(us=9.0), at(us=10.0, block=32), at(us=11.0, block=None)), (), TRITON),
    "the vendor may win": ((at(us=9.0), at(us=8.0, block=None)), (), VENDOR),
    "from the table": ((), (at(us=9.0), at(us=8.0, block=None)), VENDOR),
    "finalists before the rest": ((at(us=9.0, verified=True), at(us=8.0, block=None)), (), TRITON),
    "measured last, database": ((at(us=10.0, second=2),), (at(us=9.0, block=None, second=1),), TRITON),
    "measured last, table": ((at(us=9.0, second=1),), (at(us=10.0, block=None, second=2),), VENDOR),
    "these versions before later ones": ((at(second=1),), (at(us=1.0, block=None, second=2, versions=OLD),), TRITON),
    "other versions rather than none": ((at(us=9.0, versions=OLD), at(us=9.5, block=32, versions=OLD)), (), TRITON),
    "failures do not count": ((at(), row(None, problem=problem_json(HERE), impl="vendor", config={})), (), TRITON),
    "another SM count is another card": ((at(versions={"sms": 114}),), (), None),
    "another card": ((at(versions={"card": "NVIDIA H200"}),), (), None),
    "the same card by another name": ((at(versions={"card": "NVIDIA H100 SXM5 80GB"}),), (), TRITON),
    "another op": ((at(op="softmax"),), (), None),
    "the default may stand outside the axes": ((at(block=24),), (), ("triton", 24, "exact")),
}


@pytest.mark.parametrize(("database", "table", "wanted"), EXACT.values(), ids=EXACT)
def test_an_exact_row(places: Places, database: tuple[Row, ...], table: tuple[Row, ...], wanted: Any) -> None:
    if database:
        places.measured(*database)
    if table:
        places.table(*table)
    assert found() == wanted
    assert counters()["exact"] == (wanted is not None)


def test_stale_rows_say_so(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.measured(at(), at(HERE._replace(m=1), versions={"driver": "1"}))

    def stale(problem: Problem) -> bool:
        result = find("linear", problem, H100, False, IMPLS)
        assert isinstance(result, Found)
        return result.stale

    assert not stale(HERE)
    assert stale(HERE._replace(m=1)), "another driver"
    monkeypatch.setattr(lookup, "source_hash", lambda module: "f" * 16)
    assert stale(HERE), "an edited kernel"
    assert counters() == {"exact": 3, "bucket": 0, "default": 0, "stale": 2, "ignored": 0}


def test_the_whole_row_is_there(places: Places) -> None:
    places.measured(at(us=9.0))
    places.table(at(us=9.0, block=32, second=1))
    result = find("linear", HERE, H100, False, IMPLS)
    assert result is not None
    assert result.entry.place == "frozen table"
    assert result.row == at(us=9.0, block=32, second=1, resources={}), "a table keeps no resources"


def test_rows_of_the_invariant_scope_are_separate(places: Places) -> None:
    places.measured(at(us=5.0), at(us=9.0, block=32, invariant=True))
    assert found() == ("triton", 64, "exact")
    assert found(invariant=True) == ("triton", 32, "exact")


def test_only_what_the_scope_allows_counts(places: Places) -> None:
    places.measured(at(us=5.0, block=None), at(us=9.0), at(us=9.5, block=32))
    assert found(impls=(Impl("triton"),)) == ("triton", 64, "exact"), "the best of those allowed"
    assert found(impls=(Impl("other"),)) is None
    assert counters()["ignored"] == 0


# (config, why it is none of today's)
OUTSIDE = (({"BLOCK": 128}, "no such value"), ({"BLOCK": 64, "WARPS": 4}, "no such axis"), ({}, "an axis is missing"))


@pytest.mark.parametrize("config", [c for c, _ in OUTSIDE], ids=[why for _, why in OUTSIDE])
def test_a_config_outside_todays_space_is_ignored_and_counted(places: Places, config: dict[str, int]) -> None:
    places.measured(at(us=5.0, config=config), at(us=9.0))
    assert found() == TRITON
    assert counters()["ignored"] == 1


def test_a_config_that_the_space_refuses_for_this_problem_is_ignored(places: Places) -> None:
    narrow = HERE._replace(k=32)
    places.measured(at(narrow, us=5.0, block=64), at(narrow, us=9.0, block=32))
    assert found(narrow) == ("triton", 32, "exact")
    assert counters()["ignored"] == 1


# ---- nearby

# (the measured problem, is it near HERE)
NEAR = {
    "a half more": (HERE._replace(k=6144), True),
    "a third less": (HERE._replace(k=2736), True),
    "one less, which is no multiple of 8": (HERE._replace(k=4095), False),
    "twice": (HERE._replace(k=8192), False),
    "the next bucket of rows": (HERE._replace(m=128), False),
    "a little in both": (HERE._replace(k=5120, m=80), True),
    "a half more in both": (HERE._replace(k=6144, m=96), False),
    "another dtype": (HERE._replace(dtype="fp16"), False),
    "another flag": (HERE._replace(bias=True), False),
}


@pytest.mark.parametrize(("measured", "near"), NEAR.values(), ids=NEAR)
@pytest.mark.parametrize("shipped", [False, True])
def test_what_is_near(places: Places, measured: Problem, near: bool, shipped: bool) -> None:
    (places.table if shipped else places.measured)(at(measured))
    assert found() == (("triton", 64, "bucket") if near else None)
    assert counters()["bucket"] == near


def test_the_nearest_that_can_run_here_decides(places: Places) -> None:
    small = HERE._replace(k=60)
    places.measured(at(small._replace(k=62), block=64), at(small._replace(k=70), block=32), at(small._replace(k=75), block=16))
    assert found(small) == ("triton", 32, "bucket"), "64 is wider than a row of 60"
    assert counters()["ignored"] == 1


def test_an_exact_row_goes_before_a_faster_neighbour(places: Places) -> None:
    places.measured(at(us=90.0, versions=OLD), at(HERE._replace(k=4104), us=1.0, block=32))
    assert found() == TRITON


# ---- use_table


def test_a_given_table_is_read_and_nothing_else(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    places.measured(at(us=1.0), at(HERE._replace(m=1)))
    places.table(at(HERE._replace(m=2)))
    path = places.table(at(us=9.0, block=32, second=-0), name="given")
    with caplog.at_level(logging.INFO):
        digest = use_table(path, H100)
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert digest in caplog.text
    assert found() == ("triton", 32, "exact")
    assert found(HERE._replace(m=1)) is None
    assert found(HERE._replace(m=2)) is None
    assert use_table(path, H100) == digest, "again is no change"
    with pytest.raises(RuntimeError, match="choices were made already; call it before the first op"):
        use_table(places.table(at(), name="other"), H100)


def test_a_table_of_another_card_is_refused_with_the_nearest(places: Places) -> None:
    places.table(at(), name="tables/h200")
    places.table(at(), name="tables/b200")
    path = places.table(at(versions={"card": "NVIDIA A100-SXM4-80GB", "sms": 108}), name="a100")
    words = f"is the table of NVIDIA A100-SXM4-80GB with 108 SMs; wanted one for {CARD} with 132 SMs. Shipped tables: h200"
    with pytest.raises(ValueError, match=words):
        use_table(path, H100)
    with pytest.raises(FileNotFoundError):
        use_table(places.folder / "none.json", H100)
    assert found() is None


def test_a_shipped_table_of_another_card_is_not_used(places: Places) -> None:
    places.table(at(versions={"card": "NVIDIA H100 PCIe", "sms": 114}))
    assert found() is None


# ---- trouble, and cost


def test_a_damaged_database_is_one_warning(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    places.database.write_bytes(b"garbage" * 1000)
    places.table(at())
    with caplog.at_level(logging.WARNING):
        assert found() == TRITON, "the table still counts"
        assert found(HERE._replace(k=1)) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "damaged" in caplog.text
    assert "choices are made without it" in caplog.text


def test_a_forked_process_opens_its_own_database(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.measured(at())
    assert found() == TRITON
    opened = lookup._RECORDS._database
    monkeypatch.setattr(lookup.os, "getpid", lambda: -1)
    assert found() == TRITON
    assert lookup._RECORDS._database is not opened


def test_nothing_is_read_before_a_cuda_choice(tmp_path: Path) -> None:
    """Importing the ops and running one on the CPU opens no database and no table."""
    script = (
        "import sys, torch\n"
        "seen = []\n"
        "sys.addaudithook(lambda e, a: seen.append((e, *map(str, a[:1]))) if e in ('open', 'sqlite3.connect') else None)\n"
        "from tilewright import ops\n"
        "ops.rms_norm(torch.ones(2, 8), torch.ones(8))\n"
        "print([s for s in seen if s[0] == 'sqlite3.connect' or 'tune/tables' in s[1] or 'tune.sqlite' in s[1]])\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TRITON_INTERPRET": "0"}
    (tmp_path / "tilewright").mkdir()
    (tmp_path / "tilewright" / "tune.sqlite").write_bytes(b"not to be read")
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_a_new_problem_costs_less_than_a_millisecond(places: Places) -> None:
    """Among a thousand problems in each place. Here it takes 0.2 to 0.6 ms; the limit leaves room for a busy machine."""
    problems = [HERE._replace(m=m, k=64 * k) for m in (1, 16, 64, 256) for k in range(1, 251)]
    places.measured(*(at(p, us=9.0 + i, block=b) for p in problems for i, b in enumerate((64, 32, None))))
    places.table(*(at(p, us=9.0 + i, block=b) for p in problems for i, b in enumerate((64, 32, None))))
    found(HERE._replace(k=64 * 7 + 1))  # opens both and sorts the neighbours, once
    took: dict[str, list[float]] = {}
    for problem in [
        *problems[::20],
        *(p._replace(k=p.k + 8) for p in problems[::20]),
        *(HERE._replace(m=4000 + i) for i in range(50)),
    ]:
        start = time.thread_time()
        result = found(problem)
        took.setdefault(result[2] if result else "none", []).append(time.thread_time() - start)
    medians = {source: sorted(times)[len(times) // 2] for source, times in took.items()}
    assert set(medians) == {"exact", "bucket", "none"}
    assert max(medians.values()) < 3e-3, medians
