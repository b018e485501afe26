"""`linear` of float weights with gradients: the product and its two backward products are all `linear_op`.

    y = x w^T + b,   dx = dy w,   dw = dy^T x,   db = the sum of dy over its rows, in float32

The activation follows as an op of its own, whose gradient needs what it was given; in a forward pass without gradients it is
the product's epilogue. The bits of a gradient depend on the shapes alone. Not supported: a gradient of the gradient.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.matmul import linear_op, matmul, operand_ready
from tilewright.ops.pointwise import activation as activate
from tilewright.ops.pointwise import gelu_mul, silu_mul

__all__ = ["linear_with_gradient"]


class _Product(torch.autograd.Function):
    """x [M, K], weight [N, K], bias [N] or None -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear_op(operand_ready(x), weight, bias, "none", None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, wide = grads[0].contiguous(), torch.promote_types(grads[0].dtype, torch.float32)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            matmul(dy, weight) if of_x else None,
            matmul(dy.mT, x) if of_weight else None,
            dy.sum(0, dtype=wide).to(dy.dtype) if of_bias else None,
        )


def linear_with_gradient(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    """activation(x @ weight^T + bias) + residual, differentiable in all; x [..., K], checked by the caller."""
    y: Any = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    y = y.view(*x.shape[:-1], weight.shape[0])
    if activation in ("silu_mul", "gelu_mul"):
        gate, up = y.chunk(2, -1)
        y = silu_mul(gate, up) if activation == "silu_mul" else gelu_mul(gate, up)
    elif activation != "none":
        y = activate(y, activation)
    return y if residual is None else y + residual
