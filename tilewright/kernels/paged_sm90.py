"""Paged attention of few queries for Hopper, scheduled by hand in Gluon: the kernel of `paged_attention`'s `sm90`.

The work is divided as in paged_stream.py: the keys of all (sequence, key/value head) pairs stand in a line, in tiles of 64, and
a program takes an equal range of it. What differs is how a range is walked. Two groups of warps:

    producer  one warp: has the copy engine (TMA) fetch tile after tile of keys and values into a ring of STAGES stages, box by
              box of one page, and goes on into the next pair while the other group still ends the one before
    consumer  a warpgroup: S = Q K^T, softmax, O += P V. Queries and weights stay in registers, keys and values are read from
              shared memory by the tensor cores: no warp waits for another within a tile. Of the 64 rows of these products
              few are queries; the rest is not what limits

A pair that a range does not hold whole leaves its (m, l, o) in scratch memory, and whoever draws the pair's last ticket
combines the parts, in the order of the ranges: the same bits in every run.

Limited by the cache's bytes. The host side is paged_sm90_launch.py, which refuses what does not fit.
"""
# Gluon reads `name: gl.constexpr = value` as "known to the compiler"; to a type checker it is a value of another type.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false

# B sequences, H query heads, G key/value heads, D head dim, S tokens a page

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.hopper import block_barrier, clear_end
from tilewright.kernels.paged_sm90_ends import end_pair
from tilewright.kernels.paged_sm90_ranges import PANEL, ROWS, barriers, boxes_joined, load_tiles, range_of, stretch

__all__ = ["paged_sm90_kernel"]


# ---- consumer


@gluon.jit
def _walk(
    q, k_tiles, v_tiles, bars, j, first, count, kv_len, q_len, scale, window,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(o, m, l, the next tile's number) of `count` tiles of keys from `first` on; m in units of the scaled scores."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    k_full, v_full, k_empty, v_empty = bars
    dtype: gl.constexpr = k_tiles.dtype
    o = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    l = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
    at = kv_len - q_len + gl.arange(0, ROWS, layout=ROW_LAYOUT) // GROUP
    cols = gl.arange(0, ROWS, layout=gl.SliceLayout(0, S_LAYOUT))
    for i in range(count):
        stage = j % STAGES
        phase = j // STAGES & 1
        start = first + i * ROWS
        mbarrier.wait(k_full.index(stage), phase)
        s = gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        block_barrier()
        mbarrier.arrive(k_empty.index(stage))
        s = s * scale
        keys = gl.expand_dims(start + cols, 0)
        if QUERIES > 1 or HAS_WINDOW:
            seen = keys <= gl.expand_dims(at, 1)
            if HAS_WINDOW:
                seen &= keys > gl.expand_dims(at, 1) - window
            s = gl.where(seen & (keys < kv_len), s, float("-inf"))
        elif start + ROWS > kv_len:
            s = gl.where(keys < kv_len, s, float("-inf"))
        high = gl.maximum(m, gl.max(s, 1))
        # A row that has seen no key has m = -inf; subtracting 0 keeps its weights 0, not NaN.
        base = gl.where(high == float("-inf"), 0.0, high)
        p = gl.exp2(s - gl.expand_dims(base, 1))
        alpha = gl.exp2(m - base)
        l = l * alpha + gl.sum(p, 1)
        m = high
        o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True), 1)
        weights = gl.convert_layout(p.to(dtype), P_LAYOUT, assert_trivial=True)
        mbarrier.wait(v_full.index(stage), phase)
        if start + ROWS > kv_len:
            clear_end(v_tiles.index(stage), kv_len - start, 16)
        o = warpgroup_mma(weights, v_tiles.index(stage), o, is_async=True)
        o, weights = warpgroup_mma_wait(0, deps=(o, weights))
        block_barrier()
        mbarrier.arrive(v_empty.index(stage))
        j += 1
    return o, m, l, j


@gluon.jit
def _attend(
    bufs, bars, at, stop, b, before, share, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, kv_lens_ptr, cu_q_ptr,
    batch, tokens, room, window, q_row_stride, scale,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr, BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_tiles, v_tiles = bufs
    HELD: gl.constexpr = QUERIES * GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, Q_LAYOUT))
    dims = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, Q_LAYOUT)), 0)
    j = at * 0
    while at < stop:
        g, first, count, kv_len, q_len, pair_at, tiles = stretch(
            at, stop, b, before, kv_lens_ptr, cu_q_ptr, batch, room, window, G, QUERIES, HAS_WINDOW
        )  # fmt: skip
        if QUERIES == 1:
            q_begin = b.to(gl.int64)
        else:
            q_begin = gl.load(cu_q_ptr + b).to(gl.int64)
        token = q_begin + rows // GROUP
        live = (rows < HELD) & (rows // GROUP < q_len) & (token >= 0) & (token < tokens)
        places = token * q_row_stride + (g * GROUP + rows % GROUP) * D
        q = gl.load(q_ptr + gl.expand_dims(places, 1) + dims, mask=gl.expand_dims(live, 1), other=0.0)
        o, m, l, j = _walk(
            q, k_tiles, v_tiles, bars, j, first, count, kv_len, q_len, scale, window, GROUP, QUERIES, HAS_WINDOW, D, STAGES
        )  # fmt: skip
        end_pair(
            o, m, l, at, count, share, b, g, pair_at, tiles, q_begin, q_len, tokens, part_ptr, ticket_ptr, o_ptr, sink_ptr,
            G, GROUP, D, HELD, HAS_SINKS, BLOCK_R, AT_ONCE,
        )  # fmt: skip
        at += count
        if at == (before + tiles) * G:
            before += tiles
            b += 1


# ---- kernel


@gluon.jit(do_not_specialize=["batch", "tokens", "room", "window", "table_row_stride"])
def paged_sm90_kernel(
    k_desc, v_desc, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, table_ptr, kv_lens_ptr, cu_q_ptr,
    batch, tokens, room, window, q_row_stride, table_row_stride, scale,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, S: gl.constexpr, QUERIES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4, the consumer's; the producer brings its own warp.

    k_desc, v_desc: of the caches as [P * G * S, D], in boxes of min(S, 64) rows by 64. scale: times log2(e).
    """
    dtype: gl.constexpr = k_desc.dtype
    PANELS: gl.constexpr = D // PANEL
    BOXES: gl.constexpr = ROWS // k_desc.block_type.shape[0]
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES * PANELS * BOXES, ROWS // BOXES, PANEL], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES * PANELS * BOXES, ROWS // BOXES, PANEL], v_desc.layout)
    bars = (barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES))
    at, stop, b, before, share = range_of(kv_lens_ptr, cu_q_ptr, batch, room, window, G, QUERIES, HAS_WINDOW, 1)
    tiles = (boxes_joined(k_bufs, STAGES, ROWS, D), boxes_joined(v_bufs, STAGES, ROWS, D))
    descs = (k_desc, v_desc)
    bufs = (k_bufs, v_bufs)
    gl.warp_specialize([
        (_attend, (
            tiles, bars, at, stop, b, before, share, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, kv_lens_ptr, cu_q_ptr,
            batch, tokens, room, window, q_row_stride, scale,
            G, GROUP, D, QUERIES, HAS_WINDOW, HAS_SINKS, BLOCK_R, AT_ONCE, STAGES,
        )),
        (load_tiles, (
            descs, bufs, bars, at, stop, b, before, table_ptr, kv_lens_ptr, cu_q_ptr, batch, room, window, table_row_stride,
            G, S, QUERIES, HAS_WINDOW, BOXES, PANELS, STAGES,
        )),
    ], [1], [56])  # fmt: skip
