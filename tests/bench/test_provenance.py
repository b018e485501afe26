"""What result files say of where they come from, and that files of two codes or cards are never taken for one."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.source import ROOT
from tilewright.asm.compile import compile_only
from tilewright.bench import op, provenance, results
from tilewright.bench.provenance import Commit, changed, chosen_kernels, commit, forget, package_hash, ran_by
from tilewright.bench.results import Results, joined, parts, rows_in
from tilewright.cli import bench
from tilewright.cli.root import app
from tilewright.hw import env
from tilewright.hw.device import device_named
from tilewright.kernels.softmax.softmax import softmax_op
from tilewright.op import on_card, prefer

HASH = "0123456789abcdef0123456789abcdef01234567"
HERE = {"commit": HASH, "dirty": False, "source": "1" * 16, "device": "NVIDIA H200", "torch": "2.11", "command": "tilewright x"}


def test_a_file_names_code_card_versions_date_and_command(tmp_path: Path) -> None:
    results = Results(tmp_path / "it.json", "a set")
    results.keep([{"us": 1.0}])
    results.finish()
    found = json.loads((tmp_path / "it.json").read_text())["environment"]
    for name in ("date", "command", "commit", "dirty", "source", "torch", "triton", "ptxas", "python"):
        assert name in found, name
    assert (found["torch"], found["source"]) == (torch.__version__, package_hash())
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode == 0:
        assert found["commit"] == head.stdout.strip()
        assert isinstance(found["dirty"], bool)


@pytest.mark.parametrize(
    ("here", "told", "wanted"),
    [
        (Commit(None, None), None, Commit(None, None)),
        (Commit(None, None), HASH, Commit(HASH, False)),
        (Commit(None, None), f"{HASH}-dirty", Commit(HASH, True)),
        (Commit(HASH, True), HASH[:9], Commit(HASH, True)),
        (Commit(HASH, False), "f" * 40, "checked out here"),
        (Commit(None, None), "main", "hex digits"),
    ],
)
def test_a_copy_without_its_history_is_told_its_commit(
    here: Commit, told: str | None, wanted: Commit | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_checked_out", lambda: here)
    monkeypatch.delenv("TILEWRIGHT_COMMIT", raising=False)
    if told is not None:
        monkeypatch.setenv("TILEWRIGHT_COMMIT", told)
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted):
            commit()
    else:
        assert commit() == wanted


def test_the_commit_of_a_copy_reaches_its_files_and_a_wrong_one_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_checked_out", lambda: Commit(None, None))
    monkeypatch.setenv("TILEWRIGHT_COMMIT", f"{HASH}-dirty")
    monkeypatch.setattr(bench, "need_gpu", lambda _: None)
    monkeypatch.setattr(op, "rows", lambda *_: iter([{"dims": "M=4 N=8", "us": 1.0}]))
    out = tmp_path / "softmax.json"
    words = ["bench", "softmax", "M=4", "N=8", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["environment"]
    assert (found["commit"], found["dirty"]) == (HASH, True)
    monkeypatch.setenv("TILEWRIGHT_COMMIT", "v1")
    wrong = CliRunner().invoke(app, words)
    assert (wrong.exit_code, "error: TILEWRIGHT_COMMIT is 'v1', wanted 7 to 40 hex digits" in wrong.output) == (1, True)


@pytest.mark.skipif(env.interpreting(), reason="the interpreter takes meta tensors for CPU tensors")
def test_a_row_has_the_kernels_that_it_ran() -> None:
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")

    def call() -> None:
        with on_card(device_named("h100")), prefer("triton"), compile_only(arch=90, jobs=1):
            softmax_op.run(x)

    ran = ran_by(call)
    assert list(ran) == ["softmax/triton"]
    assert len(ran["softmax/triton"]) == 16
    assert changed(ran) == []
    assert changed({**ran, "softmax/gone": "0" * 16}) == ["softmax/gone"]
    assert changed({"softmax/triton": "0" * 16}) == ["softmax/triton"]
    forget()
    assert chosen_kernels() == {}


# ---- going on with what another process began


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What this process is, to be changed by a test."""
    facts = dict(HERE)
    monkeypatch.setattr(results, "environment", lambda: dict(facts))
    return facts


def rows(*names: str) -> list[dict[str, Any]]:
    return [{"op": "softmax", "dims": name, "us": float(len(name))} for name in names]


def test_a_run_goes_on_in_a_part_of_its_own(tmp_path: Path, here: dict[str, Any]) -> None:
    path = tmp_path / "it.json"
    Results(path, "a set", resume=True).keep(rows("a", "b"))
    here["command"] = "tilewright x --resume"
    second = Results(path, "a set", resume=True)
    assert (second.before, second.whole) == (rows("a", "b"), False)
    second.keep(rows("b", "c"))
    second.finish()
    assert [file.name for file in parts(path)] == ["it.json", "it.2.json"]
    assert json.loads(path.read_text())["rows"] == rows("a", "b"), "the first process's file stays as it was"
    assert rows_in(path) == (rows("a", "b", "c"), True)
    third = Results(path, "a set", resume=True)
    third.finish()
    assert (third.whole, third.all_rows, len(parts(path))) == (True, rows("a", "b", "c"), 2)
    found = joined(tmp_path)["it"]
    assert (found["rows"], found["parts"], "incomplete" in found) == (rows("a", "b", "c"), 2, False)
    Results(path, "a set").keep(rows("d"))
    assert [file.name for file in parts(path)] == ["it.json"], "without --resume it starts anew"


CHANGES = {
    "commit": "f" * 40, "dirty": True, "source": "2" * 16, "device": "NVIDIA H100 80GB HBM3", "torch": "2.13",
    "command": "tilewright y",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_goes_on_with_other_code_or_another_card(name: str, tmp_path: Path, here: dict[str, Any]) -> None:
    path = tmp_path / "it.json"
    Results(path, "a set").keep(rows("a"))
    before, here[name] = path.read_text(), CHANGES[name]
    with pytest.raises(ValueError, match="use another"):
        Results(path, "a set", resume=True)
    assert path.read_text() == before
    if name != "command":  # nor does another file of the same folder
        with pytest.raises(ValueError, match="a single version of the code on one GPU"):
            Results(tmp_path / "other.json", "a set", resume=True)


def test_parts_of_two_codes_are_not_joined(tmp_path: Path, here: dict[str, Any]) -> None:
    path = tmp_path / "it.json"
    Results(path, "a set", resume=True).keep(rows("a"))
    Results(path, "a set", resume=True).finish()
    assert len(joined(tmp_path)["it"]["rows"]) == 1
    second = json.loads((tmp_path / "it.2.json").read_text())
    second["environment"]["driver"] = "600.1"
    (tmp_path / "it.2.json").write_text(json.dumps(second))
    with pytest.raises(ValueError, match=r"it\.2\.json has driver 600\.1, but it\.json has None, so they are not one result"):
        joined(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="continues a file that does not exist"):
        joined(tmp_path)


def test_resuming_asks_for_a_file() -> None:
    with pytest.raises(ValueError, match="--out"):
        Results(None, "a set", resume=True)


def test_only_what_is_missing_is_measured(tmp_path: Path, here: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(found: Any, wanted: Any, *_: Any) -> Any:
        for words in wanted:
            if len(measured) == 1 and not (tmp_path / "it.2.json").exists() and "N=8" not in words:
                raise KeyboardInterrupt
            measured.append(" ".join(words))
            yield {"op": found.name, "dims": " ".join(words), "us": 1.0, "ratio": 2.0}

    monkeypatch.setattr(bench, "need_gpu", lambda _: None)
    monkeypatch.setattr(op, "rows", measure)
    words = ["bench", "softmax", "--shapes", "M=4,N=8;M=4,N=9;M=4,N=10", "--resume", "--out", str(tmp_path / "it.json")]
    assert CliRunner().invoke(app, words).exit_code != 0
    assert measured == ["M=4 N=8"]
    measured[0] = "first"
    monkeypatch.setattr(op, "rows", lambda found, wanted, *_: ({"op": found.name, "dims": " ".join(w)} for w in wanted))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert [row["dims"] for row in json.loads((tmp_path / "it.2.json").read_text())["rows"]] == ["M=4 N=9", "M=4 N=10"]
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0
    assert len(parts(tmp_path / "it.json")) == 2
