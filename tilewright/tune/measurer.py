"""A measuring process, from the side of its leader: jobs out, one answer a candidate in, whatever happens to the process.

A candidate that kills the process, or says nothing for longer than the limit, is an answer too ("crash", "timeout"); the
process is then started anew and goes on with the rest. The leader itself never touches the GPU.

The process is any command that speaks as `tilewright.tune.worker` does.
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
"""To import torch and start CUDA."""
_PREPARE_S = 120.0
"""To make the arguments, and from them what the results must be."""
_DEATH_S = 60.0
"""For the driver to take a killed process off the GPU."""


class MeasureError(OSError):
    """Nothing can be measured: the process does not start, or not one candidate is to blame for its end."""


class Job(NamedTuple):
    """What candidates are measured on."""

    op: str
    words: Sequence[str]
    """Dimensions, as a command line has them."""
    problem: str
    """What the arguments have to be summarised as: `record.problem_json`."""


class Measured(NamedTuple):
    """What came of one candidate."""

    status: str
    """Of `record.STATUSES`."""
    error: str = ""
    timing: Timing | None = None
    compiled: int = 0
    """Kernels that the measuring process had to compile itself, which should have been in the cache."""


@dataclass
class _Gone(Exception):
    status: str
    reason: str


class Measurer:
    """A measuring process and its successors; a context manager that ends it.

    Args:
        command: starts one.
        limit_s: for how long a candidate may say nothing.
    """

    def __init__(self, command: Sequence[str], *, limit_s: float) -> None:
        self._command, self._limit_s = list(command), limit_s
        self.notes: list[str] = []
        """What the process wants its user to know."""
        self._start()

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def environment(self) -> Environment:
        """Under what it measures; waits until it has started. Raises MeasureError when it does not."""
        if self._environment is None:
            try:
                self._environment = Environment(**self._hear(_START_S)["ready"])
            except _Gone as gone:
                raise MeasureError(f"the measuring process does not start: {gone.reason}; it ran {self._spelled}") from None
        return self._environment

    def measure(
        self, job: Job, candidates: Sequence[Mapping[str, Any]], best_us: float | None = None
    ) -> Iterator[tuple[int, Measured]]:
        """(place, answer) of every candidate {"impl", "config"}, as they come.

        Args:
            best_us: what was found before; what is several times slower is timed but briefly.
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
        """Times of candidates that were measured before, taken in turns. Raises MeasureError when the process dies of it."""
        try:
            found = [line["turns"] for line in self._work(job, candidates, None, turns=True) if "turns" in line]
        except _Gone as gone:
            self._end()
            self._start()
            raise MeasureError(f"{job.op} {' '.join(job.words)}: the measuring process {gone.reason} in the turns") from None
        return [Timing(*pair) for pair in found[0]]

    # ---- the process

    @property
    def _spelled(self) -> str:
        return " ".join(self._command)

    def _start(self) -> None:
        # A session of its own: Ctrl-C is the leader's business, and ending it ends what it has started.
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._rest = b""
        self._lines: list[dict[str, Any]] = []
        self._environment: Environment | None = None

    def _end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # it died with a job half written
                pipe.close()
        with suppress(ProcessLookupError):  # it has ended, and everything in its session too
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            raise MeasureError(
                f"the measuring process {self._process.pid} was killed and does not end: the driver holds it, see nvidia-smi"
            ) from None

    def _work(
        self, job: Job, candidates: Sequence[Mapping[str, Any]], best_us: float | None, *, turns: bool
    ) -> Iterator[dict[str, Any]]:
        """The lines of a job until it is done. Raises _Gone."""
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
        """Its next line. Raises _Gone when there is none in time, MeasureError when it says that it cannot."""
        assert self._process.stdout is not None
        until = time.monotonic() + patience_s
        while not self._lines:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise _Gone("timeout", f"said nothing for {patience_s:g} s")
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
