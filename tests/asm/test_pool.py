"""Tasks on processes with a time limit: answers, hangs, crashes."""

import os
import signal
import subprocess
import time

import pytest

from tilewright.asm.pool import run_limited


def work(task: int) -> object:
    match task:
        case 3:
            subprocess.run(["sleep", "60"])
        case 5:
            os.kill(os.getpid(), signal.SIGKILL)
        case 6:
            os._exit(3)
    return {"task": task, "pid": os.getpid()}


def test_outcomes() -> None:
    start = time.monotonic()
    found = {outcome.task: outcome for outcome in run_limited(work, 9, workers=2, limit_s=1.5)}
    assert time.monotonic() - start < 20
    assert sorted(found) == list(range(9))
    assert found[3].error == "took longer than 1.5 s"
    assert found[5].error == "its process was killed by SIGKILL"
    assert found[6].error == "its process ended with exit code 3"
    for task in (0, 1, 2, 4, 7, 8):
        assert found[task].error is None
        assert found[task].value["task"] == task
    assert {found[task].value["pid"] for task in (0, 1, 2, 4, 7, 8)}.isdisjoint({os.getpid()})


def test_no_process_outlives_the_loop() -> None:
    """Leaving the loop early ends the workers, and what they had started."""
    pids = []
    for outcome in run_limited(lambda task: os.getpid() if task == 0 else time.sleep(60), 2, workers=2, limit_s=60):
        pids.append(outcome.value)
        break
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_no_tasks() -> None:
    assert list(run_limited(work, 0, workers=2, limit_s=1)) == []
