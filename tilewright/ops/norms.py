"""Norms over the last dimension with gradients. Kernels: kernels/norm/*_norm.py forward, kernels/norm/backward.py backward.

The forward pass saves for the backward pass: x, or the sum that add_layer_norm or add_rms_norm returned; the weight; and for
layer_norm the mean and 1 / standard deviation of each row, 8 bytes per row (norm/layer_norm.py). x, residual, weight and bias
have first derivatives, which are bitwise reproducible on one card. Second derivatives raise an error.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.kernels.launch.autograd import dense, wants_gradient
from tilewright.kernels.launch.shapes import check_last_dim, heads_ready, rows_ready
from tilewright.kernels.norm import add_layer_norm as of_sum
from tilewright.kernels.norm import layer_norm as of_layer
from tilewright.kernels.norm import rms_norm as of_rms
from tilewright.kernels.norm.backward import layer_norm_backward_op, rms_norm_backward_op
from tilewright.ops.values import invariant_scope

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


class _LayerNorm(torch.autograd.Function):
    """layer_norm, differentiable once in x, weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """torch disables autograd during this function."""
        y, stats = of_layer.layer_norm_stats(x, weight, bias, eps)
        if invariant_scope():  # so that the result has the same bits as without gradients
            y = of_layer.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, stats)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradients of x, weight, bias, None)."""
        x, weight, stats = ctx.saved_tensors
        dx, dweight, dbias = layer_norm_backward_op(rows_ready(grads[0]), rows_ready(x), weight, ctx.eps, stats)
        return dx, dweight, dbias if ctx.needs_input_grad[2] else None, None


class _RMSNorm(torch.autograd.Function):
    """rms_norm, differentiable once in x and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """torch disables autograd during this function."""
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        check_last_dim("rms_norm", x, weight=weight)
        return of_rms.rms_norm_op(heads_ready(x), weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradients of x, weight, None)."""
        x, weight = ctx.saved_tensors
        dx, dweight = rms_norm_backward_op(rows_ready(grads[0]), heads_ready(x), weight, None, ctx.eps)
        return dx, dweight, None


class _AddRMSNorm(torch.autograd.Function):
    """(rms_norm of the sum, the sum); differentiable once in x, residual and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """torch disables autograd during this function."""
        y, total = of_rms.add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)  # the last block's sum is not used: no zeros are read for it
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradients of x, residual, weight, None)."""
        total, weight = ctx.saved_tensors
        dy, dtotal = grads
        if dy is None:
            return dtotal, dtotal, None, None
        dmore = None if dtotal is None else rows_ready(dtotal)
        dx, dweight = rms_norm_backward_op(rows_ready(dy), total, weight, dmore, ctx.eps)
        return dx, dx, dweight, None


class _AddLayerNorm(torch.autograd.Function):
    """(layer_norm of the sum, the sum); differentiable once in x, residual, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """torch disables autograd during this function."""
        y, total = of_sum.add_layer_norm(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)  # the last block's sum is not used: no zeros are read for it
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradients of x, residual, weight, bias, None)."""
        total, weight = ctx.saved_tensors
        dy, dtotal = grads
        if dy is None:
            return dtotal, dtotal, None, None, None
        dx, dweight, dbias = layer_norm_backward_op(rows_ready(dy), total, weight, ctx.eps, None)
        dx = dx if dtotal is None else dx + dtotal
        return dx, dx, dweight, dbias if ctx.needs_input_grad[3] else None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dimension.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        weight: [D].
        bias: [D] or None.
        eps: added to the variance.

    Returns:
        [..., D] of x's dtype, contiguous.

    Raises:
        ValueError: weight or bias does not match the last dimension.
    """
    weight, bias = dense(weight), dense(bias)
    if wants_gradient(x, weight, bias):
        return _LayerNorm.apply(x, weight, bias, eps)  # pyright: ignore[reportReturnType]
    return of_layer.layer_norm(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last dimension.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        weight: [D].
        eps: added to the mean square.

    Returns:
        [..., D] of x's dtype, contiguous.

    Raises:
        ValueError: the weight does not match the last dimension.
    """
    weight = dense(weight)
    if wants_gradient(x, weight):
        return _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]
    return of_rms.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add a residual, then RMS norm over the last dimension: one pass instead of two.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        residual: in the shape and dtype of x.
        weight: [D].
        eps: added to the mean square.

    Returns:
        (rms_norm(x + residual), x + residual), both of x's dtype and contiguous.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    weight = dense(weight)
    if wants_gradient(x, residual, weight):
        return _AddRMSNorm.apply(x, residual, weight, eps)  # pyright: ignore[reportReturnType]
    return of_rms.add_rms_norm(x, residual, weight, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add a residual, then layer norm over the last dimension: one pass instead of two.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        residual: in the shape and dtype of x.
        weight: [D].
        bias: [D] or None.
        eps: added to the variance.

    Returns:
        (layer_norm(x + residual), x + residual), both of x's dtype and contiguous.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    weight, bias = dense(weight), dense(bias)
    if wants_gradient(x, residual, weight, bias):
        return _AddLayerNorm.apply(x, residual, weight, bias, eps)  # pyright: ignore[reportReturnType]
    return of_sum.add_layer_norm(x, residual, weight, bias, eps)
