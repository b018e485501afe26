"""A user's module as a functional ATen graph, and what is said where that cannot be.

`torch.export` traces it in evaluation, with the shapes of the example inputs; calls that have an operator of ours stay whole
(convolution, linear, norms, attention). What cannot be traced (a branch on a tensor's value, `.item()`, calls out of torch) is
an `Untraceable`, which names the user's line.

Not here: dynamic shapes. A graph is that of the examples' shapes.
"""

import sys
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tilewright.fuse.naming import source_line

__all__ = ["Known", "Traced", "Untraceable", "line_of", "quietly", "trace"]


class Untraceable(ValueError):
    """A module whose calls are no graph; the message names the user's line and the reason."""


@dataclass(frozen=True)
class Traced:
    """An exported module."""

    module: fx.GraphModule
    """Callable as the user's; parameters are attributes."""
    state: dict[str, Tensor]
    """Parameters, buffers and constants by the names of the graph's get_attr nodes."""
    out_spec: Any
    """How the user's outputs are put together from the graph's."""
    in_spec: Any
    """The same of (args, kwargs)."""
    mutated: tuple[str, ...] = ()
    """Inputs that the module writes to."""

    @property
    def graph(self) -> fx.Graph:
        """Functional: placeholders, get_attr, ATen calls, output."""
        return self.module.graph


class Known(nn.Module, ABC):
    """A module that has its graph already, in whatever type it was cast to: `trace` asks for it instead of tracing."""

    @abstractmethod
    def as_traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
        """The graph of a call with these arguments."""


@contextmanager
def _whole_attention():
    """torch's fused inference kernels of nn.TransformerEncoder, one opaque call a layer, are off while tracing."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_OWN = tuple(str(Path(module.__file__).parent) for module in (torch,) if module.__file__)
_FUSE = str(Path(__file__).parent)


def line_of(error: BaseException, *ours: str) -> str:
    """The user's line behind an error: the innermost frame that is neither torch's nor in the folders `ours`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_OWN, _FUSE, "<", *ours))]
    if not frames:
        return "an unknown line"
    last = frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {(last.line or '').strip()}"


@contextmanager
def quietly() -> Iterator[None]:
    """torch.export prints the graph as far as it came on standard error before it raises, and copies what torch itself says is
    deprecated; what it says otherwise is kept."""
    said = StringIO()
    failed = True
    try:
        with redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            yield
        failed = False
    finally:
        if not failed:
            sys.stderr.write(said.getvalue())


class _OnCopies(nn.Module):
    """A module that writes to its inputs, given copies of them."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own call."""
        args, kwargs = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (args, kwargs))
        return self.model(*args, **kwargs)


def _exported(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.export.ExportedProgram:
    with _whole_attention(), torch.no_grad(), quietly():
        try:
            return torch.export.export(module, tuple(args), dict(kwargs)).run_decompositions({})
        # Whatever the user's code raises while it runs on fake tensors says that it is no graph of them.
        except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError) as e:
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise Untraceable(f"{type(module).__name__} cannot be traced at {line_of(e)}: {type(e).__name__}: {reason}") from e


def trace(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Traced:
    """The module as a graph.

    Args:
        module: in evaluation.
        args: example inputs.
        kwargs: the same by name.

    Raises:
        Untraceable: it is no graph; with the user's line.
    """
    if isinstance(module, Known):
        return module.as_traced(args, kwargs or {})
    exported = _exported(module, args, kwargs or {})
    mutated = tuple(exported.graph_signature.user_inputs_to_mutate.values())
    if mutated:
        exported = _exported(_OnCopies(module), args, kwargs or {})
    if exported.graph_signature.buffers_to_mutate:
        names = ", ".join(exported.graph_signature.buffers_to_mutate.values())
        raise Untraceable(f"{type(module).__name__} writes to its own buffers in every call ({names}), and a graph does not")
    _known_sizes(module, exported.graph)
    whole = exported.module()
    assert isinstance(whole, fx.GraphModule), "that is what torch.export gives"
    _without_assertions(whole)
    state = {str(n.target): _attribute(whole, str(n.target)) for n in whole.graph.nodes if n.op == "get_attr"}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    spec = exported.call_spec
    return Traced(whole, tensors, spec.out_spec, spec.in_spec, mutated)


def _without_assertions(whole: fx.GraphModule) -> None:
    """Casts leave assertions about types, which hold by construction and would count as readers of a value."""
    for node in list(whole.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            whole.graph.erase_node(node)
    whole.recompile()


def _known_sizes(module: nn.Module, graph: fx.Graph) -> None:
    """Raises Untraceable where a result's size depends on values, as that of `nonzero` and `x[mask]` does."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            unknown = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
            if unknown or (isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape)):
                where = f"{type(module).__name__} cannot be traced at {source_line(node) or node.name}"
                raise Untraceable(f"{where}: the size of {node.name} depends on values, and a graph is for known sizes")


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
