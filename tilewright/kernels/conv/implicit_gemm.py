"""`conv` as an implicit matrix product, for every shape and card: the implementation `triton`, and `few` for a single image.

A program computes a tile of BLOCK_M output pixels by BLOCK_N output channels. It loops over K (the taps of the filter times the
channels of a group) in steps of BLOCK_K, which Triton pipelines through shared memory. No im2col matrix is written to memory.
The start of each pixel's window is computed once per program. Each step adds one number to the addresses of a tile and compares
the coordinates of the pixels with the borders of the image. With few channels (PACKED), a step spans several taps, and each
column of the tile has a tap of its own.

Several groups (TOGETHER) that are narrower than a tile share one. Their weights form a block-diagonal tile; its other entries
are zero and are not loaded. This wastes multiplications, but such a convolution is memory-bound, and the tensor cores have
capacity left.

`few` is the same kernel for problems with few tiles, as in a network that processes a single image. It uses small tiles, and
SPLIT_K programs share the steps of a tile. Each program stores its partial sum in memory. The last program to finish adds the
partial sums in the order of their numbers, so the result has the same bits every time.

Channels, filter, stride, dilation and groups are compile-time constants, since a layer fixes them. Any number and size of
images runs the same kernel. int8 is summed in int32 and scaled in the epilogue. float32 is multiplied in IEEE precision,
without tensor cores.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.conv.plan import launcher, plan_of
from tilewright.kernels.conv.problem import Problem, finish_pixels, sizes_of
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.tile import grouped
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import first_launch, pointer_kind
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["FEW", "TRITON", "estimate", "planned", "tiles_of"]


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype.itemsize > 4:
        return f"does not support {problem.dtype}"
    return None


# ---- space


def tiles_of(channels: int, groups: int, block_n: int) -> tuple[int, int]:
    """(number of tiles of BLOCK_N output channels, groups per tile)."""
    own = channels // groups
    together = min(groups, max(1, block_n // own))
    return -(-groups // together) * -(-own // block_n), together


def estimate(device: Device, block_m: int, block_n: int, tiles: int) -> float:
    """The estimated time of one step of K of all tiles, in cycles that serve only for comparison.

    Tiles run in waves of one or two per SM.
    """
    together = min(2 if block_m * block_n <= 128 * 128 else 1, -(-tiles // device.sms))
    waves = tiles / (device.sms * max(together, 1))
    step = max(block_m * block_n / 2048, (block_m + block_n) / 20)
    # A partial wave takes about as long as a full one. Among many waves the partial last one hardly counts.
    return together * step * (-(-waves // 1) if waves < 4 else waves)


# BLOCK_M, BLOCK_N, num_warps. 256 columns only where the tensor core reads both operands from shared memory.
_TILES = ((128, 256, 8), (128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4), (128, 32, 4))
_WIDE_TILES = ((64, 64, 8), (64, 32, 4))


def _smem_bytes(c: Config, itemsize: int) -> int:
    return (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * c["num_stages"] * itemsize


def _block_k(problem: Problem) -> int:
    """Elements of K per step: 128 bytes, or half of that for narrow layers, whose last step would be mostly padding."""
    wide = 128 // problem.dtype.itemsize
    k = problem.c // problem.groups
    return wide // 2 if problem.dtype.itemsize < 4 and k % wide and (k % (wide // 2) == 0 or k < wide) else wide


def _default(device: Device, problem: Problem) -> Config:
    itemsize = problem.dtype.itemsize
    tiles = _WIDE_TILES if itemsize == 4 else _TILES
    block_k = _block_k(problem)
    best, least = None, float("inf")
    for block_m, block_n, warps in tiles:
        # Two programs per SM are worth more than a fourth stage: on an H100, 3 x 3 with 128 channels takes 23.3 us, not 28.0.
        stages = 4 if itemsize < 4 and block_m * block_n <= 64 * 64 else 3
        config = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}
        if _refuse_config(device, problem, config) is not None:
            continue
        tiles, together = tiles_of(problem.o, problem.groups, block_n)
        cost = together * estimate(device, block_m, block_n, -(-problem.pixels // block_m) * tiles)
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
    if c["BLOCK_N"] == 256 and (itemsize == 1 or not device.multiplies_by_warpgroup):
        return "BLOCK_N 256 spills registers where the tensor cores read an operand from registers"
    if itemsize < 4 and c["BLOCK_N"] == 32 and (problem.groups == 1 or problem.o // problem.groups > 16):
        return "BLOCK_N 32 is for groups of at most 16 output channels"
    if c["BLOCK_N"] > max(64, problem.o):
        return "BLOCK_N is larger than the number of channels of y"
    if itemsize == 4 and c["num_stages"] == 4:
        return "a fourth stage gains nothing with float32, which is not limited by loads"
    if _smem_bytes(c, itemsize) > device.smem_bytes:
        return "more shared memory than the device has"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 128, 256),
        "BLOCK_K": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    },
    refusal=_refuse_config,
)

# ---- few tiles


def _few_tiles(problem: Problem) -> int:
    """The number of tiles of 64 pixels by 32 channels."""
    return -(-problem.pixels // 64) * -(-problem.o // 32)


def _steps(problem: Problem, block_k: int) -> int:
    return problem.taps * -(-problem.c // block_k)


def _refuse_few(device: Device, problem: Problem) -> str | None:
    if problem.groups > 1 or problem.dtype.itemsize != 2:
        return "supports fp16 and bf16 without groups only"
    if _few_tiles(problem) > 4 * device.sms:
        return "is for fewer pixels and channels: here the tiles of other implementations occupy all SMs"
    if problem.taps * problem.c < 256:
        return "needs at least 256 products per output (filter taps x channels)"
    return None


# Microseconds on an H100, ResNet-50 with one image. _SHARING: the cost of sharing a tile, by the number of programs. _STEP: the
# time of a step of K with filters of more than one tap; _POINTWISE_STEP: with 1 x 1 filters.
_SHARING = {1: 0.0, 2: 1.7, 4: 2.2, 8: 3.0, 16: 5.2}
_STEP, _POINTWISE_STEP = 0.2, 0.16


def _few_default(device: Device, problem: Problem) -> Config:
    block_k, tiles = _block_k(problem), _few_tiles(problem)
    steps, step = _steps(problem, block_k), _STEP if problem.taps > 1 else _POINTWISE_STEP
    splits = [n for n in _SHARING if n == 1 or (n * tiles <= 1.25 * device.sms and 2 * n <= steps)]
    split = min(splits, key=lambda n: step * -(-steps // n) + _SHARING[n])
    return {"BLOCK_N": 64 if tiles > device.sms and problem.o > 32 else 32, "BLOCK_K": block_k, "SPLIT_K": split}


def _refuse_few_config(device: Device, problem: Problem, c: Config) -> str | None:
    if c["BLOCK_K"] != _block_k(problem):
        return "BLOCK_K must be 128 bytes wide, or half of that for layers with few channels"
    if 2 * c["SPLIT_K"] > max(2, _steps(problem, c["BLOCK_K"])):
        return "SPLIT_K is too large: each program needs at least two steps along K"
    return None


FEW_SPACE = Space(
    default=_few_default,
    axes={"BLOCK_N": (32, 64), "BLOCK_K": (32, 64), "SPLIT_K": (1, 2, 4, 8, 16)},
    refusal=_refuse_few_config,
)

# ---- kernel


@triton.jit
def _weights(w_ptr, cols, k, TAP_K: tl.constexpr, C_G: tl.constexpr, O_G: tl.constexpr, TAPS: tl.constexpr, mask):
    """Rows `cols` [BLOCK_N, 1] of the weight at the positions `k` of K. The groups of the tile have TAP_K channels per tap."""
    if TAP_K == C_G:
        return tl.load(w_ptr + cols.to(tl.int64) * (TAPS * C_G) + k, mask=mask & (k < TAPS * C_G), other=0.0)
    else:
        # `cols` and the channels of a tap are counted from the first group of the tile.
        channel = k % TAP_K
        own = channel // C_G == cols // O_G
        at = cols * (TAPS * C_G) + (k // TAP_K) * C_G + channel % C_G
        return tl.load(w_ptr + at, mask=mask & own & (k < TAPS * TAP_K), other=0.0)


@triton.jit
def _walk_taps(
    x_ptr, w_ptr, d0, h0, w0, row_mask, cols, col_mask, left, XD, XH, XW, acc,
    C: tl.constexpr, TAP_K: tl.constexpr, C_G: tl.constexpr, O_G: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    DEEP: tl.constexpr, BLOCK_K: tl.constexpr, PACKED: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """acc + x's windows @ weight^T over this program's share of K.

    x_ptr [BLOCK_M, 1] points to the pixel (d0, h0, w0), which may be outside of the image.

    `left`: number of channels of x from the first one of the tile to the last one of x.
    """
    TAPS: tl.constexpr = KD * KH * KW
    BLOCKS: tl.constexpr = (TAP_K + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = (TAPS * TAP_K + BLOCK_K - 1) // BLOCK_K if PACKED else TAPS * BLOCKS
    SHARE: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
    ks = tl.arange(0, BLOCK_K)[None, :]
    begin = tl.program_id(1) * SHARE
    for step in range(begin, min(begin + SHARE, STEPS)):
        if PACKED:
            k = step * BLOCK_K + ks
            tap, channel = k // TAP_K, k % TAP_K
            inside = row_mask & (k < TAPS * TAP_K)
        else:
            tap = step // BLOCKS
            channel = (step - tap * BLOCKS) * BLOCK_K + ks
            k = tap * TAP_K + channel
            inside = row_mask
        kd, kh, kw = tap // (KH * KW) * DD, (tap // KW) % KH * DH, tap % KW * DW
        inside &= ((h0 + kh) >= 0) & ((h0 + kh) < XH) & ((w0 + kw) >= 0) & ((w0 + kw) < XW)
        offset = kh * XW + kw
        if DEEP:
            inside &= ((d0 + kd) >= 0) & ((d0 + kd) < XD)
            offset += kd * (XH * XW)
        w_mask = col_mask
        if not PACKED and TAP_K % BLOCK_K != 0:
            w_mask &= channel < TAP_K
            inside &= channel < TAP_K
        if TAP_K != C_G:
            inside &= channel < left
        x = tl.load(x_ptr + (offset * C + channel), mask=inside, other=0.0)
        w = _weights(w_ptr, cols, k, TAP_K, C_G, O_G, TAPS, w_mask)
        if acc.dtype == tl.int32:
            acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
        else:
            acc = dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def _finish(
    acc, y_ptr, bias_ptr, residual_ptr, x_scales_ptr, w_scales_ptr, image, pixels, channels, row_mask, mask, O: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Apply the scales, then the epilogue, and store. image, pixels, row_mask: [BLOCK_M, 1]; channels: [1, BLOCK_N].

    If the result is int8 (int8.py), the scale of the image is applied last.
    """
    factor = None
    if x_scales_ptr is not None:
        scale = tl.load(x_scales_ptr + image, mask=row_mask, other=0.0)
        if y_ptr.dtype.element_ty == tl.int8:
            factor = scale
            scale = tl.load(w_scales_ptr + channels, mask=channels < O, other=0.0)
        else:
            scale = scale * tl.load(w_scales_ptr + channels, mask=channels < O, other=0.0)
        acc = acc.to(tl.float32) * scale
    finish_pixels(acc, y_ptr, bias_ptr, residual_ptr, pixels.to(tl.int64), channels, mask, O, ACTIVATION, factor)


@triton.jit
def _finish_or_join(
    acc, parts_ptr, tickets_ptr, y_ptr, bias_ptr, residual_ptr, x_scales_ptr, w_scales_ptr, image, pixels, channels,
    row_mask, mask, O: tl.constexpr, ACTIVATION: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finish a whole tile. For a shared tile, store a partial sum; the last program to arrive adds all of them and finishes."""
    if SPLIT_K > 1:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        part_ptrs = parts_ptr + tl.program_id(0).to(tl.int64) * (SPLIT_K * SIZE) + inside
        tl.store(part_ptrs + tl.program_id(1) * SIZE, acc)
        # One thread increments the counter for the whole program. Before that, all threads must have stored their parts.
        tl.debug_barrier()
        if tl.atomic_add(tickets_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(tickets_ptr + tl.program_id(0), 0)
            total = tl.load(part_ptrs, cache_modifier=".cg")
            for part in tl.static_range(1, SPLIT_K):
                total += tl.load(part_ptrs + part * SIZE, cache_modifier=".cg")
            _finish(total, y_ptr, bias_ptr, residual_ptr, None, None, image, pixels, channels, row_mask, mask, O, ACTIVATION)
    else:
        _finish(
            acc, y_ptr, bias_ptr, residual_ptr, x_scales_ptr, w_scales_ptr, image, pixels, channels, row_mask, mask, O,
            ACTIVATION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "XD", "XH", "XW", "YD", "YH", "YW", "PAD_D", "PAD_H", "PAD_W"])
def _conv_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, x_scales_ptr, w_scales_ptr, parts_ptr, tickets_ptr,
    N, XD, XH, XW, YD, YH, YW, PAD_D, PAD_H, PAD_W,
    C: tl.constexpr, O: tl.constexpr, GROUPS: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    DEEP: tl.constexpr, ACTIVATION: tl.constexpr, TOGETHER: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    C_G: tl.constexpr = C // GROUPS
    O_G: tl.constexpr = O // GROUPS
    TILES_G: tl.constexpr = (O_G + BLOCK_N - 1) // BLOCK_N  # tiles of a group
    TILES_N: tl.constexpr = (GROUPS + TOGETHER - 1) // TOGETHER * TILES_G
    M = N * YD * YH * YW
    tiles_m = tl.cdiv(M, BLOCK_M)
    row, col = grouped(tl.program_id(0), tiles_m, TILES_N, GROUP_M)
    pixels = (row * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    row_mask = pixels < M
    w0 = pixels % YW * SW - PAD_W
    rest = pixels // YW
    h0 = rest % YH * SH - PAD_H
    rest = rest // YH
    d0 = rest % YD * SD - PAD_D
    image = rest // YD

    group = col // TILES_G * TOGETHER
    first = group * O_G + col % TILES_G * BLOCK_N
    cols = tl.arange(0, BLOCK_N)
    limit = min((group + TOGETHER) * O_G, O) - first
    corner = ((image.to(tl.int64) * XD + d0) * XH + h0) * XW + w0
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32)
    acc = _walk_taps(
        x_ptr + group * C_G + corner * C, w_ptr + first.to(tl.int64) * (KD * KH * KW * C_G), d0, h0, w0, row_mask,
        cols[:, None], (cols < limit)[:, None], C - group * C_G, XD, XH, XW, acc, C, TOGETHER * C_G, C_G, O_G,
        KD, KH, KW, DD, DH, DW, DEEP, BLOCK_K, TOGETHER * C_G < BLOCK_K, SPLIT_K,
    )  # fmt: skip
    mask = row_mask & (cols < limit)[None, :]
    channels = (first + cols)[None, :]
    _finish_or_join(
        acc, parts_ptr, tickets_ptr, y_ptr, bias_ptr, residual_ptr, x_scales_ptr, w_scales_ptr, image, pixels, channels,
        row_mask, mask, O, ACTIVATION, SPLIT_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def _first_launch(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int], x_scales: Tensor | None,
    w_scales: Tensor | None, dtype: torch.dtype,
) -> Plan:  # fmt: skip
    """Fill y. Returns the plan of the launch."""
    s = sizes_of(x, weight, stride, padding, dilation, groups, size)
    (kd, kh, kw), (sd, sh, sw), (dd, dh, dw) = s.kernel, s.stride, s.dilation
    tiles, together = tiles_of(s.o, groups, config["BLOCK_N"])
    tiles, split = tiles * triton.cdiv(s.pixels, config["BLOCK_M"]), config.get("SPLIT_K", 1)
    scratch = tiles * split * config["BLOCK_M"] * config["BLOCK_N"] if split > 1 else 0
    parts, counters = _shared(scratch, tiles, x.device)
    operands = (x, weight, y, bias, residual, x_scales, w_scales, parts, counters)
    owners = (0, 1, 3, 4, 2, 5, 6, 7, 8)  # for each of the kernel's first arguments, the index of its operand
    arguments = (*(operands[i] for i in owners), s.n, *s.x, *s.y, *s.padding)
    constants = {
        "C": s.c, "O": s.o, "GROUPS": groups, "KD": kd, "KH": kh, "KW": kw, "SD": sd, "SH": sh, "SW": sw, "DD": dd, "DH": dh,
        "DW": dw, "DEEP": s.deep, "SPLIT_K": 1, "ACTIVATION": activation, "TOGETHER": together, "GROUP_M": 8,
    }  # fmt: skip
    constants |= config
    launched = first_launch(_conv_kernel, (tiles, split), arguments, constants, owners, operands)
    return Plan(launched, memory=(lambda device: _shared(scratch, tiles, device)) if scratch else None)


def _key(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int], dilation: list[int], groups: int, size: list[int], x_scales: Tensor | None, w_scales: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    return (
        x.dtype, dtype, x.get_device(), x.shape, weight.shape, *size, *stride, *padding, *dilation, groups, activation,
        *map(pointer_kind, (x, weight, bias, residual, x_scales, w_scales)), *config.values(),
    )  # fmt: skip


_PLANS = Planned(_key, _first_launch)
_launch = launcher(_PLANS)


def planned(config: Config, *args: Any) -> Plan | None:
    """The plan of a call of `TRITON` or `FEW`, or None if there is none."""
    return _PLANS.plan(config if "BLOCK_M" in config else _few_config(config), *args)


def _shared(scratch: int, tiles: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Memory for `scratch` numbers (partial sums of tiles that programs share along K), and counters. None if scratch is 0."""
    if not scratch:
        return None, None
    return torch.empty(scratch, dtype=torch.float32, device=device), tickets(device, tiles)


def _launch_few(config: Config, *args: Any) -> Tensor:
    return _launch(_few_config(config), *args)


def _few_config(config: Config) -> Config:
    """The full config of the launch. Narrow tiles have six stages, so that all loads of a short K are in flight at once."""
    return {"BLOCK_M": 64, "num_warps": 4, "num_stages": 6 if config["BLOCK_N"] == 32 else 4, **config}


TRITON = Impl(name="triton", launch=_launch, space=SPACE, plan=plan_of(planned), refuse=_refuse)
FEW = Impl(name="few", launch=_launch_few, space=FEW_SPACE, plan=plan_of(planned), refuse=_refuse_few)
