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
"""Before the end of the budget, for a process to end in and for this one to say what is left."""
_PATIENCE_S = 20.0


class Stopped(Exception):
    """SIGTERM came."""


Say = Callable[[str], None]


@dataclass(frozen=True)
class Left:
    """What is left of a group."""

    rows: int
    """Rows that are not there yet; at least 1 while the file is not whole."""
    seconds: float


def left_of(group: Group, folder: Path) -> Left:
    """What is left to measure. Raises ValueError for a file that is no result, OSError."""
    path = folder / f"{group.name}.json"
    if group.words[0] == "compare":
        rows = 0 if path.is_file() else 1
    else:
        found, whole = rows_in(path)
        rows = 0 if whole else max(1, group.rows - len(found))
    return Left(rows, group.seconds(rows))


def command_of(group: Group, folder: Path) -> list[str]:
    """The words of the process that measures a group, or the rest of it."""
    python, path = [sys.executable, "-m", "tilewright.cli"], str(folder / f"{group.name}.json")
    verb, *words = group.words
    if verb == "compare":
        return [*python, verb, *words, "--report", path]
    return [*python, verb, *words, "--out", path, "--resume"]


def table(groups: Sequence[Group], folder: Path) -> list[str]:
    """The plan in lines: what is there, what is left, how long it should take, by which command."""
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
    """Measure what is left of the groups; (names of those that failed, names of those that are not whole for want of time).

    Args:
        budget_s: start nothing that cannot write a row within it, and end what runs when it is over; None: no end.
        command: of a group.

    Raises:
        ValueError: the folder holds results of other code or other versions, or a file that is none.
        OSError: the folder cannot be made.
        Stopped: SIGTERM came; what runs was ended first. KeyboardInterrupt likewise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    strange = strangers(folder, environment(card=False))
    if strange:
        raise ValueError(f"{strange[0]}; a set is of one code: give --out another folder")
    began, failed, waiting = time.monotonic(), [], []
    pending = [group for group in groups if left_of(group, folder).rows]
    clock = _Clock(sum(left_of(group, folder).seconds for group in pending))
    for number, group in enumerate(pending, 1):
        left = left_of(group, folder)
        rest_s = None if budget_s is None else budget_s - _MARGIN_S - (time.monotonic() - began)
        if rest_s is not None and rest_s < group.first_s:
            say(f"{group.name}: not begun, {max(0.0, rest_s):.0f} s of the budget are left and it needs {group.first_s:.0f}")
            waiting.append(group.name)
            continue
        say(f"[{number}/{len(pending)}] {group.name}: {left.rows} rows, about {left.seconds:.0f} s; {clock.eta()}")
        started = time.monotonic()
        code = _run(command(group, folder), rest_s)
        clock.add(left.seconds, time.monotonic() - started)
        if not left_of(group, folder).rows:
            continue
        if code is None:
            say(f"{group.name}: ended for want of time; {left_of(group, folder).rows} rows are left")
            waiting.append(group.name)
        else:
            say(f"{group.name}: exit code {code}; {left_of(group, folder).rows} rows are left")
            failed.append(group.name)
    return failed, waiting


class _Clock:
    """How long the rest should take, by how long the first groups took."""

    def __init__(self, expected_s: float) -> None:
        self._left_s, self._expected_s, self._took_s = expected_s, 0.0, 0.0

    def add(self, expected_s: float, took_s: float) -> None:
        self._left_s -= expected_s
        self._expected_s += expected_s
        self._took_s += took_s

    def eta(self) -> str:
        pace = self._took_s / self._expected_s if self._expected_s else 1.0
        return f"about {self._left_s * pace / 60:.1f} minutes to go in all"


def _run(words: list[str], limit_s: float | None) -> int | None:
    """The exit code of a process, None when it had to be ended. It does not outlive this call."""
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
