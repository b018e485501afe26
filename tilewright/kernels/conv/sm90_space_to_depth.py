"""Rewrites a convolution for sm90_kernel.py as one with more channels and a narrower filter.

A step of that kernel is one filter position and up to 128 bytes of channels, in words of 16 bytes. Where the channels of a
pixel are fewer, or are not whole words, neighbouring pixels of a row that the filter reads together are treated as one pixel:

    patches   for a filter as wide as its stride, without padding along the width. x [N, H, W, C] is viewed as
              [N, H, W / S, S * C]; nothing is copied
    windows   for channels that are not whole words (the 3 of an image). x is copied once, with its padding. The copy is
              [N, I, J, S * C]: pixel j of row i has the channels of pixel j in the S rows of x from i * S on, with some padding
              channels where whole words need them. Overlapping windows of a row of the copy start at whole words:
              [N, I, Q, KW * S * C]

A filter of KH x KW then becomes one of KH x 1. With windows it becomes one of KH / S x 1 with a stride of 1. Patches use the
weight as it is. Windows use a copy of the weight in the order of the windows. One launch makes both copies, in about the time
that it takes to read x and write the copy.

Where S does not divide KH, windows have more rows than the filter. The weights of these rows are zero. So an infinity or NaN in
such a row makes an output NaN although the output does not depend on that row.
"""

from math import gcd
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.conv.problem import Problem, Sizes

__all__ = ["Fold", "Folded", "fold_of", "folded"]

# N images, C channels, O output channels; H, W spatial dims of x, P, Q of y; I, J those of the copy

Two = tuple[int, int]


class Fold(NamedTuple):
    """How a convolution is rewritten, and its sizes afterwards: (rows, columns), without the depth."""

    way: Literal["none", "patches", "windows"]
    c: int
    """Channels that the kernel sees."""
    channels: int
    """Channels per pixel in memory: C, or the channels of the copy."""
    kernel: Two
    stride: Two
    padding: Two
    dilation: Two


def fold_of(s: Sizes | Problem, dtype: torch.dtype) -> Fold:
    """How a convolution of two spatial dims is rewritten. `dtype` is that of x.

    Windows are not possible for a filter that is dilated along the width, unless KW is 1.
    """
    (_, kh, kw), (_, sh, sw), (_, ph, pw), (_, dh, dw) = s.kernel, s.stride, s.padding, s.dilation
    word = 16 // dtype.itemsize
    if kw > 1 and kw == sw and pw == 0 and dw == 1 and s.x[2] % sw == 0 and sw * s.c % word == 0:
        return Fold("patches", sw * s.c, s.c, (kh, 1), (sh, 1), (ph, 0), (dh, 1))
    if s.c % word == 0:
        return Fold("none", s.c, s.c, (kh, kw), (sh, sw), (ph, pw), (dh, dw))
    side = sh if dh == 1 else 1
    apart = word // gcd(word, sw)  # channels must be a multiple of this, so that windows start at whole words
    channels = -(-side * s.c // apart) * apart
    return Fold("windows", kw * channels, channels, (-(-kh // side), 1), (sh // side, 1), (0, 0), (dh, 1))


class Folded(NamedTuple):
    """The operands of the kernel."""

    x: Tensor
    """[N, H, W', C'], channels dense; windows overlap."""
    weight: Tensor
    """[O, KH, KW', C'], channels dense."""


def folded(fold: Fold, x: Tensor, weight: Tensor, s: Sizes) -> Folded:
    """x and the weight, both contiguous, in the form of `fold`: views, or copies for windows."""
    (_, h, w), filters = s.x, (s.o, *fold.kernel)
    if fold.way == "none":
        return Folded(x.view(s.n, h, w, s.c), weight.view(*filters, s.c))
    kw, sw = s.kernel[2], s.stride[2]
    if fold.way == "patches":
        return Folded(x.view(s.n, h, w // sw, fold.c), weight.view(*filters, fold.c))
    word, (kh, _), side = 16 // x.element_size(), fold.kernel, s.stride[1] // fold.stride[0]
    high = (s.y[1] - 1) * fold.stride[0] + (kh - 1) * fold.dilation[0] + 1
    row, filter_row = (-(-n * fold.channels // word) * word for n in ((s.y[2] - 1) * sw + kw, kw))
    rows = torch.empty((s.n, high, row), dtype=x.dtype, device=x.device)
    wide = torch.empty((*filters, filter_row), dtype=x.dtype, device=x.device)
    x_blocks, w_blocks = s.n * high * triton.cdiv(row, _BLOCK), s.o * kh * triton.cdiv(filter_row, _BLOCK)
    _widen_kernel[(x_blocks + w_blocks,)](
        x, rows, weight, wide, x_blocks, h, w, s.kernel[1], kw, *s.padding[1:], high, kh, row, filter_row,
        C=s.c, SIDE=side, CHANNELS=fold.channels, BLOCK=_BLOCK,
    )  # fmt: skip
    windows = rows.as_strided((s.n, high, s.y[2], fold.c), (high * row, row, sw * fold.channels, 1))
    return Folded(windows, wide[..., : fold.c])


_BLOCK = 1024


@triton.jit
def _widen(
    from_ptr, to_ptr, block, H, W, pad_h, pad_w, high, length, C: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one block of a row i of images [high, J, CHANNELS].

    Channel side * C + c of pixel j is channel c of pixel j in row i * SIDE + side of x [H, W, C]. Here rows are counted from
    `pad_h` rows above x, and pixels from `pad_w` pixels to its left. `length`: elements per row.
    """
    blocks = tl.cdiv(length, BLOCK)
    row = block // blocks
    image = (row // high).to(tl.int64)
    at = block % blocks * BLOCK + tl.arange(0, BLOCK)
    channel = at % CHANNELS
    h = row % high * SIDE + channel // C - pad_h
    w = at // CHANNELS - pad_w
    inside = (channel < SIDE * C) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    value = tl.load(from_ptr + image * H * W * C + (h * W + w) * C + channel % C, mask=inside, other=0)
    tl.store(to_ptr + row.to(tl.int64) * length + at, value, mask=at < length)


@triton.jit(do_not_specialize=["x_blocks", "H", "W", "KH", "KW", "pad_h", "pad_w", "high", "filter_high"])
def _widen_kernel(
    x_ptr, rows_ptr, w_ptr, wide_ptr, x_blocks, H, W, KH, KW, pad_h, pad_w, high, filter_high, row, filter_row,
    C: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < x_blocks:
        _widen(x_ptr, rows_ptr, block, H, W, pad_h, pad_w, high, row, C, SIDE, CHANNELS, BLOCK)
    else:
        _widen(w_ptr, wide_ptr, block - x_blocks, KH, KW, 0, 0, filter_high, filter_row, C, SIDE, CHANNELS, BLOCK)
