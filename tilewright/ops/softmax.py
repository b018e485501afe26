"""softmax and log_softmax with gradients, over any dimension (kernels/softmax/softmax.py, and softmax/backward.py).

The result is saved for the backward pass. If the dimension is not the last one, one copy moves it there, and another moves it
back.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.kernels.launch.shapes import rows_ready
from tilewright.kernels.softmax import softmax as kernels
from tilewright.kernels.softmax.backward import log_softmax_backward_op, softmax_backward_op
from tilewright.ops.permute import transpose

__all__ = ["log_softmax", "softmax"]


class _Softmax(torch.autograd.Function):
    """softmax over the last dimension, or its logarithm, differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: bool) -> Tensor:
        """torch disables autograd during this function."""
        y = kernels.log_softmax(x) if log else kernels.softmax(x)
        ctx.save_for_backward(y)
        ctx.log = log
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradient of x, None)."""
        (y,) = ctx.saved_tensors
        return (log_softmax_backward_op if ctx.log else softmax_backward_op)(rows_ready(grads[0]), y), None


def _over(x: Tensor, dim: int, log: bool) -> Tensor:
    name = "log_softmax" if log else "softmax"
    if x.dim() and not -x.dim() <= dim < x.dim():
        raise ValueError(f"{name}: dim must be -{x.dim()} to {x.dim() - 1} for x {list(x.shape)}, got {dim}")
    if x.dim() and dim % x.dim() != x.dim() - 1:
        return transpose(_over(transpose(x, dim, -1), -1, log), dim, -1)
    if wants_gradient(x):
        return _Softmax.apply(x, log)  # pyright: ignore[reportReturnType]
    return kernels.log_softmax(x) if log else kernels.softmax(x)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax over one dimension.

    Args:
        x: any shape with at least one dimension, bf16, fp16 or fp32.
        dim: the dimension. If it is not the last one, x and the result are each copied once.

    Returns:
        A contiguous tensor of x's shape and dtype. A row that is all -inf gives NaN, as in torch.

    Raises:
        ValueError: x is a scalar, is not floating point, or does not have such a dimension.
    """
    return _over(x, dim, False)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of softmax over one dimension. Arguments and errors as in `softmax`.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    return _over(x, dim, True)
