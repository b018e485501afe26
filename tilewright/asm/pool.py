"""Runs many tasks on a few processes, each with a time limit, because a compiler may take minutes, hang, or crash.

`run_limited` forks its workers, so a task may be any closure over objects of this process; only the number of the task and its
result, which must be JSON, are transferred. A task that runs out of time is killed with all processes that it has started (such
as ptxas). One that crashes ends only its worker. Both are results, not errors.

Not for work on a GPU: a forked process cannot use a CUDA context of its parent.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

__all__ = ["Outcome", "run_limited"]

_FORK = get_context("fork")
_TASKS_A_WORKER = 200  # a process that has compiled 600 kernels holds 800 MB of them


class Outcome(NamedTuple):
    """How one task ended."""

    task: int
    value: Any
    """The task's result as JSON values; None if it did not return."""
    error: str | None
    """The reason why there is no value: the time limit, or how its process ended."""


class _Worker:
    """One process and its present task."""

    def __init__(self, work: Callable[[int], Any]):
        self.pipe, other = _FORK.Pipe()
        self.process: BaseProcess = _FORK.Process(target=_serve, args=(work, other, self.pipe), daemon=True)
        self.process.start()
        other.close()
        self.task: int | None = None
        self.until = float("inf")
        self.done = 0

    def begin(self, task: int, limit_s: float) -> None:
        self.task, self.until = task, time.monotonic() + limit_s
        self.done += 1
        self.pipe.send_bytes(json.dumps(task).encode())

    def end(self) -> None:
        """Kill the process and all processes that it started. Does nothing if it is gone already."""
        if self.process.pid is not None and self.process.is_alive():
            # The process makes its own group in its first line, before it can start other processes.
            own = os.getpgid(self.process.pid) == self.process.pid
            (os.killpg if own else os.kill)(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


def run_limited(work: Callable[[int], Any], tasks: int, *, workers: int, limit_s: float) -> Iterator[Outcome]:
    """`work(0)` to `work(tasks - 1)` on forked processes; outcomes in the order in which tasks end.

    Args:
        work: returns JSON values. An exception in it is a bug: its traceback goes to stderr, and the task's outcome says that
            the process ended.
        workers: number of processes at a time.
        limit_s: most wall-clock seconds for one task.
    """
    waiting = iter(range(tasks))
    team = [_Worker(work) for _ in range(min(workers, tasks))]
    try:
        for worker in team:
            worker.begin(next(waiting), limit_s)
        while busy := [worker for worker in team if worker.task is not None]:
            patience = max(0.0, min(worker.until for worker in busy) - time.monotonic())
            ready = wait([worker.pipe for worker in busy], patience)
            now = time.monotonic()
            for worker in busy:
                if worker.pipe in ready:
                    outcome, alive = _answer(worker)
                elif now >= worker.until:
                    outcome, alive = Outcome(_task(worker), None, f"took longer than {limit_s:g} s"), False
                else:
                    continue
                worker.task = None
                task = next(waiting, None)
                if task is not None:
                    if not alive or worker.done >= _TASKS_A_WORKER:
                        worker.end()
                        team[team.index(worker)] = worker = _Worker(work)
                    worker.begin(task, limit_s)
                yield outcome
    finally:
        for worker in team:
            worker.end()


def _task(worker: _Worker) -> int:
    assert worker.task is not None
    return worker.task


def _answer(worker: _Worker) -> tuple[Outcome, bool]:
    """(the outcome, whether its process can take another task)."""
    try:
        return Outcome(_task(worker), json.loads(worker.pipe.recv_bytes()), None), True
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Outcome(_task(worker), None, f"its process {how}"), False


def _serve(work: Callable[[int], Any], pipe: Connection, parents: Connection) -> None:
    """Run tasks in a worker process until the parent closes the pipe, which also happens if the parent dies."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parents.close()
    while True:
        try:
            task = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        pipe.send_bytes(json.dumps(work(task)).encode())
    sys.stdout.flush()
