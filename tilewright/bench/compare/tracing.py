"""From a user's module to a graph that computes the same out of place: symbolically, else by torch.export.

Parameters stay the model's own. Not handled, and found out by comparing outputs: a view that is written to through another one.
"""

import copy
import inspect
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.utils._pytree import tree_leaves

__all__ = ["CONTAINERS", "TRACE_ERRORS", "Untraceable", "copies", "difference", "exported", "flat", "out_of_place", "symbolic"]

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder,
               nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # fmt: skip
"""Modules of torch.nn that are looked into."""

TRACE_ERRORS = (
    TraceError, TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError, NameError,
)  # fmt: skip
"""What tracing code that cannot be traced ends in."""


class Untraceable(ValueError):
    """A model that cannot be cut into layers."""


def copies(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in inputs)


def flat(answer: Any) -> list[Tensor]:
    return [x for x in tree_leaves(answer) if isinstance(x, Tensor)]


def difference(got: list[Tensor], wanted: list[Tensor]) -> str:
    if [x.shape for x in got] != [x.shape for x in wanted]:
        return f"outputs of shapes {[tuple(x.shape) for x in got]}, wanted {[tuple(x.shape) for x in wanted]}"
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        # On a GPU even float32 is rounded to 11 bits in convolutions, and not the same way in every run.
        limit = 1e-4 if b.dtype in (torch.float32, torch.float64) and not b.is_cuda else 2e-2
        error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
        if not error <= limit and not torch.equal(a, b):
            return f"output {i} differs by {error:.2g} (relative norm), wanted at most {limit:g}"
    return ""


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m.__module__.startswith("torch.nn") and not isinstance(m, CONTAINERS)


def symbolic(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = {p.name: p.default for p in parameters[len(inputs) :] if p.default is not p.empty}
    graph = _Tracer().trace(model, concrete_args=rest or None)
    for extra in graph.find_nodes(op="placeholder")[len(inputs) :]:
        for user in list(extra.users):
            graph.erase_node(user)  # the check that it has its default value
        graph.erase_node(extra)
    return fx.GraphModule(model, graph)


def exported(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    root = torch.export.export(model, inputs).module()
    assert isinstance(root, fx.GraphModule)
    for node in root.graph.find_nodes(op="call_module", target="_guards_fn"):
        root.graph.erase_node(node)
    root.recompile()
    return root


def out_of_place(root: fx.GraphModule) -> None:
    """In-place operations out of place, later readers of the old name given the new value; dead code and assertions away."""
    for node in list(root.graph.nodes):
        twin = _twin(root, node)
        if twin is None:
            if node.op == "call_function" and "_assert" in str(node.target):
                root.graph.erase_node(node)
            continue
        written = node.args[0] if node.args else next(iter(node.all_input_nodes))
        later, seen = [], False
        for other in root.graph.nodes:
            seen = seen or other is node
            if seen and other is not node and isinstance(written, fx.Node) and other in written.users:
                later.append(other)
        for other in later:
            assert isinstance(written, fx.Node)
            other.replace_input_with(written, node)
        node.target = twin
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
    root.graph.eliminate_dead_code()
    root.recompile()


def _twin(root: fx.GraphModule, node: fx.Node) -> Any:
    """The target that does the same out of place; None: the node writes to nothing."""
    target = node.target
    if node.op == "call_module":
        module = root.get_submodule(str(target))
        if not getattr(module, "inplace", False):
            return None
        module = copy.copy(module)
        module.inplace = False  # type: ignore[assignment]
        name = f"{str(target).replace('.', '_')}_out_of_place"
        root.add_submodule(name, module)
        return name
    if node.kwargs.get("inplace"):
        return target
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        packet = getattr(torch.ops.aten, target._schema.name.split("::")[1].rstrip("_"))
        return getattr(packet, target._overloadname)
    if node.op == "call_method" and str(target).endswith("_") and not str(target).startswith("__"):
        return str(target)[:-1]
    name = getattr(target, "__name__", "")
    if getattr(target, "__module__", "") in ("_operator", "operator") and name.startswith("i") and hasattr(operator, name[1:]):
        return getattr(operator, name[1:])
    if node.op == "call_function" and name.endswith("_") and hasattr(torch, name[:-1]) and not name.startswith("_"):
        return getattr(torch, name[:-1])
    return None
