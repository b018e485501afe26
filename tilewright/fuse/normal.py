"""The normal form of what stands behind an anchor: one small vocabulary, whatever the graph's dialect.

    activation    act(y), by the name that our operators know it by
    batch_norm    in evaluation, (weight, bias, mean, variance, eps)
    factor        y * other, y / number
    sum           y + other

Reading is strict: what an argument changes (alpha, approximate, a rounding mode, a type or shape that the call changes) is
looked at, and the call is read as the sentence that says why it is nothing of these. Exported graphs have one call each;
Inductor's have activations taken apart (activations.py), and no batch norms.

Not here: whether an operator takes such a step (rules.py).
"""

import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tilewright.fuse.anchors import same_sizes, tensor_of

__all__ = ["Activation", "Step", "activation_behind", "activation_of", "step_behind"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that is computed from a value."""

    kind: str
    """activation, batch_norm, factor, sum."""
    node: Node
    """Whose value it is."""
    inside: tuple[Node, ...] = ()
    """Other calls that it stands for."""
    name: str = ""
    """The activation's."""
    operand: Any = None
    """factor, sum: the other operand, a node or a number. batch_norm: (weight, bias, mean, variance)."""
    eps: float = 0.0


class Activation(NamedTuple):
    """An activation found in a graph."""

    name: str
    node: Node
    """Its last node, whose value it is."""
    inside: frozenset[Node]
    """All of its nodes, the last one too."""


_ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu", aten.silu.default: "silu", aten.relu6.default: "relu6",
    aten.hardswish.default: "hardswish", aten.hardsigmoid.default: "hardsigmoid", aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid", aten.leaky_relu.default: "leaky_relu", aten.hardtanh.default: "hardtanh",
    aten.elu.default: "elu", aten.mish.default: "mish", aten.softplus.default: "softplus", aten.prelu.default: "prelu",
    aten.log_sigmoid.default: "log_sigmoid", aten.celu.default: "celu", aten.selu.default: "selu", aten.glu.default: "glu",
    aten.hardshrink.default: "hardshrink", aten.softshrink.default: "softshrink",
}  # fmt: skip


def activation_of(node: Any) -> str | None:
    """The name of an activation; our operators have those of rules.ACTIVATIONS in their epilogues."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is aten.gelu.default:
        form = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(form))
    return _ACTIVATIONS.get(node.target)


def activation_behind(here: Node) -> Activation | None:
    """The activation of a value, one ATen call; None where nothing reads it so."""
    for node in here.users:
        name = activation_of(node)
        if name is not None and node.args[0] is here:
            return Activation(name, node, frozenset({node}))
    return None


def _other(node: Node, here: Node) -> Any:
    """The second operand of a call of two, `here` itself where it is both."""
    left, right = node.args[:2]
    return right if left is here else left


def _inverse(number: Any) -> float | None:
    """1 / number; None for what is no number, and where that is not finite."""
    if not isinstance(number, int | float) or isinstance(number, bool) or not number:
        return None
    inverse = 1 / number
    return inverse if math.isfinite(inverse) else None


def step_behind(here: Node, node: Node) -> Step | str | None:
    """What a call that reads `here` computes; a sentence where no epilogue could have it, None where no rule is near.

    Activations are read by `activation_behind`.
    """
    if node.target in (aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default):
        return _batch_norm(here, node)
    if node.target not in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
        return None
    a, b, other = tensor_of(here), tensor_of(node), _other(node, here)
    if a is None or b is None or a.dtype != b.dtype or not same_sizes(a.shape, b.shape):
        return "it changes the type or the shape"
    if other is here:
        return "both operands are the same value"
    if isinstance(other, Node) and tensor_of(other) is None:
        return "the other operand is no tensor of known type"
    if node.target is aten.add.Tensor:
        alpha = node.kwargs.get("alpha", 1)
        return Step(kind="sum", node=node, operand=other) if alpha == 1 else f"a sum with alpha {alpha}"
    if node.target is aten.mul.Tensor:
        return Step(kind="factor", node=node, operand=other)
    inverse = _inverse(other) if node.args[0] is here else None
    return (
        "a quotient that is no value over a number other than 0"
        if inverse is None
        else Step(kind="factor", node=node, operand=inverse)
    )


def _batch_norm(here: Node, node: Node) -> Step | str:
    """Of either spelling: aten.batch_norm, or the functional one, whose first result is the value."""
    if node.args[0] is not here:
        return "its parameters are computed from the value"
    whole = node.target is aten.batch_norm.default
    if whole and node.args[5]:
        return "a batch norm in training"
    results = [node] if whole else [user for user in node.users if user.target is operator.getitem]
    if len(results) != 1 or (not whole and (results[0].args[1] != 0 or len(node.users) != 1)):
        return "its statistics are read too"
    operand, eps = tuple(node.args[1:5]), node.args[7 if whole else 6]
    if operand[2] is None or operand[3] is None or not isinstance(eps, int | float):
        return "a batch norm without running statistics"
    value, out = tensor_of(here), tensor_of(results[0])
    if value is None or out is None or value.dtype != out.dtype or value.dim() < 2:
        return "it changes the type"
    inside = () if whole else (node,)
    return Step(kind="batch_norm", node=results[0], inside=inside, operand=operand, eps=eps)
