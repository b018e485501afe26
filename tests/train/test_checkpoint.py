"""Checkpoints by themselves: a full disk, what is whole, and nothing that a user has to read."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewright.train.checkpoint import Checkpoints


@pytest.mark.parametrize("by", ["Checkpoints", "ShardedCheckpoints"])
@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, asynchronous: bool, by: str) -> None:
    """/dev/full would not do: DCP names its files itself. A limit on the size of files fails like a disk."""
    script = f"""
import resource, signal, torch
from pathlib import Path
from tilewright.parallel.ranks import ALONE
from tilewright.train.checkpoint import Checkpoints, load
from tilewright.train.sharded import ShardedCheckpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if {by!r} == "Checkpoints":
    made = Checkpoints(Path({str(tmp_path)!r}), 1, {asynchronous})
    save = made.save
else:
    made = ShardedCheckpoints(Path({str(tmp_path)!r}), 1, {asynchronous}, ALONE)
    save = lambda step, tensors, state, config: made.save_shards(step, tensors, {{}}, state, config)
state = {{"a": torch.arange(100.0)}}
assert save(1, state, {{"step": 1}}, "") is None and made.finish() is None
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
words = save(2, {{"a": torch.zeros(100_000)}}, {{"step": 2}}, "") or made.finish()
print(words)
print(sorted(path.name for path in Path({str(tmp_path)!r}).iterdir()))
print(torch.equal(load(made.latest(), state)[0]["a"], state["a"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    words, names, equal = done.stdout.splitlines()
    assert words.startswith("checkpoint step-00000002 could not be written (")
    assert "step-00000001 is kept" in words
    assert (names, equal) == ("['step-00000001']", "True")


def test_only_whole_checkpoints_count_and_old_ones_go(tmp_path: Path) -> None:
    made = Checkpoints(tmp_path, 2, True)
    (tmp_path / "step-00000009.partial").mkdir()
    assert made.latest() is None
    for step in (1, 2, 3):
        made.save(step, {"a": torch.ones(3)}, {}, "")
    made.finish()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003", "step-00000009.partial"]
    assert made.latest() == tmp_path / "step-00000003"


def test_saving_and_loading_in_one_process_warn_of_nothing(tmp_path: Path) -> None:
    """In a process of its own: pytest's filters would hide what a user sees."""
    script = f"""
import torch
from pathlib import Path
from tilewright.train.checkpoint import Checkpoints, load
made = Checkpoints(Path({str(tmp_path)!r}), 1, True)
assert made.save(1, {{"a": torch.ones(3)}}, {{}}, "") is None and made.finish() is None
load(made.latest(), {{"a": torch.zeros(3)}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
