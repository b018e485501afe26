"""Assigns each kernel of an engine in this process to a layer, with its time, from CUPTI's records (torch.profiler).

The model runs once with a range around every module or node; a kernel belongs to the innermost range in which the host launched
it. What is timed is the program as its user runs it. If that is a captured graph, its replay has no ranges: its kernels must
then have the same names in the same order as those of the run with ranges, and get the same layers. So the assignment is either
exact or refused: kernels that differ, or that run concurrently, say nothing about single layers.

A kernel's time is from its start to its end on the device. Gaps between kernels are not assigned.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.profiler import record_function

from tilewright.bench.compare.engine import EngineError, Operation
from tilewright.bench.compare.results import Counter
from tilewright.fuse.calls import enter
from tilewright.fuse.naming import layer_name

__all__ = ["RANGE", "Kernel", "counters_of", "kernels_of", "matched", "node_ranges", "recorded"]

RANGE = "tilewright layer "
"""Of ranges, before the path of a module."""
_RUN = "tilewright run"
_RUNS = 10
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_OVERLAP = 0.01
"""Of the time of all kernels that may run at the same time as another one."""


class Kernel(NamedTuple):
    """One piece of work of a device."""

    name: str
    start_us: float
    us: float
    layer: str
    """Of the innermost range in which it was launched; "" for none."""


def kernels_of(trace: dict[str, Any]) -> list[list[Kernel]]:
    """The kernels of each run of a Chrome trace that torch.profiler wrote, in the order in which they started.

    Runs are ranges called "tilewright run". A kernel is of the run in which the host launched it.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    launched = {e["args"]["correlation"]: e for e in events if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})}
    ranges = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: (e["ts"], -e["dur"]))
    runs: dict[float, list[Kernel]] = {e["ts"]: [] for e in ranges if e["name"] == _RUN}
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        launch = launched.get(event["args"].get("correlation"))
        if launch is None:
            continue
        around = [
            e for e in ranges if e["tid"] == launch["tid"] and e["ts"] <= launch["ts"] <= e["ts"] + e["dur"]
        ]  # the outermost first
        run = next((e for e in around if e["name"] == _RUN), None)
        if run is None:
            continue
        layers = [e["name"].removeprefix(RANGE) for e in around if e["name"].startswith(RANGE)]
        runs[run["ts"]].append(Kernel(event["name"], event["ts"], event["dur"], layers[-1] if layers else ""))
    return [sorted(kernels, key=lambda kernel: kernel.start_us) for _, kernels in sorted(runs.items())]


def recorded(call: Callable[[], Any], runs: int = _RUNS) -> list[list[Kernel]]:
    """The kernels of several calls, each waited for. EngineError: the profiler gave none."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(runs):
            with record_function(_RUN):
                call()
                torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        kernels = kernels_of(json.loads(path.read_text()))
    if not kernels or not all(kernels):
        raise EngineError("torch.profiler recorded no kernels: CUPTI may be in use by another profiler, or not permitted here")
    return kernels


def counters_of(
    plain: Callable[[], Any], ranged: Callable[[], Any], ranges: Callable[[], AbstractContextManager[Any]]
) -> tuple[list[Counter], list[Operation]]:
    """A counter for each kernel of `plain`, with the module that `ranged` launches it from.

    Args:
        plain: the program as it is timed.
        ranged: the same work launched piece by piece; inside `ranges()` each piece is in a range `RANGE` + path.

    Raises EngineError: kernels differ from call to call or between the two, or overlap.
    """
    with ranges():
        owners = recorded(ranged, 2)
    timed = recorded(plain)
    return matched(owners, timed)


def matched(owners: Sequence[Sequence[Kernel]], timed: Sequence[Sequence[Kernel]]) -> tuple[list[Counter], list[Operation]]:
    """Counters of `timed` runs by the layers of the `owners`' runs. Raises EngineError, as `counters_of`."""
    names = [tuple(kernel.name for kernel in run) for run in (*owners, *timed)]
    if len(set(names)) != 1:
        odd = next(found for found in names if found != names[0])
        place = next((i for i, (a, b) in enumerate(zip(names[0], odd)) if a != b), min(len(names[0]), len(odd)))
        raise EngineError(
            f"its kernels differ from call to call, or from those of its operators run one by one ({len(names[0])} "
            f"and {len(odd)} kernels, first different at {place}), so they cannot be assigned to layers"
        )
    for run in timed:
        both = sum(max(0.0, a.start_us + a.us - b.start_us) for a, b in pairwise(run))
        if both > _OVERLAP * sum(kernel.us for kernel in run):
            raise EngineError(
                f"kernels overlap with others for {both:.1f} us of a call, so their times cannot be assigned to single layers"
            )
    counters, operations = [], []
    for i, kernel in enumerate(owners[0]):
        name = f"{i + 1}: {kernel.layer}"
        us = statistics.median(run[i].us for run in timed)
        counters.append(Counter(name=name, kind=kernel.name[:100], seconds=us * 1e-6))
        operations.append(Operation(names=(name,), scope=kernel.layer, op="", reads=(i - 1,) if i else ()))
    return counters, operations


class _Ranged(fx.Interpreter):
    """Runs a graph with a range around each node. What was `entered` is not cast and laid out again: a replay reads it so."""

    def __init__(self, graph: fx.GraphModule, entered: dict[fx.Node, Any]):
        super().__init__(graph)
        self.entered = entered

    def run_node(self, n: fx.Node) -> Any:
        if n in self.entered:
            return self.entered[n]
        with record_function(RANGE + layer_name(n)):
            value = super().run_node(n)
        if n.target is enter:
            self.entered[n] = value
        return value


def node_ranges(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[], Any]:
    """A run of a graph, node by node, each in a range with its layer's name."""

    entered: dict[fx.Node, Any] = {}

    def run() -> Any:
        with torch.no_grad():
            return _Ranged(graph, entered).run(*inputs)

    return run
