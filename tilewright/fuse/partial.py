"""A model that is no graph as a whole: the children that are, optimised one by one; the rest runs as the user wrote it.

Each child's arguments are recorded in one call of the model. A child that cannot be traced either is taken apart in turn. What
stays eager stays in the user's own dtype, and is listed in the report with the reason.

Refuses: children that are called with several shapes, that write to their inputs (an optimised one works on copies), that are
called by other ways than `child(...)`, or whose attributes the model's own code reads (an optimised one has none of them).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilewright.fuse.check import TOLERANCES, Check, Inaccurate, Tolerance, beside, compare_outputs
from tilewright.fuse.optimized import Optimized
from tilewright.fuse.report import Report
from tilewright.fuse.settings import Settings, cast
from tilewright.fuse.trace import Untraceable
from tilewright.hw.tf32 import exact_float32

__all__ = ["Partial", "optimize_children"]

Whole = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Settings], Optimized]
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Partial(Optimized):
    """The user's own module, some children of which are optimised.

    Args:
        model: a copy of the user's.
        report: what was decided.
    """

    def __init__(self, model: nn.Module, report: Report):
        nn.Module.__init__(self)
        self.model, self.report, self.captured = model, report, None
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's call."""
        with torch.no_grad():
            return self.model(*args, **kwargs)


def _recorded(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[nn.Module, list[Call]], Any]:
    """(arguments of every call of every child, the model's result)."""
    calls: dict[nn.Module, list[Call]] = {}

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.setdefault(module, []).append(pytree.tree_map(_kept, (given, named)))

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules() if m is not model]
    try:
        with torch.no_grad(), exact_float32():
            result = model(*pytree.tree_map(_kept, args), **pytree.tree_map(_kept, dict(kwargs)))
    finally:
        for hook in hooks:
            hook.remove()
    return calls, result


def _kept(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _opened(value: Any) -> Any:
    """With dataclasses as dicts of their fields: they have a comparison of their own, which tensors do not answer."""

    def opened(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        return {field.name: _opened(getattr(leaf, field.name)) for field in fields(leaf)}

    return pytree.tree_map(opened, value)


def _shapes(call: Call) -> list[Any]:
    return [(t.shape, t.dtype) if isinstance(t, Tensor) else t for t in pytree.tree_leaves(call)]


class _Children:
    """Goes through a model's children and puts optimised ones in their place."""

    def __init__(self, calls: dict[nn.Module, list[Call]], settings: Settings, whole: Whole, report: Report):
        self.calls, self.settings, self.whole, self.report = calls, settings, whole, report
        self.done: dict[nn.Module, Optimized | None] = {}
        """What became of a module, which may be a child in several places."""

    def visit(self, parent: nn.Module, path: str) -> None:
        """The children of a module that is no graph itself."""
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if child not in self.done:
                self.done[child] = self._optimized(child, f"{path}.{name}" if path else name)
            if (found := self.done[child]) is not None:
                setattr(parent, name, found)

    def _optimized(self, child: nn.Module, where: str) -> Optimized | None:
        calls = self.calls.get(child, [])
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and not calls:
            self.visit(child, where)
            return None
        if not calls:
            return self._eager(where, "the model does not call it")
        if any(_shapes(call) != _shapes(calls[0]) for call in calls[1:]):
            return self._eager(where, "it is called with several shapes")
        if not any(isinstance(t, Tensor) for t in pytree.tree_leaves(calls[0])):
            return self._eager(where, "it is called without tensors")
        # The model reads a result of one call after the next one.
        settings = self.settings._replace(copy_outputs=self.settings.copy_outputs or len(calls) > 1)
        try:
            done = self.whole(child, *calls[0], settings)
        except Untraceable as error:
            self._eager(where, str(error))
            self.visit(child, where)
            return None
        if not any(launch["op"] in _OURS for launch in done.report.launches):
            return self._eager(where, "none of our operators is in it")
        if "not written" in done.report.facts:
            self._eager(where, "it writes to its inputs, which the model around it may read")
            self.visit(child, where)
            return None
        self._merge(done.report, where)
        return done

    def _eager(self, where: str, reason: str) -> None:
        self.report.add(where, "eager", where, False, reason)

    def _merge(self, found: Report, where: str) -> None:
        self.report.add(where, "capture", where, True, "optimised by itself: the model around it is no graph")
        self.report.decisions += [replace(d, anchor=f"{where}.{d.anchor}") for d in found.decisions]
        self.report.launches += [{**launch, "layer": f"{where}.{launch['layer']}"} for launch in found.launches]
        self.report.choices += found.choices
        self.report.tuned += found.tuned
        self.report.provenance += found.provenance


_OURS = frozenset({"conv", "linear", "attention", "layer_norm", "max_pool", "mean"})
"""Names of launches of our operators in a report."""


def _restore(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Buffers as they were: a model that counts its calls has counted ours."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in state:
                buffer.copy_(state[name])


def optimize_children(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, why: Untraceable, whole: Whole
) -> Partial:
    """A model whose children are optimised as far as they are graphs.

    Args:
        model: a copy of the user's; it is changed.
        args: example arguments.
        kwargs: the same by name.
        settings: for each child.
        why: why the model is no graph.
        whole: what optimises a module that is one.

    Raises:
        Untraceable: nothing in it is a graph.
        Inaccurate: the outputs are too far from the float model's.
    """
    report = Report()
    report.add(type(model).__name__, "capture", type(model).__name__, False, str(why))
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        calls, want = _recorded(model, args, kwargs)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:  # the user's code, as it is, on the user's inputs
        raise Untraceable(f"{type(model).__name__} itself fails on the example inputs: {error} ({why})") from error
    _restore(model, state)
    native = _native(model, args, kwargs, settings) if settings.tolerance is None else None
    children = _Children(calls, settings, whole, report)
    children.visit(model, "")
    if all(found is None for found in children.done.values()):
        reasons = "; ".join(f"{d.anchor}: {d.reason}" for d in report.decisions[1:]) or "it has no children"
        raise Untraceable(f"{why}. Nothing of it can be optimised by itself: {reasons}") from why
    done = Partial(model, report)
    try:
        got = done(*pytree.tree_map(_kept, args), **pytree.tree_map(_kept, dict(kwargs)))
    except AttributeError as error:
        raise Untraceable(f"{why}. Its code reads what optimised children do not have: {error}") from error
    want, got = _opened(want), _opened(got)
    _restore(model, state)
    allowed = TOLERANCES[settings.precision]
    if settings.tolerance is not None:
        allowed = Tolerance.given(settings.tolerance)
    check = Check(settings.precision, allowed, compare_outputs(want, got))
    if check.failed and native is not None:
        check = beside(check, compare_outputs(want, native))
    if check.failed:
        raise Inaccurate(check)
    report.error = check.to_json()
    return done


def _native(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings) -> Any:
    """What torch's own model gives in the precision, of a copy; None where it cannot be run in that."""
    given, named = pytree.tree_map(lambda leaf: cast(settings.dtype, _kept(leaf)), (args, dict(kwargs)))
    try:
        with torch.no_grad():
            return _opened(copy.deepcopy(model).to(settings.dtype)(*given, **named))
    except (RuntimeError, ValueError, TypeError):  # kernels that torch does not have, code that asks for float32
        return None
