"""An exported graph becomes a graph of our operators: groups are emitted where their last call stood, views become strides.

Calls that are no anchor are emitted as they are, on tensors of the shapes they expect, and their results are made dense (which
they nearly always are). What depends on parameters alone is computed here, once.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from tilewright.fuse import calls
from tilewright.fuse.anchors import Anchor, tensor_of
from tilewright.fuse.buffers import Buffers, Value
from tilewright.fuse.check import FLOAT_NODE
from tilewright.fuse.emit import EMIT, emit_gate, emit_merged
from tilewright.fuse.moved_bias import move_biases
from tilewright.fuse.naming import layer_name
from tilewright.fuse.patterns import VIEWS, Group, find_groups
from tilewright.fuse.report import LAUNCH, Report
from tilewright.fuse.trace import Traced
from tilewright.fuse.view_calls import PARTS, follow, parts_of
from tilewright.fuse.views import channels_last, dense
from tilewright.fuse.weights import Weights

__all__ = ["Lowering"]

aten = torch.ops.aten

_CONSTANT_BYTES = 1 << 26
"""Larger results of constants are computed in every call: they may be expanded ones."""
_RANDOM = ("rand", "bernoulli", "multinomial", "normal")


def beside(conv: Anchor, x: Tensor) -> bool:
    """Whether filters stand side by side on an image of few channels (`emit`'s patches)."""
    weight = tensor_of(conv.weight)
    kernel = () if weight is None else tuple(weight.shape[2:])
    return math.prod(kernel) > 1 and tuple(conv.options["stride"]) == kernel and x.shape[1] <= 16


def _reads_channels(group: Group, node: Node, value: Tensor) -> bool:
    """Whether a group reads an input of the model with its channels last."""
    anchor = group.anchor
    if anchor.kind == "conv":
        if value.dim() != len(anchor.options["stride"]) + 2:
            return False
        # A patch is gathered from rows of pixels as the user has them.
        return node is group.residual or (node is anchor.x and not beside(anchor, value))
    return node is anchor.x and anchor.kind in ("max_pool", "global_mean") and value.dim() == 4


class Lowering(Buffers):
    """Builds the new graph.

    Args:
        traced: the model in the graph's dtype.
        exact: parameters of the float model by name.
        report: decisions go there.
        refused: names of anchors' nodes that are left to torch.
    """

    def __init__(self, traced: Traced, exact: dict[str, Tensor], report: Report, refused: frozenset[str] = frozenset()):
        self.root = nn.Module()
        super().__init__(Weights(exact, traced.state, self.root), report)
        self.traced = traced
        self.groups, self.gates, self.merges = find_groups(traced.graph, report, refused)
        move_biases(self.groups, report)

    def run(self) -> fx.GraphModule:
        """The new graph, in a module."""
        from_last = {group.last: group for group in self.groups}
        gates = {gate.node: gate for gate in self.gates}
        merged = {group.anchor.node: batch for batch in self.merges for group in batch}
        skipped = {n for group in self.groups for n in (group.anchor.node, *group.anchor.inside, *group.chain)} - set(from_last)
        skipped |= {n for gate in self.gates for n in (*gate.inside, *(group.last for group in gate.groups))}
        for node in self.traced.graph.nodes:
            if node in gates:
                self.values[node] = emit_gate(self, gates[node])
            elif node in skipped:
                continue
            elif node in from_last:
                group = from_last[node]
                batch = merged.get(group.anchor.node)
                self.values[node] = EMIT[group.anchor.kind](self, group) if batch is None else emit_merged(self, batch, group)
            else:
                self.plain(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def plain(self, node: Node) -> None:
        """A node that no group has."""
        if node.op == "placeholder":
            self.values[node] = self._placeholder(node)
        elif node.op == "get_attr":
            known = self.traced.state.get(str(node.target))
            if known is not None:
                self.values[node] = Value(None, dense(known.shape), known.detach())
        elif node.op == "output":
            self.graph.output(fx.map_arg(node.args[0], lambda n: self.tensor(self.values[n])))
        elif node.op == "call_function":
            self.values[node] = self._call(node)

    def _placeholder(self, node: Node) -> Any:
        new, value = self.graph.placeholder(node.name), tensor_of(node)
        if value is None:
            return new
        last = any(_reads_channels(group, node, value) for group in self.groups)
        dtype = value.dtype if value.is_floating_point() else None
        return self.buffer(calls.enter, (new, dtype, last), channels_last(value.shape) if last else dense(value.shape), node)

    def _call(self, node: Node) -> Any:
        given = [self.values[n] for n in node.all_input_nodes]
        tensors = [v for v in given if isinstance(v, Value)]
        if node.target in PARTS and tensors[0].constant is None and (parts := parts_of(node, tensors[0].view)) is not None:
            return tuple(Value(tensors[0].node, view) for view in parts)
        if node.target is operator.getitem and isinstance(given[0], tuple):
            return given[0][node.args[1]]  # pyright: ignore[reportArgumentType, reportCallIssue]
        if node.target in VIEWS or node.target in (aten.select.int, aten.slice.Tensor, aten.expand.default):
            value = tensors[0]
            if value.constant is None and (view := follow(node, value.view)) is not None:
                return Value(value.node, view)
        if all(v.constant is not None for v in tensors) and len(tensors) == len(given):
            constant = self._constant(node)
            if constant is not None:
                return Value(None, dense(constant.shape), constant)
        return self._leftover(node, tensors)

    def _constant(self, node: Node) -> Tensor | None:
        out = tensor_of(node)
        if out is None or out.numel() * out.element_size() > _CONSTANT_BYTES or any(r in str(node.target) for r in _RANDOM):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n].constant)
        with torch.no_grad():
            return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def _leftover(self, node: Node, tensors: Sequence[Value]) -> Any:
        """The ATen call itself, on tensors of the shapes that it expects; its result made dense."""
        target = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.tensor(self.values[n]))
        new = self.graph.call_function(target, args, kwargs)  # pyright: ignore[reportArgumentType]
        new.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        out = tensor_of(node)
        if out is None:
            return new
        images = [v.view for v in tensors if v.node is not None and len(v.shape) == out.dim() > 2]
        last = any(v.strides == channels_last(v.shape).strides != dense(v.shape).strides for v in images)
        value = self.buffer(calls.as_dense, (new, last), channels_last(out.shape) if last else dense(out.shape), node)
        if target is not operator.getitem:
            new.meta[LAUNCH] = {"layer": layer_name(node), "op": str(target), "what": str(list(out.shape))}
            self.report.launches.append(new.meta[LAUNCH])
        assert value.node is not None, "a buffer"
        value.node.meta[FLOAT_NODE] = node.name
        return value
