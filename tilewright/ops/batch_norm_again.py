"""The fast path of a repeated batch norm in training: the kernels are launched directly, without the checks of the ops.

The forward pass and the backward pass have three launches each (kernels/norm/channel/batch_statistics.py,
norm/channel/batch_norm_apply.py, norm/channel/batch_norm_backward.py). Only these launches, their memory allocations and one
`torch.autograd.Function` remain, because in small layers the host time of everything else would dominate. Repeated calls may
differ in the memory of their tensors (no tensor is kept alive) and in the momentum. The backward pass uses its op instead of
the direct launches if the layout of a gradient differs from x, or if another scope or a dispatch mode is active.

Supported activations: none and relu, whose derivatives can be computed from their results. Second derivatives raise an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.hw.here import indirect, wrapped
from tilewright.kernels.launch.autograd import laid_like, restored, wants_gradient
from tilewright.kernels.launch.plan import Plan
from tilewright.kernels.norm.channel import batch_norm_backward, batch_statistics
from tilewright.kernels.norm.channel.batch_norm_backward import batch_norm_backward_op
from tilewright.op import scope

__all__ = ["BatchNormAgain", "wanted"]


class BatchNormAgain:
    """A batch norm in training that can be repeated.

    Args:
        statistics: the first two launches.
        normalised: the third launch.
        places: returns x [N, C, ...], or a tensor with the same layout, as a view [N, S, C], which the op needs.
        eps: added to the variance.
        relu: whether a relu follows the norm.
    """

    def __init__(
        self,
        statistics: batch_statistics.Again,
        normalised: Plan,
        places: Callable[[Tensor], Tensor],
        eps: float,
        relu: bool,
    ):
        self._statistics, self._normalised, self._places, self._eps, self.relu = statistics, normalised, places, eps, relu
        self._scope = scope()
        self._backward: batch_norm_backward.Again | None = None
        self._generation = -1

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, momentum: float,
    ) -> Tensor:  # fmt: skip
        """activation(norm(x) + residual), with gradients if an input requires them; updates the running statistics."""
        given = (x, weight, bias, residual, running_mean, running_var, momentum)
        if wants_gradient(x, weight, bias, residual):
            return _Again.apply(*given, self)  # pyright: ignore[reportReturnType]
        return self.forward(*given)[0]

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, momentum: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(y, mean, variance)."""
        mean, variance = self._statistics.launch(x, running_mean, running_var, momentum)
        y = torch.empty_like(x)
        self._normalised.run(x, mean, variance, weight, bias, residual, y)
        return y, mean, variance

    def backward(
        self, dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, variance: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(dx, the residual's gradient, dweight, dbias)."""
        plain = not wrapped(dy) and not indirect() and scope() == self._scope
        plain = plain and dy.dtype == x.dtype and dy.stride() == x.stride() and not dy.data_ptr() % 16
        if plain and self._backward is not None and self._generation == batch_norm_backward_op.generation:
            dx, g, dweight, dbias = self._backward.launch(dy, x, y, mean, variance, weight)
            return dx, dy if g is None else g, dweight, dbias
        dy = laid_like(dy, x)
        given = [None if t is None else self._places(t) for t in (dy, x, y)]
        args = (*given, mean, variance, weight, self._eps)
        dx, g, dweight, dbias = batch_norm_backward_op(*args)
        if plain:
            self._backward, self._generation = batch_norm_backward.launched(*args), batch_norm_backward_op.generation
        dx, g = (t.as_strided(x.shape, x.stride()) if t.numel() else dy for t in (dx, g))
        return dx, g, dweight, dbias


class _Again(torch.autograd.Function):
    """The call as an autograd function; differentiable once in its first four arguments: x, weight, bias and residual."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, *_, again = args
        y, mean, variance = again.forward(*args[:-1])
        ctx.save_for_backward(x, weight, mean, variance, y if again.relu else None)
        ctx.options = (again, None if bias is None else bias.dtype, x.stride())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, variance, y = ctx.saved_tensors
        again, of_bias, strides = ctx.options
        x, y = restored(x, strides), None if y is None else restored(y, strides)
        dx, dresidual, dweight, dbias = again.backward(grads[0], x, y, mean, variance, weight)
        return dx, *wanted(ctx, dweight, dbias, of_bias, dresidual), None, None, None, None


def wanted(
    ctx: Any, dweight: Tensor, dbias: Tensor, of_bias: torch.dtype | None, dresidual: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of weight, bias (in the given dtype) and residual, arguments 1 to 3; None for those that are not needed."""
    of_weight, bias, of_residual = ctx.needs_input_grad[1:4]
    return dweight if of_weight else None, dbias.to(of_bias) if bias else None, dresidual if of_residual else None
