"""Timing on a GPU.

A call is timed as part of a CUDA graph that runs it over several sets of arguments, which together are larger than any L2
cache. So neither launch gaps nor a warm cache affect the result. Figures that are compared are measured alternately in one
process.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["interleaved_us", "sets_for"]

_ROTATE_BYTES = 512 << 20
_SETTLED_ROUNDS = 3
_TURN_US = 5000.0


def _graph(call: Callable[[int], Any], sets: int, repeats: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Keep the results of one rotation. Otherwise each call would write to the memory of the previous one, which is in L2.
    held: list[Any] = [None] * sets
    with torch.cuda.graph(graph, stream=stream):
        for i in range(sets * repeats):
            held[i % sets] = call(i % sets)
    return graph


def sets_for(call_bytes: int) -> int:
    """The number of argument sets that together are larger than the L2."""
    return max(2, min(64, -(-_ROTATE_BYTES // max(1, call_bytes))))


def interleaved_us(
    calls: Sequence[Callable[[int], Any]], *, sets: int, rounds: int = 20, settle: float = 0.0, call_us: float = 0.0
) -> list[tuple[float, float]]:
    """(median, spread) in microseconds of each call, measured in turns. `call(i)` runs on argument set i of `sets`.

    Each round has a different order, which is the same in every run: at the power limit the clock during a call depends on what
    ran before it. Spread is half the distance between the 10th and the 90th percentile.

    Args:
        rounds: turns of each call, after two that are not counted. With `settle` there are three, all counted.
        settle: seconds for which a call runs alone in each of its turns before it is timed; timing takes a third of that (at
            least one replay). At the power limit, a card's clock takes tenths of a second to adapt to a call: in turns of
            milliseconds all calls run at the same clock, that of their mixture.
        call_us: lower bound of a call's time. A turn has 16 calls, or as many long calls as take 5 ms, and each set at least
            once.
    """
    calls_a_turn = min(16, math.ceil(_TURN_US / call_us)) if call_us else 16
    repeats = max(1, calls_a_turn // sets)
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
    """Microseconds of a replay: the mean of `timed` consecutive replays, after `lead` replays that are not timed."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(lead):
        graph.replay()
    start.record()
    for _ in range(timed):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / timed
