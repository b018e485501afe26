"""Frozen tables: deterministic, for one card, and refused when they are not what they say."""

import json
from pathlib import Path

import pytest

from tests.tune.rows import CARD, problem, row
from tests.tune.test_database import OLD, filled
from tilewright.tune.database import Database
from tilewright.tune.frozen import TABLES, FrozenTable, freeze, write_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tune.sqlite"


def test_freezing_is_deterministic_and_keeps_what_decides(path: Path) -> None:
    rows = [
        row(3.0004, second=1, config={"BLOCK": 1}),
        row(2.0, second=2, config={"BLOCK": 2}),
        row(2.5, second=3, impl="vendor", config={}),
        row(1.0, second=0, versions=OLD),
        row(7.0, second=1, op="softmax", problem=problem(cols=5), invariant=True, versions=OLD),
        row(None, second=5, config={"BLOCK": 4}),
    ]
    texts = []
    for i, order in enumerate((rows, rows[::-1])):
        with Database(filled(path.with_name(f"{i}.sqlite"), *order)) as database:
            texts.append(freeze(database.entries()))
    assert texts[0] == texts[1]
    plain = json.loads(texts[0])
    assert (plain["card"], plain["sms"]) == (CARD, 132)
    assert {e["triton"] for e in plain["environments"]} == {"3.7.1", "3.6.0"}
    file = path.with_name("h100.json")
    write_table(file, texts[0])
    table = FrozenTable(file, check=True)
    assert [(e.impl, e.us) for e in table.of("linear", problem(), False)] == [("triton", 2.0), ("vendor", 2.5)]
    assert [e.stack.triton for e in table.of("softmax", problem(cols=5), True)] == ["3.6.0"]
    assert table.problems("softmax", False) == []
    assert freeze(table.entries()) == texts[0], "a table freezes to itself"
    assert [p.name for p in path.parent.glob(".*")] == []


def test_a_table_is_for_one_card(path: Path) -> None:
    filled(path, row(), row(versions={"card": "NVIDIA A100-SXM4-80GB", "sms": 108}))
    with Database(path) as database:
        with pytest.raises(ValueError, match=r"one card, but the rows are from NVIDIA A100-SXM4-80GB, NVIDIA H100.*--card"):
            freeze(database.entries())
        with pytest.raises(ValueError, match="the rows are from none"):
            freeze(database.entries(op="softmax"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"format":1', '"format":2', "format is 2, wanted 1"),
        ('"sms"', '"sm"', "'sms' is missing"),
        ('"problems"', '"rows"', "'problems' is missing"),
        ('"us":10.0', '"us":-1', "us is -1, wanted microseconds"),
        ('"environment":0', '"environment":7', "list index out of range"),
        ("{", "[", "not JSON"),
    ],
)
def test_what_is_no_table_is_refused(path: Path, old: str, new: str, words: str) -> None:
    with Database(filled(path, row())) as database:
        text = freeze(database.entries())
    file = path.with_name("bad.json")
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=words):
        FrozenTable(file, check=True)


@pytest.mark.parametrize("file", [pytest.param(p, id=p.name) for p in sorted(TABLES.glob("*.json"))])
def test_shipped_tables_are_good(file: Path) -> None:
    table = FrozenTable(file, check=True)
    assert freeze(table.entries()) == file.read_text(), "as `tilewright tune freeze` writes it"
