"""Matrix products of one row that start while the preceding launch still runs (programmatic dependent launch, from sm_90 on).

`gemv` loads weight and bias before it waits for x (kernels/gemm/gemv.py). This is correct if no launch writes them; in an
optimised graph they are constants. It saves time only if the preceding launch lets the next one start early. Norms and other
products of one row do this (launch/pdl.py); after other launches it would cost 0.4 us. When `choose` measures a product, no
such launch precedes it. So both variants are measured again here, after a norm.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from tilewright.fuse import calls
from tilewright.fuse.calls import Choice
from tilewright.fuse.choose import Launch, launches_of, sets_of
from tilewright.hw.device import device_of
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.launch.pdl import overlaps
from tilewright.kernels.norm.layer_norm import layer_norm_op
from tilewright.op import scope
from tilewright.tune.measure import Stopwatch

__all__ = ["mark", "start_early"]

_NORMS = (calls.layer_norm, calls.add_layer_norm, calls.shifted_layer_norm)
_RELEASE = frozenset(impl.name for impl in linear_op.impls if impl.releases)
_EARLY = next(impl for impl in linear_op.impls if "PDL" in impl.space.axes)
_QUIET = (calls.strided, operator.getitem, torch.ops.aten.view.default)
"""Calls that launch nothing."""
_CHOICE = 6
"""Position of the argument `choice` of `calls.linear`."""
_LEAD = 0.98
"""The early variant is used if its time is at most this share of the other variant's. Two timings differ by about 1 %."""


def start_early(fused: fx.GraphModule, inputs: list[Any]) -> int:
    """Let products of a graph start early where this is faster. Returns the number of such products.

    Args:
        fused: the graph; its calls are changed in place.
        inputs: flat example inputs, on a GPU.
    """
    found = dict[Node, Launch]()
    for launch in launches_of(fused, inputs):
        if launch.op is linear_op and overlaps(device_of(launch.args[0].get_device())):
            found |= dict.fromkeys(launch.nodes, launch)
    usual = dict[Node, Choice]()
    for node, launch in found.items():
        device = device_of(launch.args[0].get_device())
        given: Any = node.args[_CHOICE] if len(node.args) > _CHOICE else None
        choice = None if given else linear_op.choose(device, linear_op.problem(*launch.args))
        usual[node] = given if choice is None else (choice.impl.name, choice.config)
    count = mark(fused.graph, usual, lambda node: _better(found[node], usual[node]))
    fused.recompile()
    return count


_KNOWN: dict[Any, Choice | None] = {}
"""Results of this process. With them, a part of a model that is timed separately gets the same kernels as the whole model."""


def _better(launch: Launch, usual: Choice) -> Choice | None:
    device = device_of(launch.args[0].get_device())
    key = device.name, linear_op.problem(*launch.args), str(usual), scope()
    if key not in _KNOWN:
        _KNOWN[key] = _measured(launch, usual)
    return _KNOWN[key]


def _measured(launch: Launch, usual: Choice) -> Choice | None:
    """The fastest early variant after a norm, if it is faster than the usual choice there; otherwise None."""
    device, problem = device_of(launch.args[0].get_device()), linear_op.problem(*launch.args)
    if _EARLY.refusal(device, problem, scope()) is not None:
        return None
    configs = [_EARLY.space.default(device, problem), *([usual[1]] if usual[0] == _EARLY.name else [])]
    choices = [usual, *((_EARLY.name, {**config, "PDL": True}) for config in configs)]
    sets, scale = sets_of(launch), torch.ones_like(launch.args[0][0])

    def call(choice: Choice) -> Callable[[int], Any]:
        def run(i: int) -> Any:
            x, *rest = sets[i]
            return calls.run(linear_op, (layer_norm_op(x, scale, None, 1e-5), *rest), choice)

        return run

    with torch.no_grad():
        times = [t.us for t in Stopwatch().in_turns([call(choice) for choice in choices], len(sets), rounds=9)]
    best = min(range(len(times)), key=lambda i: times[i])
    return choices[best] if best and times[best] <= _LEAD * times[0] else None


def _is_constant(argument: Any) -> bool:
    return argument is None or (isinstance(argument, Node) and argument.op == "get_attr")


def mark(graph: fx.Graph, usual: dict[Node, Choice], early: Callable[[Node], Choice | None]) -> int:
    """Write the choices of early products into a graph's calls. Returns their number.

    A product may start early if the preceding launch allows it and if weight and bias are constants.

    Args:
        graph: the graph.
        usual: product -> its usual choice.
        early: a function that returns the choice with which a product starts early; None: it keeps the usual choice.
    """
    releases, count = False, 0
    for node in graph.nodes:
        if node.op != "call_function" or node.target in _QUIET:
            continue
        name = usual[node][0] if node in usual else None
        if name is not None and releases and all(map(_is_constant, node.args[1:3])):
            choice = early(node)
            if choice is not None:
                node.args, name = (*node.args[:_CHOICE], choice), choice[0]
                count += 1
        releases = node.target in _NORMS or name in _RELEASE
    return count
