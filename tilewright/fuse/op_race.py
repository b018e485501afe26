"""Decides whether our operator or torch's own kernel computes a call of op_calls.py. Both are timed once per problem.

If torch's kernel is clearly faster, the graph's call gets `library=True`. Inside `with invariant():` or `prefer(...)` our
operator is always used. Not supported: devices other than a CUDA GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright.fuse import op_calls
from tilewright.op import scope
from tilewright.tune.measure import Stopwatch

__all__ = ["RACED", "race"]

RACED = {
    op_calls.activation: 4, op_calls.adaptive_avg_pool: 2, op_calls.avg_pool: 7, op_calls.batch_norm: 8,
    op_calls.conv_transpose: 9,
    op_calls.group_norm: 7, op_calls.instance_norm: 4, op_calls.rms_norm: 4, op_calls.softmax: 2, op_calls.upsample: 5,
}  # fmt: skip
"""Calls -> position of the argument `library`."""
_LEAD = 0.98
"""torch's kernel is used if its time is at most this share of our operator's. Two timings of one kernel differ by about 1 %."""

Timed = Callable[[Sequence[Callable[[int], Any]]], list[float]]
"""A function that times several calls, and returns the microseconds of each."""


def _on_gpu(ways: Sequence[Callable[[int], Any]]) -> list[float]:
    return [t.us for t in Stopwatch().in_turns(list(ways), 2, rounds=7)]


class _Recorder(fx.Interpreter):
    """Runs a graph and records the distinct problems of the calls to time."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.found: dict[Any, tuple[tuple[Any, ...], list[Node]]] = {}

    def run_node(self, n: Node) -> Any:
        """Run a node and return its value. A call with two variants is recorded."""
        if n.target in RACED:
            args = tuple(self.fetch_args_kwargs_from_env(n)[0][: RACED[n.target]])
            key = (n.target, *map(_summary, args))
            self.found.setdefault(key, (args, []))[1].append(n)
        return super().run_node(n)


def _summary(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def race(fused: fx.GraphModule, inputs: list[Any], timed: Timed = _on_gpu) -> list[dict[str, Any]]:
    """Time both variants of each distinct call, and write the faster one into the graph.

    Args:
        fused: the graph; its calls are changed in place.
        inputs: flat example inputs.
        timed: function that times calls.

    Returns:
        One row per distinct problem, as in choose.choose.
    """
    if scope().invariant or scope().preferred is not None:
        return []
    recorder, rows = _Recorder(fused), list[dict[str, Any]]()
    with torch.no_grad():
        recorder.run(*inputs)
        for (target, *problem), (args, nodes) in recorder.found.items():
            ours, library = timed([_way(target, args, library) for library in (False, True)])
            won = library < _LEAD * ours
            for node in nodes:
                node.args = (*node.args[: RACED[target]], won)
            us = {"tilewright": round(ours, 2), "torch": round(library, 2)}
            taken = "torch" if won else "tilewright"
            row = {"op": target.__name__, "problem": str(problem), "times": len(nodes), "taken": taken, "us": us}
            rows.append(row)
    fused.recompile()
    return rows


def _way(target: Callable[..., Any], args: tuple[Any, ...], library: bool) -> Callable[[int], Any]:
    return lambda i: target(*args, library)
