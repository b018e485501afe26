"""The fast path of a repeated convolution in training: the kernels are launched directly, without the checks of the ops.

The forward pass is kernels/conv/replay.py (which repeats calls without gradients) inside one `torch.autograd.Function`. The
backward pass launches the implementations that the ops of ops/conv.py have chosen. If cuDNN computes both the gradient of x and
that of the weight, one cuDNN call computes them and the gradient of the bias. A gradient that a Hopper kernel computes is a
separate launch. In all other cases the backward pass calls the ops every time, also if another scope or a dispatch mode is
active.

No tensor is kept alive between calls. Second derivatives raise an error.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.hw.here import indirect, wrapped
from tilewright.kernels.conv.checks import Window
from tilewright.kernels.conv.replay import FORMATS, Plan, cudnn_choosing, takes_padding
from tilewright.kernels.conv.transpose.conv_transpose import conv_transpose_op
from tilewright.kernels.conv.weight_gradient.conv_weight_gradient import conv_weight_gradient_op
from tilewright.kernels.launch.autograd import no_view, restored
from tilewright.op import scope

__all__ = ["ConvTraining"]

_BACKWARD = torch.ops.aten.convolution_backward.default


class ConvTraining:
    """A convolution in training that can be repeated; tensors have torch's shapes, [N, C, *S], and dense channels.

    Args:
        forward: the same convolution without gradients and activation.
        window: strides, padding, dilation and the result's size.
        groups: the number of groups of channels.
    """

    def __init__(self, forward: Plan, window: Window, groups: int):
        self.forward = forward
        self._options = (window.stride, window.low, window.dilation, groups)
        self._size = tuple(window.size)
        self._scope = scope()
        self._short: dict[tuple[Any, ...], bool] = {}
        """(gradients needed, generations of the two ops' choices) -> whether the gradients can be launched directly."""
        self._of_x: Any = None
        """Launches the kernel for the gradient of x; None: the cuDNN call computes it."""
        self._of_weight: Any = None
        """The same for the gradient of the weight."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """conv(x, weight) + bias + residual, differentiable once in all four."""
        return _Trained.apply(x, weight, bias, residual, self)  # pyright: ignore[reportReturnType]

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> list[Tensor | None]:
        """The gradients of x, weight and bias; None for those that are not needed."""
        if wrapped(dy):
            return self._by_ops(dy.movedim(1, -1).contiguous().movedim(-1, 1), x, weight, needs)
        dy = dy.contiguous(memory_format=FORMATS[x.dim()])
        plain = not indirect() and scope() == self._scope and dy.data_ptr() % 16 == 0
        key = (needs, conv_transpose_op.generation, conv_weight_gradient_op.generation)
        known = self._short.get(key) if plain else False
        if known is None:
            found = self._by_ops(dy, x, weight, needs)
            self._short[key] = self._learn(dy, x, weight, needs)
            return found
        if not known:
            return self._by_ops(dy, x, weight, needs)
        stride, padding, dilation, groups = self._options
        own = self._of_x if needs[0] else None
        mask = [needs[0] and own is None, needs[1] and self._of_weight is None, needs[2]]
        found = (None, None, None)
        if any(mask):
            with cudnn_choosing(deterministic=True):
                found = _BACKWARD(
                    dy, x, weight, list(weight.shape[:1]), stride, padding, dilation, False, [0] * len(stride), groups, mask
                )  # fmt: skip
        dx, dw, db = (gradient if asked else None for gradient, asked in zip(found, mask, strict=True))
        if own is not None:
            dx = torch.empty_like(x)
            own.run(dy, weight, dx, None, None, None, None)
        if self._of_weight is not None and needs[1]:
            dw = torch.empty_like(weight)
            self._of_weight.run(dy, x, dw)
        return [dx, dw, db]

    def _by_ops(self, dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> list[Tensor | None]:
        of_x, of_weight = self._arguments(dy, x, weight)
        dx = conv_transpose_op(*of_x).movedim(-1, 1) if needs[0] else None
        dw = conv_weight_gradient_op(*of_weight).movedim(-1, 1) if needs[1] else None
        return [dx, dw, dy.sum((0, *range(2, dy.dim()))) if needs[2] else None]

    def _arguments(self, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arguments of the ops for the gradients of x and of the weight."""
        dy, pixels, filters = (t.movedim(1, -1) for t in (dy, x, weight))
        return (dy, filters, None, "none", *self._options, list(x.shape[2:])), (
            dy, pixels, *self._options, list(weight.shape[2:]),
        )  # fmt: skip

    def _learn(self, dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> bool:
        """Store the choices of the ops. Returns whether these gradients can be launched directly."""
        of_x, of_weight = self._arguments(dy, x, weight)
        stride, padding, dilation, _ = (tuple(o) if isinstance(o, list) else o for o in self._options)
        shapes = (x.shape[2:], weight.shape[2:], stride, padding, dilation, self._size)
        if not needs[1] or not takes_padding(*shapes):
            return False
        choice = conv_weight_gradient_op.chosen(*of_weight)
        self._of_weight = None if choice.impl.plan is None else choice.impl.plan(choice.config, *of_weight)
        if self._of_weight is None and not choice.impl.library:
            return False
        if not needs[0]:
            return True
        choice = conv_transpose_op.chosen(*of_x)
        self._of_x = None if choice.impl.plan is None else choice.impl.plan(choice.config, *of_x)
        return self._of_x is not None or choice.impl.library


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, call: ConvTraining
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.strides = call, (x.stride(), weight.stride())
        return no_view(call.forward(x, weight, bias, residual))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = map(restored, ctx.saved_tensors, ctx.strides)
        needs = ctx.needs_input_grad
        return *ctx.call.backward(grads[0], x, weight, needs[:3]), grads[0] if needs[3] else None, None
