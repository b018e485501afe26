"""sum, mean, max and argmax over any dimensions, with gradients and torch's semantics (kernels/reduce/reduction.py).

The input is viewed as [N, R, C], of which R is reduced. This needs no copy if the reduced dimensions are neighbours in a
contiguous tensor (the last ones, the first ones, or some in between); otherwise x is copied. A reduction over no elements
behaves as in torch: a sum is 0, a mean is NaN, and a maximum is an error.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.kernels.reduce.reduction import reduce_max_op, reduce_sum_op
from tilewright.ops.permute import permute

__all__ = ["argmax", "max", "mean", "sum"]


def _dims(op: str, x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """The dimensions as sorted non-negative numbers. Raises ValueError if x does not have them."""
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be floating point, got {list(x.shape)} {x.dtype}")
    given = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim) or range(x.dim())
    if any(not -x.dim() <= d < x.dim() for d in given):
        raise ValueError(f"{op}: dim must be -{x.dim()} to {x.dim() - 1} for x {list(x.shape)}, got {dim}")
    found = sorted(d % x.dim() for d in given)
    if len(set(found)) < len(found):
        raise ValueError(f"{op}: dim names a dimension twice, got {dim}")
    return found


def _columns(x: Tensor, dims: list[int]) -> Tensor:
    """x as [N, R, C], where R is all of `dims`: a view if the op can read it, otherwise a copy."""
    kept = [d for d in range(x.dim()) if d not in dims]
    neighbours = dims[-1] - dims[0] == len(dims) - 1
    if x.is_contiguous() and neighbours:
        before, after = math.prod(x.shape[: dims[0]]), math.prod(x.shape[dims[-1] + 1 :])
        reduced = math.prod([x.shape[d] for d in dims])
        return x.view(1, before, reduced).mT if after == 1 else x.view(before, reduced, after)
    return permute(x, [*kept, *dims]).view(1, math.prod([x.shape[d] for d in kept]), -1).mT


def _shape(x: Tensor, dims: list[int], keepdim: bool) -> list[int]:
    return [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]


class _Sum(torch.autograd.Function):
    """The sum or mean over dims, which are kept with size 1; differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], mean: bool) -> Tensor:
        """torch disables autograd during this function."""
        ctx.shape, ctx.count = x.shape, math.prod([x.shape[d] for d in dims]) if mean else 1
        return _summed(x, dims, mean)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """(gradient of x), and None for the rest."""
        return (grads[0] / ctx.count if ctx.count > 1 else grads[0]).expand(ctx.shape), None, None


def _summed(x: Tensor, dims: list[int], mean: bool) -> Tensor:
    """The sum or mean; the reduced dimensions are kept with size 1."""
    shape = _shape(x, dims, True)
    if not math.prod([x.shape[d] for d in dims]):
        return torch.full(shape, math.nan if mean else 0.0, dtype=x.dtype, device=x.device)
    if not x.numel():
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    return reduce_sum_op(_columns(x, dims), mean).view(shape)


def _reduced(op: str, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> Tensor:
    dims, mean = _dims(op, x, dim), op == "mean"
    if not dims:  # a scalar
        return x.clone()
    y: Tensor = _Sum.apply(x, dims, mean) if wants_gradient(x) else _summed(x, dims, mean)  # pyright: ignore[reportAssignmentType]
    return y if keepdim else y.view(_shape(x, dims, False))


def sum(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The sum over dimensions, accumulated in float32.

    Args:
        x: bf16, fp16 or fp32, any shape.
        dim: one dimension, several, or None for all.
        keepdim: keep the reduced dimensions, with size 1.

    Returns:
        The sums, in x's dtype.

    Raises:
        ValueError: x is not floating point, x does not have such a dimension, or a dimension is named twice.
    """
    return _reduced("sum", x, dim, keepdim)


def mean(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """The mean over dimensions, accumulated in float32. Arguments and errors as in `sum`; the mean of no elements is NaN."""
    return _reduced("mean", x, dim, keepdim)


class _Max(torch.autograd.Function):
    """(values, indices) of the maximum over one dimension, which is kept with size 1; differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """torch disables autograd during this function."""
        values, places = _largest("max", x, [dim])
        ctx.save_for_backward(places)
        ctx.shape, ctx.dim = x.shape, dim
        ctx.mark_non_differentiable(places)
        return values, places

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """(gradient of x, None): the gradient of each maximum goes to the element at its index."""
        (places,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).scatter(ctx.dim, places, grads[0]), None


def _largest(op: str, x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """(values, indices) of the maximum; the reduced dimensions are kept with size 1."""
    shape = _shape(x, dims, True)
    if not math.prod([x.shape[d] for d in dims]):
        raise IndexError(f"{op}: an empty set of values has no largest value; dimensions {dims} of x {list(x.shape)} are empty")
    if not x.numel():
        return torch.empty(shape, dtype=x.dtype, device=x.device), torch.empty(shape, dtype=torch.int64, device=x.device)
    values, places = reduce_max_op(_columns(x, dims))
    return values.view(shape), places.view(shape)


def max(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The largest element along a dimension, and its index.

    Args:
        x: bf16, fp16 or fp32, any shape. NaN is larger than any number.
        dim: the dimension.
        keepdim: keep the reduced dimension, with size 1.

    Returns:
        (values of x's dtype, indices int64). Among equal values the first one is taken.

    Raises:
        IndexError: the dimension is empty.
        ValueError: x is not floating point, or does not have such a dimension.
    """
    dims = _dims("max", x, dim)
    if not dims:
        raise ValueError("max: x is a scalar, which has no dimension to reduce")
    found: tuple[Tensor, Tensor] = _Max.apply(x, dims[0]) if wants_gradient(x) else _largest("max", x, dims)  # pyright: ignore[reportAssignmentType]
    values, places = found
    shape = _shape(x, dims, keepdim)
    return values.view(shape), places.view(shape)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the largest element, along a dimension or in the flattened x.

    Args:
        x: bf16, fp16 or fp32, any shape. NaN is larger than any number.
        dim: the dimension, or None for the flattened x.
        keepdim: keep the reduced dimensions, with size 1.

    Returns:
        Indices, int64. Among equal values the first one is taken.

    Raises:
        IndexError: there are no elements.
        ValueError: x is not floating point, or does not have such a dimension.
    """
    dims = _dims("argmax", x, dim)
    if not dims:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    return _largest("argmax", x.detach(), dims)[1].view(_shape(x, dims, keepdim))
