"""`tilewright bench all`: the plan says what its commands measure, and a run that is cut short in whatever way goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.awake import awake_s
from tests.bench.fake_group import CRASH
from tilewright.bench import attention_8bit
from tilewright.bench.dims import find_op
from tilewright.bench.engine import WORKLOADS
from tilewright.bench.everything import Group, command_of, left_of, measure, table
from tilewright.bench.op import shapes_of
from tilewright.bench.ops import CASES
from tilewright.bench.plan import GROUPS, chosen
from tilewright.bench.provenance import environment
from tilewright.bench.results import parts, rows_in
from tilewright.bench.sets import PROJECTIONS, ROWS
from tilewright.cli import bench_all
from tilewright.cli.root import app
from tilewright.models import SHAPES

BY_NAME = {group.name: group for group in GROUPS}


# ---- the plan


def options(words: tuple[str, ...], name: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == name]


def counted(words: tuple[str, ...]) -> int:
    """The rows that a command measures."""
    verb, *rest = words
    plain = [word for word in rest if not word.startswith("-") and "=" not in word]
    if verb == "engine":
        assert rest[0] in SHAPES
        assert set(options(words, "-w")) <= set(WORKLOADS)
        return len(options(words, "-w")) * int(options(words, "--runs")[0])
    if verb == "ops":
        return len(CASES)
    if verb == "layers":
        formats = [word for word in plain if not word.replace(".", "").isdecimal()]
        return len(formats) * len(options(words, "--rows") or ROWS) * len(PROJECTIONS)
    if verb == "attention-8bit":
        return len(attention_8bit.shapes_of(["fp8"], None))
    shapes, named = ((options(words, name) or [None])[0] for name in ("--shapes", "--set"))
    return len(shapes_of(find_op(verb), [], shapes, named))


@pytest.mark.parametrize("name", [group.name for group in GROUPS if group.words[0] == "bench"])
def test_the_plan_counts_the_rows_of_its_commands(name: str) -> None:
    group = BY_NAME[name]
    assert group.rows == counted(group.words[1:])


@pytest.mark.parametrize("name", BY_NAME)
def test_commands_are_taken_by_the_command_line(name: str, tmp_path: Path) -> None:
    """With a word more than there is they are wrong usage, for that word alone."""
    _, _, _, *words = command_of(BY_NAME[name], tmp_path)
    found = CliRunner().invoke(app, [*words, "--no-such-option"])
    assert found.exit_code == 2
    assert "No such option: --no-such-option" in found.output


def test_all_fits_into_25_minutes_and_groups_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(GROUPS)
    assert sum(group.seconds(group.rows) for group in chosen(None)) < 25 * 60
    assert all(group.first_s < 240 for group in GROUPS), "what does not fit into a chunk of nine minutes would never be begun"


def test_where_the_files_go(tmp_path: Path) -> None:
    words = command_of(BY_NAME["conv"], tmp_path)
    assert words[3:] == ["bench", "conv", "--out", str(tmp_path / "conv.json"), "--resume"]
    assert command_of(BY_NAME["compare-resnet50-32-eager"], tmp_path)[-2:] == [
        "--report",
        f"{tmp_path}/compare-resnet50-32-eager.json",
    ]


def test_which_groups(tmp_path: Path) -> None:
    assert [group.name for group in chosen(["attention", "conv-transpose"])] == ["attention", "conv-transpose"]
    assert {group.words[1] for group in chosen(["engine"])} == {"engine"}
    assert all(group.extra for group in chosen(["compare"]))
    assert not any(group.extra for group in chosen(None))
    wrong = CliRunner().invoke(app, ["bench", "all", "--out", str(tmp_path), "--only", "convolution"])
    assert (wrong.exit_code, "there is no group 'convolution'" in wrong.output) == (1, True)


def test_dry_run(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["bench", "all", "--out", str(tmp_path / "none"), "--dry-run"])
    assert found.exit_code == 0
    assert "tilewright bench linear --set decode --against vendor" in found.output
    assert not (tmp_path / "none").exists()
    total = sum(group.seconds(group.rows) for group in chosen(None))
    assert f"{total / 60:.1f} minutes" in found.output.splitlines()[-1]


# ---- running it


def group(name: str, rows: int, row_s: float = 0.0, how: str = "", start_s: float = 0.0) -> Group:
    return Group(name=name, words=("bench", str(rows), str(row_s), how), rows=rows, start_s=start_s, row_s=row_s)


def fake(group: Group, folder: Path) -> list[str]:
    _, *words = group.words
    path, here = str(folder / f"{group.name}.json"), json.dumps(environment(card=False))
    return [sys.executable, "-m", "tests.bench.fake_group", path, here, *filter(None, words)]


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    groups, said = [group("a", 3), group("b", 2)], []
    assert measure(groups, tmp_path, said.append, command=fake) == ([], [])
    assert [line.partition(":")[0] for line in said] == ["[1/2] a", "[2/2] b"]
    was = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert measure(groups, tmp_path, said.append, command=fake) == ([], [])
    assert len(said) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == was
    assert "3 of 3 rows" in table(groups, tmp_path)[0]


def test_a_crash_costs_one_group_and_the_next_try_goes_on(tmp_path: Path) -> None:
    groups, said = [group("a", 3, how="crash"), group("b", 2)], []
    for left in (2, 1):
        assert measure(groups, tmp_path, said.append, command=fake) == (["a"], [])
        assert f"a: exit code {CRASH}; {left} rows are left" in said
    assert left_of(groups[1], tmp_path).rows == 0
    assert measure(groups, tmp_path, said.append, command=fake) == ([], [])
    assert len(parts(tmp_path / "a.json")) == 3
    rows, whole = rows_in(tmp_path / "a.json")
    assert ([row["dims"] for row in rows], whole) == (["M=0", "M=1", "M=2"], True)
    assert len({row["pid"] for row in rows}) == 3, "a file for each process"


def test_the_budget_ends_between_rows(tmp_path: Path) -> None:
    """7 s less the margin of 5."""
    groups, said = [group("slow", 400, 0.1), group("late", 1, 60.0)], []
    began = awake_s()
    failed, waiting = measure(groups, tmp_path, said.append, budget_s=7, command=fake)
    assert awake_s() - began < 7
    assert (failed, waiting) == ([], ["slow", "late"])
    assert any(line.startswith("late: not started") for line in said)
    found = len(rows_in(tmp_path / "slow.json")[0])
    assert 0 < found < 400
    assert left_of(groups[0], tmp_path).rows == 400 - found


KILLED = """
import sys
from pathlib import Path
from tests.bench.test_everything import fake, group
from tilewright.bench.everything import Stopped, measure
try:
    measure([group("a", 10000, 0.05)], Path(sys.argv[1]), print, command=fake)
except Stopped:
    print("stopped")
    sys.exit(143)
"""


def test_sigterm_ends_the_measuring_process_too(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True)
    path = tmp_path / "a.json"
    until = time.monotonic() + 100
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    pid = json.loads(path.read_text())["rows"][0]["pid"]
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "stopped" in told
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    rows = rows_in(path)[0]
    assert rows
    assert Counter(row["dims"] for row in rows).most_common(1)[0][1] == 1


def test_a_folder_of_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure([group("a", 1)], tmp_path, lambda line: None, command=fake)
    content = json.loads((tmp_path / "a.json").read_text())
    content["environment"]["commit"] = "f" * 40
    (tmp_path / "a.json").write_text(json.dumps(content))
    monkeypatch.setattr(bench_all, "need_gpu", lambda what: None)
    found = CliRunner().invoke(app, ["bench", "all", "--out", str(tmp_path)])
    assert (found.exit_code, f"has commit {'f' * 40}" in found.output) == (1, True)
