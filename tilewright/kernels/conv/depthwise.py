"""`conv` with one input channel for each output channel: the implementation `depthwise`.

Channels share nothing, so there is no matrix product. Each pixel is needed once per tap, and these reads must not become the
limit. So a thread computes COLS neighbouring outputs of one vector of channels (16 bytes) and slides along a row of x. It loads
each vector once and multiplies it into every output whose window contains it, in float32. A loop goes over the rows of the
filter; its repeated reads of x come from L1. Filters of up to 9 taps stay completely in registers, and the outputs of a thread
may then span LINES rows of y.

Memory-bound up to 3 x 3; limited by multiply-adds at 7 x 7. The weight is read as [*K, O], channels dense. `nn.Conv2d` keeps it
in this order in memory; any other weight is copied first. Refuses: int8, and convolutions that are not depthwise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.conv.problem import Problem, empty_output, finish_pixels, sizes_of
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["DEPTHWISE", "depthwise_weight"]

SMALL = tl.constexpr(9)
"""The largest number of taps whose weights fit in registers together with the accumulators."""


def _refuse(device: Device, problem: Problem) -> str | None:
    if not problem.depthwise:
        return "supports depthwise convolutions only: one channel of x per group"
    return f"does not support {problem.dtype}" if problem.dtype.itemsize not in (2, 4) else None


# ---- space


def _default(device: Device, problem: Problem) -> Config:
    width, itemsize = problem.y[2], problem.dtype.itemsize
    # 7 divides the widths that follow from ImageNet's 224: 56, 28, 14, 7. With a stride above 1 each loaded vector serves fewer
    # outputs, so COLS is smaller (below).
    cols = 7 if width % 7 == 0 else 4 if width > 2 else 2
    if _small(problem) and width > 2 and problem.y[1] > 1:
        # H100, 3 x 3, 144 channels of 56 x 56: 25.7 us, or 27.3 with one row of 7 outputs; with stride 2 15.8, or 17.0.
        strided = problem.stride[2] > 1
        return {"LINES": 2, "COLS": 2 if strided else 4, "num_warps": 4 if strided else 2}
    if problem.stride[2] > 1 or itemsize == 4:
        cols = 4 if width > 2 else 2
    return {"LINES": 1, "COLS": cols, "num_warps": 4}


def _small(problem: Problem) -> bool:
    """Whether the weights of all taps stay in registers: at most 9 taps, without a depth."""
    flat = (problem.x[0], problem.y[0], problem.kernel[0], problem.padding[0]) == (1, 1, 1, 0)
    return flat and problem.kernel[1] * problem.kernel[2] <= SMALL.value


def _refuse_config(device: Device, problem: Problem, c: Config) -> str | None:
    if c["LINES"] > 1 and not _small(problem):
        return "LINES above 1 needs a filter of at most 9 taps and at most two spatial dims"
    if c["LINES"] * c["COLS"] > 8:
        return "LINES x COLS above 8 spills registers"
    return None


SPACE = Space(
    default=_default,
    axes={"LINES": (1, 2), "COLS": (2, 4, 7), "num_warps": (2, 4)},
    refusal=_refuse_config,
)

# ---- kernel


@triton.jit
def _slide(
    acc, x_ptr, w_ptr, w0, row_mask, channel_mask, XW,
    O: tl.constexpr, MULT: tl.constexpr, KW: tl.constexpr, SW: tl.constexpr, DW: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """acc (COLS tiles [ROWS, VECTOR]) plus the products of one row of the filter. x_ptr points to column w0 of the row of x."""
    weights = ()
    for k in tl.static_range(0, KW):
        weights = weights + (tl.load(w_ptr + k * O, mask=channel_mask, other=0.0).to(tl.float32),)
    for j in tl.static_range(0, (COLS - 1) * SW + (KW - 1) * DW + 1):
        inside = row_mask & ((w0 + j) >= 0) & ((w0 + j) < XW)
        x = tl.load(x_ptr + j * (O // MULT), mask=inside & channel_mask, other=0.0).to(tl.float32)
        after = ()
        for t in tl.static_range(0, COLS):
            if j >= t * SW and (j - t * SW) % DW == 0 and (j - t * SW) // DW < KW:
                after = after + (acc[t] + x * weights[(j - t * SW) // DW],)
            else:
                after = after + (acc[t],)
        acc = after
    return acc


@triton.jit
def _tap(
    total, x, weights, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    """total + x * weight, for the tap that is DOWN pixels below and ACROSS pixels right of the window's first pixel, if any."""
    if DOWN >= 0 and ACROSS >= 0 and DOWN % DH == 0 and ACROSS % DW == 0 and DOWN // DH < KH and ACROSS // DW < KW:
        return total + x * weights[DOWN // DH * KW + ACROSS // DW]
    else:
        return total


@triton.jit
def _whole_filter(
    acc, x_ptr, w_ptr, h0, w0, row_mask, channel_mask, XH, XW,
    C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """acc (LINES x COLS tiles) plus the products of a small filter, whose weights are in registers.

    Each row of x is loaded once for all lines.
    """
    weights = ()
    for k in tl.static_range(0, KH * KW):
        weights = weights + (tl.load(w_ptr + k * O, mask=channel_mask, other=0.0).to(tl.float32),)
    for i in tl.static_range(0, (LINES - 1) * SH + (KH - 1) * DH + 1):
        line_mask = row_mask & ((h0 + i) >= 0) & ((h0 + i) < XH)
        for j in tl.static_range(0, (COLS - 1) * SW + (KW - 1) * DW + 1):
            inside = line_mask & ((w0 + j) >= 0) & ((w0 + j) < XW)
            x = tl.load(x_ptr + (i * XW + j) * C, mask=inside & channel_mask, other=0.0).to(tl.float32)
            after = ()
            for t in tl.static_range(0, LINES * COLS):
                after = after + (_tap(acc[t], x, weights, i - t // COLS * SH, j - t % COLS * SW, KH, KW, DH, DW),)
            acc = after
    return acc


@triton.jit(do_not_specialize=["N", "XD", "XH", "XW", "YD", "YH", "YW", "PAD_D", "PAD_H", "PAD_W"])
def _depthwise_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, N, XD, XH, XW, YD, YH, YW, PAD_D, PAD_H, PAD_W,
    C: tl.constexpr, O: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    DEEP: tl.constexpr, ACTIVATION: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    MULT: tl.constexpr = O // C
    UNITS: tl.constexpr = (O + VECTOR - 1) // VECTOR
    # Neighbouring threads have neighbouring vectors of channels, then the next group of outputs. So they access neighbouring
    # memory, whatever the number of channels.
    units = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    channels = units % UNITS * VECTOR + tl.arange(0, VECTOR)[None, :]
    channel_mask = channels < O
    places = units // UNITS
    across = tl.cdiv(YW, COLS)
    down = tl.cdiv(YH, LINES)
    row_mask = places < N * YD * down * across
    w = places % across * COLS
    rest = places // across
    h = rest % down * LINES
    d, image = (rest // down) % YD, rest // down // YD
    h0, w0, d0 = h * SH - PAD_H, w * SW - PAD_W, d * SD - PAD_D
    corner = ((image.to(tl.int64) * XD + d0) * XH + h0) * XW + w0
    x_ptr += corner * C + channels // MULT
    w_ptr += channels
    acc = ()
    for _ in tl.static_range(0, LINES * COLS):
        acc = acc + (tl.zeros([ROWS, VECTOR], tl.float32),)
    if KH * KW <= SMALL and not DEEP:
        acc = _whole_filter(
            acc, x_ptr, w_ptr, h0, w0, row_mask, channel_mask, XH, XW, C, O, KH, KW, SH, SW, DH, DW, LINES, COLS
        )  # fmt: skip
    else:
        for line in range(KD * KH):
            dd, dh = line // KH * DD, line % KH * DH
            mask = row_mask & ((h0 + dh) >= 0) & ((h0 + dh) < XH) & ((d0 + dd) >= 0) & ((d0 + dd) < XD)
            at = x_ptr + (dd * XH + dh) * XW * C
            acc = _slide(acc, at, w_ptr + line * (KW * O), w0, mask, channel_mask, XW, O, MULT, KW, SW, DW, COLS)
    first = (image.to(tl.int64) * YD + d) * YH + h
    for t in tl.static_range(0, LINES * COLS):
        pixels = (first + t // COLS) * YW + w + t % COLS
        mask = row_mask & (w + t % COLS < YW) & (h + t // COLS < YH) & channel_mask
        finish_pixels(acc[t], y_ptr, bias_ptr, residual_ptr, pixels, channels, mask, O, ACTIVATION)


# ---- launcher


def depthwise_weight(weight: Tensor) -> Tensor:
    """A depthwise weight [O, *K, 1] as [*K, O] with dense channels: a view if its memory has that order, else a copy."""
    return weight.squeeze(-1).movedim(0, -1).contiguous()


def _launch(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int], dilation: list[int], groups: int, size: list[int], x_scales: Tensor | None, w_scales: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    y = empty_output(x, weight, size, dtype)
    if not y.numel():
        return y
    s = sizes_of(x, weight, stride, padding, dilation, groups, size)
    (kd, kh, kw), (sd, sh, sw), (dd, dh, dw) = s.kernel, s.stride, s.dilation
    vector, rows = 16 // x.element_size(), 32 * config["num_warps"]
    places = s.n * s.y[0] * triton.cdiv(s.y[1], config["LINES"]) * triton.cdiv(s.y[2], config["COLS"])
    _depthwise_kernel[(triton.cdiv(places * triton.cdiv(s.o, vector), rows),)](
        x, depthwise_weight(weight), bias, residual, y, s.n, *s.x, *s.y, *s.padding, C=s.c, O=s.o,
        KD=kd, KH=kh, KW=kw, SD=sd, SH=sh, SW=sw, DD=dd, DH=dh, DW=dw, DEEP=s.deep,
        ACTIVATION=activation, ROWS=rows, VECTOR=vector, **config,
    )  # fmt: skip
    return y


DEPTHWISE = Impl(name="depthwise", launch=_launch, space=SPACE, refuse=_refuse)
