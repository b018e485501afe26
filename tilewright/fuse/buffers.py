"""Tensors of an optimised graph while it is built: buffers, views of them, constants, and copies where views are not enough.

A value of the exported graph becomes a buffer of the new graph and a `View` of it. The memory layout of each call's result is
known, so any chain of views after a call becomes a single view and costs nothing. If no strides can express the layout, the
value is copied once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from tilewright.fuse import calls
from tilewright.fuse.anchors import tensor_of
from tilewright.fuse.naming import layer_name
from tilewright.fuse.plan import Group
from tilewright.fuse.report import Report
from tilewright.fuse.view_calls import follow, is_view
from tilewright.fuse.views import View, channels_last, dense
from tilewright.fuse.weights import Weights

__all__ = ["Buffers", "Value"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Value:
    """The value of a node of the old graph, as it is represented in the new graph."""

    node: Node | None
    """The buffer; None for a constant."""
    view: View
    constant: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the old node's value."""
        return self.view.shape


class Buffers:
    """A graph under construction, and the position of each value of the old graph in it.

    Args:
        weights: the parameters.
        report: records the launches.
    """

    def __init__(self, weights: Weights, report: Report):
        self.weights, self.report = weights, report
        self.graph = fx.Graph()
        self.values: dict[Node, Any] = {}
        """Node of the old graph -> `Value`. For values that are not tensors: a node of the new graph."""
        self.memory: dict[Node, View] = {}
        """Buffer -> its layout, relative to the tensor that the new node returns."""
        self.made: dict[tuple[Node, View], Node] = {}
        """Views made so far, so that each is made only once."""
        self.merged: dict[Node, Value] = {}
        """Anchor of a linear -> the merged matrix product that computes it."""
        self.grown: dict[Node, Node] = {}
        """The last of several growing concatenations -> the rows of their buffer, after the last append so far."""

    # ---- tensors

    def buffer(self, target: Callable[..., Any], args: tuple[Any, ...], view: View, old: Node | None) -> Value:
        """Emit a call whose result has the layout `view`."""
        node = self.graph.call_function(target, args)
        self.memory[node] = view
        if old is not None:
            node.meta = {key: old.meta[key] for key in ("nn_module_stack", "stack_trace") if key in old.meta}
        return Value(node, view)

    def tensor(self, value: Any) -> Any:
        """A node of the new graph whose tensor has the value's shape. Values that are not tensors are returned unchanged."""
        if not isinstance(value, Value):
            return value
        if value.constant is not None:
            return self.attribute(value.constant, "constant")
        base = value.node
        assert base is not None, "a value without a buffer must be a constant"
        if self.memory[base] == value.view:
            return base
        key = (base, value.view)
        if key not in self.made:
            self.made[key] = self._strided(base, value.view)
        return self.made[key]

    def _strided(self, base: Node, view: View) -> Node:
        strides, atoms = view.strides, view.atoms
        if strides is not None:
            return self.graph.call_function(calls.strided, (base, list(view.shape), list(strides), view.offset))
        sizes, steps = [size for size, _ in atoms], [stride for _, stride in atoms]
        whole = self.graph.call_function(calls.strided, (base, sizes, steps, view.offset))
        node = self.graph.call_function(aten.reshape.default, (whole, list(view.shape)))
        self.memory[node] = dense(view.shape)
        return node

    def attribute(self, value: Tensor | nn.Module, hint: str) -> Node:
        """The new graph's node for a constant tensor."""
        name = self.weights.keep(value, hint)
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target == name:
                return node
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)):  # pyright: ignore[reportArgumentType]
            node = self.graph.get_attr(name)
        return node

    def opened(self, value: Value) -> Value:
        """The value as a view of a buffer; a constant is turned into a buffer."""
        if value.constant is None:
            return value
        node = self.tensor(value)
        self.memory[node] = dense(value.shape)
        return Value(node, dense(value.shape))

    def copied(self, value: Value, last: bool) -> Value:
        """The value copied to new memory, contiguous or channels-last."""
        view = channels_last(value.shape) if last else dense(value.shape)
        return self.buffer(calls.as_dense, (self.tensor(value), last), view, None)

    def arranged(self, value: Value, last: bool) -> Value:
        """The value in channels-last (`last`) or contiguous layout: the value itself if it has this layout, or a copy."""
        value = self.opened(value)
        wanted = channels_last(value.shape) if last else dense(value.shape)
        return value if value.view.strides == wanted.strides else self.copied(value, last)

    def rows(self, value: Value) -> tuple[Node, View, bool]:
        """The value [..., K] as rows. Returns three values.

        A tensor of rows [R, K] in memory order; the leading dims as a view of a buffer [R, 1]; and whether the memory order is
        the logical order.
        """
        value = self.opened(value)
        count = 1
        for size in value.shape[:-1]:
            count *= size
        found = value.view.memory_order()
        if found is not None:
            flat, lead = found
            return self.tensor(Value(value.node, flat)), lead, lead.strides == dense(lead.shape).strides
        plain = value.view.reshape((count, value.shape[-1]))
        if plain is None or plain.strides is None or plain.strides[-1] != 1:
            value = self.copied(value, False)
            plain = dense((count, value.shape[-1]))
        return self.tensor(Value(value.node, plain)), dense(value.shape[:-1]), True

    def behind(self, group: Group, value: Value) -> Value:
        """The value after the views of a group's chain are applied to it."""
        for node in group.chain:
            if is_view(node):
                view = follow(node, value.view)
                value = Value(value.node, view) if view is not None else self._reshaped(value, node)
        return value

    def _reshaped(self, value: Value, node: Node) -> Value:
        out = tensor_of(node)
        assert out is not None, "the result of a view must be a tensor"
        return self.opened(self.copied(value, False)) if value.shape == tuple(out.shape) else self.buffer(
            aten.reshape.default, (self.tensor(value), list(out.shape)), dense(out.shape), node
        )  # fmt: skip

    def launched(self, group: Group, op: str, value: Value, what: str) -> None:
        """Record a launch in the report."""
        self.report.launches.append({"layer": layer_name(group.anchor.node), "op": op, "what": what})
