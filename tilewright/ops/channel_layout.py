"""Helpers that group, instance and batch norm share: layouts, checks, and the operations after the norm."""

import torch
from torch import Tensor

from tilewright.ops.permute import permute
from tilewright.ops.pointwise import activation as activate

__all__ = ["channels_last", "check_channels", "followed", "image_of", "places_of"]


def channels_last(x: Tensor) -> bool:
    """Whether the channels of x [N, C, ...] are dense in memory."""
    return (x.permute(0, 2, 3, 1) if x.dim() == 4 else x.movedim(1, -1)).is_contiguous()


def places_of(x: Tensor, last: bool) -> Tensor:
    """x [N, C, ...] as [N, S, C], dense along C if `last`, else along S. A view if x has this layout, otherwise a copy."""
    n, c = x.shape[:2]
    if last:
        moved = x.movedim(1, -1)
        return (moved if moved.is_contiguous() else permute(x, (0, *range(2, x.dim()), 1))).view(n, -1, c)
    return x.contiguous().view(n, c, -1).mT


def image_of(y: Tensor, shape: torch.Size, last: bool) -> Tensor:
    """The inverse of `places_of`."""
    return y.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1) if last else y.mT.view(shape)


def followed(y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """Add the residual and apply the activation, as separate launches."""
    y = y if residual is None else y + residual
    return y if activation == "none" else activate(y, activation)


def check_channels(op: str, x: Tensor, least: int, **vectors: Tensor | None) -> None:
    """Raise a ValueError unless x is floating point [N, C, ...] with at least `least` dims, and each vector is [C]."""
    if x.dim() < least or not x.is_floating_point():
        wanted = "[N, C, ...]" if least == 2 else "[N, C, ...] with at least one spatial dimension"
        raise ValueError(f"{op}: x must be floating point {wanted}, got {list(x.shape)} {x.dtype}")
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[1:2]:
            raise ValueError(f"{op}: {name} must be [{x.shape[1]}], one number per channel; got {list(vector.shape)}")
