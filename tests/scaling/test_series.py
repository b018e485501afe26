"""Plans whose runs have options of their own, and series that are stopped by force."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.scaling.test_commands import scaling
from tilewright.scaling import Runs
from tilewright.scaling.budget_law import fit_budget_law
from tilewright.scaling.plan import plan, plan_widths, rates, read_plan, repeated
from tilewright.scaling.run import TABLE, done, run_plan
from tilewright.scaling.trainer import command_of

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "benchmarks/results/h200/studies/scaling-books-3"
EPOCH = 44.2e6
"""Tokens of the 360 books."""
WIDTHS = ("--hidden", "32,64,96,128,160,192,256,320", "--layers", "4", "--head-dim", "32", "--vocab", "4096")
RATES = ("--lr", "128:4e-3,512:1e-3")


def test_rates_are_interpolated_between_hidden_sizes() -> None:
    by_width = rates("128:4e-3,512:1e-3")
    assert [by_width(hidden) for hidden in (32, 128, 256, 512, 1024)] == [[4e-3], [4e-3], [2e-3], [1e-3], [1e-3]]
    assert rates("256:2e-3")(64) == [2e-3]
    assert rates("1e-3,2e-3")(64) == [1e-3, 2e-3]
    for text in ("", "x", "1e-3,64:2e-3", "0", "-1e-3", "64:inf", "1:2:3"):
        with pytest.raises(ValueError, match="wanted learning rates"):
            rates(text)


def test_a_plan_of_widths_keeps_what_is_near_and_read_once(tmp_path: Path) -> None:
    every = plan_widths(1e14, (64, 128, 256), budgets=2, ratio=4, vocab=4096, head_dim=32, layers=4)
    assert [run.shape.hidden for run in every.runs] == [64, 128, 256] * 2
    assert all(run.flops == pytest.approx(run.budget, rel=1e-3) for run in every.runs)
    few = plan_widths(1e14, (64, 128, 256), budgets=1, vocab=4096, head_dim=32, layers=4, max_tokens=1e7)
    assert [run.shape.hidden for run in few.runs] == [128, 256]
    twice = repeated(few, rates("1e-3,2e-3"), 2)
    assert len({run.name for run in twice.runs}) == 8
    assert {(run.options["lr"], run.options["seed"]) for run in twice.runs} == {(r, s) for r in (1e-3, 2e-3) for s in (0, 1)}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(twice.to_json()))
    assert read_plan(path) == twice
    for wrong, words in (((), "hidden sizes are"), ((48,), "multiples of the head dim 32")):
        with pytest.raises(ValueError, match=words):
            plan_widths(1e14, wrong, layers=4, head_dim=32)
    with pytest.raises(ValueError, match="no hidden size is left"):
        plan_widths(1e14, (64,), layers=4, head_dim=32, max_tokens=1e3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hidden", "64"), "needs --layers"),
        (("--hidden", "x", "--layers", "4"), "wanted hidden sizes"),
        (("--max-tokens", "1e6"), "--max-tokens needs --hidden"),
        (("--seeds", "0"), "wanted 1 to 1000"),
        (("--lr", "fast"), "wanted learning rates"),
    ],
)
def test_bad_arguments_of_a_plan_are_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    code, _, err = scaling("plan", "--budget", "1e20", *arguments)
    assert code == 1
    assert words in " ".join(err.split())


def test_options_of_runs_reach_the_trainer_and_are_checked_before_any_run(tmp_path: Path) -> None:
    made = repeated(read_plan(STUDY / "plan.json"), rates("3e-3"), 1)
    words = command_of(STUDY / "base.toml", made, [tmp_path])(made.runs[0], tmp_path)
    given = dict(zip(words[5::2], words[6::2]))
    assert given["--lr"] == "0.003"
    assert given["--seed"] == "0"
    assert given["--data"] == str(tmp_path)
    for options, reason in (
        ({"steps": 3}, "which the plan determines"),
        ({"momentum": 1}, "not a field"),
        ({"lr": -1.0}, "lr is -1"),
    ):
        rows = made.to_json()["runs"]
        rows[1]["options"] = options
        (tmp_path / "plan.json").write_text(json.dumps({**made.to_json(), "runs": rows}))
        with pytest.raises(ValueError, match=f"{made.runs[1].name} cannot be trained: .*{reason}"):
            command_of(STUDY / "base.toml", read_plan(tmp_path / "plan.json"))
    rows[1]["options"] = {"graphs": True}
    (tmp_path / "plan.json").write_text(json.dumps({**made.to_json(), "runs": rows}))
    with pytest.raises(ValueError, match="neither a number nor text"):
        read_plan(tmp_path / "plan.json")


def test_the_study_of_books_is_what_its_commands_make(tmp_path: Path) -> None:
    grid = ("--budget", "3.2e14", "--budgets", "5", "--ratio", "2", "--span", "4.5", "--max-tokens", "44e6", "--seeds", "2")
    several = ("--hidden", "128,256", *WIDTHS[2:], "--lr", "1e-3,2e-3,4e-3,8e-3")
    commands = {
        "plan.json": (*grid, *WIDTHS, *RATES, "--prior", STUDY / "prior.json"),
        "rates.json": ("--budget", "3.2e14", "--budgets", "1", *several),
    }
    for name, arguments in commands.items():
        code, _, err = scaling("plan", *arguments, "--out", tmp_path / name)
        assert code == 0, err
        assert read_plan(tmp_path / name) == read_plan(STUDY / name)


def test_the_study_of_books_can_be_trained_and_brackets_each_minimum() -> None:
    for name in ("plan.json", "rates.json"):
        command_of(STUDY / "base.toml", read_plan(STUDY / name))
    made = read_plan(STUDY / "plan.json")
    distinct = {(run.budget, run.params) for run in made.runs}
    budgets = sorted({budget for budget, _ in distinct})
    assert len(budgets) == 5
    assert len(distinct) >= 20
    assert len(made.runs) == 2 * len(distinct)
    assert all(run.tokens < EPOCH for run in made.runs)
    for budget in budgets:
        best = 0.72e6 * (budget / 4e13) ** 0.53  # of the two earlier series
        sizes = [params for b, params in distinct if b == budget]
        assert len(sizes) >= 4
        assert min(sizes) < best / 1.4
        assert max(sizes) > best * 2


@pytest.mark.parametrize("floor", [0.3, 0.5, 0.7, 0.85])
def test_the_study_of_books_predicts_within_one_per_cent_if_runs_scatter_like_the_earlier_ones(floor: float) -> None:
    made = read_plan(STUDY / "plan.json").runs
    params, tokens, flops = (np.array([getattr(run, name) for run in made], float) for name in ("params", "tokens", "flops"))
    # Lowest losses of 1.236 and 1.124 nats a byte at 4e13 and 3.2e14 FLOPs, as in the first series, whatever the floor.
    gamma = np.log((1.2364 - floor) / (1.1237 - floor)) / np.log(8)

    def lowest(c: np.ndarray) -> np.ndarray:
        return floor + (1.2364 - floor) * (c / 4e13) ** -gamma

    exact = lowest(flops) * np.exp(0.034 * np.log(params / 0.72e6 / (flops / 4e13) ** 0.53) ** 2)
    rng = np.random.default_rng(11)
    good = 0
    for _ in range(20):
        loss = exact * np.exp(rng.normal(0, 0.003, len(exact)))
        said, _ = fit_budget_law(Runs(params=params, tokens=tokens, flops=flops, loss=loss)).loss(2.56e15)
        good += abs(said / float(lowest(np.array(2.56e15))) - 1) < 0.01
    assert good >= 18


SERIES = """
import sys, time
from pathlib import Path
from tilewright.scaling.plan import plan
from tilewright.scaling.run import run_plan
folder = Path(sys.argv[1])
trainer = "import pathlib, sys, time\\nhere = pathlib.Path(sys.argv[1])\\n(here / 'began').touch()\\n" \\
    "while not (here.parent / 'go').exists(): time.sleep(0.02)\\n"
made = plan(1e15, budgets=1, sizes=3, vocab=1024, head_dim=32, tied=True)
run_plan(made, folder, lambda run, here: [sys.executable, "-c", trainer, str(here)], lambda here: 1.0, print)
"""


@pytest.mark.timeout(120)
def test_a_trainer_that_outlives_its_series_keeps_the_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    series = subprocess.Popen([sys.executable, "-c", SERIES, str(tmp_path)], env=environment)
    made = plan(1e15, budgets=1, sizes=3, vocab=1024, head_dim=32, tied=True)
    first = tmp_path / made.runs[0].name / "began"
    while not first.exists():
        assert series.poll() is None
        time.sleep(0.02)
    series.send_signal(signal.SIGKILL)
    series.wait()

    def again() -> Path:
        return run_plan(made, tmp_path, lambda run, here: [sys.executable, "-c", ""], lambda here: 1.0, lambda words: None)

    with pytest.raises(BlockingIOError, match="another process executes runs"):
        again()
    (tmp_path / "go").touch()
    while True:
        try:
            again()
            break
        except BlockingIOError:
            time.sleep(0.02)
    assert len(done(tmp_path / TABLE)) == 3
