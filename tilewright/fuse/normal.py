"""Converts the calls after an anchor to a normal form with four kinds of steps, which is the same for every kind of graph.

    activation    act(y), with the name that our operators use
    batch_norm    in evaluation mode: (weight, bias, mean, variance, eps)
    factor        y * other, y / number
    sum           y + other

All arguments that matter are checked (alpha, approximate, a rounding mode, a change of type or shape). For a call that does not
qualify, the result is a sentence that states the reason. In exported graphs each step is one call. In Inductor's graphs
activations are decomposed (activations.py), and there are no batch norms.

Not here: whether an operator can fuse such a step (rules.py).
"""

import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tilewright.fuse.anchors import same_sizes, tensor_of

__all__ = ["BATCH_NORMS", "Activation", "Step", "activation_behind", "activation_of", "step_behind"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation on a value."""

    kind: str
    """activation, batch_norm, factor, sum."""
    node: Node
    """The node whose value is the result."""
    inside: tuple[Node, ...] = ()
    """Other calls that belong to the step."""
    name: str = ""
    """Name of the activation."""
    operand: Any = None
    """factor, sum: the other operand, a node or a number. batch_norm: (weight, bias, mean, variance)."""
    eps: float = 0.0


class Activation(NamedTuple):
    """An activation found in a graph."""

    name: str
    node: Node
    """Its last node, whose value is the result."""
    inside: frozenset[Node]
    """All of its nodes, including the last one."""


_ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu", aten.silu.default: "silu", aten.relu6.default: "relu6",
    aten.hardswish.default: "hardswish", aten.hardsigmoid.default: "hardsigmoid", aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid", aten.leaky_relu.default: "leaky_relu", aten.hardtanh.default: "hardtanh",
    aten.elu.default: "elu", aten.mish.default: "mish", aten.softplus.default: "softplus", aten.prelu.default: "prelu",
    aten.log_sigmoid.default: "log_sigmoid", aten.celu.default: "celu", aten.selu.default: "selu", aten.glu.default: "glu",
    aten.hardshrink.default: "hardshrink", aten.softshrink.default: "softshrink",
}  # fmt: skip


def activation_of(node: Any) -> str | None:
    """The name of the activation that a call computes; None for other calls.

    Our operators can compute those in rules.ACTIVATIONS in their epilogue.
    """
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is aten.gelu.default:
        form = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(form))
    return _ACTIVATIONS.get(node.target)


def activation_behind(here: Node) -> Activation | None:
    """The activation applied to a value, if it is one ATen call; otherwise None."""
    for node in here.users:
        name = activation_of(node)
        if name is not None and node.args[0] is here:
            return Activation(name, node, frozenset({node}))
    return None


def _other(node: Node, here: Node) -> Any:
    """The other operand of a binary call; `here` if both are the same."""
    left, right = node.args[:2]
    return right if left is here else left


def _inverse(number: Any) -> float | None:
    """1 / number; None if it is not a number, or the result is not finite."""
    if not isinstance(number, int | float) or isinstance(number, bool) or not number:
        return None
    inverse = 1 / number
    return inverse if math.isfinite(inverse) else None


BATCH_NORMS = (aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default)


def step_behind(here: Node, node: Node) -> Step | str | None:
    """The step that a call on the value `here` computes.

    Returns a sentence with the reason if no epilogue can compute the call, and None if no rule is about such calls. Activations
    are not recognised here, but by `activation_behind`.
    """
    if node.target in BATCH_NORMS:
        return _batch_norm(here, node)
    if node.target not in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
        return None
    a, b, other = tensor_of(here), tensor_of(node), _other(node, here)
    if a is None or b is None or a.dtype != b.dtype or not same_sizes(a.shape, b.shape):
        return "its result has another dtype or shape than the value that it reads"
    if other is here:
        return "both operands are the same value"
    if isinstance(other, Node) and tensor_of(other) is None:
        return "its other operand is not a tensor of known dtype"
    if node.target is aten.add.Tensor:
        alpha = node.kwargs.get("alpha", 1)
        wrong = f"a sum with alpha={alpha}; only alpha=1 can be fused"
        return Step(kind="sum", node=node, operand=other) if alpha == 1 else wrong
    if node.target is aten.mul.Tensor:
        return Step(kind="factor", node=node, operand=other)
    inverse = _inverse(other) if node.args[0] is here else None
    return (
        "a division by something other than a nonzero number"
        if inverse is None
        else Step(kind="factor", node=node, operand=inverse)
    )


def _batch_norm(here: Node, node: Node) -> Step | str:
    """The step for a batch norm in either form: aten.batch_norm, or the functional call, whose first result is the value."""
    if node.args[0] is not here:
        return "a batch norm that reads the value as a parameter, not as its input"
    whole = node.target is aten.batch_norm.default
    if whole and node.args[5]:
        return "a batch norm in training mode"
    results = [node] if whole else [user for user in node.users if user.target is operator.getitem]
    if len(results) != 1 or (not whole and (results[0].args[1] != 0 or len(node.users) != 1)):
        return "a batch norm whose returned statistics are read too"
    operand, eps = tuple(node.args[1:5]), node.args[7 if whole else 6]
    if operand[2] is None or operand[3] is None or not isinstance(eps, int | float):
        return "a batch norm without running statistics"
    value, out = tensor_of(here), tensor_of(results[0])
    if value is None or out is None or value.dtype != out.dtype or value.dim() < 2:
        return "a batch norm that changes the dtype, or whose input has fewer than 2 dims"
    inside = () if whole else (node,)
    return Step(kind="batch_norm", node=results[0], inside=inside, operand=operand, eps=eps)
