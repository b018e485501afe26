"""The gradient of `conv` by its weight, channels-last, in one, two or three spatial dims.

    dw[o, k, c] = sum over images n and output pixels p of dy[n, p, o] * x[n, p * stride - padding + k * dilation, c]

    dy [N, *P, O], x [N, *S, C], dw [O, *K, C / groups], contiguous; bf16, fp16 or fp32, one dtype throughout.

A matrix product whose summed dimension is pixels: [O, pixels] by [pixels, taps x channels]. Both operands lie in memory with
their other side dense, as the tensor cores of sm_90 read them; older ones have them transposed on the way to registers. The
weight is small and the pixels are many, so SPLIT programs share a tile: each sums its pixels in float32 into memory of its
own, and a second kernel adds the parts in a fixed order. The same call gives the same bits.

Limited by the tensor cores from some 64 channels on. Groups that are narrower than a tile share one, and only what stands on
the diagonal is stored: a depthwise gradient wastes most of its multiplications.

    vendor       cuDNN, its deterministic kernels
    sm90         Hopper: Gluon, boxes of pixels fetched by the copy engine, as many products as the filter has rows
    triton       any shape

Not supported: gradients, float64, int8, 2^30 output pixels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.conv.cudnn import cudnn_choosing
from tilewright.kernels.conv.implicit_gemm import tiles_of
from tilewright.kernels.conv.inputs import conv_weight_gradient_arguments
from tilewright.kernels.conv.problem import Sizes, sizes_of
from tilewright.kernels.conv.reference import plain_padding
from tilewright.kernels.conv.weight_gradient.sm90 import WEIGHT_GRADIENT_SM90
from tilewright.kernels.device.dot import dot
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["conv_weight_gradient_op"]

# ---- reference


def _shaped(dy: Tensor, x: Tensor, groups: int, kernel: Sequence[int]) -> Tensor:
    """A weight without memory."""
    return torch.empty((dy.shape[-1], *kernel, x.shape[-1] // groups), dtype=x.dtype, device="meta")


def _gradient(
    dy: Tensor, x: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    kernel: Sequence[int],
) -> Tensor:  # fmt: skip
    """torch's gradient of the weight; sides that one number a dimension does not say are padded first."""
    like = _shaped(dy, x, groups, kernel)
    size, pads = dy.shape[1:-1], list(padding)
    moved = x.movedim(-1, 1)
    if not plain_padding(x, like, stride, padding, dilation, size):
        spatial = zip(x.shape[1:-1], kernel, stride, padding, dilation, size, strict=True)
        sides = [(low, (p - 1) * s + d * (k - 1) + 1 - low - n) for n, k, s, low, d, p in spatial]
        moved = torch.nn.functional.pad(moved, [side for pair in reversed(sides) for side in pair])
        pads = [0] * len(pads)
    weight = x.new_empty(like.shape).movedim(-1, 1)  # only its shape is looked at
    return torch.ops.aten.convolution_backward(
        dy.movedim(-1, 1), moved, weight, None, list(stride), pads, list(dilation), False, [0] * len(pads), groups,
        [False, True, False],
    )[1].movedim(1, -1)  # fmt: skip


def _reference(
    dy: Tensor, x: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    kernel: Sequence[int],
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.shape[0]:
        return torch.zeros(_shaped(dy, x, groups, kernel).shape, dtype=x.dtype, device=x.device)
    return _gradient(dy.to(wide), x.to(wide), stride, padding, dilation, groups, kernel).to(x.dtype).contiguous()


# ---- problem, cost, examples


class Problem(NamedTuple):
    """All that a choice may depend on; the number of output pixels is rounded up to a power of two."""

    dtype: torch.dtype
    pixels: int
    o: int
    c: int
    groups: int
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    dilation: tuple[int, int, int]
    aligned: bool
    """Whether both operands start at multiples of 16 bytes."""
    deep: bool
    """Whether there are three spatial dims."""

    @property
    def columns(self) -> int:
        """Taps times channels of a group."""
        return self.kernel[0] * self.kernel[1] * self.kernel[2] * (self.c // self.groups)


def _sizes(
    dy: Tensor, x: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    kernel: Sequence[int],
) -> Sizes:  # fmt: skip
    return sizes_of(x, _shaped(dy, x, groups, kernel), stride, padding, dilation, groups, dy.shape[1:-1])


def _problem(dy: Tensor, x: Tensor, *window: Any) -> Problem:
    s = _sizes(dy, x, *window)
    aligned = (dy.data_ptr() | x.data_ptr()) % 16 == 0
    return Problem(
        x.dtype, next_pow2(s.pixels) if s.pixels else 0, s.o, s.c, s.groups, s.kernel, s.stride, s.dilation, aligned, s.deep
    )  # fmt: skip


def _cost(dy: Tensor, x: Tensor, *window: Any) -> Cost:
    s = _sizes(dy, x, *window)
    weights = s.o * s.taps * (s.c // s.groups)
    return Cost(flops=2 * s.pixels * weights, bytes=dy.nbytes + x.nbytes + weights * x.element_size())


_example = Example.sized(conv_weight_gradient_arguments)
EXAMPLES = (
    _example("3x3", 2, 64, 7, 40),
    _example("split", 8, 24, 9, 16, 1, dtype=torch.bfloat16),
    _example("stem", 2, 3, 13, 16, 5, S=2),
    _example("squares", 1, 64, 5, 128, 2, P=1, dtype=torch.bfloat16),
    _example("dilated", 1, 12, 9, 20, S=2, dilation=2, P=1, dtype=torch.float32),
    _example("groups", 2, 16, 5, 24, groups=4),
    _example("depthwise", 2, 12, 6, 12, groups=12, dtype=torch.float32),
    _example("line", 2, 10, 13, 8, 4, P=0, dims=1, dtype=torch.float32),
    _example("volume", 1, 8, 4, 6, 2, dims=3, P=0),
    _example("no images", 0, 8, 4, 8),
)

# ---- space

# BLOCK_M (of O), BLOCK_N (of taps x channels), num_warps
_TILES = ((128, 128, 8), (64, 128, 4), (64, 64, 4))
_WIDE_TILES = ((64, 32, 4),)


def _tiles(problem: Problem, block_m: int, block_n: int) -> int:
    rows, together = tiles_of(problem.o, problem.groups, block_m)
    return rows * -(-problem.columns * together // block_n)


def _default(device: Device, problem: Problem) -> Config:
    wide = problem.dtype.itemsize == 4
    own, columns = max(problem.o // problem.groups, 1), problem.columns
    # Columns of several taps with narrow loads need an address each, and registers for it.
    narrow = problem.c // problem.groups % 8 != 0 or columns <= 64
    block_m, block_n, warps = _WIDE_TILES[0] if wide else _TILES[2 if narrow else 0 if own > 64 else 1]
    # Two programs an SM, each with 16 steps at least: a part of the sum is written and read once.
    want = 2 * device.sms / _tiles(problem, block_m, block_n)
    most = max(1, problem.pixels // (16 * 64))
    split = max(s for s in (1, 2, 4, 8, 16, 32, 64) if s == 1 or (s <= 1.5 * want and s <= most))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLIT": split, "num_warps": warps, "num_stages": 3}


def _refuse_config(device: Device, problem: Problem, c: Config) -> str | None:
    tiles = _WIDE_TILES if problem.dtype.itemsize == 4 else _TILES
    if (c["BLOCK_M"], c["BLOCK_N"], c["num_warps"]) not in tiles:
        return "not a supported tile: it would spill registers or leave warps idle"
    if c["SPLIT"] > 1 and _tiles(problem, c["BLOCK_M"], c["BLOCK_N"]) * c["SPLIT"] > 8 * device.sms:
        return "SPLIT is too large: fewer parts are enough to occupy all SMs"
    if c["SPLIT"] > max(1, problem.pixels // 64):
        return "SPLIT is too large: a part has less than one step of pixels"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 128),
        "SPLIT": (1, 2, 4, 8, 16, 32, 64),
        "num_warps": (4, 8),
        "num_stages": (3,),
    },
    refusal=_refuse_config,
)

# ---- kernels


def divisor(d: int) -> tuple[int, int]:
    """(factor, shift) with n // d == (4 n factor >> 32) >> shift for all n below 2^30 (Granlund and Montgomery, PLDI 1994)."""
    shift = (d - 1).bit_length()
    return -(-(1 << (30 + shift)) // d), shift


@triton.jit
def _divided(n, factor, shift):
    """n // d for `divisor(d)`: a division in three instructions, where each step of a loop divides."""
    return (tl.umulhi((n * 4).to(tl.uint32), factor.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit(do_not_specialize=[
    "PIXELS", "STEPS", "XD", "XH", "XW", "YD", "YH", "YW", "PAD_D", "PAD_H", "PAD_W",
    "FACTOR_D", "SHIFT_D", "FACTOR_H", "SHIFT_H", "FACTOR_W", "SHIFT_W",
])  # fmt: skip
def _gradient_kernel(
    dy_ptr, x_ptr, out_ptr, PIXELS, STEPS, XD, XH, XW, YD, YH, YW, PAD_D, PAD_H, PAD_W,
    FACTOR_D, SHIFT_D, FACTOR_H, SHIFT_H, FACTOR_W, SHIFT_W,
    C: tl.constexpr, O: tl.constexpr, GROUPS: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    DEEP: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    C_G: tl.constexpr = C // GROUPS
    O_G: tl.constexpr = O // GROUPS
    TAP: tl.constexpr = TOGETHER * C_G  # columns of a tap
    COLUMNS: tl.constexpr = KD * KH * KW * TAP
    TILES_N: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    TILES_G: tl.constexpr = (O_G + BLOCK_M - 1) // BLOCK_M
    tile_m, tile_n = tl.program_id(0) // TILES_N, tl.program_id(0) % TILES_N
    group = tile_m // TILES_G * TOGETHER
    first = group * O_G + tile_m % TILES_G * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < min((group + TOGETHER) * O_G, O) - first
    cols = tl.arange(0, BLOCK_N)
    if TAP % BLOCK_N == 0:
        tap = tile_n * BLOCK_N // TAP
        channel = tile_n * BLOCK_N - tap * TAP + cols
    else:
        tap, channel = (tile_n * BLOCK_N + cols) // TAP, (tile_n * BLOCK_N + cols) % TAP
    col_mask = (tile_n * BLOCK_N + cols < COLUMNS) & (channel < C - group * C_G)
    kd, kh, kw = tap // (KH * KW) * DD - PAD_D, (tap // KW) % KH * DH - PAD_H, tap % KW * DW - PAD_W
    if TAP % BLOCK_N != 0:
        kd, kh, kw = kd[None, :], kh[None, :], kw[None, :]
    x_ptr += group * C_G + channel[None, :]
    dy_ptr += first + rows[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.program_id(1) * STEPS, (tl.program_id(1) + 1) * STEPS):
        pixels = (step * BLOCK_K + tl.arange(0, BLOCK_K))[:, None]
        inside = pixels < PIXELS
        dy = tl.load(dy_ptr + pixels.to(tl.int64) * O, mask=inside & row_mask[None, :], other=0.0)
        line = _divided(pixels, FACTOR_W, SHIFT_W)
        w = (pixels - line * YW) * SW + kw
        plane = _divided(line, FACTOR_H, SHIFT_H)
        h = (line - plane * YH) * SH + kh
        inside &= (h >= 0) & (h < XH) & (w >= 0) & (w < XW)
        if DEEP:
            image = _divided(plane, FACTOR_D, SHIFT_D)
            d = (plane - image * YD) * SD + kd
            inside &= (d >= 0) & (d < XD)
            plane = image * XD + d
        x = tl.load(x_ptr + ((plane * XH + h) * XW + w).to(tl.int64) * C, mask=inside & col_mask[None, :], other=0.0)
        acc = dot(tl.trans(dy), x, acc)
    mask = row_mask[:, None] & col_mask[None, :]
    if TOGETHER > 1:
        mask &= rows[:, None] // O_G == channel[None, :] // C_G
    at = (first + rows)[:, None].to(tl.int64) * (KD * KH * KW * C_G) + (tap * C_G + channel % C_G)[None, :]
    out_ptr += tl.program_id(1).to(tl.int64) * (O * KD * KH * KW * C_G)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["SPLIT"])
def _add_kernel(parts_ptr, out_ptr, SPLIT, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of SPLIT arrays of COUNT numbers, first to last."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(SPLIT):
        total += tl.load(parts_ptr + at, mask=at < COUNT, other=0.0)
        parts_ptr += COUNT
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < COUNT)


def _launch(config: Config, dy: Tensor, x: Tensor, *window: Any) -> Tensor:
    s, groups = _sizes(dy, x, *window), window[-2]
    dw = torch.empty((s.o, *window[-1], s.c // groups), dtype=x.dtype, device=x.device)
    if not s.pixels or not dw.numel():
        return dw.zero_()
    split, block_k = config["SPLIT"], 128 // x.element_size()
    rows, together = tiles_of(s.o, groups, config["BLOCK_M"])
    tiles = rows * ceil_div(s.taps * together * (s.c // groups), config["BLOCK_N"])
    parts = dw if split == 1 else torch.empty((split, dw.numel()), dtype=torch.float32, device=x.device)
    (kd, kh, kw), (sd, sh, sw), (dd, dh, dw_) = s.kernel, s.stride, s.dilation
    _gradient_kernel[(tiles, split)](
        dy, x, parts, s.pixels, ceil_div(ceil_div(s.pixels, block_k), split), *s.x, *s.y, *s.padding,
        *divisor(s.y[0]), *divisor(s.y[1]), *divisor(s.y[2]), C=s.c, O=s.o, GROUPS=groups,
        KD=kd, KH=kh, KW=kw, SD=sd, SH=sh, SW=sw, DD=dd, DH=dh, DW=dw_, DEEP=s.deep, TOGETHER=together, BLOCK_K=block_k,
        **{key: value for key, value in config.items() if key != "SPLIT"},
    )  # fmt: skip
    if split > 1:
        _add_kernel[(ceil_div(dw.numel(), 256),)](parts, dw, split, COUNT=dw.numel(), BLOCK=256)
    return dw


def _launch_vendor(config: Config, *args: Any) -> Tensor:
    with cudnn_choosing(deterministic=True):
        return _gradient(*args).contiguous()


def _refuse(device: Device, problem: Any) -> str | None:
    if problem.dtype.itemsize not in (2, 4):
        return f"does not support {problem.dtype}"
    return "supports fewer than 2^30 output pixels only" if problem.pixels > 1 << 29 else None


def _first(device: Device, problem: Problem) -> str | None:
    """Where ours goes before cuDNN: H100, fp16, 3 x 3 of few channels and many pixels.

    32 images: 25.3 us, cuDNN 31.8, at 64 channels of 56 x 56; 22.3, 27.2, at 128 of 28 x 28; 23.5, 20.5, at 256 of 14 x 14.
    """
    if not device.is_hopper or problem.dtype.itemsize != 2 or problem.kernel != (1, 3, 3) or problem.o * problem.c > 128 * 128:
        return None
    return "sm90" if problem.pixels >= 1 << 15 and WEIGHT_GRADIENT_SM90.refusal(device, problem) is None else None


conv_weight_gradient_op = Op(
    name="conv_weight_gradient",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=conv_weight_gradient_arguments,
    first=_first,
    rows_in_problem=True,
    impls=(
        Impl(
            name="vendor",
            library=True,
            launch=_launch_vendor,
            refuse=lambda device, problem: None if problem.pixels else "cuDNN does not support empty tensors",
        ),
        WEIGHT_GRADIENT_SM90,
        Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse),
    ),
)
