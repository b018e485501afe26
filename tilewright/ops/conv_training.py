"""A repeated convolution in training: straight from torch's tensors to the launches, forward and backward.

It is kernels/conv/replay.py (calls without gradients) inside one `torch.autograd.Function`. The gradients of x and of the
weight are those of ops/conv.py: the implementations that its ops have chosen are launched again. If both gradients are cuDNN's,
they are one call, which also computes the bias's; a gradient by a Hopper kernel is a separate launch. All other cases go
through the ops every time, as does a gradient that is computed in another scope or under a dispatch mode.

No tensor is kept alive between calls. Second derivatives are refused.
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
    """A call that can be repeated; tensors have torch's shapes, [N, C, *S], with dense channels.

    Args:
        forward: the call without gradients and activation.
        window: strides, padding, dilation and the result's size.
        groups: the number of groups of channels.
    """

    def __init__(self, forward: Plan, window: Window, groups: int):
        self.forward = forward
        self._options = (window.stride, window.low, window.dilation, groups)
        self._size = tuple(window.size)
        self._scope = scope()
        self._short: dict[tuple[Any, ...], bool] = {}
        """Whether the gradients can be launched directly, by which gradients are wanted and by the state of their ops'
        choices."""
        self._of_x: Any = None
        """Launches the gradient of x; None: cuDNN computes it in the same call."""
        self._of_weight: Any = None
        """The same for the weight."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """conv(x, weight) + bias + residual, differentiable once in all four."""
        return _Trained.apply(x, weight, bias, residual, self)  # pyright: ignore[reportReturnType]

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> list[Tensor | None]:
        """Those gradients of x, weight and bias that are needed; None for others."""
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
        """Remember what the ops have chosen. Returns whether these gradients can be launched directly, by us or by cuDNN."""
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
