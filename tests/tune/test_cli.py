"""`tilewright tune export | import | merge | freeze | show`, as a user types them."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from tests.tune.rows import CARD, problem, row
from tilewright.cli import app, tune_op
from tilewright.hw.device import device_named
from tilewright.kernels.gemm.linear import linear_op
from tilewright.op import scope
from tilewright.tune.database import Database
from tilewright.tune.frozen import FrozenTable
from tilewright.tune.record import parse
from tilewright.tune.search import Plan, Report

# An option that is renamed or goes breaks somebody's script: change these on purpose only.
OPTIONS = {
    "export": {"--op", "--card", "--database"},
    "import": {"--database", "--json"},
    "merge": {"--database", "--json"},
    "freeze": {"--card", "--op", "--out", "--database", "--json"},
    "show": {"--card", "--table", "--all", "--database", "--json"},
}


class Done(NamedTuple):
    code: int
    out: str
    err: str


def tune(*arguments: str | Path, stdin: str = "") -> Done:
    result = CliRunner().invoke(app, ["tune", *map(str, arguments)], input=stdin, prog_name="tilewright")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tune.sqlite"
    with Database(path) as database:
        database.add_all(
            (
                row(10.0, second=1),
                row(11.0, second=2, impl="vendor", config={}),
                row(9.0, second=3, problem=problem(dtype="bfloat16", k=8)),
                row(None, second=4, config={"BLOCK": 16}, error="illegal [red]address"),
                row(5.0, second=5, op="softmax", versions={"card": "NVIDIA A100-SXM4-80GB", "sms": 108}),
            )
        )
    return path


@pytest.mark.parametrize("verb", OPTIONS)
def test_the_options_are_frozen(verb: str) -> None:
    command = get_command(app).commands["tune"].commands[verb]  # type: ignore[attr-defined]
    options = {name for p in command.params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
    assert options - {"--help", "-h"} == OPTIONS[verb]


def test_export_import_merge(file: Path, tmp_path: Path) -> None:
    done = tune("export", "--database", file)
    assert [parse(line).op for line in done.out.splitlines()] == ["linear"] * 4 + ["softmax"]
    assert done.err == "5 rows\n"
    out, copy = tmp_path / "rows.jsonl", tmp_path / "copy.sqlite"
    assert tune("export", out, "--card", "h100", "--op", "linear", "--database", file).err == "4 rows\n"
    assert tune("import", out, "--database", copy).err == f"{out}: 4 rows, 4 of them new\n"
    answer = tune("import", "-", "--database", copy, "--json", stdin=done.out).out
    assert json.loads(answer) == {"from": "-", "rows": 5, "new": 1}
    assert json.loads(tune("merge", file, "--database", copy, "--json").out)["new"] == 0


def test_freeze_and_show_the_table(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "h100.json"
    facts = json.loads(tune("freeze", "--card", "h100", "--out", out, "--database", file, "--json").out)
    assert facts == {"path": str(out), "card": CARD, "rows": 3, "sha256": FrozenTable(out).sha256}
    shown = json.loads(tune("show", "--table", out, "--json").out)
    assert [(r["op"], r["impl"], r["us"], r["ahead_of"]) for r in shown] == [
        ("linear", "triton", 10.0, "vendor"),
        ("linear", "vendor", 11.0, None),
        ("linear", "triton", 9.0, None),
    ]


def test_show_says_who_won_and_by_how_much(file: Path) -> None:
    done = tune("show", "linear", "--database", file)
    assert re.search(r"m=64 .* triton .* BLOCK=64 .* 10\.00 ± 0\.10 .* by 10\.0%, noise 1\.4%", done.out)
    assert re.search(r"k=8 .* alone", done.out)
    assert "illegal" not in done.out
    everything = tune("show", "linear", "--all", "--database", file).out
    assert "crash: illegal [red]address" in everything
    rows = json.loads(tune("show", "--json", "--database", file).out)
    assert [(r["margin"], r["noise"]) for r in rows if r["ahead_of"]] == [(0.1, 0.0141)]
    assert len(json.loads(tune("show", "--all", "--json", "--database", file).out)) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "lineer"], "no rows of op 'lineer'; wanted one of linear"),
        (["show", "--card", "h10"], "no rows of card 'h10'; wanted one of h100"),
        (
            ["freeze", "--out", "/nowhere/t.json"],
            f"one card, but the rows are from NVIDIA A100-SXM4-80GB, {CARD}; select one with --card",
        ),
        (["merge", "/nowhere/x.sqlite"], "/nowhere/x.sqlite does not exist"),
        (["import", "/nowhere/x.jsonl"], "No such file or directory: '/nowhere/x.jsonl'"),
        (["import", __file__], "line 1: not JSON"),
        (["show", "--table", __file__], "test_cli.py is not a tuning table: not JSON"),
        (["show", "--table", __file__, "--all"], "leave out --all"),
    ],
    ids=lambda v: " ".join(v[:2]) if isinstance(v, list) else "",
)
def test_what_a_user_gets_wrong_is_one_line(file: Path, arguments: list[str], words: str) -> None:
    database = [] if "--table" in arguments else ["--database", file]
    done = tune(*arguments, *database)
    assert done.code == 1
    assert re.fullmatch(r"error: .+\n", done.err), done.err
    assert words in done.err


def test_without_a_database_it_says_what_makes_one(tmp_path: Path) -> None:
    for verb in (["show"], ["export"], ["freeze"]):
        done = tune(*verb, "--database", tmp_path / "none.sqlite")
        assert done.code == 1
        assert "does not exist; `tilewright tune OP ...` or `tilewright tune import` creates it" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--invariant",), ("--dry-run",)], ids=str)
def test_a_search_compiles_as_on_the_card(options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an op calls on its way takes its definition on meta tensors, unless they stand for a card's: nothing is compiled."""
    h100, seen, x = device_named("h100"), list[Any](), torch.empty(512, 512, dtype=torch.float16, device="meta")

    def search(task: Any, *args: Any, **kwargs: Any) -> Report:
        now = scope()
        assert now.card is not None
        choice = linear_op.choose(now.card, linear_op.problem(x, x, None, "none", None))
        seen.append((now.card.name, now.invariant, choice.impl.name))
        return Report(task=task)

    def plan(task: Any, **kwargs: Any) -> Plan:
        search(task)
        return Plan(task=task, first=[], rest=[], dropped=Counter())

    monkeypatch.setattr(tune_op, "_device", lambda *args: h100)
    monkeypatch.setattr("tilewright.tune.search.search", search)
    monkeypatch.setattr("tilewright.tune.search.planned", plan)
    assert tune("softmax", "M=512", "N=512", "--database", tmp_path / "t.sqlite", *options).code == (
        0 if "--dry-run" in options else 1
    )
    [(card, invariant, impl)] = seen
    assert (card, invariant) == (h100.name, "--invariant" in options)
    assert impl != "reference"
    assert scope().card is None
