"""Optimises a model that cannot be traced as a whole. Its children are optimised one by one; its own code runs unchanged.

The arguments of each child are recorded in one call of the model. If a child cannot be traced either, its own children are
tried. Parts that stay eager keep the user's own dtype. The report lists them with the reason. Like a whole model, an optimised
child makes graphs for further shapes, and runs the original child for all other calls.

Not supported: children that write to their inputs (an optimised child works on copies), children that are not called as
`child(...)`, and children whose methods the model's own code calls.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright.fuse.captured import plainly
from tilewright.fuse.check import Check, Inaccurate, allowed_of, beside, compare_outputs
from tilewright.fuse.judge import called, called_on_copies
from tilewright.fuse.op_calls import ACTIVATIONS
from tilewright.fuse.optimized import Optimized
from tilewright.fuse.report import Report
from tilewright.fuse.settings import Settings, cast
from tilewright.fuse.state import with_own_state
from tilewright.fuse.structure import flatten, rebuild
from tilewright.fuse.trace import Untraceable

__all__ = ["Partial", "optimize_children"]

Whole = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Settings, torch.device], Optimized]
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Partial(Optimized):
    """The user's own module with some optimised children.

    Args:
        model: a copy of the user's module, in which children have been replaced.
        settings: settings of the children.
        device: the device of the model.
        report: the decisions.
    """

    def __init__(self, model: nn.Module, settings: Settings, device: torch.device, report: Report):
        super().__init__(model, settings, device, _never)
        self.report, self.turns = report, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with the same arguments as the user's."""
        self._placed(flatten((args, kwargs))[0])
        with plainly(self.device):
            return self.model(*args, **kwargs)


def _never(owner: Optimized, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Never called: a model that cannot be traced has no graph of its own."""
    raise AssertionError("a model that cannot be traced has no graph of its own")


class _Calls(NamedTuple):
    """A record of one call of a model."""

    of: dict[nn.Module, list[Call]]
    """Arguments of every call of every child."""
    graded: set[nn.Module]
    """Children through which the model computes gradients."""


def _recorded(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Calls, Any]:
    """Call a copy of the model. Returns (the calls of its children, its result)."""
    calls, copied = _Calls({}, set()), with_own_state(model)
    original = dict(zip(copied.modules(), model.modules(), strict=True))

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        module = original[module]
        calls.of.setdefault(module, []).append(_copies((given, named)))
        if torch.is_grad_enabled() and any(t.requires_grad for t in flatten((given, named))[0]):
            calls.graded.add(module)

    scripted = {part for m in copied.modules() if isinstance(m, torch.jit.ScriptModule) for part in m.modules()}
    for module in copied.modules():
        if module is not copied and module not in scripted:
            module.register_forward_pre_hook(note, with_kwargs=True)
    return calls, called(copied, args, kwargs)


def _copies(value: Any) -> Any:
    tensors, structure = flatten(value)
    return rebuild(structure, [t.detach().clone() for t in tensors])


class _Children:
    """Visits a model's children and replaces them by optimised ones."""

    def __init__(
        self, calls: _Calls, settings: Settings, device: torch.device, whole: Whole, report: Report
    ):  # fmt: skip
        self.calls, self.settings, self.device, self.whole, self.report = calls, settings, device, whole, report
        self.done: dict[nn.Module, Optimized | None] = {}
        """Module -> its optimised form, or None. A module may be a child in several places."""

    def visit(self, parent: nn.Module, path: str) -> None:
        """Optimise the children of a module that cannot be traced itself."""
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if child not in self.done:
                self.done[child] = self._optimized(child, f"{path}.{name}" if path else name)
            if (found := self.done[child]) is not None:
                setattr(parent, name, found)

    def _optimized(self, child: nn.Module, where: str) -> Optimized | None:
        calls = self.calls.of.get(child, [])
        if isinstance(child, torch.jit.ScriptModule):
            return self._eager(where, "it is a TorchScript module, which has no Python code to trace")
        if child in self.calls.graded:
            return self._eager(where, "the model computes gradients through it")
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and not calls:
            self.visit(child, where)
            return None
        if not calls:
            return self._eager(where, "the model does not call it for the example inputs")
        if not flatten(calls[0])[0]:
            return self._eager(where, "no tensor is passed to it")
        # If a child is called several times, the model may read the result of one call after the next call.
        settings = self.settings._replace(copy_outputs=self.settings.copy_outputs or len(calls) > 1)
        try:
            done = self.whole(child, *calls[0], settings, self.device)
        except Untraceable as error:
            self._eager(where, str(error))
            self.visit(child, where)
            return None
        if done.made[0].captured is None:
            return self._eager(where, done.report.facts["speed"])
        if not any(map(_counts, done.report.launches)):
            return self._eager(where, "no operator of tilewright can compute any of its calls")
        if done.writes:
            self._eager(where, "it writes to its inputs, which the model around it may read")
            self.visit(child, where)
            return None
        self._merge(done.report, where)
        return done

    def _eager(self, where: str, reason: str) -> None:
        self.report.add(where, "eager", where, False, reason)

    def _merge(self, found: Report, where: str) -> None:
        self.report.add(where, "capture", where, True, "optimised separately, because the model around it cannot be traced")
        self.report.children[where] = found
        self.report.decisions += [replace(d, anchor=f"{where}.{d.anchor}") for d in found.decisions]
        self.report.launches += [{**launch, "layer": f"{where}.{launch['layer']}"} for launch in found.launches]
        self.report.choices += found.choices
        self.report.tuned += found.tuned
        self.report.provenance += found.provenance


def _counts(launch: Mapping[str, Any]) -> bool:
    """Whether a launch justifies a graph: its operator is from this package, and it is more than an activation.

    Calls of other operators have a namespace in their names, as in aten.cat.default.
    """
    return "." not in launch["op"] and launch["op"] != "inductor" and launch["op"] not in ACTIVATIONS


def optimize_children(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, device: torch.device,
    why: Untraceable, whole: Whole,
) -> Partial:  # fmt: skip
    """Optimise those children of a model that can be traced.

    Args:
        model: a copy of the user's model; it is changed.
        args: example arguments.
        kwargs: example arguments by name.
        settings: settings for each child.
        device: the device of the model.
        why: the reason why the model itself cannot be traced.
        whole: a function that optimises a module that can be traced.

    Raises:
        Untraceable: no part of the model can be traced, or its code reads attributes that optimised children do not have.
        Inaccurate: the outputs differ too much from those of the float model.
    """
    report = Report()
    report.add(type(model).__name__, "capture", type(model).__name__, False, str(why))
    calls, want = _recorded(model, args, kwargs)
    native = _native(model, args, kwargs, settings) if settings.tolerance is None else None
    children = _Children(calls, settings, device, whole, report)
    children.visit(model, "")
    if all(found is None for found in children.done.values()):
        reasons = "; ".join(f"{d.anchor}: {d.reason}" for d in report.decisions[1:]) or "it has no children"
        raise Untraceable(f"{why}. None of its children can be optimised either: {reasons}") from why
    done = Partial(model, settings, device, report)
    try:
        got = called_on_copies(model, args, kwargs)
    except AttributeError as error:
        raise Untraceable(f"{why}. Its code reads an attribute that its optimised children do not have: {error}") from error
    check = Check(settings.precision, allowed_of(settings.precision, settings.tolerance), compare_outputs(want, got))
    if check.failed and native is not None:
        check = beside(check, compare_outputs(want, native))
    if check.failed:
        raise Inaccurate(check)
    report.error = check.to_json()
    return done


def _native(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings) -> Any:
    """The outputs of torch's own model in the precision, from a copy; None if it cannot run in that precision."""
    tensors, structure = flatten((args, dict(kwargs)))
    given, named = rebuild(structure, [cast(settings.dtype, t) for t in tensors])
    try:
        return called(copy.deepcopy(model).to(settings.dtype), given, named)
    except (RuntimeError, ValueError, TypeError):  # torch lacks a kernel, or the model's code needs float32
        return None
