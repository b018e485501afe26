"""Ranks that die: the launcher names them and ends the others, and so do the others where there is no launcher."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from typer.testing import CliRunner

from tests.awake import awake_s
from tests.parallel.runs import config_of, log_of, write_books
from tests.server.tiny_model import write_tiny_model
from tilewright.cli import app
from tilewright.hw.env import Launched, launched, variables_of_rank
from tilewright.parallel.launch import run_ranks
from tilewright.parallel.watch import Watch
from tilewright.train.config import merged, read_toml
from tilewright.train.loop import Summary
from tilewright.train.main import train


@pytest.mark.parametrize(
    ("end", "words"),
    [("os.kill(os.getpid(), 9)", "rank 1 of 3 was ended by SIGKILL"), ("sys.exit(3)", "rank 1 of 3 ended with exit code 3")],
)
def test_the_launcher_ends_all_when_one_ends_badly(end: str, words: str, tmp_path: Path) -> None:
    program = f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(600)"
    said: list[str] = []
    start = awake_s()
    with pytest.raises(ChildProcessError, match=words):
        run_ranks([sys.executable, "-c", program], 3, said.append)
    assert awake_s() - start < 30
    assert said == [f"{words}; ending the others"]


def test_the_launcher_tells_each_rank_its_place(tmp_path: Path) -> None:
    program = f"import os; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    run_ranks([sys.executable, "-c", program], 3, print)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "3", "1": "3", "2": "3"}


def test_a_place_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Launched(rank=1, world=4, local_rank=1, address="127.0.0.1", port=1234)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, variables_of_rank(place)[name])
    assert launched() == place
    monkeypatch.setenv("MASTER_PORT", "frog")
    with pytest.raises(ValueError, match="as torchrun sets them"):
        launched()
    monkeypatch.delenv("RANK")
    assert launched() is None


class Store:
    """Where ranks meet, and watches of two of them."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self.store.port

    def watch(self, rank: int, **more: Any) -> Watch:
        return Watch("127.0.0.1", self.port, rank, 2, grace_s=600, every_s=0.05, silent_s=1.0, **more)


def test_a_rank_that_falls_silent_is_named() -> None:
    meeting = Store()
    first = meeting.watch(0)
    meeting.store.set("alive/1", "7")
    assert "rank 1 is gone" in (first.verdict(30) or "")
    first.stop()


def test_a_rank_that_dies_before_its_first_check_is_named() -> None:
    meeting = Store()
    first = meeting.watch(0)
    dead = Watch("127.0.0.1", meeting.port, 1, 2, grace_s=600, every_s=600, silent_s=600)  # nothing comes of it for ten minutes
    assert "rank 1 is gone" in (first.verdict(30) or "")
    first.stop()
    dead.stop()


@pytest.mark.long
def test_ranks_that_were_all_stopped_do_not_take_each_other_for_gone() -> None:
    """Stopped for three times as long as a rank may be silent; the second one goes on a little later than the first."""
    program = """
import sys
from tilewright.parallel.watch import Watch
watch = Watch("127.0.0.1", int(sys.argv[1]), int(sys.argv[2]), 2, grace_s=600, every_s=0.1, silent_s=1.0)
for _ in sys.stdin:
    print(watch.verdict(1.0), flush=True)
"""
    meeting = Store()
    commands = [[sys.executable, "-c", program, str(meeting.port), str(rank)] for rank in range(2)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands]

    def verdicts() -> list[str]:
        for rank in both:
            print(file=rank.stdin, flush=True)
        return [rank.stdout.readline() for rank in both if rank.stdout]

    try:
        assert verdicts() == ["None\n", "None\n"]
        for rank in reversed(both):
            rank.send_signal(signal.SIGSTOP)
            time.sleep(0.3)  # the first one has seen all that the second one wrote
        time.sleep(3)
        for rank in both:
            rank.send_signal(signal.SIGCONT)
            time.sleep(0.3)
        assert verdicts() == ["None\n", "None\n"]
    finally:
        for rank in both:
            rank.kill()


def test_a_rank_that_fails_says_why_to_the_others() -> None:
    meeting = Store()
    first, second = meeting.watch(0), meeting.watch(1)
    assert first.verdict(0.3) is None
    second.failed("no room")
    assert first.verdict(30) == "rank 1 failed: no room"
    first.stop()
    second.stop()


def test_a_rank_that_is_done_is_not_missed() -> None:
    meeting = Store()
    first, second = meeting.watch(0), meeting.watch(1)
    second.stop()
    assert first.verdict(2.5) is None
    first.stop()


def test_a_plan_is_checked_before_anything_starts(tmp_path: Path) -> None:
    model, books = write_tiny_model(tmp_path / "tiny"), write_books(tmp_path / "books.jsonl")
    command = ["train", "run", "--model", str(model), "--init", "random", "--data", str(books), "--device", "cpu"]
    command += ["--out", str(tmp_path / "run"), "--dtype", "float32", "--row-tokens", "48", "--micro-batches", "4"]
    for plan, words in (
        ("tp=3", "slices 3 does not divide the heads, 4"), ("pp=4", "more than the 2 layers"), ("dp=8", "does not divide"),
        ("frog=1", "has no option 'frog'"), ("dp=2,zero=7", "wanted 0, 1, 2 or 3"),
    ):  # fmt: skip
        result = CliRunner().invoke(app, [*command, "--parallel", plan])
        assert result.exit_code == 1
        assert words in result.stderr
        assert not (tmp_path / "run").exists()
    result = CliRunner().invoke(app, [*command, "--parallel", "dp=2,tp=2", "--nodes", "2"])
    assert "torchrun --nnodes 2 --nproc-per-node 2" in result.stdout
    assert 'parallel = "dp=2,tp=2"' in result.stdout
    assert CliRunner().invoke(app, [*command, "--parallel", "dp=2,tp=2", "--nodes", "3"]).exit_code == 1


def _train(config: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilewright.cli", "train", "run", str(config), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, **more)


def _here(config: Path) -> tuple[Summary, list[str]]:
    """(how the run ended, what it said) by this process."""
    said: list[str] = []
    return train(merged(read_toml(config), {}), say=said.append), said


def test_a_run_in_slices_and_chunks_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    wanted, _ = _here(config_of(tmp_path, "one", parallel="slices=2,chunks=1"))
    config = config_of(tmp_path, "two", parallel="slices=2")
    assert _here(config)[0] == wanted
    for name in ("step-00000004", "model"):
        (tmp_path / "two" / name).rename(tmp_path / f"old-{name}")
    _, said = _here(config)
    assert "continuing after step 2" in said
    assert log_of(tmp_path / "two") == log_of(tmp_path / "one")
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]
    with pytest.raises(ValueError, match="parallel was slices=2 and is now undivided"):
        _here(config_of(tmp_path, "two"))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_goes_on_under_another_plan_with_the_same_bits(tmp_path: Path) -> None:
    wanted, _ = _here(config_of(tmp_path, "one", parallel="slices=2"))
    found = _train(config_of(tmp_path, "two", parallel="tp=2,sp"))
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == asdict(wanted)
    assert log_of(tmp_path / "two") == log_of(tmp_path / "one")
    whole = (tmp_path / "one" / "model" / "model.safetensors").read_bytes()
    assert (tmp_path / "two" / "model" / "model.safetensors").read_bytes() == whole

    # Back to the checkpoint in the middle, and from there by one process.
    for name in ("step-00000004", "model"):
        (tmp_path / "two" / name).rename(tmp_path / f"old-{name}")
    _, said = _here(config_of(tmp_path, "two", parallel="slices=2"))
    assert "continuing after step 2" in said
    assert log_of(tmp_path / "two") == log_of(tmp_path / "one")
    assert (tmp_path / "two" / "model" / "model.safetensors").read_bytes() == whole
    with pytest.raises(ValueError, match="parallel was slices=2 and is now undivided"):
        _here(config_of(tmp_path, "two"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", ["pp=2,dp=2", "dp=4,zero=3"])
def test_a_run_goes_on_by_four_ranks_with_the_same_bits(tmp_path: Path, plan: str) -> None:
    for name in ("one", "two"):
        _here(config_of(tmp_path, name))
    for name in ("step-00000004", "model"):
        (tmp_path / "two" / name).rename(tmp_path / f"old-{name}")
    again = _train(config_of(tmp_path, "two", parallel=plan))
    assert "continuing after step 2" in again.stderr, again.stderr
    assert log_of(tmp_path / "two") == log_of(tmp_path / "one")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_whose_ranks_are_all_killed_goes_on_with_the_same_bits(tmp_path: Path, after: int) -> None:
    more = {"steps": 8, "save_every": 1, "optimizer": "adamw"}
    _here(config_of(tmp_path, "one", **more))
    config = config_of(tmp_path, "two", parallel="dp=2,zero=3", **more)
    command = [sys.executable, "-m", "tilewright.cli", "train", "run", str(config)]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as run:
        while not list((tmp_path / "two").glob(f"step-*{after}")) and run.poll() is None:
            time.sleep(0.005)  # the next checkpoint is being written, or soon will be
        os.killpg(run.pid, signal.SIGKILL)
    assert not (tmp_path / "two" / "model").exists(), "it was killed too late: then this compares nothing"
    again = _train(config_of(tmp_path, "two", parallel="dp=2,zero=1", **more))
    assert again.returncode == 0, again.stderr
    assert "continuing after step" in again.stderr
    assert log_of(tmp_path / "two") == log_of(tmp_path / "one")
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_killed_rank_ends_a_run_within_half_a_minute_and_is_named(tmp_path: Path) -> None:
    """Without our launcher, as on several machines: each rank has to notice by itself."""
    config = config_of(tmp_path, "run", parallel="dp=4", steps=100000, save_every=100000)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "tilewright.cli", "train", "run", str(config)]
    ranks = []
    for rank in range(4):
        place = Launched(rank=rank, world=4, local_rank=rank, address="127.0.0.1", port=store.port)
        ranks.append(subprocess.Popen(command, env=variables_of_rank(place), stderr=subprocess.PIPE, text=True))
    try:
        log, deadline = tmp_path / "run" / "log.jsonl", awake_s() + 300
        while not log.exists() or not log.read_bytes():
            assert awake_s() < deadline
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.1)
        os.kill(ranks[2].pid, signal.SIGKILL)
        start = awake_s()
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert awake_s() - start < 30
        assert all("rank 2 is gone" in said[rank] and ranks[rank].returncode == 1 for rank in (0, 1, 3)), said
    finally:
        for rank in ranks:
            rank.kill()


def test_a_launcher_that_is_gone_is_noticed() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    watch = Watch("127.0.0.1", port, 0, 2, grace_s=600, every_s=0.05, silent_s=5.0)
    del store
    assert "launcher" in (watch.verdict(60) or "")
    watch.stop()
