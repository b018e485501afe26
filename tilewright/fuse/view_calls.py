"""ATen's view calls: which calls are views, and how each of them changes the dimensions of a `View`.

This is determined from the arguments of the node and from the shapes that tracing has stored.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from tilewright.fuse.anchors import tensor_of
from tilewright.fuse.views import View

__all__ = ["PARTS", "follow", "is_part", "is_view", "parts_of", "plain_source"]

aten = torch.ops.aten


def _argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _same(node: Node, view: View) -> View:
    return view


def _reshape(node: Node, view: View) -> View | None:
    out = tensor_of(node)
    return None if out is None else view.reshape(tuple(out.shape))


def _transpose(node: Node, view: View) -> View:
    order = list(range(len(view.dims)))
    a, b = _argument(node, 1, "dim0"), _argument(node, 2, "dim1")
    order[a], order[b] = order[b], order[a]
    return view.permute(order)


def _t(node: Node, view: View) -> View:
    return view.permute(list(reversed(range(len(view.dims)))))


def _permute(node: Node, view: View) -> View:
    return view.permute([d % len(view.dims) for d in _argument(node, 1, "dims")])


def _unsqueeze(node: Node, view: View) -> View:
    return view.unsqueeze(_argument(node, 1, "dim") % (len(view.dims) + 1))


def _squeeze(node: Node, view: View) -> View:
    given = _argument(node, 1, "dim", list(range(len(view.dims))))
    dims = [given] if isinstance(given, int) else given
    return view.squeeze([d % len(view.dims) for d in dims])


def _select(node: Node, view: View) -> View | None:
    dim, index = _argument(node, 1, "dim") % len(view.dims), _argument(node, 2, "index")
    return view.select(dim, index % view.shape[dim]) if isinstance(index, int) else None


def _slice(node: Node, view: View) -> View | None:
    out = tensor_of(node)
    dim, start, step = _argument(node, 1, "dim", 0), _argument(node, 2, "start"), _argument(node, 4, "step", 1)
    if out is None or not isinstance(start, int | None) or not isinstance(step, int):
        return None
    dim %= len(view.dims)
    size = view.shape[dim]
    start = 0 if start is None else max(0, min(size, start + size if start < 0 else start))
    return view.narrow(dim, start, out.shape[dim], step) if out.shape[dim] else None


def _expand(node: Node, view: View) -> View | None:
    out = tensor_of(node)
    return None if out is None else view.expand(tuple(out.shape))


_FOLLOW: dict[Any, Callable[[Node, View], View | None]] = {
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.expand.default: _expand,
}


_NARROWING = (aten.select.int, aten.slice.Tensor, aten.expand.default)
_DROPOUTS = (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout)


def is_view(node: Node) -> bool:
    """Whether a call only rearranges elements: every element of its input is in its result once, and nothing is computed.

    This includes dropout in evaluation mode, and casts to the dtype that a value already has.
    """
    if node.op != "call_function":
        return False
    if node.target in _DROPOUTS:
        return not _argument(node, 2, "train", True)
    if node.target in _CASTS:
        a, b = tensor_of(node.args[0]), tensor_of(node)
        return a is not None and b is not None and (a.dtype, a.device, a.layout) == (b.dtype, b.device, b.layout)
    return node.target in _FOLLOW and node.target not in _NARROWING


def is_part(node: Node) -> bool:
    """Whether a call computes nothing, but reads only some elements of its input, or reads elements several times."""
    return node.op == "call_function" and (node.target in _NARROWING or node.target in PARTS)


def plain_source(node: Any) -> Any:
    """The value to which a chain of views is applied; the node itself if it is no view."""
    while isinstance(node, Node) and is_view(node):
        node = node.args[0]
    return node


def follow(node: Node, view: View) -> View | None:
    """The layout of a view call's result, if its input has the layout `view`; None if atoms cannot express it."""
    found = _FOLLOW.get(node.target, _same if is_view(node) else None)
    return None if found is None else found(node, view)


PARTS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
"""Calls that return several views."""


def parts_of(node: Node, view: View) -> tuple[View, ...] | None:
    """The layouts of the results of a call in `PARTS`; None if atoms cannot express one of them."""
    of = node.meta.get("val")
    if not isinstance(of, list | tuple):
        return None
    unbound = node.target is aten.unbind.int
    dim = _argument(node, 1 if unbound else 2, "dim", 0) % len(view.dims)
    found, start = [], 0
    for i, part in enumerate(of):
        found.append(view.select(dim, i) if unbound else view.narrow(dim, start, part.shape[dim]))
        start += 0 if unbound else part.shape[dim]
    return None if any(part is None for part in found) else tuple(part for part in found if part is not None)
