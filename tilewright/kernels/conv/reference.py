"""Convolution in plain torch on channels-last tensors: the definition of `conv`, and how `vendor` calls cuDNN."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.kernels.device.activations import activated

__all__ = ["convolved", "plain_padding", "reference"]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int, size: Sequence[int],
) -> Tensor:  # fmt: skip
    """torch's convolution of x [N, *S, C] and weight [O, *K, C / groups] -> [N, *size, O], channels-last as cuDNN leaves it."""
    call = _CONV[x.dim() - 2]
    plain, high = plain_padding(x, weight, stride, padding, dilation, size), _high(x, weight, stride, padding, dilation, size)
    x, weight = x.movedim(-1, 1), weight.movedim(-1, 1)
    if plain:
        return call(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups).movedim(1, -1)
    pads = [side for low, up in zip(reversed(padding), reversed(high), strict=True) for side in (low, up)]
    return call(F.pad(x, pads), weight, bias, tuple(stride), 0, tuple(dilation), groups).movedim(1, -1)


def _high(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], size: Sequence[int]
) -> list[int]:
    """Padding of the high sides, which follows from the size of the output."""
    spatial = zip(x.shape[1:-1], weight.shape[1:-1], stride, padding, dilation, size, strict=True)
    return [(p - 1) * s + d * (k - 1) + 1 - low - n for n, k, s, low, d, p in spatial]


def plain_padding(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], size: Sequence[int]
) -> bool:
    """Whether torch's padding, which is one number per dimension, is sufficient.

    It is if the high side is equal to the low side, or smaller by less than a stride: the filter then reads the same pixels.
    """
    high = _high(x, weight, stride, padding, dilation, size)
    return min(padding) >= 0 and all(0 <= low - up < s for low, up, s in zip(padding, high, stride, strict=True))


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, size: Sequence[int], x_scales: Tensor | None,
    w_scales: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """activation(conv(x, weight) * scales + bias + residual), computed in float32 (float64 for float64), rounded once."""
    given = x.dtype if x_scales is None else x_scales.dtype
    wide = torch.promote_types(given, torch.float32)
    out = torch.float64 if wide == torch.float64 else dtype
    if not x.shape[0]:
        return torch.empty((0, *size, weight.shape[0]), dtype=out, device=x.device)
    y = convolved(x.to(wide), weight.to(wide), None, stride, padding, dilation, groups, size)
    if x_scales is not None and w_scales is not None:
        y = y * x_scales.view(-1, *(1,) * (x.dim() - 1)) * w_scales
    if bias is not None:
        y = y + bias
    if residual is not None:
        y = y + residual
    return activated(y.to(wide), activation).to(out).contiguous()
