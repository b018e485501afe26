"""Timing on a GPU, and what must stand beside every number.

A call is timed as part of a CUDA graph that runs it over several sets of arguments, so that neither launch gaps nor a warm L2
flatter it: the sets together are larger than any L2. Figures that are compared are measured in turns in one process.
"""

import json
import math
import platform
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from tilewright import __version__
from tilewright.hw.device import device_of

__all__ = ["Results", "environment", "interleaved_us"]

_ROTATE_BYTES = 512 << 20
_SETTLED_ROUNDS = 3


def environment() -> dict[str, Any]:
    """Device, driver and versions, as a result file must name them."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "tilewright": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cpu": platform.processor() or platform.machine(),
    }
    if torch.cuda.is_available():
        facts |= {"device": device_of(0).name, "cuda": torch.version.cuda, "driver": _driver(), "ptxas": _ptxas()}
    return facts


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    try:
        return pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()


def _ptxas() -> str:
    from triton import knobs

    text = subprocess.run([knobs.nvidia.ptxas.path, "--version"], capture_output=True, text=True, check=True).stdout
    return next(line for line in text.splitlines() if "release" in line).split("release ")[1].split(",")[0]


def _graph(call: Callable[[int], Any], sets: int, repeats: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Results are held for one rotation, or every call would write to the memory of the one before, which L2 absorbs.
    held: list[Any] = [None] * sets
    with torch.cuda.graph(graph, stream=stream):
        for i in range(sets * repeats):
            held[i % sets] = call(i % sets)
    return graph


def sets_for(call_bytes: int) -> int:
    """How many sets of arguments make a rotation larger than the L2."""
    return max(2, min(64, -(-_ROTATE_BYTES // max(1, call_bytes))))


def interleaved_us(
    calls: Sequence[Callable[[int], Any]], *, sets: int, rounds: int = 20, settle: float = 0.0
) -> list[tuple[float, float]]:
    """(median, spread) in microseconds of each call, measured in turns. `call(i)` runs on argument set i of `sets`.

    Each round has an order of its own, the same in every run: at the power limit a call's clock depends on what ran before it.
    Spread is half the distance between the 10th and the 90th percentile.

    Args:
        rounds: turns of each call, after two that are not counted. With `settle` there are three, all counted.
        settle: seconds that a call runs alone before it is timed, for a third as long (one replay at least), whenever its turn
            comes. At its power limit a card's clock follows a call over tenths of a second: in turns of milliseconds all calls
            have one clock, that of their mixture.
    """
    repeats = max(1, 16 // sets)
    graphs = [_graph(call, sets, repeats) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    turns, uncounted = (_SETTLED_ROUNDS, 0) if settle else (rounds + 2, 2)
    leads = [math.ceil(settle * 1e6 / _replays_us(graph, 1, 2)) if settle else 0 for graph in graphs]
    for turn in range(turns):
        for i in order.sample(range(len(graphs)), len(graphs)):
            us = _replays_us(graphs[i], leads[i], max(1, leads[i] // 3))
            if turn >= uncounted:
                times[i].append(us / (sets * repeats))
    return [(statistics.median(t), (sorted(t)[int(0.9 * len(t))] - sorted(t)[int(0.1 * len(t))]) / 2) for t in times]


def _replays_us(graph: torch.cuda.CUDAGraph, lead: int, timed: int) -> float:
    """Microseconds of a replay: the mean of `timed`, after `lead` that nobody times, one behind the other."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(lead):
        graph.replay()
    start.record()
    for _ in range(timed):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / timed


class Results:
    """A result file that is on the disk after every row: a run that is cut short leaves what it measured, marked "incomplete".

    Each writing replaces the file, so that a reader finds the one before it or the new one, whole; an older file stands until
    the first row is there. `finish` takes the mark away.
    """

    def __init__(self, path: Path | None, what: str) -> None:
        """`path`: the file, whose folder is made; None keeps the rows in memory alone. Raises OSError."""
        self.rows: list[dict[str, Any]] = []
        self._path, self._what, self._environment = path, what, {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._environment = environment()

    def keep(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take the rows as they come, the file written after each; returns all there are. Raises OSError."""
        for row in rows:
            self.rows.append(row)
            self.write()
        return self.rows

    def finish(self, **more: Any) -> None:
        """Write what goes beside the rows, and no mark. Raises OSError."""
        self.write(incomplete=False, **more)

    def write(self, *, incomplete: bool = True, **more: Any) -> None:
        """Write the rows as they are now. Raises OSError."""
        if self._path is None:
            return
        mark = {"incomplete": True} if incomplete else {}
        content = {"what": self._what, **mark, "environment": self._environment, **more, "rows": self.rows}
        path, text = self._path.resolve(), json.dumps(content, indent=1) + "\n"
        if path.exists() and not path.is_file():  # a pipe, a terminal: what is written there stays, so it gets the whole alone
            if not incomplete:
                path.write_text(text)
            return
        beside = path.with_name(path.name + ".part")
        beside.write_text(text)
        beside.replace(path)


def _command() -> str:
    """What was typed, as a shell takes it again: the command line tool, or a script of the repository."""
    program = Path(sys.argv[0])
    typed = ["python", f"scripts/{program.name}"] if program.parent.name == "scripts" else ["tilewright"]
    return shlex.join([*typed, *sys.argv[1:]])
