"""Computes rewards in separate processes, within limits of time and memory. A failure affects only the sample concerned.

The processes exchange lines of JSON with this process. A process that does not answer in time is killed and replaced. This
process is not affected.
"""

import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from tilewright.rl.environments.base import Task

__all__ = ["Workers"]

_START_S = 120.0
_LONGEST_LINE = 1 << 20


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    selector: selectors.BaseSelector
    ready: bool = False
    job: int | None = None
    until: float = 0.0
    buffer: bytearray = field(default_factory=bytearray)

    def pipe(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


class Workers:
    """`count` processes that score answers in the environment named by `spec` (see `named.environment`).

    `failures` counts the answers without a reward by reason: "time", "memory", "raised", "died", "not finite". `last_error` is
    the text of the last exception. Use as a context manager: leaving it ends the processes.
    """

    def __init__(self, spec: str, *, count: int = 2, timeout_s: float = 5.0, memory_bytes: int = 1 << 30) -> None:
        if not (1 <= count <= 1024 and 0 < timeout_s <= 3600 and 1 << 20 <= memory_bytes <= 1 << 40):
            raise ValueError(
                f"count is {count}, timeout_s is {timeout_s} and memory_bytes is {memory_bytes}; wanted 1 to 1024 "
                "workers, above 0 and up to 3600 s, and 1 MiB to 1 TiB"
            )
        self._command = [sys.executable, "-m", "tilewright.rl.environments.worker", spec, str(memory_bytes)]
        self._timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()
        self.failures: Counter[str] = Counter()
        self.last_error = ""
        self._workers = [self._start() for _ in range(count)]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            self._end(worker)
        self._selector.close()

    def score(self, tasks: Sequence[Task], answers: Sequence[str]) -> list[float | None]:
        """The reward of each answer. None for an answer without a reward; the reason is counted in `failures`.

        Raises:
            ValueError: the environment cannot be loaded, or loading takes more than two minutes. The worker prints the reason
                to stderr.
        """
        replies = self._run([{**_plain(task), "answer": answer} for task, answer in zip(tasks, answers, strict=True)])
        return [None if reply is None else self._reward(reply) for reply in replies]

    def reply(self, tasks: Sequence[Task], answers: Sequence[Sequence[str]]) -> list[str | None]:
        """The reply of a `MultiTurn` environment in each conversation, given the answers so far. None ends the conversation. A
        failure is counted in `failures` and also gives None. Raises the same errors as `score`."""
        replies = self._run([{**_plain(task), "answers": list(said)} for task, said in zip(tasks, answers, strict=True)])
        return [None if reply is None else self._said(reply) for reply in replies]

    def _run(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """The result of each request; None for requests that took too long."""
        found: list[dict[str, Any] | None] = [None] * len(requests)
        waiting = list(range(len(requests)))[::-1]
        left = len(requests)
        while left:
            for worker in self._workers:
                if worker.ready and worker.job is None and waiting:
                    job = waiting.pop()
                    self._ask(worker, job, requests[job])
            now = time.monotonic()
            nearest = min((w.until for w in self._workers if w.job is not None or not w.ready), default=now)
            for key, _ in self._selector.select(max(0.0, nearest - now)):
                worker: _Worker = key.data
                job, reply = worker.job, self._read(worker)
                if reply is not None and job is not None:
                    found[job] = reply
                    left -= 1
            for place, worker in enumerate(self._workers):
                if (worker.job is not None or not worker.ready) and time.monotonic() >= worker.until:
                    if not worker.ready:
                        raise ValueError(f"a reward worker was not ready after {_START_S:g} s: {' '.join(self._command[1:])}")
                    left -= 1
                    self._replace(place, "time")
        return found

    def _start(self) -> _Worker:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        worker = _Worker(process, self._selector, until=time.monotonic() + _START_S)
        os.set_blocking(worker.pipe().fileno(), False)
        self._selector.register(worker.pipe(), selectors.EVENT_READ, worker)
        return worker

    def _ask(self, worker: _Worker, job: int, request: dict[str, Any]) -> None:
        worker.job, worker.until = job, time.monotonic() + self._timeout_s
        assert worker.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, which `_read` will notice
            worker.process.stdin.write(json.dumps(request).encode() + b"\n")
            worker.process.stdin.flush()

    def _read(self, worker: _Worker) -> dict[str, Any] | None:
        """A complete result, if there is one. A process that has ended, or that has written too long a line, is replaced."""
        part = worker.pipe().read(1 << 16)
        worker.buffer += part or b""
        line, end, rest = worker.buffer.partition(b"\n")
        if end:
            worker.buffer = rest
            if not worker.ready:
                worker.ready = True
                return None
            worker.job = None
            return json.loads(line)
        if part == b"" or len(worker.buffer) > _LONGEST_LINE:
            if not worker.ready:
                raise ValueError(
                    f"a reward worker ended before it was ready; its error is above: {' '.join(self._command[1:])}"
                )
            self._replace(self._workers.index(worker), "died" if worker.job is None else "")
            return {"error": "died"}
        return None

    def _reward(self, reply: dict[str, Any]) -> float | None:
        reward = reply.get("reward")
        if isinstance(reward, float) and math.isfinite(reward):
            return reward
        self.failures[reply.get("error", "not finite")] += 1
        self.last_error = reply.get("detail", self.last_error)
        return None

    def _said(self, reply: dict[str, Any]) -> str | None:
        if "error" in reply:
            self.failures[reply["error"]] += 1
            self.last_error = reply.get("detail", self.last_error)
            return None
        return reply["reply"]

    def _replace(self, place: int, reason: str) -> None:
        if reason:
            self.failures[reason] += 1
        self._end(self._workers[place])
        self._workers[place] = self._start()

    def _end(self, worker: _Worker) -> None:
        self._selector.unregister(worker.pipe())
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, 9)  # the worker's own session: this also ends processes that the reward has started
        worker.process.wait()
        for pipe in (worker.process.stdin, worker.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def _plain(task: Task) -> dict[str, Any]:
    return {"prompt": task.prompt, "data": dict(task.data)}
