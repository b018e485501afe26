"""The rules of fusion, for every kind of graph: what each operator can compute in its epilogue, and in which order.

    conv      folds: batch norm, factors, biases  ->  residual  ->  activation
    linear    folds: batch norm, factors, biases  ->  activation  ->  residual
    conv_transpose    folds, only with groups=1  ->  activation
    group_norm, batch_norm        activation

A step after an anchor (normal.py) goes into the first slot that accepts it, unless the group has already used a later slot. A
slot that rejects a step returns the reason. In Inductor's graphs the weights are inputs, so nothing can be folded into them.
One case remains: a bias with one number per column becomes an operand of the operator.

Kinds that are not in the table have no epilogue. Not here: the order in which calls are considered (walk.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Node

from tilewright.fuse.anchors import Anchor, same_sizes, tensor_of
from tilewright.fuse.anchors_attention import MASKED
from tilewright.fuse.columns import Columns, Spread, columns_of
from tilewright.fuse.normal import Activation, Step
from tilewright.fuse.plan import Fold, Group

__all__ = ["ACTIVATIONS", "EPILOGUES", "MERGED", "Dialect", "Slot", "Tip", "slot_of"]

ACTIVATIONS = frozenset({"relu", "gelu", "gelu_tanh", "silu"})
"""Activations that convolutions and matrix products can compute in their epilogue."""


class Dialect(NamedTuple):
    """Differences between the kinds of graphs that are planned."""

    read: Callable[[Node], Anchor | str | None]
    """Function: the anchor for a call, or a sentence that states why the call is no anchor."""
    activation: Callable[[Node], Activation | None]
    """Function: the activation applied to a value."""
    view: Callable[[Node], bool]
    """Function: whether a call is a view, so that calls after it can still go into the epilogue."""
    parameters: bool
    """Whether the values of weights are known. If so, other operations can be folded into them, weights can be stacked, and
    values that depend on weights alone are computed once."""


@dataclass(frozen=True)
class Tip:
    """A value from which a group may grow: its last value, or a view of it."""

    group: Group
    here: Node
    columns: Columns | None
    """The positions of the anchor's columns in this value; None if they are unknown."""
    views: tuple[Node, ...] = ()
    """Views from the group's last value to this one."""
    kept: str | None = None
    """Why the value must be stored even if it is fused: a call other than these views reads it. None if it need not be."""


class Slot(NamedTuple):
    """A position in an epilogue, for steps of certain kinds."""

    name: str
    steps: tuple[str, ...]
    """Kinds of steps that the slot accepts."""
    refuses: Callable[[Tip, Step, Callable[[Any], bool]], str | None]
    """Function: the reason why the slot rejects a step; None if it accepts it. The last argument is a function that returns
    whether a value is a parameter."""
    apply: Callable[[Tip, Step], tuple[str, str]]
    """Function: adds the step to the group; returns (kind of the decision, text of the decision)."""
    many: bool = False
    """Whether the slot accepts several steps."""


# ---- folding into weight and bias


def _spread(tip: Tip, step: Step) -> Spread | None:
    """How the elements of a step's operand map to the anchor's columns; None if they do not map to columns."""
    here, shaped = tensor_of(tip.here), tensor_of(step.operand[2] if step.kind == "batch_norm" else step.operand)
    if tip.columns is None or here is None or shaped is None:
        return None
    if step.kind != "batch_norm":
        return tip.columns.spread(shaped.shape)
    return tip.columns.spread((shaped.shape[0], *(1,) * (here.dim() - 2)))


_NOT_COLUMNS = "its operand does not have one number for each column of the product or channel of the convolution"


def _fold_refuses(tip: Tip, step: Step, parameter: Callable[[Any], bool]) -> str | None:
    anchor, operand = tip.group.anchor, step.operand
    if not all(n is None or parameter(n) for n in (anchor.weight, anchor.bias)):
        return _bias_refuses(tip, step)
    if not isinstance(operand, Node | tuple):
        return None if math.isfinite(operand) else f"its factor is {operand}, which is not finite"
    numbers = operand if isinstance(operand, tuple) else (operand,)
    if not all(n is None or parameter(n) for n in numbers):
        return "its operand is computed in every call, so it cannot be folded into the weight"
    return None if _spread(tip, step) else _NOT_COLUMNS


def _bias_refuses(tip: Tip, step: Step) -> str | None:
    """`refuses` if weight or bias is not a parameter: only a bias is accepted, as an operand of the call."""
    if step.kind != "sum" or tip.group.folds or tip.group.anchor.bias is not None or not isinstance(step.operand, Node):
        return "the weight or the bias is not a constant of the graph, so nothing can be folded into them"
    spread, here, other = _spread(tip, step), tensor_of(tip.here), tensor_of(step.operand)
    if spread is None or here is None or other is None or not spread.in_order(other.shape):
        return _NOT_COLUMNS
    return None if (here.dtype, here.device) == (other.dtype, other.device) else "its operand has another dtype or device"


_FOLDS = {
    "batch_norm": ("batch_norm", "folded into weight and bias"),
    "factor": ("scale", "multiplied into the weight"),
    "sum": ("bias", "added to the bias"),
}


def _fold(tip: Tip, step: Step) -> tuple[str, str]:
    kind, words = _FOLDS[step.kind]
    operands = step.operand if isinstance(step.operand, tuple) else (step.operand,)
    tip.group.folds.append(Fold(kind=kind, operands=operands, spread=_spread(tip, step), eps=step.eps, node=step.node))
    return kind, words


# ---- activation and residual


def _activation_refuses(tip: Tip, step: Step, parameter: Callable[[Any], bool]) -> str | None:
    return None if step.name in ACTIVATIONS else f"{tip.group.anchor.kind} has no {step.name} in its epilogue"


def _activate(tip: Tip, step: Step) -> tuple[str, str]:
    tip.group.activation = step.name
    return "activation", f"{step.name} in the epilogue"


def _residual_refuses(tip: Tip, step: Step, parameter: Callable[[Any], bool]) -> str | None:
    here, other = tensor_of(tip.here), tensor_of(step.operand)
    if here is None or other is None:
        return "it adds a number; the operator can add only a tensor"
    if not same_sizes(here.shape, other.shape) or (here.dtype, here.device) != (other.dtype, other.device):
        return "its other operand has another shape, dtype or device"
    if tip.group.anchor.kind == "conv" and tip.columns != columns_of(tip.group.anchor):
        return "there are views between the convolution and the sum"
    return None


def _add(tip: Tip, step: Step) -> tuple[str, str]:
    tip.group.residual = step.operand
    return "residual", "added in the epilogue"


_FOLD = Slot("a batch norm, factor or bias", ("batch_norm", "factor", "sum"), _fold_refuses, _fold, many=True)
_ACTIVATION = Slot("an activation", ("activation",), _activation_refuses, _activate)
_RESIDUAL = Slot("a residual", ("sum",), _residual_refuses, _add)

EPILOGUES: dict[str, tuple[Slot, ...]] = {
    "batch_norm": (_ACTIVATION,),
    "conv": (_FOLD, _RESIDUAL, _ACTIVATION),
    "conv_transpose": (_FOLD, _ACTIVATION),
    "group_norm": (_ACTIVATION,),
    "linear": (_FOLD, _ACTIVATION, _RESIDUAL),
}
"""Kind of anchor -> the slots of its epilogue, in the operator's order."""

MERGED: dict[str, Callable[[Anchor], tuple[Node, ...]]] = {
    "attention": lambda anchor: (anchor.x, *anchor.others),
    MASKED: lambda anchor: (anchor.x, *anchor.others[:2]),
}
"""Kind of anchor -> its operands that can be merged into one matrix product if they are linears with the same input."""


def _at(group: Group, slots: tuple[Slot, ...]) -> int:
    """The index of the last slot that a group has used; -1 for none."""
    used = {
        _FOLD.name: bool(group.folds),
        _ACTIVATION.name: group.activation != "none",
        _RESIDUAL.name: group.residual is not None,
    }
    return max((i for i, slot in enumerate(slots) if used.get(slot.name)), default=-1)


def slot_of(tip: Tip, step: Step, parameter: Callable[[Any], bool]) -> Slot | str:
    """The slot that accepts a step after a tip, or the reason why no slot does."""
    kind = tip.group.anchor.kind
    slots = EPILOGUES.get(kind, ())
    at, reason = _at(tip.group, slots), f"{kind} has no {step.kind} in its epilogue"
    for i, slot in enumerate(slots):
        if step.kind not in slot.steps:
            continue
        refused = slot.refuses(tip, step, parameter)
        if refused is not None:
            reason = refused
        elif i == at and not slot.many:
            reason = f"{kind} can apply only one {slot.name.partition(' ')[2]}, and it already has one"
        elif i < at:
            reason = f"{kind} can apply {slot.name} only before {slots[at].name}; here it comes after it"
        else:
            return slot
    return reason
