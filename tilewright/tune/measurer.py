"""Controls a measuring process: sends it jobs, and gets an answer for each candidate, even if the process dies.

The process that uses this module is the leader. If a candidate kills the measuring process, or if there is no output for longer
than the limit, this is the candidate's result ("crash", "timeout"), and a new process continues with the rest. The leader
itself never uses the GPU.

The process is any command that follows the protocol of `tilewright.tune.worker`.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from tilewright.tune.measure import Timing
from tilewright.tune.record import Environment

__all__ = ["Job", "MeasureError", "Measured", "Measurer"]

_START_S = 180.0
"""Time to import torch and start CUDA."""
_PREPARE_S = 120.0
"""Time to make the arguments and the expected results."""
_DEATH_S = 60.0
"""Time for the driver to remove a killed process from the GPU."""


class MeasureError(OSError):
    """Nothing can be measured: the process does not start, or it ended for reasons other than a candidate."""


class Job(NamedTuple):
    """The problem on which candidates are measured."""

    op: str
    words: Sequence[str]
    """The dimensions, as words of a command line."""
    problem: str
    """The expected summary of the arguments: `record.problem_json`."""


class Measured(NamedTuple):
    """The result of one candidate."""

    status: str
    """One of `record.STATUSES`."""
    error: str = ""
    timing: Timing | None = None
    compiled: int = 0
    """Kernels that the measuring process had to compile itself although they should have been in the cache."""


@dataclass
class _Gone(Exception):
    status: str
    reason: str


class Measurer:
    """A measuring process and its successors; a context manager that ends it.

    Args:
        command: the command that starts one.
        limit_s: the longest time without output while a candidate runs, in seconds.
    """

    def __init__(self, command: Sequence[str], *, limit_s: float) -> None:
        self._command, self._limit_s = list(command), limit_s
        self.notes: list[str] = []
        """Messages of the process for the user."""
        self._start()

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def environment(self) -> Environment:
        """The environment of its measurements; waits until it has started. Raises MeasureError if it does not start."""
        if self._environment is None:
            try:
                self._environment = Environment(**self._hear(_START_S)["ready"])
            except _Gone as gone:
                raise MeasureError(
                    f"the measuring process does not start: it {gone.reason}; the command was {self._spelled}"
                ) from None
        return self._environment

    def measure(
        self, job: Job, candidates: Sequence[Mapping[str, Any]], best_us: float | None = None
    ) -> Iterator[tuple[int, Measured]]:
        """(index, answer) of every candidate {"impl", "config"}, as they arrive.

        Args:
            best_us: the best time found before; a candidate that is several times slower is timed only briefly.
        """
        waiting = dict(enumerate(candidates))
        while waiting:
            places, at = list(waiting), None
            try:
                for line in self._work(job, list(waiting.values()), best_us, turns=False):
                    if "begin" in line:
                        at = places[line["begin"]]
                    elif "end" in line:
                        at = None
                        place, answer = places[line["end"]], _measured(line)
                        del waiting[place]
                        if answer.timing is not None:
                            best_us = min(best_us or answer.timing.us, answer.timing.us)
                        yield place, answer
                        if not line["alive"]:
                            break
                else:
                    return
            except _Gone as gone:
                if at is None:
                    raise MeasureError(
                        f"{job.op} {' '.join(job.words)}: the measuring process {gone.reason} before a candidate ran"
                    ) from None
                del waiting[at]
                yield at, Measured(gone.status, gone.reason)
            self._end()
            self._start()

    def in_turns(self, job: Job, candidates: Sequence[Mapping[str, Any]]) -> list[Timing]:
        """Times of candidates that were measured before, timed alternately. Raises MeasureError if the process dies."""
        try:
            found = [line["turns"] for line in self._work(job, candidates, None, turns=True) if "turns" in line]
        except _Gone as gone:
            self._end()
            self._start()
            raise MeasureError(
                f"{job.op} {' '.join(job.words)}: the measuring process {gone.reason} while it compared the best in turns"
            ) from None
        return [Timing(*pair) for pair in found[0]]

    # ---- the process

    @property
    def _spelled(self) -> str:
        return " ".join(self._command)

    def _start(self) -> None:
        # A new session: Ctrl-C goes to the leader only, and ending the session ends everything that the process has started.
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._rest = b""
        self._lines: list[dict[str, Any]] = []
        self._environment: Environment | None = None

    def _end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # it died before it had read the whole job
                pipe.close()
        with suppress(ProcessLookupError):  # it has ended, with everything in its session
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            raise MeasureError(
                f"the measuring process {self._process.pid} was killed but does not end: the driver holds it, see nvidia-smi"
            ) from None

    def _work(
        self, job: Job, candidates: Sequence[Mapping[str, Any]], best_us: float | None, *, turns: bool
    ) -> Iterator[dict[str, Any]]:
        """The output lines of a job until it is done. Raises _Gone."""
        self.environment()
        asked = {**job._asdict(), "candidates": list(candidates), "best_us": best_us, "turns": turns}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        patience = _PREPARE_S + self._limit_s
        while "done" not in (line := self._hear(patience)):
            if "note" in line:
                self.notes.append(line["note"])
                continue
            patience = self._limit_s
            yield line

    def _hear(self, patience_s: float) -> dict[str, Any]:
        """The next line. Raises _Gone if there is none in time, MeasureError if the process reports that it cannot work."""
        assert self._process.stdout is not None
        until = time.monotonic() + patience_s
        while not self._lines:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise _Gone("timeout", f"sent no answer for {patience_s:g} s")
            read = os.read(self._process.stdout.fileno(), 1 << 20)
            if not read:
                raise self._died()
            *whole, self._rest = (self._rest + read).split(b"\n")
            self._lines += [json.loads(line) for line in whole]
        line = self._lines.pop(0)
        if "failed" in line:
            raise MeasureError(f"the measuring process cannot do its work: {line['failed']}")
        return line

    def _died(self) -> _Gone:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return _Gone("crash", "closed its output")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return _Gone("crash", how)


def _measured(line: Mapping[str, Any]) -> Measured:
    timing = None if line["us"] is None else Timing(line["us"], line["us_spread"])
    return Measured(line["status"], line["error"], timing, line["compiled"])
