"""Turns an exported graph into a graph of our operators. A group is emitted at its last call, and views become strides.

Calls that belong to no group are emitted unchanged, on tensors of the shapes that they expect. Their results are made dense,
which rarely needs a copy. Values that depend on parameters alone are computed here, once.
"""

import math
import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from tilewright.fuse import calls, emit_ops
from tilewright.fuse.anchors import Anchor, tensor_of
from tilewright.fuse.buffers import Buffers, Value
from tilewright.fuse.check import FLOAT_NODE
from tilewright.fuse.emit import EMIT, emit_gate, emit_merged
from tilewright.fuse.moved_bias import move_biases
from tilewright.fuse.naming import layer_name, source_line
from tilewright.fuse.plan import FUSED, Group, Plan, Unbuilt, merge_name
from tilewright.fuse.report import LAUNCH, Report
from tilewright.fuse.trace import Traced, Untraceable
from tilewright.fuse.trial import Trial
from tilewright.fuse.view_calls import PARTS, follow, is_part, is_view, parts_of
from tilewright.fuse.views import channels_last, dense
from tilewright.fuse.walk import plan
from tilewright.fuse.weights import Weights

__all__ = ["Lowering"]

aten = torch.ops.aten


def beside(conv: Anchor, x: Tensor) -> bool:
    """Whether a convolution is over non-overlapping patches of an image with few channels (`_patches` in emit.py)."""
    weight = tensor_of(conv.weight)
    kernel = () if weight is None else tuple(weight.shape[2:])
    return math.prod(kernel) > 1 and tuple(conv.options["stride"]) == kernel and x.shape[1] <= 16


def _reads_channels(group: Group, node: Node, value: Tensor) -> bool:
    """Whether a group needs an input of the model in channels-last format."""
    anchor = group.anchor
    if anchor.kind == "conv":
        if value.dim() != len(anchor.options["stride"]) + 2:
            return False
        # A convolution of patches gathers them directly from the user's layout.
        return node is group.residual or (node is anchor.x and not beside(anchor, value))
    return node is anchor.x and (
        anchor.kind in emit_ops.IMAGES or (anchor.kind in ("max_pool", "global_mean") and value.dim() == 4)
    )


_EMIT = {**EMIT, **emit_ops.EMIT}


class Lowering:
    """Turns a traced model into the new graph.

    If a fusion cannot be built, the graph is planned and built again without it. Its calls are then left to torch, and the
    report states the reason.

    Args:
        traced: the model in the graph's dtype.
        exact: parameters of the float model by name.
        report: records decisions.
        refused: names of layers or nodes that must not be fused (walk.plan).
    """

    def __init__(self, traced: Traced, exact: dict[str, Tensor], report: Report, refused: Collection[str] = frozenset()):
        self.traced, self.exact, self.report = traced, exact, report
        # Traced casts include type assertions. These always hold, but they would count as readers of a value.
        for node in [n for n in traced.graph.nodes if n.target is aten._assert_tensor_metadata.default]:
            traced.graph.erase_node(node)
            traced.module.recompile()
        self.refused = dict.fromkeys(refused, "it is excluded from fusion, so torch computes it")

    def run(self) -> fx.GraphModule:
        """Build the new graph. Returns it as a module."""
        while True:
            build = _Build(self.traced, self.exact, plan(self.traced.graph, self.refused))
            module = build.run()
            if not build.failed:
                break
            assert not build.failed.keys() <= self.refused.keys(), f"planned again although refused: {build.failed}"
            self.refused |= build.failed
        listed = build.plan.listed(list(self.traced.graph.nodes))
        self.report.decisions += [d for d in listed if d.kind != FUSED or not d.taken] + build.report.decisions
        self.report.launches += build.report.launches
        self.report.plan = build.plan.to_json()
        return module


_FAILURES = (ValueError, TypeError, LookupError, RuntimeError, AssertionError)
"""Errors that mean that a fusion cannot be built."""


class _Build(Buffers):
    """One attempt to build the graph, from one plan."""

    def __init__(self, traced: Traced, exact: dict[str, Tensor], found: Plan):
        self.root, self.traced, self.plan = nn.Module(), traced, found
        super().__init__(Weights(exact, traced.state, self.root, found.constant), Report())
        self.trial = Trial(self.root)
        self.failed: dict[str, str] = {}
        """Names that the next plan must not fuse -> the reason."""
        move_biases(found.groups, self.report)

    def run(self) -> fx.GraphModule:
        """Build the graph. The result is unusable if `failed` is not empty."""
        gates = {gate.node: gate for gate in self.plan.gates}
        merged = {group.last: batch for batch in self.plan.merges for group in batch}
        gated = {group.last for gate in self.plan.gates for group in gate.groups}
        groups = {group.last: group for group in self.plan.groups if group.last not in gated}
        skipped = {n for group in self.plan.groups for n in group.nodes} | {n for gate in self.plan.gates for n in gate.inside}
        for node in self.traced.graph.nodes:
            if node in gates:
                gate = gates[node]
                inside = (*(n for group in gate.groups for n in group.nodes), *gate.inside, node)
                self._fused(node, partial(emit_gate, self, gate), inside, [node.name])
            elif node in merged:
                batch, group = merged[node], groups[node]
                names = [merge_name(one.anchor.node) for one in batch]
                self._fused(node, partial(emit_merged, self, batch, group), group.nodes, names)
            elif node in groups:
                group = groups[node]
                steps = [n.name for n in group.chain if not is_view(n)]
                emit = _EMIT[group.anchor.kind]
                self._fused(node, partial(emit, self, group), group.nodes, steps or [group.anchor.node.name])
            elif node not in skipped:
                self.plain(node)
                self._run_new(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def _fused(self, last: Node, emit: Callable[[], Value], nodes: Sequence[Node], names: Sequence[str]) -> None:
        """Emit a fusion as the value of its last call. If that fails, record its names, and continue with torch's calls."""
        before = set(self.graph.nodes)
        try:
            value = emit()
            self._run_new()
            self.values[last] = value
        except _FAILURES as error:
            words = (str(error).strip().splitlines() or [type(error).__name__])[0]
            planned = isinstance(error, Unbuilt)
            self.failed |= dict.fromkeys(
                error.nodes if planned else names, words if planned else f"it could not be built: {words}"
            )
            for node in reversed([n for n in self.graph.nodes if n not in before]):
                self.graph.erase_node(node)
            self.made = {key: node for key, node in self.made.items() if node in before}
            self.trial.values = {node: value for node, value in self.trial.values.items() if node in before}
            self.memory = {node: view for node, view in self.memory.items() if node in before}
            self.merged = {node: value for node, value in self.merged.items() if value.node in before}
            self.grown = {node: rows for node, rows in self.grown.items() if rows in before}
            for node in sorted(set(nodes), key=list(self.traced.graph.nodes).index):
                self.plain(node)
            self._run_new()

    def _run_new(self, like: Node | None = None) -> None:
        """Run all calls that were emitted since the previous run on fake tensors."""
        new = list(takewhile(lambda node: node not in self.trial.values, reversed(self.graph.nodes)))
        for node in reversed(new):
            self.trial.run(node, self.memory.get(node), None if like is None else like.meta.get("val"))

    # ---- everything else

    def plain(self, node: Node) -> None:
        """Emit a node that is in no group."""
        if node.op == "placeholder":
            self.values[node] = self._placeholder(node)
        elif node.op == "get_attr":
            known = self.traced.state.get(str(node.target))
            if known is not None:
                self.values[node] = Value(None, dense(known.shape), known.detach().contiguous())
        elif node.op == "output":
            self.graph.output(fx.map_arg(node.args[0], lambda n: self.tensor(self.values[n])))
        elif node.op == "call_function" and self.plan.decisions[node].kind != "unread":
            self.values[node] = self._call(node)

    def _placeholder(self, node: Node) -> Any:
        new, value = self.graph.placeholder(node.name), tensor_of(node)
        if value is None:
            return new
        last = any(_reads_channels(group, node, value) for group in self.plan.groups)
        dtype = value.dtype if value.is_floating_point() else None
        return self.buffer(calls.enter, (new, dtype, last), channels_last(value.shape) if last else dense(value.shape), node)

    def _call(self, node: Node) -> Any:
        given = [self.values[n] for n in node.all_input_nodes]
        tensors = [v for v in given if isinstance(v, Value)]
        if node.target in PARTS and tensors[0].constant is None and (parts := parts_of(node, tensors[0].view)) is not None:
            return tuple(Value(tensors[0].node, view) for view in parts)
        if node.target is operator.getitem and isinstance(given[0], tuple):
            return given[0][node.args[1]]  # pyright: ignore[reportArgumentType, reportCallIssue]
        if self.plan.constant(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n].constant)
            with torch.no_grad():
                constant = node.target(*args, **kwargs).contiguous()  # pyright: ignore[reportCallIssue]
            return Value(None, dense(constant.shape), constant)
        if is_view(node) or is_part(node):
            value = tensors[0]
            if value.constant is None and (view := follow(node, value.view)) is not None:
                return Value(value.node, view)
        return self._leftover(node, tensors)

    def _as_traced(self, node: Node) -> Node:
        """The operand of as_strided, in the memory layout that it has in the model, because as_strided addresses memory.

        Raises Untraceable if the operand is a view of a larger tensor.
        """
        source: Any = node.args[0]
        value, known = self.opened(self.values[source]), tensor_of(source)
        if known is not None and known.untyped_storage().nbytes() == known.numel() * known.element_size():
            for last in (False, True):
                view = channels_last(value.shape) if last and known.dim() > 2 else dense(value.shape)
                if view.strides == tuple(known.stride()):
                    whole = value.node is not None and value.view == self.memory[value.node] == view
                    return self.tensor(value if whole else self.copied(value, last))
        where = source_line(node) or node.name
        raise Untraceable(f"{where}: as_strided reads the memory of a larger tensor through a view, which a graph cannot do")

    def _leftover(self, node: Node, tensors: Sequence[Value]) -> Any:
        """Emit the ATen call itself, on tensors of the shapes that it expects. Its result is made dense."""
        target = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.tensor(self.values[n]))
        if node.target is aten.as_strided.default:
            args = (self._as_traced(node), *args[1:])
        new = self.graph.call_function(target, args, kwargs)  # pyright: ignore[reportArgumentType]
        new.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        self.trial.traced[new] = node.meta.get("val")
        out = tensor_of(node)
        if out is None:
            return new
        images = [v.view for v in tensors if v.node is not None and len(v.shape) == out.dim() > 2]
        last = any(v.strides == channels_last(v.shape).strides != dense(v.shape).strides for v in images)
        value = self.buffer(calls.as_dense, (new, last), channels_last(out.shape) if last else dense(out.shape), node)
        if target is not operator.getitem:
            new.meta[LAUNCH] = {"layer": layer_name(node), "op": str(target), "what": str(list(out.shape))}
            self.report.launches.append(new.meta[LAUNCH])
        assert value.node is not None, "the result of a call must have a buffer"
        value.node.meta[FLOAT_NODE] = node.name
        return value
