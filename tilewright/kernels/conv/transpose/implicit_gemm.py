"""`conv_transpose` as an implicit matrix product, for every shape and card: the implementation `triton`.

A stride of S spreads x's pixels S apart, and of the filter's taps each output meets every S-th only. Outputs with the same
taps are a phase: S of them along a dimension, S x S in a plane. A program computes a tile of BLOCK_M outputs of one phase by
BLOCK_N channels and walks the taps of its phase alone: no zeros are inserted and none multiplied. Within a phase x's pixels
are beside each other again. Where a dimension has both stride and dilation, all outputs are one phase and taps that do not fit
are masked.

Where the last dimension's filter is as wide as its stride, each output has one tap along it and stands where its tap's columns
are: such taps count as channels of y, which change nothing in memory, and only the other dimensions have phases.

K is the taps times x's channels of a group, in steps of BLOCK_K; the weight's tile is dense along its other side, as it stands
in memory. Groups that are narrower than a tile share one, as in conv/implicit_gemm.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.conv.implicit_gemm import estimate, tiles_of
from tilewright.kernels.conv.problem import Problem, Sizes, finish_pixels, sizes_of
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.tile import grouped
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["TRITON", "fold_of"]

# ---- space

# BLOCK_M, BLOCK_N, num_warps. 256 columns only where the tensor core reads both operands from shared memory.
_TILES = ((128, 256, 8), (128, 128, 8), (128, 64, 4), (64, 64, 4))
_WIDE_TILES = ((64, 64, 8), (64, 32, 4))


def fold_of(s: Problem | Sizes) -> int:
    """Taps of the last dimension that may count as channels of y; 1: none."""
    width = s.kernel[2]
    plain = s.padding[2] == 0 and s.dilation[2] == 1 and s.groups == 1
    return width if plain and s.stride[2] == width and s.x[2] == s.y[2] * width else 1


def _block_k(problem: Problem) -> int:
    wide = 128 // problem.dtype.itemsize
    k = problem.o // problem.groups
    return wide // 2 if problem.dtype.itemsize < 4 and k % wide and k <= wide // 2 * 3 else wide


def _default(device: Device, problem: Problem) -> Config:
    itemsize = problem.dtype.itemsize
    fold = fold_of(problem)
    columns = problem.c * fold if problem.c // problem.groups >= 64 else min(problem.c * fold, 64)
    pixels = problem.n_bucket * problem.x[0] * problem.x[1] * problem.x[2] // fold
    best, least = None, float("inf")
    for block_m, block_n, warps in _WIDE_TILES if itemsize == 4 else _TILES:
        config = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": _block_k(problem), "num_warps": warps, "num_stages": 3}
        if _refuse_config(device, problem, config) is not None:
            continue
        cost = estimate(device, block_m, block_n, -(-pixels // block_m) * -(-columns // block_n))
        if cost < least:
            best, least = config, cost
    assert best is not None  # the narrowest tile fits every card
    return best


def _refuse_config(device: Device, problem: Problem, c: Config) -> str | None:
    itemsize = problem.dtype.itemsize
    if (c["BLOCK_M"], c["BLOCK_N"], c["num_warps"]) not in (_WIDE_TILES if itemsize == 4 else _TILES):
        return "not a supported tile: it would spill registers or leave warps idle"
    if c["BLOCK_K"] != _block_k(problem):
        return "BLOCK_K must be 128 bytes wide, or half of that for layers with few channels"
    if c["BLOCK_N"] == 256 and not device.multiplies_by_warpgroup:
        return "BLOCK_N 256 spills registers where the tensor cores read an operand from registers"
    if c["BLOCK_N"] > max(64, problem.c * fold_of(problem)):
        return "BLOCK_N is larger than the number of columns of the product"
    if itemsize == 4 and c["num_stages"] == 4:
        return "a fourth stage gains nothing with float32, which is not limited by loads"
    if (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * c["num_stages"] * itemsize > device.smem_bytes:
        return "more shared memory than the device has"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 128, 256),
        "BLOCK_K": (32, 64),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    },
    refusal=_refuse_config,
)

# ---- kernel


@triton.jit
def _phase(phi, SIZE, PAD, K: tl.constexpr, S: tl.constexpr, PHASED: tl.constexpr):
    """(outputs, taps, first tap, where the first output's first tap is in x) of a phase along one dimension."""
    if PHASED:
        first = (phi + PAD) % S
        return (SIZE - phi + S - 1) // S, (K - first + S - 1) // S, first, (phi + PAD - first) // S
    else:
        return SIZE, K, 0, PAD


@triton.jit
def _source(j, start, t, P, S: tl.constexpr, D: tl.constexpr, PHASED: tl.constexpr):
    """(coordinate in x, whether it is one) behind output j of a phase and its tap t."""
    if PHASED:
        p = j + (start - t * D)
        return p, (p >= 0) & (p < P)
    else:
        at = j + (start - t * D)
        p = at // S
        return p, (at >= 0) & (at % S == 0) & (p < P)


@triton.jit
def _walk_phase(
    x_ptr, w_ptr, jd, jh, jw, row_mask, cols, col_mask, left, PD, PH, PW, start_d, start_h, start_w,
    first_d, first_h, first_w, taps_d, taps_h, taps_w, acc,
    O: tl.constexpr, TAP_K: tl.constexpr, C_G: tl.constexpr, O_G: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, DEEP: tl.constexpr, PHASED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + the tile of a phase. x_ptr stands at the tile's first channel, a scalar for each row's image."""
    BLOCKS: tl.constexpr = (TAP_K + BLOCK_K - 1) // BLOCK_K
    ks = tl.arange(0, BLOCK_K)
    # A phase without taps has a count of 0 or less along a dimension.
    taps = max(taps_d, 0) * max(taps_h, 0) * max(taps_w, 0)
    for step in range(taps * BLOCKS):
        tap = step // BLOCKS
        td, th, tw = tap // (taps_h * taps_w), (tap // taps_w) % taps_h, tap % taps_w
        channel = (step - tap * BLOCKS) * BLOCK_K + ks
        h, inside_h = _source(jh, start_h, th, PH, SH, DH, PHASED)
        w, inside_w = _source(jw, start_w, tw, PW, SW, DW, PHASED)
        at = h * PW + w
        inside = row_mask & inside_h & inside_w
        if DEEP:
            d, inside_d = _source(jd, start_d, td, PD, SD, DD, PHASED)
            inside &= inside_d
            at += d * (PH * PW)
        w_mask = col_mask
        if TAP_K % BLOCK_K != 0:
            w_mask &= (channel < TAP_K)[:, None]
            inside &= (channel < TAP_K)[None, :]
        if TAP_K != O_G:
            inside &= (channel < left)[None, :]
            w_mask &= (channel < left)[:, None] & (channel[:, None] // O_G == cols // C_G)
        x = tl.load(x_ptr + at * O + channel[None, :], mask=inside, other=0.0)
        if PHASED:
            td, th, tw = first_d + td * SD, first_h + th * SH, first_w + tw * SW
        k = (td * KH + th) * KW + tw
        at_w = channel[:, None] * (KD * KH * KW * C_G) + (k * C_G + cols % C_G if TAP_K != O_G else k * C_G + cols)
        acc = dot(x, tl.load(w_ptr + at_w, mask=w_mask, other=0.0), acc)
    return acc


@triton.jit(do_not_specialize=["N", "YD", "YH", "YW", "PD", "PH", "PW", "PAD_D", "PAD_H", "PAD_W"])
def _transpose_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, N, YD, YH, YW, PD, PH, PW, PAD_D, PAD_H, PAD_W,
    C: tl.constexpr, O: tl.constexpr, GROUPS: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BIAS: tl.constexpr, DEEP: tl.constexpr, PHASED: tl.constexpr, ACTIVATION: tl.constexpr, TOGETHER: tl.constexpr,
    TILES_N: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    C_G: tl.constexpr = C // GROUPS
    O_G: tl.constexpr = O // GROUPS
    TILES_G: tl.constexpr = (C_G + BLOCK_N - 1) // BLOCK_N  # tiles of a group
    phase = tl.program_id(1)
    phi_d, phi_h, phi_w = phase // (SH * SW), (phase // SW) % SH, phase % SW
    count_d, taps_d, first_d, start_d = _phase(phi_d, YD, PAD_D, KD, SD, PHASED)
    count_h, taps_h, first_h, start_h = _phase(phi_h, YH, PAD_H, KH, SH, PHASED)
    count_w, taps_w, first_w, start_w = _phase(phi_w, YW, PAD_W, KW, SW, PHASED)
    tiles_m = tl.cdiv(N * count_d * count_h * count_w, BLOCK_M)
    if tl.program_id(0) >= tiles_m * TILES_N:
        return
    row, col = grouped(tl.program_id(0), tiles_m, TILES_N, GROUP_M)
    rows = (row * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    row_mask = rows < N * count_d * count_h * count_w
    jw, jh = rows % count_w, (rows // count_w) % count_h
    rest = rows // count_w // count_h
    jd, image = rest % count_d, (rest // count_d).to(tl.int64)

    group = col // TILES_G * TOGETHER
    first = group * C_G + col % TILES_G * BLOCK_N
    cols = tl.arange(0, BLOCK_N)[None, :]
    col_mask = cols < min((group + TOGETHER) * C_G, C) - first
    # A tile of one group may begin within it; in one of several, columns count from the first group's.
    inside_group = first - group * C_G
    acc = _walk_phase(
        x_ptr + group * O_G + image * (PD * PH * PW) * O,
        w_ptr + group.to(tl.int64) * (O_G * KD * KH * KW * C_G) + inside_group,
        jd, jh, jw, row_mask, cols, col_mask, O - group * O_G, PD, PH, PW, start_d, start_h, start_w,
        first_d, first_h, first_w, taps_d, taps_h, taps_w, tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
        O, TOGETHER * O_G, C_G, O_G, KD, KH, KW, SD, SH, SW, DD, DH, DW, DEEP, PHASED, BLOCK_K,
    )  # fmt: skip
    if PHASED:
        jd, jh, jw = phi_d + jd * SD, phi_h + jh * SH, phi_w + jw * SW
    pixels = ((image * YD + jd) * YH + jh) * YW + jw
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + (first + cols) % BIAS, mask=col_mask, other=0.0).to(tl.float32)
    finish_pixels(acc, y_ptr, None, None, pixels, first + cols, row_mask & col_mask, C, ACTIVATION)


def _launch(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, size: list[int],
) -> Tensor:  # fmt: skip
    y = torch.empty((x.shape[0], *size, weight.shape[-1] * groups), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    s = sizes_of(y, weight, stride, padding, dilation, groups, x.shape[1:-1])
    channels, fold = s.c, fold_of(s)
    if fold > 1:
        s = s._replace(c=s.c * fold, x=s.x[:2] + s.y[2:], kernel=(*s.kernel[:2], 1), stride=(*s.stride[:2], 1))
    (kd, kh, kw), (sd, sh, sw), (dd, dh, dw) = s.kernel, s.stride, s.dilation
    phased = all(a == 1 or b == 1 for a, b in zip(s.stride, s.dilation, strict=True))
    spread = s.stride if phased else (1, 1, 1)
    outputs = s.n
    for length, step in zip(s.x, spread, strict=True):
        outputs *= triton.cdiv(length, step)
    tiles, together = tiles_of(s.c, groups, config["BLOCK_N"])
    _transpose_kernel[(triton.cdiv(outputs, config["BLOCK_M"]) * tiles, spread[0] * spread[1] * spread[2])](
        x, weight.contiguous(), bias, y, s.n, *s.x, *s.y, *s.padding, C=s.c, O=s.o, GROUPS=groups,
        KD=kd, KH=kh, KW=kw, SD=sd, SH=sh, SW=sw, DD=dd, DH=dh, DW=dw, BIAS=channels, DEEP=s.deep, PHASED=phased,
        ACTIVATION=activation, TOGETHER=together, TILES_N=tiles, GROUP_M=8, **config,
    )  # fmt: skip
    return y


TRITON = Impl(
    name="triton",
    launch=_launch,
    space=SPACE,
    refuse=lambda device, problem: None if problem.dtype.itemsize in (2, 4) else f"does not support {problem.dtype}",
)
