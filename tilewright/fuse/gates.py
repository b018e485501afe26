"""Recognises act(a) * b as one gated matrix product. a and b are two linears with one input, or the halves of one linear."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from tilewright.fuse.anchors import tensor_of
from tilewright.fuse.normal import activation_of
from tilewright.fuse.plan import Gate, Group
from tilewright.fuse.rules import Tip
from tilewright.fuse.view_calls import PARTS, follow, parts_of
from tilewright.fuse.views import View, dense

__all__ = ["gate_of"]

_GATED = ("silu", "gelu")
"""Activations for which `linear` has a gated form."""


def gate_of(node: Node, tips: Mapping[Node, Tip], parameter: Callable[[Any], bool]) -> Gate | None:
    """The gated product for a multiplication, or None."""
    if node.target is not torch.ops.aten.mul.Tensor:
        return None
    one, two = node.args[:2]
    if not isinstance(one, Node) or not isinstance(two, Node):
        return None
    shapes = [tensor_of(n) for n in (one, two)]
    if any(t is None for t in shapes) or shapes[0].shape != shapes[1].shape or shapes[0].dtype != shapes[1].dtype:  # pyright: ignore
        return None
    for gate, up in ((one, two), (two, one)):
        found = _two_linears(node, tips.get(gate), tips.get(up), parameter) or _halves(node, gate, up, tips, parameter)
        if found is not None:
            return found
    return None


def _joinable(group: Group, parameter: Callable[[Any], bool]) -> bool:
    """Whether a group is a linear whose weight can be stacked with another's."""
    a = group.anchor
    known = parameter(a.weight) and (a.bias is None or parameter(a.bias))
    return a.kind == "linear" and known and not a.options["kn"] and not group.folds and group.residual is None


def _two_linears(node: Node, gate: Tip | None, up: Tip | None, parameter: Callable[[Any], bool]) -> Gate | None:
    if gate is None or up is None or gate.group is up.group or gate.views or up.views:
        return None
    if not _joinable(gate.group, parameter) or not _joinable(up.group, parameter):
        return None
    if gate.group.activation not in _GATED or len(gate.group.chain) != 1 or not up.group.plain:
        return None
    if len(gate.here.users) != 1 or len(up.here.users) != 1 or gate.group.anchor.x is not up.group.anchor.x:
        return None
    return Gate(node, (gate.group, up.group), f"{gate.group.activation}_mul")


def _halves(node: Node, gate: Any, up: Any, tips: Mapping[Node, Tip], parameter: Callable[[Any], bool]) -> Gate | None:
    name = activation_of(gate)
    if name not in _GATED or len(gate.users) != 1 or len(up.users) != 1:
        return None
    first, second = _part(gate.args[0]), _part(up)
    if first is None or second is None or first[0] is not second[0] or len(gate.args[0].users) != 1:
        return None
    tip = tips.get(first[0])
    if tip is None or tip.views or not tip.group.plain or not _joinable(tip.group, parameter):
        return None
    whole = dense(tensor_of(tip.here).shape)  # pyright: ignore[reportOptionalMemberAccess]
    last = len(whole.dims) - 1
    width = whole.shape[last] // 2
    halves = [whole.narrow(last, start, width) for start in (0, width)]
    views = [first[1], second[1]]
    if whole.shape[last] % 2 or views not in (halves, halves[::-1]):
        return None
    inside = tuple(dict.fromkeys((*first[2], *second[2], gate)))
    if not all(user in inside for user in tip.here.users) or not all(
        u in inside for n in inside[:-1] for u in n.users if u is not node
    ):
        return None
    return Gate(node, (tip.group,), f"{name}_mul", views == halves, inside)


def _part(node: Any) -> tuple[Node, View | None, tuple[Node, ...]] | None:
    """(the whole value, the part as a view of it, the calls in between) if a value is a part of another one, otherwise None."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    source, index, between = node, None, (node,)
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        source, index, between = node.args[0], node.args[1], (node.args[0], node)
    if (index is not None) != (source.target in PARTS) or not source.args or not isinstance(source.args[0], Node):
        return None
    whole = tensor_of(source.args[0])
    if whole is None or (index is None and source.target is not torch.ops.aten.slice.Tensor):
        return None
    if index is None:
        return source.args[0], follow(source, dense(whole.shape)), between
    parts = parts_of(source, dense(whole.shape))
    return None if parts is None else (source.args[0], parts[index], between)  # pyright: ignore
