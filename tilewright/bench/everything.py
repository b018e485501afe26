"""`tilewright bench all`: every group of `bench.plan` into one folder, resumable, within a budget of time.

Each group is a separate process with the command that measures it alone: its file contains that command, a crash costs one
group, and memory is free again for the next. This process does not use the GPU. Files in the folder determine what is left, so
a killed run is continued by the same command, and rows that were written are not measured again.
"""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tilewright.bench.plan import Group
from tilewright.bench.provenance import environment
from tilewright.bench.results import rows_in, strangers

__all__ = ["Stopped", "command_of", "left_of", "measure", "table"]

_MARGIN_S = 5.0
"""Time kept free at the end of the budget, for the running process to end and for this one to report what is left."""
_PATIENCE_S = 20.0


class Stopped(Exception):
    """SIGTERM came."""


Say = Callable[[str], None]


@dataclass(frozen=True)
class Left:
    """The part of a group that is not measured yet."""

    rows: int
    """Missing rows; at least 1 as long as the file is incomplete."""
    seconds: float


def left_of(group: Group, folder: Path) -> Left:
    """The part of a group that is left to measure. Raises OSError, or ValueError if the file is not a result."""
    path = folder / f"{group.name}.json"
    if group.words[0] == "compare":
        rows = 0 if path.is_file() else 1
    else:
        found, whole = rows_in(path)
        rows = 0 if whole else max(1, group.rows - len(found))
    return Left(rows, group.seconds(rows))


def command_of(group: Group, folder: Path) -> list[str]:
    """The command of the process that measures a group, or the rest of it."""
    python, path = [sys.executable, "-m", "tilewright.cli"], str(folder / f"{group.name}.json")
    verb, *words = group.words
    if verb == "compare":
        return [*python, verb, *words, "--report", path]
    return [*python, verb, *words, "--out", path, "--resume"]


def table(groups: Sequence[Group], folder: Path) -> list[str]:
    """The plan as lines of text: for each group its rows so far, the expected seconds for the rest, and its command."""
    lines = []
    for group in groups:
        left = left_of(group, folder)
        state = f"{group.rows - min(left.rows, group.rows)} of {group.rows} rows"
        lines.append(f"{group.name:<26} {state:<18} {left.seconds:5.0f} s  tilewright {shlex.join(group.words)}")
    total = sum(left_of(group, folder).seconds for group in groups)
    return [*lines, f"{'all':<26} {'':<18} {total:5.0f} s, {total / 60:.1f} minutes as estimated for an H100 or H200"]


def measure(
    groups: Sequence[Group], folder: Path, say: Say, *, budget_s: float | None = None,
    command: Callable[[Group, Path], list[str]] = command_of,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Measure what is left of the groups.

    Args:
        budget_s: start no group that cannot write a row within this time, and end the running one when it is over; None: no
            limit.
        command: gives the command for a group.

    Returns:
        (names of the groups that failed, names of the groups for which there was not enough time).

    Raises:
        ValueError: the folder has results of other code or other versions, or a file that is not a result.
        OSError: the folder cannot be made.
        Stopped: SIGTERM was received; the running process was ended first. KeyboardInterrupt: the same for Ctrl-C.
    """
    folder.mkdir(parents=True, exist_ok=True)
    strange = strangers(folder, environment(card=False))
    if strange:
        raise ValueError(
            f"{strange[0]}; a folder contains results of a single version of the code, so set --out to another folder"
        )
    began, failed, waiting = time.monotonic(), [], []
    pending = [group for group in groups if left_of(group, folder).rows]
    clock = _Clock(sum(left_of(group, folder).seconds for group in pending))
    for number, group in enumerate(pending, 1):
        left = left_of(group, folder)
        rest_s = None if budget_s is None else budget_s - _MARGIN_S - (time.monotonic() - began)
        if rest_s is not None and rest_s < group.first_s:
            say(f"{group.name}: not started, because it needs {group.first_s:.0f} s and {max(0.0, rest_s):.0f} s are left")
            waiting.append(group.name)
            continue
        say(f"[{number}/{len(pending)}] {group.name}: {left.rows} rows, about {left.seconds:.0f} s; {clock.eta()}")
        started = time.monotonic()
        code = _run(command(group, folder), rest_s)
        clock.add(left.seconds, time.monotonic() - started)
        if not left_of(group, folder).rows:
            continue
        if code is None:
            say(f"{group.name}: stopped at the end of the budget; {left_of(group, folder).rows} rows are left")
            waiting.append(group.name)
        else:
            say(f"{group.name}: exit code {code}; {left_of(group, folder).rows} rows are left")
            failed.append(group.name)
    return failed, waiting


class _Clock:
    """Estimates how long the remaining groups take, from how long the first ones took."""

    def __init__(self, expected_s: float) -> None:
        self._left_s, self._expected_s, self._took_s = expected_s, 0.0, 0.0

    def add(self, expected_s: float, took_s: float) -> None:
        self._left_s -= expected_s
        self._expected_s += expected_s
        self._took_s += took_s

    def eta(self) -> str:
        pace = self._took_s / self._expected_s if self._expected_s else 1.0
        return f"about {self._left_s * pace / 60:.1f} minutes left in all"


def _run(words: list[str], limit_s: float | None) -> int | None:
    """Run a process and return its exit code, or None if it had to be ended. It does not outlive this call."""
    process = None
    with _sigterm_raises():
        try:
            process = subprocess.Popen(words)
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process is not None:
                _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
