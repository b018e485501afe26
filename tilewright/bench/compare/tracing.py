"""Traces a user's module to a graph that computes the same out of place: symbolically, or else by torch.export.

A symbolic trace calls the user's modules and PyTorch's functions like the user's code, so its programs take eager mode equally
long. An exported trace calls ATen's operators, which take the host another time. Shapes are known while tracing, so code that
computes with them can be traced. Parameters remain the model's own.

A view that is written through another one is detected by comparing outputs; as a last resort, torch.export's own pass converts
such writes to out-of-place operations.
"""

import copy
import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.fx.proxy import TraceError
from torch.utils._pytree import tree_leaves

from tilewright.fuse.trace import quietly

__all__ = [
    "CONTAINERS", "TRACE_ERRORS", "Untraceable", "copies", "difference", "exported", "flat", "functional", "out_of_place",
    "symbolic",
]  # fmt: skip

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder,
               nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # fmt: skip
"""Modules of torch.nn whose inner calls are traced."""

TRACE_ERRORS = (
    TraceError, TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError, NameError,
)  # fmt: skip
"""The exceptions that are raised if code cannot be traced."""


class Untraceable(ValueError):
    """A model that cannot be cut into layers."""


def copies(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in inputs)


def flat(answer: Any) -> list[Tensor]:
    return [x for x in tree_leaves(answer) if isinstance(x, Tensor)]


def difference(got: list[Tensor], wanted: list[Tensor]) -> str:
    if [x.shape for x in got] != [x.shape for x in wanted]:
        return f"outputs have shapes {[tuple(x.shape) for x in got]}, wanted {[tuple(x.shape) for x in wanted]}"
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        # On a GPU even float32 is rounded to 11 bits in convolutions, and not the same way in every run.
        limit = 1e-4 if b.dtype in (torch.float32, torch.float64) and not b.is_cuda else 2e-2
        if not b.isfinite().all() and not (a.isfinite() == b.isfinite()).all():
            return f"output {i} has infinities or NaNs at other places"
        a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
        error = (a - b).norm() / b.norm().clamp_min(1e-30)
        if not error <= limit and not torch.equal(a, b):
            return f"output {i} differs by {error:.2g} (relative norm), wanted at most {limit:g}"
    return ""


class _Proxy(fx.Proxy):
    """A tensor in a trace with a known shape, type and device, so that code can compute with them."""

    tracer: "_Tracer"

    def __getattr__(self, k: str) -> Any:
        value = self.tracer.values.get(self.node)
        found = getattr(value, k, None) if isinstance(value, Tensor) else None
        if found is None or callable(found):
            return super().__getattr__(k)
        return self.tracer.create_proxy("call_function", getattr, (self, k), {}) if isinstance(found, Tensor) else found

    def __len__(self) -> int:
        return len(self.tracer.values[self.node]) if self.node in self.tracer.values else super().__len__()


class _Tracer(fx.Tracer):
    """Traces for the given inputs: a value that is computed from shapes only is a number, not a node."""

    def __init__(self, inputs: tuple[Tensor, ...]):
        super().__init__()
        self.values: dict[fx.Node, Any] = {}
        """Fake tensors of the nodes whose shapes are known: of all, but behind an operation that cannot be run on fakes."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._inputs = iter(inputs)
        self._running = False  # a module on fakes, whose calls and parameters are then no nodes

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m.__module__.startswith("torch.nn") and not isinstance(m, CONTAINERS)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        """A proxy as fx makes it; the value itself if it contains no tensor."""
        made = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        try:
            value = self._value(kind, target, args, kwargs)
        except TRACE_ERRORS:  # also raised by code that reads numbers from the data
            return made
        if kind.startswith("call_") and not flat(value):
            self.graph.erase_node(made.node)
            return value
        self.values[made.node] = value
        return made

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        value = self.values.get(obj.node)
        return super().iter(obj) if value is None else iter([obj[i] for i in range(len(value))])

    def _value(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "placeholder":
            given = next(self._inputs, *args)
            return self._fake.from_tensor(given) if isinstance(given, Tensor) else given
        args, kwargs = map_aggregate((args, kwargs), lambda a: self.values[a.node] if isinstance(a, fx.Proxy) else a)
        self._running = True
        try:
            with self._fake, torch.no_grad():
                if kind == "get_attr":
                    return operator.attrgetter(target)(self.root)
                if kind == "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                return (self.root.get_submodule(target) if kind == "call_module" else target)(*args, **kwargs)
        finally:
            self._running = False


def symbolic(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = {p.name: p.default for p in parameters[len(inputs) :] if p.default is not p.empty}
    graph = _Tracer(inputs).trace(model, concrete_args=rest or None)
    if any(node.target is nn.functional.multi_head_attention_forward for node in graph.nodes):
        raise Untraceable("multi_head_attention_forward is one node of the trace: two products and an attention")
    for extra in graph.find_nodes(op="placeholder")[len(inputs) :]:
        for user in list(extra.users):
            graph.erase_node(user)  # the check that it has its default value
        graph.erase_node(extra)
    return fx.GraphModule(model, graph)


def exported(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    with quietly():
        return _as_graph(torch.export.export(model, inputs))


def functional(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """As `exported`, and also replaces writes to parts of a tensor by out-of-place operations."""
    with quietly():
        return _as_graph(torch.export.export(model, inputs).run_decompositions({}))


def opaque(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """The model as one node, for a comparison without layers."""
    graph = fx.Graph()
    given = tuple(graph.placeholder(f"input_{i}") for i in range(len(inputs)))
    graph.output(graph.call_module("model", given))
    return fx.GraphModule({"model": model}, graph)


def _as_graph(program: torch.export.ExportedProgram) -> fx.GraphModule:
    root = program.module()
    assert isinstance(root, fx.GraphModule)
    for node in root.graph.find_nodes(op="call_module", target="_guards_fn"):
        root.graph.erase_node(node)
    root.recompile()
    return root


def out_of_place(root: fx.GraphModule) -> None:
    """Replace in-place operations by out-of-place ones, pass the new values to later readers, and remove dead code and
    assertions."""
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
    """The target that does the same out of place; None if the node does not write to a tensor."""
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
