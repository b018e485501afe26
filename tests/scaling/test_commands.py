"""The commands and the files they read: what is wrong with an input is one sentence; series of runs survive a crash."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import tilewright
from tests.scaling.tables import synthetic, write
from tilewright.cli import app
from tilewright.scaling import Columns, read_runs
from tilewright.scaling.law import Law
from tilewright.scaling.plan import Plan, PlannedRun, plan, read_plan
from tilewright.scaling.run import TABLE, done, run_plan
from tilewright.scaling.shapes import nearest_shape

HEADER = "params,tokens,flops,loss\n"


def table(noise: float = 0.001) -> list[str]:
    runs = synthetic(noise, np.random.default_rng(0))
    return [f"{n!r},{d!r},{c!r},{y!r}\n" for n, d, c, y in zip(*(getattr(runs, k).tolist() for k in HEADER.strip().split(",")))]


def scaling(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["scaling", *map(str, arguments)], prog_name="tilewright")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_fit_then_predict_then_plan(tmp_path: Path) -> None:
    data = write(tmp_path / "runs.csv", HEADER + "".join(table()))
    law, plots = tmp_path / "law.json", tmp_path / "plots"
    code, out, err = scaling("fit", data, "--bootstrap", "100", "--test", "hoffmann", "--out", law, "--plots", plots)
    assert code == 0, err
    assert "not rejected" not in out
    assert "is rejected" in out
    assert sorted(path.name for path in plots.iterdir()) == ["frontier.svg", "isoflop.svg", "residuals.svg"]
    assert all(path.read_text().startswith("<svg") for path in plots.iterdir())
    code, out, err = scaling("predict", law, "--flops", "1e21")
    assert code == 0, err
    assert "extrapolates 1.0 decades" in out
    code, out, err = scaling("predict", law, "--flops", "1e21", "--json")
    assert json.loads(out)["decades"] == pytest.approx(1.0)
    planned = tmp_path / "plan.json"
    code, out, err = scaling("plan", "--budget", "1e20", "--prior", law, "--out", planned, "--json")
    assert code == 0, err
    assert len(json.loads(out)["runs"]) == len(read_plan(planned).runs) == 25
    code, out, err = scaling("predict", law, "--plan", planned, "--json")
    fitted, row, run = Law(**json.loads(law.read_text())["law"]), json.loads(out)[3], read_plan(planned).runs[3]
    assert row["loss"] == pytest.approx(fitted.loss(run.params, run.tokens))
    assert row["loss_interval"][0] < row["loss"] < row["loss_interval"][1]
    code, out, err = scaling("predict", law, "--plan", planned)
    assert f"{run.name}: {run.params:.3g} parameters" in out
    for wrong in ((), ("--flops", "1e21", "--plan", planned)):
        code, _, err = scaling("predict", law, *wrong)
        assert code == 1
        assert "give either a budget with --flops or a plan with --plan" in " ".join(err.split())


def cut(lines: list[str], row: int, column: int, text: str) -> str:
    cells = lines[row].strip().split(",")
    cells[column] = text
    return HEADER + "".join([*lines[:row], ",".join(cells) + "\n", *lines[row + 1 :]])


ROWS = table()
BAD = {
    "zero": (cut(ROWS, 3, 3, "0"), "row 5, column 'loss': '0' is not a finite number above 0"),
    "nan": (cut(ROWS, 0, 3, "nan"), "row 2, column 'loss': 'nan' is not a finite number"),
    "infinite": (cut(ROWS, 0, 0, "inf"), "column 'params': 'inf'"),
    "negative": (cut(ROWS, 0, 1, "-5"), "column 'tokens': '-5'"),
    "word": (cut(ROWS, 0, 1, "many"), "column 'tokens': 'many'"),
    "short row": (HEADER + "".join(ROWS) + "1e9,1e10\n", "column 'flops': ''"),
    "does not have the columns": ("x,y,z\n1,2,3\n", "has the columns 'x', 'y', 'z'; it needs loss and two of"),
    "empty": ("", "has the columns none"),
    "header alone": (HEADER, "has 0 runs"),
    "few": (HEADER + "".join(ROWS[::8]), "there are only 5"),
    "two budgets": (HEADER + "".join(ROWS[:16]), "a trend over budgets needs at least 3 budgets, but the runs have 2"),
    "one size": (
        HEADER + "".join(f"1e9,{d},{6e9 * d},{3 + i / 10}\n" for i, d in enumerate([10.0**k for k in range(8, 18)])),
        "same parameters",
    ),
    "binary": ("\x00\x01\x02", "none was recognised|no CSV|has columns"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables_are_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    text, words = BAD[case]
    code, out, err = scaling("fit", write(tmp_path / "runs.csv", text))
    assert code == 1
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("Fitting")]
    assert len(lines) == 1, err
    import re

    assert re.search(words, lines[0]), lines[0]


def test_columns_have_other_names_or_are_given(tmp_path: Path) -> None:
    text = "Model Size,Training FLOP,final\n" + "".join(f"{r.split(',')[0]},{r.split(',')[2]},{r.split(',')[3]}" for r in ROWS)
    path = write(tmp_path / "runs.csv", text)
    with pytest.raises(ValueError, match=r"none was recognised for tokens, loss.*--loss-column"):
        read_runs(path)
    with pytest.raises(ValueError, match="has no column 'endloss' for loss; its columns are 'Model Size'"):
        read_runs(path, Columns(loss="endloss"))
    runs = read_runs(path, Columns(loss="final"))
    assert len(runs) == 40
    assert runs.flops_per_param_token == pytest.approx(6.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--drop-highest", "40"),
        ("--drop-highest", "-1"),
        ("--delta", "0"),
        ("--bootstrap", "-1"),
        ("--test", "1,2"),
        ("--test", "0,1,1,1,1"),
    ],
    ids=" ".join,
)
def test_bad_options_are_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code, _, err = scaling("fit", write(tmp_path / "runs.csv", HEADER + "".join(ROWS)), *arguments)
    assert code == 1
    assert "wanted" in err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "tilewright-scaling-law", "version": 2}', "\x00"])
def test_a_law_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    code, _, err = scaling("predict", write(tmp_path / "law.json", text), "--flops", "1e21")
    assert code == 1
    assert "is not a file that" in err


TRAINER = """
import json, pathlib, sys
folder, params, tokens = pathlib.Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
if (pathlib.Path(folder).parent / "fail").exists() and params > 2e6:
    sys.exit("no memory for this one")
count = folder / "calls"
count.write_text(str(1 + int(count.read_text() if count.exists() else 0)))
(folder / "loss").write_text(str(1.8 + 480 / params**.35 + 2100 / tokens**.37))
"""


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_series_goes_on_where_it_failed(jobs: int, tmp_path: Path) -> None:
    trainer = write(tmp_path / "trainer.py", TRAINER)
    made = plan(1e15, budgets=2, vocab=1024, head_dim=32, tied=True)
    folder = tmp_path / "series"
    folder.mkdir()
    write(folder / "fail", "")

    def command(run: PlannedRun, here: Path) -> list[str]:
        return [sys.executable, str(trainer), str(here), str(run.params), str(run.tokens)]

    def loss(here: Path) -> float:
        return float((here / "loss").read_text())

    said: list[str] = []
    with pytest.raises(ValueError, match=r"failed with exit code 1; the end of .*no memory for this one"):
        run_plan(made, folder, command, loss, said.append, jobs)
    before = done(folder / TABLE)
    assert len(before) < len(made.runs)
    assert before or jobs > 1
    (folder / "fail").unlink()
    # A crash in the middle of a row: what is cut off is made again.
    if before:
        with (folder / TABLE).open("a") as file:
            file.write(f"{made.runs[-1].name},1,2")
    run_plan(made, folder, command, loss, said.append, jobs)
    runs = read_runs(folder / TABLE)
    assert len(runs) == len(made.runs)
    assert sorted(runs.params.tolist()) == sorted(run.params for run in made.runs)
    assert runs.loss == pytest.approx(1.8 + 480 / runs.params**0.35 + 2100 / runs.tokens**0.37)
    once = made.runs if jobs == 1 else [run for run in made.runs if run.name in before]  # others were stopped on their way
    assert all((folder / run.name / "calls").read_text() == "1" for run in once)


WAITER = """
import pathlib, sys, time
folder, others = pathlib.Path(sys.argv[1]), sys.argv[2:]
(folder / "began").touch()
while others and not all((folder.parent / name / "began").exists() for name in others):
    time.sleep(0.02)
sys.exit("no memory for this one") if others else time.sleep(600)
"""


def test_runs_at_the_same_time_are_stopped_with_the_one_that_fails(tmp_path: Path) -> None:
    trainer = write(tmp_path / "trainer.py", WAITER)
    made = plan(1e15, budgets=1, sizes=3, vocab=1024, head_dim=32, tied=True)
    names = [run.name for run in made.runs]

    def command(run: PlannedRun, here: Path) -> list[str]:
        return [sys.executable, str(trainer), str(here), *(names[:2] if run.name == names[2] else [])]

    with pytest.raises(ValueError, match=f"{names[2]} failed with exit code 1.*no memory for this one"):
        run_plan(made, tmp_path, command, lambda _: 1.0, print, 3)
    assert not done(tmp_path / TABLE)
    with pytest.raises(ValueError, match="jobs is 0, wanted 1 or more"):
        run_plan(made, tmp_path, command, lambda _: 1.0, print, 0)


def test_two_series_in_one_folder_are_refused(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another process executes runs"):
            run_plan(plan(1e17, vocab=1024), tmp_path, lambda *_: [], lambda _: 1.0, print)


def test_a_missing_scipy_names_the_extra(tmp_path: Path) -> None:
    data = write(tmp_path / "runs.csv", HEADER + "".join(ROWS))
    program = "import sys; sys.modules['scipy'] = None; from tilewright.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", program, "scaling", "fit", str(data)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert result.returncode == 1
    assert "pip install 'tilewright[scaling]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif("train" not in get_command(app).commands, reason="`tilewright train` is not there")  # pyright: ignore
@pytest.mark.timeout(300)
def test_a_plan_is_trained_and_goes_on(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog, and nobody knows why it does so. " * 40
    data = write(tmp_path / "text.jsonl", "".join(json.dumps({"text": text[i:] + text[:i]}) + "\n" for i in range(20)))
    base = write(
        tmp_path / "base.toml",
        f'data = ["{data}"]\neval_data = "{data}"\ntokenizer = "bookworm"\ndtype = "float32"\ndevice = "cpu"\nmicro_rows = 2\n'
        "lr = 1e-3\nwarmup = 1\neval_rows = 2\n",
    )
    vocab = json.loads((Path(tilewright.__file__).parent / "assets/bookworm/config.json").read_text())["vocab_size"]
    shapes = [nearest_shape(size, vocab, tied=True, head_dim=16) for size in (1, 2 * 32 * vocab)]
    runs = [
        PlannedRun(name=f"r{i}", budget=1e9, flops=512 * s.train_flops(64), params=s.params, tokens=512, shape=s)
        for i, s in enumerate(shapes)
    ]
    plan_file = write(tmp_path / "plan.json", json.dumps(Plan(sequence=64, runs=tuple(runs)).to_json()))
    code, out, err = scaling("run", plan_file, base, "--out", tmp_path / "series")
    assert code == 0, err
    table = read_runs(Path(out.strip()))
    assert table.params.tolist() == [run.params for run in runs]
    assert all(0.5 < loss < 10 for loss in table.loss)
    before = (tmp_path / "series" / TABLE).read_text()
    code, out, err = scaling("run", plan_file, base, "--out", tmp_path / "series")
    assert code == 0, err
    assert err.count("already done") == 2
    assert (tmp_path / "series" / TABLE).read_text() == before
