"""Lets Inductor compile groups of calls that none of our operators computes, if that is faster. For GPUs.

Between our launches, an optimised graph runs torch's own calls one by one: custom activations, masks, embeddings and their
sums. If two or more such calls are not separated by one of our launches, they become one module (with torch.fx's
CapabilityBasedPartitioner), even if they do not read each other's results. torch.compile compiles the module to a few kernels.
Both versions are timed on the example inputs, and the compiled module is kept if it is faster. It is captured together with the
rest of the graph.

Not supported: random numbers, and calls other than plain arithmetic, gathering or reduction. If Inductor cannot compile a part,
or if the compiled code gives other outputs, the part does not change, and the reason is recorded.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from tilewright.fuse import calls
from tilewright.fuse.judge import apart_from
from tilewright.fuse.naming import layer_name
from tilewright.fuse.report import LAUNCH, Report
from tilewright.tune.measure import Stopwatch

__all__ = ["compile_leftovers"]

aten = torch.ops.aten

_GATHERED = frozenset(
    {
        aten.embedding.default, aten.cat.default, aten.stack.default, aten.where.self, aten.masked_fill.Scalar,
        aten.flip.default,
        aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default,
        aten.amin.default, aten.var.correction, aten.rsqrt.default, aten.cumsum.default, aten.argmax.default, aten.glu.default,
        aten.hardswish.default, aten.hardsigmoid.default, aten.roll.default, aten.tril.default, aten.triu.default,
        aten.group_norm.default, aten.instance_norm.default, aten.rms_norm.default,
    }
)  # fmt: skip
"""Calls that may go to Inductor, in addition to the calls that torch tags as pointwise."""
_MOVES = frozenset(
    {
        aten.slice.Tensor, aten.select.int, aten.expand.default, aten.reshape.default, aten.unsqueeze.default,
        aten.permute.default, aten.to.dtype, aten._to_copy.default, aten.clone.default, calls.as_dense, operator.getitem,
        aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default,
    }
)  # fmt: skip
"""Calls that only move data. They may be in a part, but they do not count as its two or more calls."""
_LEAD = 0.95
"""A compiled part is kept if its time is at most this share of the time of its calls run one by one."""


def _computes(node: Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags or target in _GATHERED


class _Support(OperatorSupportBase):
    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        """Whether a call may go to Inductor."""
        if node.target is operator.getitem:
            source = node.args[0]
            return isinstance(source, Node) and (source.target in _MOVES or _computes(source))
        return _computes(node) or (node.op == "call_function" and node.target in _MOVES)


class _Part(nn.Module):
    """A part compiled by torch.compile."""

    def __init__(self, compiled: Any):
        super().__init__()
        self.compiled = compiled

    def forward(self, *args: Any) -> Any:
        """Run the compiled part."""
        return self.compiled(*args)


class _Decider(fx.Interpreter):
    """Runs a graph. It decides about each part when it reaches the part, because the operands are then available."""

    def __init__(self, module: fx.GraphModule, report: Report):
        super().__init__(module)
        self.whole, self.report = module, report

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        _decide(self.whole, target, args, self.report)
        return super().call_module(target, args, kwargs)


def _timed(ways: Sequence[Any], args: tuple[Any, ...]) -> list[float]:
    def call(way: Any) -> Any:
        return lambda i: way(*args)

    return [t.us for t in Stopwatch().in_turns([call(way) for way in ways], 1, rounds=9)]


def compile_leftovers(fused: fx.GraphModule, inputs: list[Any], report: Report) -> fx.GraphModule:
    """Compile parts of a graph where this is faster. The graph is changed in place, and returned.

    Args:
        fused: a graph on a GPU. The implementations of our launches must have been chosen before.
        inputs: flat example inputs.
        report: records a decision for each part.
    """
    partitioner = CapabilityBasedPartitioner(fused, _Support(), allows_single_node_partition=False)
    found = [part for part in partitioner.propose_partitions() if sum(map(_computes, part.nodes)) > 1]
    if not found:
        return fused
    fused = partitioner.fuse_partitions(found, prefix="leftover_")
    with torch.no_grad():
        _Decider(fused, report).run(*inputs)
    return fused


def _decide(fused: fx.GraphModule, target: str, args: tuple[Any, ...], report: Report) -> None:
    from torch._dynamo.exc import TorchDynamoException  # imported here, because it takes seconds
    from torch._inductor.exc import InductorError

    part = fused.get_submodule(target)
    assert isinstance(part, fx.GraphModule), "a part of a graph must be a graph"
    computing = [n for n in part.graph.nodes if _computes(n)]
    layers = [n.meta[LAUNCH]["layer"] if LAUNCH in n.meta else layer_name(n) for n in computing]
    what = f"{len(layers)} calls of {', '.join(dict.fromkeys(layers))}"
    compiled = torch.compile(part, fullgraph=True, dynamic=False)
    try:
        got = compiled(*args)
    except (TorchDynamoException, InductorError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        report.add(layers[0], "inductor", target, False, f"{what}: Inductor cannot compile them: {first}")
        return
    if (off := apart_from(part(*args), got)) is not None:
        words = off.words or f"relative RMS error {off.rms:.2e}"
        report.add(layers[0], "inductor", target, False, f"{what}: Inductor's code gives wrong outputs ({words})")
        return
    calls_us, part_us = _timed((part, compiled), args)
    taken = part_us <= _LEAD * calls_us
    reason = f"{what}: {part_us:.1f} us compiled by Inductor, {calls_us:.1f} us one by one"
    report.add(layers[0], "inductor", target, taken, reason)
    if taken:
        setattr(fused, target, _Part(compiled))
        gone = [n.meta[LAUNCH] for n in part.graph.nodes if LAUNCH in n.meta]
        at = min((report.launches.index(row) for row in gone if row in report.launches), default=len(report.launches))
        report.launches[:] = [row for row in report.launches if not any(row is other for other in gone)]
        report.launches.insert(at, {"layer": layers[0], "op": "inductor", "what": what})
