"""Measures how long a launch takes on the current GPU: CUDA graphs with rotating arguments, medians, alternating comparisons.

A candidate is captured as a graph of several launches, each with its own set of arguments. All sets together are larger than
the L2 cache, so no launch finds data there that the preceding launch has left. As in a program that replays graphs, the time
includes the gap between two kernels, about 1 us, but no host time. The results of a set are kept until the set is used again;
otherwise every launch would write to the memory of the preceding one.

Not here: the list of candidates, and what happens if a candidate kills the process.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

__all__ = ["POLICY", "Stopwatch", "Timing", "sets_for"]

POLICY = "CUDA graph, arguments rotating over more than the L2, median"
"""How times are taken, for `Environment.policy`."""

_LONG_US = 400.0
"""If a launch takes longer than this, the graph contains each argument set only once."""
_LAUNCHES = 16
"""About the number of launches in a graph if they are shorter; at least one per argument set."""


class Timing(NamedTuple):
    """The time of one candidate."""

    us: float
    """Median, microseconds."""
    spread: float
    """Half the distance between the 10th and the 90th percentile, microseconds."""


def sets_for(call_bytes: int, l2_bytes: int) -> int:
    """The number of argument sets (2 to 64) that makes a rotation four times as large as the L2 cache."""
    return max(2, min(64, -(-4 * l2_bytes // max(1, call_bytes))))


class Stopwatch:
    """Times calls on the current device. All graphs share one stream and one memory pool, because new allocations take longer
    than most candidates. Only one thread may use it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        # As long as one graph exists, its pool keeps the memory of deleted graphs.
        self._keeper = torch.cuda.CUDAGraph()
        self._captured(self._keeper, lambda: torch.zeros(1, device="cuda"))

    def once(self, call: Callable[[int], Any]) -> tuple[Any, float]:
        """(the result of `call(0)`, microseconds). The first call compiles or loads kernels, so the second one is timed."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = call(0)
            start, end = _event(), _event()
            start.record(self._stream)
            call(0)
            end.record(self._stream)
        end.synchronize()
        return result, start.elapsed_time(end) * 1e3

    def time(self, call: Callable[[int], Any], sets: int, *, replays: int = 8, hopeless_us: float = float("inf")) -> Timing:
        """Time `call(i)`, i from 0 to `sets - 1` in turn; it must have run on this stopwatch before (`once`).

        Args:
            call: launches on the current stream, and waits for nothing.
            sets: the number of argument sets.
            replays: replays of the graph; each gives one value for the median.
            hopeless_us: if the first replay takes longer than this per launch, there are only two more.
        """
        graph, launches = self._capture(call, sets)
        first = self._replay(graph, launches, 1)[0]
        return _timing(self._replay(graph, launches, replays if first <= hopeless_us else 2))

    def in_turns(self, calls: Sequence[Callable[[int], Any]], sets: int, *, rounds: int = 20) -> list[Timing]:
        """Time several candidates alternately, one replay each per round, so that a change of clocks affects all of them."""
        graphs = [self._capture(call, sets) for call in calls]
        found: list[list[float]] = [[] for _ in calls]
        for turn in range(rounds + 1):
            for (graph, launches), times in zip(graphs, found, strict=True):
                us = self._replay(graph, launches, 1)
                if turn:
                    times += us
        return [_timing(times) for times in found]

    def _capture(self, call: Callable[[int], Any], sets: int) -> tuple[torch.cuda.CUDAGraph, int]:
        _, us = self.once(call)
        launches = sets if us > _LONG_US else sets * max(1, _LAUNCHES // sets)
        graph = torch.cuda.CUDAGraph()
        held: list[Any] = [None] * sets

        def rotation() -> None:
            for i in range(launches):
                held[i % sets] = call(i % sets)

        self._captured(graph, rotation)
        return graph, launches

    def _captured(self, graph: torch.cuda.CUDAGraph, launch: Callable[[], Any]) -> None:
        # Not `torch.cuda.graph`: it first returns all cached memory to the driver, which takes milliseconds for each candidate.
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                launch()
            finally:
                graph.capture_end()

    def _replay(self, graph: torch.cuda.CUDAGraph, launches: int, times: int) -> list[float]:
        """Microseconds per launch in each replay; the GPU goes from one replay to the next without waiting for the host."""
        with torch.cuda.stream(self._stream):
            events = [_event()]
            events[0].record(self._stream)
            for _ in range(times):
                graph.replay()
                events.append(_event())
                events[-1].record(self._stream)
        events[-1].synchronize()
        return [a.elapsed_time(b) * 1e3 / launches for a, b in pairwise(events)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _timing(times: list[float]) -> Timing:
    ordered = sorted(times)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Timing(median, (ordered[int(0.9 * len(ordered))] - ordered[int(0.1 * len(ordered))]) / 2)
