"""Removes calls that repeat another call or change nothing. This happens before a graph is planned.

    pad(x, zeros), roll(x, zeros)      becomes x
    cat([x])                           becomes x
    f(x), and f(x) again               becomes one call

Such calls occur in published models. For example, some pad a size to a multiple although it already is a multiple, or apply the
same activation to the same vector in each block. Inductor makes the same simplifications. torch's own calls, against which an
optimised graph is timed, run the simplified graph too (rivals.py). A value that is a result of the graph stays a separate
tensor.

Not changed: calls with random numbers, calls that write, and calls without inputs.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.utils import _pytree as pytree

__all__ = ["simplify"]

aten = torch.ops.aten


def simplify(graph: fx.Graph) -> int:
    """Remove such calls from a functional ATen graph, in place. Returns the number of removed calls."""
    seen: dict[Hashable, Node] = {}
    count = 0
    for node in list(graph.nodes):
        if any(user.op == "output" for user in node.users):
            continue
        key = _key(node)
        same = _input_of(node) or (None if key is None else seen.setdefault(key, node))
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            count += 1
    return count


def _input_of(node: Node) -> Node | None:
    """The input that a call returns unchanged; None if there is no such input."""
    if node.target is aten.cat.default:
        joined: Any = node.args[0]
        return joined[0] if len(joined) == 1 else None
    moves = (aten.pad.default, aten.constant_pad_nd.default, aten.roll.default)
    if node.target not in moves or len(node.args) < 2 or not isinstance(node.args[0], Node):
        return None
    how_far = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
    return node.args[0] if all(isinstance(n, int) and n == 0 for n in how_far) else None


def _key(node: Node) -> Hashable | None:
    """A key that is equal for calls with equal results; None if the results may differ."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.all_input_nodes:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return None
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    return target, str(structure), tuple(map(_leaf, leaves))


def _leaf(value: Any) -> Hashable:
    """A key for an argument. It distinguishes 1, 1.0 and True, and also 0.0 and -0.0."""
    return value if isinstance(value, Node) else (type(value), repr(value))
