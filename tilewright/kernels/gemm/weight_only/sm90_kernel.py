"""int4 weights and many rows on Hopper: the launch that multiplies by W also converts W to x's dtype.

A separate launch that writes W before the product is limited by memory bandwidth, and the tensor cores are idle meanwhile: 14 %
of the time at 2048 rows. Here each program has a fourth group of warps, and the rows of W are converted in the order in which
the tiles need them:

    at the start   both consumers and the fourth group convert rows, until the rows that the first wave of tiles reads are done
    then           the consumers multiply, as in gemm/sm90_kernel.py; meanwhile the fourth group converts item after item
    producer       before it loads boxes of W, it waits until all rows of the tile are counted as done

Tiles run down GROUP_M rows of tiles before the next column, so that few rows of W are needed at first. hopper/producer_rows.py
assigns rows to groups of warps and implements the waiting; sm90_dequant_rows.py converts a row. A program has 512 threads, so
each is launched with 128 registers. Therefore wgmma instructions have at most 128 columns.

Limited by the tensor cores, and at the start by writing the first rows to memory. Gated activations are refused: gate and up
rows are needed at the same time, but would be converted one after the other.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.kernels.gemm.sm90_kernel import load_tiles, multiply_tiles
from tilewright.kernels.gemm.weight_only.sm90_dequant_rows import ITEM, write_item
from tilewright.kernels.hopper.producer_rows import draw_item, leave
from tilewright.kernels.hopper.ring import barriers, new_ring

__all__ = ["mixed_sm90_kernel"]

_GROUPS = gl.constexpr(4)


@gluon.jit
def _make_rows(source, counters_ptr, N, K, GROUP: gl.constexpr, COLS: gl.constexpr, K_VECTOR: gl.constexpr):
    """The fourth group of warps: converts item after item."""
    items = gl.cdiv(N, ITEM)
    item = draw_item(counters_ptr)
    while item < items:
        write_item(source, counters_ptr, item, N, K, GROUP, COLS, K_VECTOR)
        item = draw_item(counters_ptr)
    leave(counters_ptr, N, _GROUPS)


@gluon.jit
def _make_and_multiply(
    source, counters_ptr, first_items, x_bufs, w_bufs, tile_bufs, ring, turns,
    y_desc, y_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
    M, N, K, tiles_m, tiles_n, steps, waves, share, PARTS, residual_stride, y_stride, wg: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STREAM: gl.constexpr, ACTIVATION: gl.constexpr, VECTOR: gl.constexpr,
    GROUP: gl.constexpr, COLS: gl.constexpr, K_VECTOR: gl.constexpr,
):  # fmt: skip
    """A consumer: converts some of the first items, then computes its tiles."""
    items = gl.cdiv(N, ITEM)
    item = draw_item(counters_ptr)
    while item < items:
        write_item(source, counters_ptr, item, N, K, GROUP, COLS, K_VECTOR)
        if item < first_items:
            item = draw_item(counters_ptr)
        else:
            item = items
    multiply_tiles(
        x_bufs, w_bufs, tile_bufs, ring, turns,
        y_desc, y_ptr, None, None, None, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
        M, N, K, tiles_m, tiles_n, steps, waves, share, PARTS, 0, 0, residual_stride, y_stride,
        wg, "m", "k", "k", 1, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM, 0, ACTIVATION, VECTOR, False, 0, NARROW=True,
    )  # fmt: skip
    leave(counters_ptr, N, _GROUPS)


@gluon.jit
def _load_made(
    x_desc, w_desc, x_bufs, w_bufs, ring, counters_ptr, M, N, tiles_m, tiles_n, steps, waves, share,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    """The producer warp: loads the tiles of x and W."""
    load_tiles(
        x_desc, None, w_desc, x_bufs, w_bufs, ring, M, N, tiles_m, tiles_n, steps, waves, share, 0, 0,
        "k", "k", 1, 1, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM, 0, counters_ptr=counters_ptr,
    )  # fmt: skip
    leave(counters_ptr, N, _GROUPS)


@gluon.jit(do_not_specialize=["first_items", "M", "N", "K", "steps", "waves", "share", "PARTS", "y_stride"])
def mixed_sm90_kernel(
    source, x_desc, w_desc, y_desc, y_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr, counters_ptr,
    first_items, M, N, K, steps, waves, share, PARTS, residual_stride, y_stride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EPILOGUE_N: gl.constexpr, TILE_LAYOUT: gl.constexpr, STREAM: gl.constexpr, ACTIVATION: gl.constexpr, VECTOR: gl.constexpr,
    GROUP: gl.constexpr, COLS: gl.constexpr, K_VECTOR: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `sm90_kernel`, with a W [N, K] that is converted from `source` (see `write_item`) and that w_desc reads.

    counters_ptr: `counters_of(N)` zeros. A consumer that has converted item first_items or a later one begins its tiles. GROUP:
    columns of W that share a scale. COLS: columns of an item that are converted at a time. REGISTERS: registers per thread of
    the second consumer, the producer and the fourth group.
    """
    ROWS: gl.constexpr = BLOCK_M // 2
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, ROWS, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    tile_bufs = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [2, ROWS, EPILOGUE_N], TILE_LAYOUT)
    ring = new_ring(STAGES, 2)
    turns = barriers(2, 1)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    gl.warp_specialize([
        (_make_and_multiply, (
            source, counters_ptr, first_items, x_bufs, w_bufs, tile_bufs, ring, turns,
            y_desc, y_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
            M, N, K, tiles_m, tiles_n, steps, waves, share, PARTS, residual_stride, y_stride, 0,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM, ACTIVATION, VECTOR, GROUP, COLS, K_VECTOR,
        )),
        (_make_and_multiply, (
            source, counters_ptr, first_items, x_bufs, w_bufs, tile_bufs, ring, turns,
            y_desc, y_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
            M, N, K, tiles_m, tiles_n, steps, waves, share, PARTS, residual_stride, y_stride, 1,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM, ACTIVATION, VECTOR, GROUP, COLS, K_VECTOR,
        )),
        (_load_made, (
            x_desc, w_desc, x_bufs, w_bufs, ring, counters_ptr, M, N, tiles_m, tiles_n, steps, waves, share,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM,
        )),
        (_make_rows, (source, counters_ptr, N, K, GROUP, COLS, K_VECTOR)),
    ], [4, 1, 4], REGISTERS)  # fmt: skip
