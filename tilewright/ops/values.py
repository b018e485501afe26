"""`valued`: the values of one tensor with the gradient of another. `invariant_scope`: whether that scope is active."""

from typing import Any

import torch
from torch import Tensor

from tilewright.op import scope

__all__ = ["invariant_scope", "valued"]


def invariant_scope() -> bool:
    """Whether the invariant scope is active. Under torch.compile: whether it was active during tracing, because Dynamo cannot
    read context variables."""
    return scope().invariant


# Has the effect of torch.compiler.assume_constant_result, which would import Dynamo. That import takes 1.5 s in every process.
invariant_scope._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def valued(y: Tensor, value: Tensor) -> Tensor:
    """A tensor with the values of `value` and the gradient of `y`. Both are the same quantity, rounded differently.

    In the invariant scope, this gives a forward pass with gradients the same bits as one without. It is used where the kernel
    for serving saves nothing for a backward pass: other operators, which have gradients, then compute the quantity once more.

    Args:
        y: any shape, with a gradient.
        value: in y's shape and dtype, without a gradient.
    """
    return _Valued.apply(y, value)  # pyright: ignore[reportReturnType]
