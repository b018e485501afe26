"""`grouped_linear` by tiles on tensor cores, on every card: the implementations `triton` and `invariant`.

A program computes BLOCK_M rows of one expert by BLOCK_N rows of its weight. It loops over K in steps that Triton pipelines
through shared memory. Tiles are numbered expert by expert, and within an expert in groups of GROUP_M tile rows, so that
concurrent programs share the expert's weight in L2. The weight of an expert is read once per BLOCK_M of its rows. So with tiles
of 16 rows, a decoding step reads the weights of the chosen experts once, and no others. Rows may be gathered as they are read
(`order`), which saves a copy of x sorted by expert.

`invariant` is the same kernel with one config for every number of rows: the bits of a row do not depend on other rows.

float32 is multiplied as float32, in sums of 512 terms. Refuses: float64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.grouped.problem import (
    GROUPED_ACTIVATIONS,
    GroupedProblem,
    empty_grouped,
    finish_rows,
    group_of,
    most_tiles,
)
from tilewright.kernels.gemm.grouped.work import grouped_tile_work
from tilewright.kernels.gemm.problem import weight_rows
from tilewright.kernels.gemm.tile import grouped
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.model import Work
from tilewright.tune.space import Config, Space

__all__ = ["INVARIANT", "TRITON"]


def _refuse(device: Device, problem: GroupedProblem) -> str | None:
    return f"does not support {problem.dtype}" if problem.dtype.itemsize > 4 else None


# ---- space

# The most rows per expert for which a tile is used, and the tile: BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages
_TILES = (
    (16, (16, 64, 128, 4, 4)),
    (32, (32, 64, 128, 4, 4)),
    (64, (64, 128, 64, 4, 4)),
    (1 << 30, (128, 128, 64, 8, 4)),
)
_LARGE = (128, 256, 64, 8, 3)
_WIDE_TILES = ((16, (16, 64, 32, 4, 4)), (32, (32, 64, 32, 4, 4)), (1 << 30, (64, 64, 32, 8, 3)))
_NAMES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")


def _smem_bytes(c: Config, itemsize: int) -> int:
    return (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * c["num_stages"] * itemsize


def _default(device: Device, problem: GroupedProblem) -> Config:
    itemsize, each = problem.dtype.itemsize, problem.rows_each
    tiles = _TILES if itemsize == 2 else _WIDE_TILES
    tile = next(tile for most, tile in tiles if each <= most)
    if itemsize == 2 and each >= 256 and problem.n >= 512 and device.multiplies_by_warpgroup:
        tile = _LARGE
    config = {**dict(zip(_NAMES, tile, strict=True)), "GROUP_M": 8}
    while _smem_bytes(config, itemsize) > device.smem_bytes and config["num_stages"] > 2 and device.smem_bytes:
        config["num_stages"] -= 1
    return config


def _config_refusal(device: Device, problem: GroupedProblem, c: Config) -> str | None:
    itemsize = problem.dtype.itemsize
    if c["BLOCK_M"] > max(16, 2 * problem.rows_each):
        return "BLOCK_M is at least twice the number of rows per expert"
    if c["BLOCK_M"] < 64 and 4 * c["BLOCK_M"] < problem.rows_each:
        return "BLOCK_M is less than a quarter of the rows per expert: the weight would be read too many times"
    if c["BLOCK_K"] * itemsize not in ((128, 256) if itemsize == 2 else (128,)):
        return "BLOCK_K must be 128 bytes wide, or 256 with 16-bit operands, which stay in shared memory"
    if c["BLOCK_N"] == 256 and not device.multiplies_by_warpgroup:
        return "BLOCK_N 256 spills registers where the tensor cores read operands from registers"
    if _smem_bytes(c, itemsize) > device.smem_bytes:
        return "more shared memory than the device has"
    if c["num_stages"] < 4 and c["BLOCK_M"] < 128:
        return "BLOCK_M below 128 needs four pipeline stages or more, because it waits for memory"
    accumulators = c["BLOCK_M"] * c["BLOCK_N"] // (32 * c["num_warps"])
    if accumulators > (128 if device.multiplies_by_warpgroup and itemsize == 2 else 64):
        return "the accumulators and operands need more registers than a thread has"
    if accumulators < (4 if c["num_warps"] == 4 else 16 if itemsize == 4 else 32):
        return "too many warps for so small a tile"
    if itemsize == 4 and accumulators > 32:
        return "IEEE float32 products keep operands in registers: at most 32 accumulators per thread fit"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (32, 64, 128, 256),
        "BLOCK_K": (32, 64, 128),
        "GROUP_M": (8,),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    },
    refusal=_config_refusal,
)

# ---- kernel


@triton.jit
def _walk_k(
    x_ptr, w_ptr, sources, live, first_col, steps, N, K, x_stride, w_n_stride, w_k_stride,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The float32 tile of x @ w^T over `steps` steps of K. float32 inputs are summed in parts of 512 terms (gemm/tile.py)."""
    FLOAT32: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    SPAN: tl.constexpr = 512 // BLOCK_K
    cols = (first_col + tl.arange(0, BLOCK_N))[:, None]
    ks = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + sources[:, None].to(tl.int64) * x_stride + ks
    w_ptrs = w_ptr + weight_rows(cols, N, GATED).to(tl.int64) * w_n_stride + ks * w_k_stride
    x_mask, w_mask = live[:, None], cols < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(steps):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=x_mask, other=0.0)
            w = tl.load(w_ptrs, mask=w_mask, other=0.0)
        else:
            left = ks < K - step * BLOCK_K
            x = tl.load(x_ptrs, mask=x_mask & left, other=0.0)
            w = tl.load(w_ptrs, mask=w_mask & left, other=0.0)
        acc = dot(x, tl.trans(w), acc)
        if FLOAT32:
            if step % SPAN == SPAN - 1:
                total += acc
                acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * w_k_stride
    return total + acc if FLOAT32 else acc


@triton.jit(do_not_specialize=["R", "M", "T", "chosen"])
def _grouped_kernel(
    x_ptr, w_ptr, bounds_ptr, order_ptr, bias_ptr, y_ptr, R, M, T, X, N, K, chosen,
    x_stride, w_x_stride, w_n_stride, w_k_stride,
    MASKED: tl.constexpr, CLEAR: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BLOCK_N)
    expert, tile, high, first, end, limit = group_of(bounds_ptr, tl.program_id(0), across, R, X, M, MASKED, BLOCK_M, BLOCK_X)
    if expert > X:
        return
    if not CLEAR:
        limit = end
    row, col = grouped(tile, high, across, GROUP_M)
    first_row, first_col = first + row * BLOCK_M, col * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_M)
    live = rows < end
    if first_row >= limit:
        return
    if order_ptr is not None:
        source = tl.load(order_ptr + rows, mask=live, other=0) // chosen
        rows = tl.minimum(tl.maximum(source, 0), T - 1)
    place = tl.minimum(expert, X - 1).to(tl.int64)
    acc = _walk_k(
        x_ptr, w_ptr + place * w_x_stride, rows, live, first_col, tl.where(first_row < end, tl.cdiv(K, BLOCK_K), 0), N, K,
        x_stride, w_n_stride, w_k_stride, GATED, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptr += place * N
    finish_rows(acc, y_ptr, bias_ptr, first_row, first_col, end, limit, N, ACTIVATION, GATED)


def _launch(
    config: Config, x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None,
    chosen: int, clear: bool = True,
) -> Tensor:  # fmt: skip
    function, gated = GROUPED_ACTIVATIONS[activation]
    y = empty_grouped(x, weight, activation, order)
    if not y.numel():
        return y
    (experts, n, k), masked = weight.shape, x.dim() == 3
    rows = y.numel() // y.shape[-1]
    high = experts * ceil_div(x.shape[1], config["BLOCK_M"]) if masked else most_tiles(rows, experts, config["BLOCK_M"])
    _grouped_kernel[(high * ceil_div(n, config["BLOCK_N"]),)](
        x, weight, bounds, order, bias, y, rows, x.shape[1] if masked else 0, x.shape[0], experts, n, k, chosen,
        x.stride(-2), weight.stride(0), weight.stride(1), weight.stride(2),
        MASKED=masked, CLEAR=clear, ACTIVATION=function, GATED=gated, EVEN_K=k % config["BLOCK_K"] == 0,
        BLOCK_X=next_pow2(experts + 1), **config,
    )  # fmt: skip
    return y


_ANY_ROWS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 4}
_ANY_ROWS_WIDE = {**_ANY_ROWS, "BLOCK_K": 32, "num_warps": 8, "num_stages": 3}


def _any_rows(dtype: torch.dtype) -> Config:
    return _ANY_ROWS if dtype.itemsize == 2 else _ANY_ROWS_WIDE


def _launch_invariant(config: Config, x: Tensor, *args: Any) -> Tensor:
    return _launch(_any_rows(x.dtype), x, *args)


def _work_invariant(device: Device, config: Config, x: Tensor, *args: Any) -> Work:
    return grouped_tile_work(device, _any_rows(x.dtype), x, *args)


TRITON = Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, work=grouped_tile_work)

INVARIANT = Impl(name="invariant", launch=_launch_invariant, refuse=_refuse, batch_invariant=True, work=_work_invariant)
