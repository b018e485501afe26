"""Traces a user's module as a functional ATen graph of its tensors, and explains why if that is impossible.

`torch.export` traces it in evaluation with the shapes of the example inputs; calls for which we have an operator are not
decomposed (convolution, linear, norms, attention). The graph takes the tensors in the arguments and returns those in the
result, in the order of
`structure.flatten`; other arguments are constants of the graph. If a module cannot be traced (a branch on a tensor's value,
`.item()`, calls that leave torch), `Untraceable` is raised, with the user's line.

Not here: dynamic shapes. A graph is for the examples' shapes only.
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
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tilewright.fuse.naming import source_line
from tilewright.fuse.one_type import one_type
from tilewright.fuse.simplify import simplify
from tilewright.fuse.structure import Structure, flatten, opened, rebuild

__all__ = ["Known", "Traced", "Untraceable", "line_of", "quietly", "trace", "without_fast_path"]


class Untraceable(ValueError):
    """A module that cannot be traced; the message has the user's line and the reason."""


@dataclass(frozen=True)
class Traced:
    """An exported module."""

    module: fx.GraphModule
    """Called with the tensors of (args, kwargs), returns a sequence of the result's tensors; parameters are attributes."""
    state: dict[str, Tensor]
    """Parameters, buffers and constants, by the names in the graph's get_attr nodes."""
    mutated: tuple[str, ...] = ()
    """Inputs that the module writes to, by their path: args[0], kwargs['x']."""

    @property
    def graph(self) -> fx.Graph:
        """Functional: placeholders, get_attr, ATen calls, output."""
        return self.module.graph


class Known(nn.Module, ABC):
    """A module that already has its graph, for the dtype it was cast to: `trace` uses it instead of tracing."""

    @abstractmethod
    def as_traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
        """The graph of a call with these arguments."""


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Inside this scope, torch's fused inference kernels of nn.TransformerEncoder (one opaque call per layer) are disabled."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_OWN = tuple(str(Path(module.__file__).parent) for module in (torch,) if module.__file__)
_FUSE = str(Path(__file__).parent)


def line_of(error: BaseException, *ours: str) -> str:
    """The user's line behind an error: the innermost frame that is neither torch's nor in one of the folders `ours`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_OWN, _FUSE, "<", *ours))]
    if not frames:
        return "an unknown line"
    last = frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {(last.line or '').strip()}"


@contextmanager
def quietly() -> Iterator[None]:
    """Suppresses the partial graph that torch.export prints on standard error before it raises, and torch's own deprecation
    warnings; keeps all other output."""
    said = StringIO()
    failed = True
    try:
        with redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            # Whether that is state, `judge.right_outputs` has found out.
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export", UserWarning)
            yield
        failed = False
    finally:
        if not failed:
            sys.stderr.write(said.getvalue())


class _Flat(nn.Module):
    """A module as a function from tensors to a tuple of tensors.

    Args:
        module: the user's.
        structure: of (args, kwargs).
        copies: whether it gets copies of its inputs, because it writes to them.
    """

    def __init__(self, module: nn.Module, structure: Structure, copies: bool):
        super().__init__()
        self.user, self.structure, self.copies = module, structure, copies

    def forward(self, *input: Tensor) -> tuple[Tensor, ...]:
        """The module's own call. The graph's placeholders are called input_0, input_1 ..."""
        given = [t.clone() for t in input] if self.copies else input
        args, kwargs = rebuild(self.structure, given)
        return tuple(flatten(self.user(*args, **kwargs))[0])


_USER = "user"
"""The name of the module in `_Flat`, a prefix of all names in the graph."""


class _NoDropout(TorchFunctionMode):
    """Dropout in evaluation returns its own input, as in a call. torch.export copies it, so later writes would be lost."""

    _KINDS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._KINDS:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "p", "training"), args)) | (kwargs or {})
        if given.get("training", func not in (F.alpha_dropout, F.feature_alpha_dropout)):
            return func(*args, **(kwargs or {}))
        return given["input"]


_BY_VALUE = "this depends on the value of a tensor, which a graph does not know"
_WORDS = {"GuardOnDataDependentSymNode": _BY_VALUE, "DataDependentOutputException": _BY_VALUE}
"""What errors of tracing mean, by the names of their classes."""


def _exported(module: _Flat, tensors: Sequence[Tensor]) -> torch.export.ExportedProgram:
    name = type(module.user).__name__
    for path, inside in module.user.named_modules():
        if isinstance(inside, torch.jit.ScriptModule):
            where = f"it contains a TorchScript module ({path})" if path else "it is a TorchScript module"
            raise Untraceable(f"{name} cannot be traced: {where}, which has no Python code to trace")
    with without_fast_path(), torch.no_grad(), quietly(), _NoDropout():
        try:
            return torch.export.export(module, tuple(tensors)).run_decompositions({})
        # Every error of the user's code on fake tensors means that it cannot be traced, as does every error of torch.export,
        # some of whose classes derive from Exception alone.
        except Exception as e:
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            words = _WORDS.get(type(e).__name__, f"{type(e).__name__}: {reason}")
            raise Untraceable(f"{name} cannot be traced at {line_of(e)}: {words}") from e


def trace(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Traced:
    """Trace a module.

    Args:
        module: in evaluation.
        args: example inputs.
        kwargs: example inputs by name.

    Raises:
        Untraceable: it cannot be traced; the message has the user's line.
    """
    if isinstance(module, Known):
        return module.as_traced(args, kwargs or {})
    given = (tuple(args), dict(kwargs or {}))
    tensors, structure = flatten(given)
    exported = _exported(_Flat(module, structure, copies=False), tensors)
    signature = exported.graph_signature
    mutated = tuple(_place(given, list(signature.user_inputs).index(n)) for n in signature.user_inputs_to_mutate.values())
    if mutated:
        exported = _exported(_Flat(module, structure, copies=True), tensors)
    if exported.graph_signature.buffers_to_mutate:
        names = ", ".join(name.removeprefix(f"{_USER}.") for name in exported.graph_signature.buffers_to_mutate.values())
        raise Untraceable(f"{type(module).__name__} writes to its own buffers in every call ({names}), and a graph does not")
    _known_sizes(module, exported.graph)
    whole = exported.module()
    assert isinstance(whole, fx.GraphModule), "that is what torch.export gives"
    _with_users_names(whole)
    simplify(whole.graph)
    one_type(whole.graph)
    _reshaped(whole)
    state = {str(n.target): _attribute(whole, str(n.target)) for n in whole.graph.nodes if n.op == "get_attr"}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return Traced(whole, tensors, mutated)


def _place(given: Any, index: int) -> str:
    """The path of a tensor in (args, kwargs), such as `args[0]`."""
    tensors = (path for path, leaf in pytree.tree_flatten_with_path(opened(given))[0] if isinstance(leaf, Tensor))
    path = list(tensors)[index]
    return ("kwargs" if isinstance(path[1], pytree.MappingKey) else "args") + pytree.keystr(tuple(path[1:]))


def _with_users_names(whole: fx.GraphModule) -> None:
    """Restore the user's names of weights and modules, without the prefix of `_Flat`."""
    inside = getattr(whole, _USER, None)
    for node in whole.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr" and target.startswith(f"{_USER}."):
            node.target = target.removeprefix(f"{_USER}.")
        if stack := node.meta.get("nn_module_stack"):
            short = {key: (path.removeprefix(_USER).removeprefix("."), kind) for key, (path, kind) in stack.items()}
            node.meta["nn_module_stack"] = short
    if isinstance(inside, nn.Module):
        delattr(whole, _USER)
        for kind in ("_modules", "_parameters", "_buffers"):
            getattr(whole, kind).update(getattr(inside, kind))
        constants = {name: v for name, v in vars(inside).items() if isinstance(v, Tensor)}
        vars(whole).update(constants)
    whole.recompile()


def _reshaped(whole: fx.GraphModule) -> None:
    """Let views copy if they must: real strides may differ from those of the fake tensors in tracing.

    This is so for `roll` (torch 2.11 to 2.13): on a CPU its result is contiguous, but the fake result has its input's layout.
    Nothing in the graph is written in place, so a copy is equivalent.
    """
    for node in whole.graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
    whole.recompile()


def _known_sizes(module: nn.Module, graph: fx.Graph) -> None:
    """Raises Untraceable if a result's size depends on values, as for `nonzero` and `x[mask]`."""
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
