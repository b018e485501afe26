"""`linear` with float weights and gradients: the product and its two backward products all use `linear_op`.

    y = x w^T + b (+ residual),   dx = dy w,   dw = dy^T x,   db = the sum of dy over its rows, in float32

With gradients, the activation is a separate op, because its own gradient needs its input; otherwise it is the product's
epilogue. The implementation that was chosen for a call is cached, so the next call with the same key skips the checks and the
choice. The key holds everything in which calls can differ, except the memory of their tensors. For the same values, the bits of
a gradient depend only on the shapes. Second derivatives are not supported.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.hw.here import indirect, wrapped
from tilewright.kernels.gemm.linear import linear_op, matmul, operand_ready
from tilewright.kernels.launch.autograd import no_view, restored
from tilewright.kernels.launch.replay import Held, call_key
from tilewright.kernels.launch.shapes import rows_ready
from tilewright.op import Choice, scope
from tilewright.ops.pointwise import activation as activate
from tilewright.ops.pointwise import gated_halves
from tilewright.ops.values import invariant_scope

__all__ = ["activated", "linear_again", "linear_with_gradient"]


class _Product(torch.autograd.Function):
    """x [M, K], weight [N, K], bias [N] or None, residual [M, N] or None -> [M, N], rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        residual = None if residual is None else rows_ready(residual)
        return linear_op(operand_ready(x), operand_ready(weight), bias, "none", residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        found = _gradients(grads[0].contiguous(), x, weight, ctx.needs_input_grad)
        return *found, grads[0] if ctx.needs_input_grad[3] else None


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of x [M, K], weight and bias; None for those that are not needed. dy [M, N] is contiguous."""
    return (
        matmul(dy, weight) if needs[0] else None,
        matmul(dy.mT, x) if needs[1] else None,
        dy.sum(0) if needs[2] else None,  # torch sums 16-bit numbers in float32 and rounds once
    )


class _Again:
    """The implementations chosen for calls with the same key: of the product and, after a first backward pass, the gradients.

    On a GPU the backward pass runs in a thread of autograd, in which only the default scope is active.
    """

    def __init__(self, product: Choice):
        self.product, self.scope = product, scope()
        self.of_x: Choice | None = None
        self.of_weight: Choice | None = None

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """The gradients of x [..., K], weight and bias; None for those that are not needed."""
        rows, flat = dy.reshape(-1, dy.shape[-1]).contiguous(), x.view(-1, x.shape[-1])
        if scope() != self.scope:
            self.scope, self.of_x, self.of_weight = scope(), None, None
        if wrapped(dy) or indirect() or rows.data_ptr() % 16:
            dx, dw, db = _gradients(rows, flat, weight, needs)
            return None if dx is None else dx.view(x.shape), dw, db
        dx = dw = None
        if needs[0]:
            args = (rows, weight.mT, None, "none", None)
            dx, self.of_x = _launch(self.of_x, args)
            dx = dx.view(x.shape)
        if needs[1]:
            dw, self.of_weight = _launch(self.of_weight, (rows.mT, flat.mT, None, "none", None))
        return dx, dw, rows.sum(0) if needs[2] else None


def _launch(known: Choice | None, args: tuple[Any, ...]) -> tuple[Tensor, Choice]:
    if known is not None:
        return known.impl.launch(known.config, *args), known
    return linear_op(*args), linear_op.chosen(*args)


class _ProductAgain(torch.autograd.Function):
    """x [..., K], weight [N, K], bias [N] or None -> [..., N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, again: _Again) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.again, ctx.strides = again, (x.stride(), weight.stride())
        impl, config = again.product[:2]
        y = impl.launch(config, x.view(-1, x.shape[-1]), weight, bias, "none", None)
        return no_view(y.view(*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = map(restored, ctx.saved_tensors, ctx.strides)
        return *ctx.again.backward(grads[0], x, weight, ctx.needs_input_grad), None


_AGAIN = Held()


def linear_again(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor | None:
    """`linear_with_gradient` (without a residual) for operands like those of an earlier call; None if there was none."""
    key = call_key((linear_op.generation, activation), x, weight, bias)
    again: _Again | None = None if key is None else _AGAIN.get(key)
    if again is None:
        return None
    y: Any = _ProductAgain.apply(x, weight, bias, again)
    return activated(y, activation)


def linear_with_gradient(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    """activation(x @ weight^T + bias) + residual, differentiable in all operands; x [..., K]. The arguments are not checked."""
    rows = x.reshape(-1, x.shape[-1])
    if residual is not None and activation == "none" and invariant_scope():
        y: Any = _Product.apply(rows, weight, bias, residual.reshape(-1, weight.shape[0]))
        return y.view(residual.shape)
    y: Any = _Product.apply(rows, weight, bias, None)
    key = call_key((linear_op.generation, activation), x, weight, bias) if residual is None else None
    ready = x.is_contiguous() and operand_ready(weight) is weight
    if key is not None and ready and x.dim() > 1 and x.numel() and weight.numel():
        _AGAIN.keep(key, _Again(linear_op.chosen(rows, weight, bias, "none", None)))
    y = y.view(*x.shape[:-1], weight.shape[0])
    y = activated(y, activation)
    return y if residual is None else y + residual


def activated(y: Tensor, activation: str) -> Tensor:
    """The activation of `linear` applied to a product [..., N], as a separate op with gradients."""
    if activation == "none":
        return y
    if activation in ("silu_mul", "gelu_mul"):
        return gated_halves(y, activation.removesuffix("_mul"))
    return activate(y, activation)
