"""Makes an int8 graph from a graph in 16 bits and a plan (quantise.py): some calls are replaced, the others are copied."""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright.fuse import calls, int8_calls
from tilewright.fuse.check import ANCHOR_NODE, FLOAT_NODE
from tilewright.fuse.quantise import Candidate, Found, Plan, source_of
from tilewright.kernels.conv.int8 import folded_scales

__all__ = ["int8_graph"]

_ACTIVATION, _RESIDUAL, _SHAPE = 4, 3, 5
"""Positions of arguments of `calls.linear`. Up to the activation, the positions in `calls.conv` are the same."""


class _Builder:
    def __init__(self, fused: fx.GraphModule, found: Found, plan: Plan, dtype: torch.dtype):
        self.fused, self.found, self.plan, self.dtype = fused, found, plan, dtype
        self.graph = fx.Graph()
        self.plain: dict[Node, Node] = {}
        """Old node -> the new node in 16 bits, if there is one."""
        self.codes: dict[Node, Node] = {}
        self.row_scales: dict[Node, Node] = {}
        self.named = 0

    def run(self) -> tuple[fx.GraphModule, dict[Node, Node]]:
        """Build the new graph. Returns (its module, product -> its new call)."""
        made: dict[Node, Node] = {}
        for node in self.fused.graph.nodes:
            if node in self.plan.products:
                made[node] = self._product(node, self.found.candidates[node])
            elif node in self.plan.norms:
                self._norm(node, self.plan.norms[node])
            elif node.target is calls.strided:
                source = source_of(node)
                if source in self.plain:
                    self.plain[node] = self.graph.node_copy(node, self._sixteen)
            else:
                self.plain[node] = self.graph.node_copy(node, self._sixteen)
            if node in self.plan.quantised:
                step = self._constant(self.found.scales[node])
                self.codes[node] = self._call(int8_calls.quantise, (self.plain[node], step), node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule(self.fused, self.graph), made

    def _call(self, target: Any, args: tuple[Any, ...], old: Node, sixteen: bool = False) -> Node:
        node = self.graph.call_function(target, args)
        node.meta = {key: old.meta[key] for key in ("nn_module_stack", "stack_trace") if key in old.meta}
        if sixteen:
            node.meta.update({key: old.meta[key] for key in (FLOAT_NODE, ANCHOR_NODE) if key in old.meta})
        return node

    def _constant(self, value: Tensor) -> Node:
        name = f"int8_{self.named}"
        while hasattr(self.fused, name):
            self.named += 1
            name = f"int8_{self.named}"
        self.fused.register_buffer(name, value, persistent=False)
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):  # pyright: ignore[reportArgumentType]
            return self.graph.get_attr(name)

    def _sixteen(self, node: Node) -> Node:
        """The new node for a value in 16 bits. If only a quantised value exists, it is dequantised."""
        if node in self.plain:
            return self.plain[node]
        if node.target is calls.strided:
            self.plain[node] = self.graph.call_function(calls.strided, (self._sixteen(node.args[0]), *node.args[1:]))  # pyright: ignore[reportArgumentType]
            return self.plain[node]
        step = self._constant(self.found.scales[node])
        self.plain[node] = self._call(int8_calls.dequantise, (self.codes[node], step, self.dtype), node, True)
        return self.plain[node]

    def _quantised(self, node: Node) -> Node:
        """The new node for a value's quantised form. Views are applied to the quantised buffer."""
        if node not in self.codes:
            inner = self._quantised(node.args[0])  # pyright: ignore[reportArgumentType]
            self.codes[node] = self.graph.call_function(calls.strided, (inner, *node.args[1:]))
        return self.codes[node]

    def _norm(self, node: Node, keep: bool) -> None:
        args = [self._sixteen(a) if isinstance(a, Node) else a for a in node.args]
        whole = self._call(int8_calls.layer_norm_quantise, (*args, keep), node)
        items = [self.graph.call_function(operator.getitem, (whole, i)) for i in range(3 if keep else 2)]
        self.codes[node], self.row_scales[node] = items[:2]
        if keep:
            items[2].meta.update({key: node.meta[key] for key in (FLOAT_NODE, ANCHOR_NODE) if key in node.meta})
            self.plain[node] = items[2]

    def _product(self, node: Node, c: Candidate) -> Node:
        new = self._linear(node, c) if node.target is calls.linear else self._conv(node, c)
        if node in self.plan.outputs:
            self.codes[node] = new
        else:
            self.plain[node] = new
        return new

    def _shift(self, node: Node) -> Tensor | None:
        bias = node.args[2]
        return None if bias is None else self.fused.get_buffer(str(bias.target))  # pyright: ignore

    def _linear(self, node: Node, c: Candidate) -> Node:
        codes, weight = self._quantised(node.args[0]), self._constant(c.codes)  # pyright: ignore[reportArgumentType]
        w_scales, activation, shape = self._constant(c.w_scales), node.args[_ACTIVATION], node.args[_SHAPE]
        if c.rows:
            scales = self.row_scales[c.source]
        else:
            scales = self._constant(self.found.scales[c.source].reshape(1).expand(c.images).contiguous())
        bias = None if node.args[2] is None else self._sixteen(node.args[2])  # pyright: ignore[reportArgumentType]
        if node in self.plan.outputs:
            step = self._constant(self.found.scales[node])
            args = (codes, weight, scales, w_scales, bias, activation, step, shape)
            return self._call(int8_calls.linear_int8_to_int8, args, node)
        residual = None if node.args[_RESIDUAL] is None else self._sixteen(node.args[_RESIDUAL])  # pyright: ignore
        chained = c.source in self.plan.norms or c.source in self.plan.quantised
        args = (codes, weight, scales, w_scales, bias, activation, residual, self.dtype, chained, shape)
        return self._call(int8_calls.linear_int8_to_float, args, node, True)

    def _conv(self, node: Node, c: Candidate) -> Node:
        codes, weight = self._quantised(node.args[0]), self._constant(c.codes)  # pyright: ignore[reportArgumentType]
        activation, options, x_scale = node.args[_ACTIVATION], node.args[5:8], self.found.scales[c.source]
        other: Any = node.args[_RESIDUAL]
        if node in self.plan.outputs:
            given = None if other is None else self.found.scales[source_of(other)]
            w_scales, shift, factors = folded_scales(
                x_scale, c.w_scales, self._shift(node), given, self.found.scales[node], c.images
            )
            bias = None if shift is None else self._constant(shift)
            residual = None if other is None else self._quantised(other)
            args = (codes, weight, bias, residual, activation, *options, self._constant(w_scales), self._constant(factors))
            return self._call(int8_calls.conv_int8_to_int8, args, node)
        bias = None if node.args[2] is None else self._sixteen(node.args[2])  # pyright: ignore[reportArgumentType]
        residual = None if other is None else self._sixteen(other)
        scales = self._constant(x_scale.reshape(1).expand(c.images).contiguous()), self._constant(c.w_scales)
        args = (codes, weight, bias, residual, activation, *options, *scales, self.dtype)
        return self._call(int8_calls.conv_int8_to_float, args, node, True)


def int8_graph(
    fused: fx.GraphModule, found: Found, plan: Plan, dtype: torch.dtype
) -> tuple[fx.GraphModule, dict[Node, Node]]:  # fmt: skip
    """Make the graph with quantisation according to a plan. It shares the parameters.

    Args:
        fused: a graph in 16 bits. It is not changed, but quantised weights and scales are added to its module as buffers.
        found: facts about its products.
        plan: which calls quantise.
        dtype: dtype of values that are not quantised.

    Returns:
        (the new graph, product -> its new call).
    """
    return _Builder(fused, found, plan, dtype).run()
