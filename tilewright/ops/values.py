"""One number computed in two ways: the value of one, the gradient of the other."""

from typing import Any

import torch
from torch import Tensor

from tilewright.op import scope

__all__ = ["invariant_scope", "valued"]


def invariant_scope() -> bool:
    """Whether the invariant scope is in force; under torch.compile that of the trace: Dynamo reads no context variable."""
    return scope().invariant


# All that torch.compiler.assume_constant_result does, but for the import of Dynamo: 1.5 s of every start of a process.
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

    In the invariant scope a forward pass with gradients has the bits of one without. Where the kernel that serves keeps nothing
    for a backward pass, the number is computed a second time by operators that do.

    Args:
        y: any shape, with a gradient.
        value: y's shape and dtype, without one.
    """
    return _Valued.apply(y, value)  # pyright: ignore[reportReturnType]
