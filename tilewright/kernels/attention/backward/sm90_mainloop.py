"""The operations of a warpgroup of `attention_backward_sm90_kernel` on a tile: products, masks, weights, sums in memory,
results.

sm90_kernel.py explains them, and calls them in order.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.attention.backward.sm90_schedule import ROWS, turn
from tilewright.kernels.hopper.primitives import block_barrier, release

__all__ = [
    "add",
    "as_operand",
    "begin_with",
    "columns_of",
    "finish",
    "first_products",
    "flat",
    "near_end",
    "part_of_dq",
    "scores",
    "scores_ahead",
    "share",
    "unknown",
    "weigh",
]


@gluon.jit
def flat(box):
    """The matrix in a box that contains one sequence."""
    return box.reshape([box.shape[1], box.shape[2]])


@gluon.jit
def begin_with(line):
    """[64, M] in which each row is `line` [M] from shared memory: the initial accumulators of scores."""
    M: gl.constexpr = line.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    row = gl.expand_dims(line.load(gl.SliceLayout(0, layout)), 0)
    every = gl.broadcast(row, gl.zeros([ROWS, M], gl.float32, layout))[0]
    # An explicit copy. Otherwise ptxas would copy between two products, and wait there for the first one.
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [every], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def scores(rows, others, begin):
    """Issue begin + rows [64, D] times a block of queries or of dO [M, D]; return it in flight, [64, M]."""
    return warpgroup_mma(rows, others.permute((1, 0)), begin, is_async=True)


@gluon.jit
def _visible(s, key, query, offset, max_k, left, ends_ptr, CAUSAL: gl.constexpr, LEFT: gl.constexpr):
    """Scores [keys, queries], set to -inf where a query does not see a key. offset: keys before the first query's own key.

    ends_ptr: where the document of each key ends, under a causal mask; else None.
    """
    layout: gl.constexpr = s.type.layout
    keys = key + gl.expand_dims(gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    if CAUSAL:
        queries = query + gl.expand_dims(gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout)), 0)
        seen = (keys <= queries + offset) & (keys < max_k)
        if LEFT:
            seen &= keys >= queries + (offset - left)
        if ends_ptr is not None:
            seen &= queries < gl.load(ends_ptr + gl.minimum(keys, max_k - 1))
        return gl.where(seen, s, float("-inf"))
    else:
        return gl.where(keys < max_k, s, float("-inf"))


@gluon.jit
def as_operand(x, acc):
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _add_to(ptr, block):
    """Add [64, N] to float32 memory, in the order in which the threads hold the numbers."""
    N: gl.constexpr = block.shape[1]
    # The layout of wgmma accumulators: 16 rows per warp; a thread has rows 8 apart, and pairs of columns 8 apart.
    line = block.reshape([4, 2, 8, N // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * N])
    layout: gl.constexpr = line.type.layout
    gl.atomic_add(ptr + gl.arange(0, ROWS * N, layout=layout), line, sem="relaxed")


@gluon.jit
def add(results, place, member, j, dq, shape, wg: gl.constexpr, KEYS: gl.constexpr, M: gl.constexpr, CAUSAL: gl.constexpr):
    """Add a warpgroup's part of dq to memory. With `order_ptr`, wait until the parts of preceding blocks of keys are added."""
    dq_ptr, order_ptr = results[0], results[3]
    block, kv_head, b, _, _ = place
    head = b * shape[2] + kv_head
    part = ((head * shape[3] + member) * gl.cdiv(shape[4], M) + j) * 2 + wg
    to = dq_ptr + part.to(gl.int64) * (dq.shape[0] * dq.shape[1])
    if order_ptr is None:
        _add_to(to, dq)
    else:
        before = turn(block, j, shape, KEYS, M, CAUSAL)
        while gl.atomic_add(order_ptr + part, 0, sem="acquire") < before:
            pass
        _add_to(to, dq)
        # One thread passes the turn on for the warpgroup, so the additions of all threads must be complete before.
        block_barrier()
        gl.atomic_add(order_ptr + part, 1, sem="release")


@gluon.jit
def unknown(number):
    """`number`, made opaque to the compiler, so that it computes the addresses of operands where they are used.

    Otherwise it computes them before the loop and has no registers to keep them: at 256 dims the 500 instructions of the loop
    then included 75 moves to uniform registers and 17 loads of spilled values.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def columns_of(box, part: gl.constexpr, COLS: gl.constexpr):
    """A part of the columns of a matrix in shared memory, or all."""
    matrix = flat(box)
    if matrix.shape[1] == COLS:
        return matrix
    else:
        return matrix.slice(part * COLS, COLS, dim=1)


@gluon.jit
def part_of_dq(ds_bufs, side, k_bufs, kv, part: gl.constexpr, COLS: gl.constexpr):
    """Issue [64, COLS] of dS K for a block of queries, and return it in flight. A part is 64 of 128 rows, or else some of the
    columns."""
    M: gl.constexpr = ds_bufs.shape[2]
    PARTS: gl.constexpr = ds_bufs.shape[0] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    dq = gl.zeros([ROWS, COLS], gl.float32, layout)
    for i in gl.static_range(PARTS):
        ds = ds_bufs.index(side * PARTS + i)
        rows = ds.slice(part * ROWS, ROWS, dim=1) if M == 2 * ROWS else ds
        dq = warpgroup_mma(
            rows.permute((1, 0)), columns_of(k_bufs.index(kv * PARTS + i), part, COLS), dq, use_acc=i > 0, is_async=True
        )
    return dq


@gluon.jit
def _store(ptr, x, b, kv_head, key, col, shape, D: gl.constexpr):
    """Store the rows of x [64, N] whose keys exist, beginning at column `col` of their head."""
    KV_H, max_k = shape[2], shape[5]
    layout: gl.constexpr = x.type.layout
    at = key + gl.expand_dims(gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    ptr += (b * max_k).to(gl.int64) * (KV_H * D) + kv_head * D + col
    gl.store(ptr + at.to(gl.int64) * (KV_H * D) + cols, x.to(ptr.dtype.element_ty), mask=at < max_k)


@gluon.jit
def first_products(bufs, bars, it, part, begin: gl.constexpr, rows: gl.constexpr):
    """(scores, complete; dO V^T, in flight) for a warpgroup's keys and `rows` queries of the it-th block, from `begin` on."""
    q_bufs, do_bufs, k_bufs, v_bufs, _ds_bufs, _p_bufs, lse_bufs, delta_bufs = bufs
    STAGES: gl.constexpr = q_bufs.shape[0]
    stage = it % STAGES
    mbarrier.wait(bars[1].index(stage), it // STAGES & 1)
    mbarrier.wait(bars[3].index(stage), it // STAGES & 1)
    s = begin_with(lse_bufs.index(stage).slice(begin, rows))
    dp = begin_with(delta_bufs.index(stage).slice(begin, rows))
    s = scores(flat(k_bufs.index(part)), flat(q_bufs.index(stage)).slice(begin, rows), s)
    dp = scores(flat(v_bufs.index(part)), flat(do_bufs.index(stage)).slice(begin, rows), dp)
    s = warpgroup_mma_wait(1, deps=(s,))
    return s, dp


@gluon.jit
def scores_ahead(bufs, bars, it, total, part, begin: gl.constexpr, rows: gl.constexpr):
    """Issue the scores of `rows` queries of the it-th block, and return them in flight. After the last block they are garbage
    and unused."""
    STAGES: gl.constexpr = bufs[0].shape[0]
    stage = it % STAGES
    if it < total:
        mbarrier.wait(bars[1].index(stage), it // STAGES & 1)
    queries = flat(bufs[0].index(stage)).slice(begin, rows)
    return scores(flat(bufs[2].index(part)), queries, begin_with(bufs[6].index(stage).slice(begin, rows)))


@gluon.jit
def near_end(shape, key):
    """The end of the document that contains `key`, if documents are packed. For a warpgroup's first key this is the smallest
    end among its keys."""
    end = 0
    if shape[7] is not None:
        end = gl.load(shape[7] + gl.minimum(key, shape[5] - 1))
    return end


@gluon.jit
def weigh(s, dp, key, query, end, shape, scale_log2, bar, phase, CAUSAL: gl.constexpr, LEFT: gl.constexpr):
    """(weights, dO V^T, complete). end: `near_end` of the key."""
    max_q, max_k, left, ends_ptr = shape[4], shape[5], shape[6], shape[7]
    PACKED: gl.constexpr = ends_ptr is not None
    own = query + max_k - max_q
    masked = (own < key + ROWS - 1 and CAUSAL) or key + ROWS > max_k or (own + s.shape[1] - 1 > key + left and LEFT)
    if masked or (query + s.shape[1] > end and PACKED):
        s = _visible(s, key, query, max_k - max_q, max_k, left, ends_ptr, CAUSAL, LEFT)
    p = gl.exp2(s * scale_log2)
    # ptxas would move the wait for dO V^T before the exponentials, but it moves nothing across a loop. The wait on a barrier is
    # a loop, and ends at once here, because this phase is already complete.
    mbarrier.wait(bar, phase)
    dp, p = warpgroup_mma_wait(0, deps=(dp, p))
    return p, dp


@gluon.jit
def share(bar):
    """Make this warpgroup's stores visible to the other warpgroup and to the tensor cores."""
    fence_async_shared()
    release(bar)


@gluon.jit
def _hand_over(bufs, bars, dk, dv, kv, phase, wg: gl.constexpr, SETS: gl.constexpr):
    """Pass the set of buffers, now with dk and dv in it, to the warp that stores. Waits until both warpgroups have finished
    their products with it."""
    kv_done, out_full = bars[7]
    PARTS: gl.constexpr = bufs[2].shape[0] // SETS
    release(kv_done.index(kv))
    mbarrier.wait(kv_done.index(kv), phase)
    flat(bufs[3].index(kv * PARTS + wg)).store(dv.to(bufs[3].dtype))
    flat(bufs[2].index(kv * PARTS + wg)).store(dk.to(bufs[2].dtype))
    share(out_full.index(kv))


@gluon.jit
def finish(
    bufs, bars, results, dk, dv, place, key, col, shape, kv, phase,
    wg: gl.constexpr, D: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Store dk and dv of a tile, or pass them on for storing: rows from `key` on, columns from `col` on. Releases the
    buffers."""
    if SETS == 2:
        _hand_over(bufs, bars, dk, dv, kv, phase, wg, SETS)
    else:
        if SETS == 1:
            release(bars[6].index(kv))
        _, kv_head, b, _, _ = place
        _store(results[2], dv, b, kv_head, key, col, shape, D)
        _store(results[1], dk, b, kv_head, key, col, shape, D)
