"""`permute` and `transpose` as copies with gradients (kernels/layout/permute.py). The gradient is the inverse permutation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.kernels.layout.permute import form_of, permute_op

__all__ = ["permute", "transpose"]


class _Permute(torch.autograd.Function):
    """The copy; differentiable any number of times, because its gradient is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Tensor:
        """torch disables autograd during this function."""
        ctx.dims = dims
        return _copied(x, dims)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """(gradient of x, None)."""
        back = sorted(range(len(ctx.dims)), key=ctx.dims.__getitem__)
        return permute(grads[0], back), None


def _copied(x: Tensor, dims: list[int]) -> Tensor:
    if not torch.compiler.is_compiling() and (x.is_conj() or x.is_neg()):  # lazy views: the bits in memory are not the values
        x = x.resolve_conj().resolve_neg()
    view = x.permute(dims)
    if view.is_contiguous():
        return view.clone(memory_format=torch.contiguous_format)
    if x.numel() and form_of(x.shape, x.stride(), dims) is None:
        x = x.contiguous()
    return permute_op(x, dims)


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """x.permute(dims), copied into a contiguous tensor.

    Args:
        x: any shape and strides; a dtype of 1, 2, 4 or 8 bytes.
        dims: each of x's dimensions once; negative ones count from the last.

    Returns:
        A new contiguous tensor of x's dtype; its dimension k is x's dimension dims[k].

    Raises:
        ValueError: dims are not x's dimensions. On a GPU also: an element has 16 bytes, or more than six dimensions are left
            after those are merged that stay neighbours in the result.
    """
    wanted = [d + x.dim() if d < 0 else d for d in dims]
    if sorted(wanted) != list(range(x.dim())):
        raise ValueError(
            f"permute: dims must name each of the {x.dim()} dimensions of x {list(x.shape)} once, got {list(dims)}"
        )
    if wants_gradient(x):
        return _Permute.apply(x, wanted)  # pyright: ignore[reportReturnType]
    return _copied(x, wanted)


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """x.transpose(dim0, dim1), copied into a contiguous tensor.

    Args:
        x: as in `permute`.
        dim0: one dimension.
        dim1: the other dimension.

    Raises:
        ValueError: x does not have one of these dimensions; further as in `permute`.
    """
    if not all(-x.dim() <= d < x.dim() for d in (dim0, dim1)):
        raise ValueError(
            f"transpose: dimensions must be -{x.dim()} to {x.dim() - 1} for x {list(x.shape)}, got {dim0} and {dim1}"
        )
    dims = list(range(x.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute(x, dims)
