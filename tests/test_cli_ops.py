"""`tilewright ops` and `tilewright doctor`, and what commands say where an extra is missing."""

import json
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewright import __version__
from tilewright.cli import app
from tilewright.cli import doctor as verb
from tilewright.cli.doctor import Finding
from tilewright.extras import EXTRAS, MissingExtra, needed
from tilewright.hw.device import device_named
from tilewright.op import Inputs
from tilewright.ops import ALL
from tilewright.rl.environments.gym import ReasoningGym
from tilewright.rl.environments.math import grade

ROOT = Path(__file__).resolve().parent.parent
BLOCKED = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
sys.argv = ["tilewright", *sys.argv[2:]]
from tilewright.cli import main
main()
"""
"""Runs the command line as if some libraries were not installed."""


def without(libraries: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, libraries, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)


def test_all_operators_are_listed_with_what_a_card_has() -> None:
    done = CliRunner().invoke(app, ["ops", "--card", "h100", "--card", "rtx-4090", "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {op.name for op in ALL}
    assert all(len(row["what"]) > 10 for row in rows.values())
    linear = rows["linear"]["cards"]
    assert "sm90" in linear["H100 80GB"]
    assert "sm90" not in linear["RTX 4090"]
    assert "triton" in linear["RTX 4090"]


def test_each_operator_is_described_by_its_own_file() -> None:
    rows = json.loads(CliRunner().invoke(app, ["ops", "--card", "h100", "--json"]).output)
    unsaid = [row["name"] for row in rows if not row["what"] or row["what"].startswith("Operations, their implementations")]
    assert unsaid == []
    adamw = next(row for row in rows if row["name"] == "adamw")
    assert adamw["what"].startswith("AdamW over all tensors")


def test_a_listed_implementation_is_one_that_choose_may_take() -> None:
    done = CliRunner().invoke(app, ["ops", "softmax", "--card", "a100", "--json"])
    listed = {row["name"]: row["cards"]["A100 80GB"] for row in json.loads(done.stdout)}
    for op in (op for op in ALL if op.name in listed):
        for example in op.examples:
            choice = op.choose(device_named("a100"), op.problem(*example.make(Inputs())))
            assert choice.impl.name in listed[op.name]


def test_an_unknown_name_or_card_is_one_line() -> None:
    for words, told in ((["ops", "sofmax"], "'sofmax'"), (["ops", "--card", "h10"], "did you mean")):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 1
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_doctor_finds_this_machine_well() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert done.exit_code == 0, done.stdout
    assert found["kernels, cpu"]["state"] == "ok"
    assert all(finding["advice"] for finding in found.values() if finding["state"] == "missing")


def test_doctor_fails_where_something_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "TESTED", {"torch": ((99, 0), (99, 1)), "triton": ((0, 1), (0, 2))})
    monkeypatch.setattr(verb, "CHECKS", (verb._versions,))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "broken   torch" in done.stdout
    assert "missing  triton" in done.stdout


def test_doctor_sees_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright import ops

    right = ops.linear
    monkeypatch.setattr(ops, "linear", lambda x, weight: right(x, weight) * 1.01)
    assert next(verb._run()).state == "broken"


def test_doctor_names_the_extra_of_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "find_spec", lambda name: None if name in ("uvicorn", "tokenizers") else object())
    found = {finding.what: finding for finding in verb._extras()}
    assert found["extra serve"] == Finding(
        "extra serve", "missing", "without uvicorn", "for `tilewright serve`: pip install 'tilewright[serve]'"
    )
    assert found["extra llm"].state == "missing"
    assert found["extra hub"].state == "ok"


EVERY = ",".join([*dict.fromkeys(chain(*EXTRAS.values())), "starlette", "transformers"])


@pytest.mark.parametrize(
    ("libraries", "words", "extra"),
    [
        (EVERY, ("serve", "bookworm"), "serve"),
        (EVERY, ("run", "--prompt", "hi"), "llm"),
        ("huggingface_hub", ("run", "Qwen/Qwen3-0.6B", "--prompt", "hi"), "hub"),
        (EVERY, ("compare", "--model", "tabular_mlp", "--ours", "onnxruntime", "--baseline", "eager", "--whole"), "compare"),
    ],
)
def test_a_missing_extra_is_one_sentence(libraries: str, words: tuple[str, ...], extra: str) -> None:
    done = without(libraries, *words)
    assert done.returncode == 1
    assert f"pip install 'tilewright[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_data_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n')
    recipe = '[[input]]\npaths = ["in.jsonl"]\n[tokens]\ntokenizer = "tokenizer.json"\nend_of_text = "</s>"\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    done = without(EVERY, "data", "clean", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: tokenizers is not installed: pip install 'tilewright[data]'\n"


@pytest.mark.parametrize("task", ["math", "gym"])
def test_tasks_of_rl_name_what_is_missing(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in EXTRAS["rl"]:
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, f"{library}.factory", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'tilewright\[rl\]'"):
        ReasoningGym("basic_arithmetic") if task == "gym" else grade(r"\boxed{1/2}", "0.5")


def test_a_library_that_a_library_needs_is_the_one_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_one.py").write_text("import inner_one.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra, match=r"inner_one is not installed: pip install 'tilewright\[data\]'"):
        needed("outer_one", "data")


def test_every_extra_is_known_to_doctor() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for_users = set(project["optional-dependencies"]) - {"all", "docs", "test", "dev"}
    assert for_users == set(EXTRAS) == set(verb.FOR)


def test_operators_need_no_extra() -> None:
    done = without(EVERY, "ops", "attention", "--json")
    assert done.returncode == 0, done.stderr


def test_the_version_stands_in_one_place() -> None:
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
