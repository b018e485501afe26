"""`linear` by tiles on tensor cores, for every shape, layout and card: the implementations `triton` and `invariant`.

A program computes a tile of BLOCK_M rows of x by BLOCK_N rows of the weight. It loops over K in steps of BLOCK_K, which Triton
pipelines through shared memory (cp.async, num_stages deep). Programs are numbered in groups of GROUP_M tile rows, so that
concurrent programs share x and weights in L2.

When there are fewer tiles than SMs, SPLIT_K programs share a tile. Each stores its float32 partial sum in a workspace and then
increments the tile's ticket counter. The program that draws the last ticket adds all parts in a fixed order, so two runs give
the same bits.

`invariant` is the same kernel with one config for every number of rows: the bits of a row do not depend on its batch.

Operands may be dense along K or along M / N (NN, NT, TN products), or along neither (slow, but correct). A K that is not a
multiple of 8 cannot be read with vector loads and is slow too. float32 is multiplied in IEEE precision, which on NVIDIA cards
means without tensor cores. Refuses: float64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, empty_output, finish, weight_rows
from tilewright.kernels.gemm.work import tile_work
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl
from tilewright.tune.model import Work
from tilewright.tune.space import Config, Space

__all__ = ["INVARIANT", "TRITON", "best_tile", "grouped"]


def _refuse(device: Device, problem: Problem) -> str | None:
    return f"does not support {problem.dtype}" if problem.dtype.itemsize > 4 else None


# ---- space

# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages. Tiles of 256 columns are used only where the tensor cores read both operands
# from shared memory (sm_90, 100); elsewhere registers would spill.
_TILES = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (64, 256, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (32, 128, 64, 4, 4),
    (32, 64, 128, 4, 4),
    (16, 64, 128, 4, 4),
)
_WIDE_TILES = (
    (64, 64, 32, 8, 4),
    (32, 64, 32, 4, 4),
    (16, 64, 32, 4, 4),
)


def best_tile(tiles: tuple[tuple[int, ...], ...], splits: tuple[int, ...], sms: int, problem: Problem) -> tuple[int, ...]:
    """The (tile, split) with the least estimated time, as one flat tuple: the tile's entries, then the split.

    Per index of K, a tile takes as long as its multiply-adds or the loads of its operands from L2, whichever is longer. Tiles
    run in waves. The rates are those of an H100 in bf16; only their ratios matter.
    """
    multiply_adds, l2_bytes = 2048, 40
    best, best_cycles = (), float("inf")
    for tile in tiles:
        block_m, block_n, block_k, warps = tile[:4]
        count = -(-problem.m_bucket // block_m) * -(-problem.n // block_n)
        per_k = max(block_m * block_n / multiply_adds, (block_m + block_n) * 2 / l2_bytes)
        steps = max(1, -(-problem.k // block_k))
        for split in splits:
            if split > 1 and (count * split > sms or steps < 4 * split or _too_many_parts(block_m * block_n, warps, split)):
                continue
            # The start and end of a program cost about 1500 cycles. With a split, each program also writes its part, and the
            # last one waits for its ticket and reads all parts.
            ends = 1500 if split == 1 else 3000 + (1 + split) * block_m * block_n * 4 / l2_bytes
            cycles = -(-count * split // sms) * (-(-steps // split) * block_k * per_k + ends)
            if cycles < best_cycles:
                best, best_cycles = (*tile, split), cycles
    return best


def _too_many_parts(elements: int, warps: int, split: int) -> bool:
    """Whether adding the parts of a tile would spill registers. All parts are loaded at once, to wait for L2 only once."""
    accumulators = elements // (32 * warps)
    return accumulators > 64 or accumulators * split > 256


def _smem_bytes(c: Config, itemsize: int) -> int:
    return (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * c["num_stages"] * itemsize


def _fits(device: Device, tile: tuple[int, ...], itemsize: int) -> bool:
    block_m, block_n, block_k, _, stages = tile
    if block_n == 256 and device.arch not in (90, 100, 103):
        return False
    return (block_m + block_n) * block_k * stages * itemsize <= device.smem_bytes


def _default(device: Device, problem: Problem) -> Config:
    itemsize = problem.dtype.itemsize
    tiles = tuple(t for t in (_TILES if itemsize == 2 else _WIDE_TILES) if _fits(device, t, itemsize))
    block_m, block_n, block_k, warps, stages, split = best_tile(tiles, (1, 2, 4, 8), device.sms, problem)
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8, "SPLIT_K": split,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    itemsize = problem.dtype.itemsize
    if c["BLOCK_M"] > max(64, problem.m_bucket):
        return "BLOCK_M is larger than the number of rows of x, and than 64, which sm_90's tensor cores multiply at once"
    if c["BLOCK_K"] * itemsize not in ((128, 256) if itemsize == 2 else (128,)):
        return "BLOCK_K must be 128 bytes wide, or 256 with 16-bit operands, which stay in shared memory"
    if _smem_bytes(c, itemsize) > device.smem_bytes:
        return "more shared memory than the device has"
    accumulators = c["BLOCK_M"] * c["BLOCK_N"] // (32 * c["num_warps"])
    if accumulators > (128 if device.multiplies_by_warpgroup and itemsize == 2 else 64):
        return "the accumulators and operands need more registers than a thread has"
    if accumulators < (8 if c["num_warps"] == 4 else 16 if itemsize == 4 else 32):
        return "too many warps for so small a tile"
    if itemsize == 4 and accumulators > 32:
        return "IEEE float32 products keep operands in registers: at most 32 accumulators per thread fit"
    if c["SPLIT_K"] > 1:
        tiles = -(-problem.m_bucket // c["BLOCK_M"]) * -(-problem.n // c["BLOCK_N"])
        if tiles * c["SPLIT_K"] > 2 * device.sms:
            return "the tiles occupy all SMs without SPLIT_K"
        if c["num_stages"] < 4 and _smem_bytes({**c, "num_stages": 4}, itemsize) <= device.smem_bytes:
            return "with SPLIT_K the loop along K is short: it needs at least four pipeline stages"
        if _too_many_parts(c["BLOCK_M"] * c["BLOCK_N"], c["num_warps"], c["SPLIT_K"]):
            return "the partial sums of a tile need more registers than its threads have"
        if problem.k < 2 * c["SPLIT_K"] * c["BLOCK_K"]:
            return "fewer than two steps along K per program"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (32, 64, 128),
        "GROUP_M": (8,),
        "SPLIT_K": (1, 2, 4, 8),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    },
    refusal=_config_refusal,
)

# ---- kernel


@triton.jit
def grouped(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(tile row, tile column) of a tile number. Tiles run down GROUP_M rows before the next column."""
    group = tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return first + within % height, within // height


@triton.jit
def _walk_k(
    x_ptr, w_ptr, first_row, first_col, start, end, M, N, K, x_m_stride, x_k_stride, w_n_stride, w_k_stride,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The float32 tile of x @ w^T over the steps [start, end) of K. For float32 inputs, it adds up partial sums of 512 terms.

    A plain sequential sum has a relative error of 2.7e-8 * sqrt(K / 2) (RMS): 4.9e-6 at K = 65,536; with partial sums it is
    4e-7. For 16-bit inputs the final rounding is larger than that, and the order of addition is up to the tensor cores.
    """
    FLOAT32: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    SPAN: tl.constexpr = 512 // BLOCK_K
    rows = (first_row + tl.arange(0, BLOCK_M))[:, None]
    cols = (first_col + tl.arange(0, BLOCK_N))[:, None]
    ks = tl.arange(0, BLOCK_K)[None, :]
    skipped = (start * BLOCK_K).to(tl.int64)
    x_ptrs = x_ptr + skipped * x_k_stride + rows.to(tl.int64) * x_m_stride + ks * x_k_stride
    w_ptrs = w_ptr + skipped * w_k_stride + weight_rows(cols, N, GATED).to(tl.int64) * w_n_stride + ks * w_k_stride
    x_mask, w_mask = rows < M, cols < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(start, end):
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
        x_ptrs += BLOCK_K * x_k_stride
        w_ptrs += BLOCK_K * w_k_stride
    return total + acc if FLOAT32 else acc


# Batch strides are specialised like the others. Otherwise Triton could not see that the pointers of a batch entry are aligned.
@triton.jit(do_not_specialize=["M"])
def _tile_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, parts_ptr, tickets_ptr, M, N, K,
    x_m_stride, x_k_stride, w_n_stride, w_k_stride, residual_stride, x_batch_stride, w_batch_stride, residual_batch_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    batch = (tile // (tiles_m * tiles_n)).to(tl.int64)
    row, col = grouped(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    first_row, first_col = row * BLOCK_M, col * BLOCK_N
    y_ptr += batch * M * (N // 2 if GATED else N)
    if residual_ptr is not None:
        residual_ptr += batch * residual_batch_stride
    steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(steps, SPLIT_K)
    start = tl.program_id(1) * share
    acc = _walk_k(
        x_ptr + batch * x_batch_stride, w_ptr + batch * w_batch_stride, first_row, first_col,
        start, min(start + share, steps), M, N, K, x_m_stride, x_k_stride, w_n_stride, w_k_stride,
        GATED, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if SPLIT_K == 1:
        finish(acc, y_ptr, bias_ptr, residual_ptr, first_row, first_col, M, N, residual_stride, ACTIVATION, GATED)
    else:
        size: tl.constexpr = BLOCK_M * BLOCK_N
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        part_ptrs = parts_ptr + tile.to(tl.int64) * (SPLIT_K * size) + inside
        tl.store(part_ptrs + tl.program_id(1) * size, acc)
        # One thread draws the ticket for the program. Before that, every thread must have written its part.
        tl.debug_barrier()
        if tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            total = tl.load(part_ptrs, cache_modifier=".cg")
            for part in tl.static_range(1, SPLIT_K):
                total += tl.load(part_ptrs + part * size, cache_modifier=".cg")
            tl.store(tickets_ptr + tile, 0)
            finish(total, y_ptr, bias_ptr, residual_ptr, first_row, first_col, M, N, residual_stride, ACTIVATION, GATED)


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    function, gated = ACTIVATIONS[activation]
    y = empty_output(x, weight, gated)
    if not y.numel():
        return y
    m, k = x.shape[-2:]
    n = weight.shape[-2]
    batch, x_batch, w_batch, residual_batch = 1, 0, 0, 0
    if x.dim() == 3:
        batch, x_batch, w_batch = x.shape[0], x.stride(0), weight.stride(0)
        residual_batch = 0 if residual is None else residual.stride(0)
    x_m, x_k = x.stride()[-2:]
    w_n, w_k = weight.stride()[-2:]
    split = config["SPLIT_K"]
    tiles = batch * ceil_div(m, config["BLOCK_M"]) * ceil_div(n, config["BLOCK_N"])
    parts = counters = None
    if split > 1:
        parts = torch.empty(tiles * split * config["BLOCK_M"] * config["BLOCK_N"], dtype=torch.float32, device=x.device)
        counters = tickets(x.device, tiles)
    _tile_kernel[(tiles, split)](
        x, weight, bias, residual, y, parts, counters, m, n, k, x_m, x_k, w_n, w_k,
        0 if residual is None else residual.stride(-2), x_batch, w_batch, residual_batch,
        ACTIVATION=function, GATED=gated, EVEN_K=k % config["BLOCK_K"] == 0, **config,
    )  # fmt: skip
    return y


# 64 rows are the fewest that sm_90's tensor cores accept; this keeps the padding small in decoding. Fits every card from sm_80.
_ANY_M = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "SPLIT_K": 1, "num_warps": 4, "num_stages": 4}
_ANY_M_WIDE = {**_ANY_M, "BLOCK_K": 32, "num_warps": 8, "num_stages": 3}


def _launch_any_m(config: Config, x: Tensor, *args: Any) -> Tensor:
    return _launch(_ANY_M if x.element_size() == 2 else _ANY_M_WIDE, x, *args)


def _work_any_m(device: Device, config: Config, x: Tensor, *args: Any) -> Work:
    any_m = _ANY_M if x.element_size() == 2 else _ANY_M_WIDE
    return tile_work(device, any_m, x, *args)


TRITON = Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, work=tile_work)

INVARIANT = Impl(name="invariant", launch=_launch_any_m, refuse=_refuse, batch_invariant=True, work=_work_any_m)
