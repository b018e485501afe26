"""Traces a user's module as a functional ATen graph. If this is impossible, the error states the reason.

`torch.export` traces the module in evaluation mode, with the shapes of the example inputs. Calls for which we have an operator
are not decomposed (convolution, linear, norms, attention). The graph's inputs are the tensors in the arguments, and its outputs
are the tensors in the result, both in the order of `structure.flatten`. Other arguments are constants of the graph. If a module
cannot be traced (a branch on a tensor's value, `.item()`, calls outside torch), `Untraceable` is raised. Its message contains
the user's source line.

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
    """A module cannot be traced. The message contains the reason and, where there is one, the user's source line."""


@dataclass(frozen=True)
class Traced:
    """An exported module."""

    module: fx.GraphModule
    """Its arguments are the tensors of (args, kwargs); it returns a sequence of the result's tensors. Parameters are
    attributes."""
    state: dict[str, Tensor]
    """Parameters, buffers and constants, by the names in the graph's get_attr nodes."""
    mutated: tuple[str, ...] = ()
    """Inputs to which the module writes, as paths: args[0], kwargs['x']."""

    @property
    def graph(self) -> fx.Graph:
        """The functional graph. Its nodes are placeholders, get_attr, ATen calls and the output."""
        return self.module.graph


class Known(nn.Module, ABC):
    """A module that already has a graph for the dtype to which it was cast. `trace` uses this graph instead of tracing."""

    @abstractmethod
    def as_traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
        """The graph of a call with these arguments."""


@contextmanager
def without_fast_path() -> Iterator[None]:
    """A scope in which torch's fused inference kernels of nn.TransformerEncoder (one opaque call per layer) are disabled."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_OWN = tuple(str(Path(module.__file__).parent) for module in (torch,) if module.__file__)
_FUSE = str(Path(__file__).parent)


def line_of(error: BaseException, *ours: str) -> str:
    """The user's source line that caused an error: the innermost frame that is neither in torch nor in a folder of `ours`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_OWN, _FUSE, "<", *ours))]
    if not frames:
        return "an unknown line"
    last = frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {(last.line or '').strip()}"


@contextmanager
def quietly() -> Iterator[None]:
    """A scope that suppresses torch's own deprecation warnings, and the partial graph that torch.export prints on an error.

    All other output to standard error is kept.
    """
    said = StringIO()
    failed = True
    try:
        with redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            # `judge.right_outputs` has already checked whether such attributes are state.
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export", UserWarning)
            yield
        failed = False
    finally:
        if not failed:
            sys.stderr.write(said.getvalue())


class _Flat(nn.Module):
    """A module as a function from tensors to a tuple of tensors.

    Args:
        module: the user's module.
        structure: the structure of (args, kwargs).
        copies: whether the module gets copies of its inputs, because it writes to them.
    """

    def __init__(self, module: nn.Module, structure: Structure, copies: bool):
        super().__init__()
        self.user, self.structure, self.copies = module, structure, copies

    def forward(self, *input: Tensor) -> tuple[Tensor, ...]:
        """Call the module. Because of the parameter's name, the graph's placeholders are called input_0, input_1 ..."""
        given = [t.clone() for t in input] if self.copies else input
        args, kwargs = rebuild(self.structure, given)
        return tuple(flatten(self.user(*args, **kwargs))[0])


_USER = "user"
"""The name of the module in `_Flat`. In the graph it is a prefix of all names."""


class _NoDropout(TorchFunctionMode):
    """Makes dropout in evaluation mode return its input itself, as in a normal call.

    torch.export would copy the input, so later writes to the result would not change the input.
    """

    _KINDS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._KINDS:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "p", "training"), args)) | (kwargs or {})
        if given.get("training", func not in (F.alpha_dropout, F.feature_alpha_dropout)):
            return func(*args, **(kwargs or {}))
        return given["input"]


_BY_VALUE = "this depends on the value of a tensor, which is not known when the model is traced"
_WORDS = {"GuardOnDataDependentSymNode": _BY_VALUE, "DataDependentOutputException": _BY_VALUE}
"""Name of an error class -> the meaning of such an error during tracing."""


def _exported(module: _Flat, tensors: Sequence[Tensor]) -> torch.export.ExportedProgram:
    name = type(module.user).__name__
    for path, inside in module.user.named_modules():
        if isinstance(inside, torch.jit.ScriptModule):
            where = f"it contains a TorchScript module ({path})" if path else "it is a TorchScript module"
            raise Untraceable(f"{name} cannot be traced: {where}, which has no Python code to trace")
    with without_fast_path(), torch.no_grad(), quietly(), _NoDropout():
        try:
            return torch.export.export(module, tuple(tensors)).run_decompositions({})
        # Any error means that the module cannot be traced: errors of the user's code on fake tensors, and errors of
        # torch.export. Some of torch.export's error classes are direct subclasses of Exception.
        except Exception as e:
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            words = _WORDS.get(type(e).__name__, f"{type(e).__name__}: {reason}")
            raise Untraceable(f"{name} cannot be traced at {line_of(e)}: {words}") from e


def trace(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Traced:
    """Trace a module.

    Args:
        module: a module in evaluation mode.
        args: example inputs.
        kwargs: example inputs by name.

    Raises:
        Untraceable: the module cannot be traced; the message contains the user's source line.
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
        raise Untraceable(f"{type(module).__name__} writes to its own buffers in every call ({names}), which a graph cannot do")
    _known_sizes(module, exported.graph)
    whole = exported.module()
    assert isinstance(whole, fx.GraphModule), "torch.export must give a graph module"
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
    """Restore the user's names of weights and modules: remove the prefix that `_Flat` adds."""
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
    """Replace views by reshapes, which copy if necessary: real strides may differ from those of the fake tensors in tracing.

    This happens with `roll` (torch 2.11 to 2.13): on a CPU its result is contiguous, but the fake result has its input's
    layout. No call of the graph writes in place, so a copy is equivalent to a view.
    """
    for node in whole.graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
    whole.recompile()


def _known_sizes(module: nn.Module, graph: fx.Graph) -> None:
    """Raises Untraceable if the size of a result depends on values, as with `nonzero` and `x[mask]`."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            unknown = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
            if unknown or (isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape)):
                where = f"{type(module).__name__} cannot be traced at {source_line(node) or node.name}"
                raise Untraceable(f"{where}: the size of {node.name} depends on values, but a graph needs known sizes")


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
