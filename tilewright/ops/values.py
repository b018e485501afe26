"""For a number that is computed in two ways: a result with the value of one and the gradient of the other."""

from typing import Any

import torch
from torch import Tensor

from tilewright.op import scope

__all__ = ["invariant_scope", "valued"]


def invariant_scope() -> bool:
    """Whether the invariant scope is active. Under torch.compile: whether it was while tracing (Dynamo reads no context
    variable)."""
    return scope().invariant


# Does what torch.compiler.assume_constant_result does, without importing Dynamo, which takes 1.5 s in every process.
invariant_scope._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def valued(y: Tensor, value: Tensor) -> Tensor:
    """`value`, with the gradient of y; both are the same number, rounded differently.

    With this, a forward pass with gradients has the same bits in the invariant scope as one without. If the kernel that serving
    uses keeps nothing for a backward pass, the number is computed a second time by operators that do.

    Args:
        y: any shape, with a gradient.
        value: y's shape and dtype, without one.
    """
    return _Valued.apply(y, value)  # pyright: ignore[reportReturnType]
