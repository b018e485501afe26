"""The gradients of attention for Hopper, written in Gluon: the kernel that loops over the queries for a block of keys.

backward.py has the formulae. bf16 or fp16; equal lengths, or packed documents that attend to themselves. The host side
(sm90.py) refuses other problems, prepares two numbers for each row of queries, and rounds dq at the end.

A program has KEYS keys of one key/value head, and accumulates their dk and dv in registers. Limited by the tensor cores, and
for D = 64 equally by the exponentials. Hence the schedule of FlashAttention-3 (Shah et al., 2024):

    producer    one warp: loads K and V by TMA once, and blocks of Q and dO as many blocks ahead as there are pipeline stages.
                It is in sm90_schedule.py, with the assignment of keys: a program has one block of keys, or one after the other
    consumers   two warpgroups. Scores are transposed, [keys, queries]. So the weights and their gradients, which are
                accumulators, can be used directly as the first operands of dv += P dO and dk += dS Q. The gradients of the
                scores also go through shared memory, for dq: each warpgroup computes one half of dq, and adds it to float32
                memory. Up to 128 dims, each warpgroup has 64 keys. At 256 dims, both have the same 64 keys, and half of the
                dims each. There each half of dq is one product: as two dependent products it was 20 to 25 % slower

The accumulators of a score's product start with -lse / scale, and those of dO V^T with -delta, so the subtractions cost
nothing. For a row that sees no key or does not exist, the start of the scores is -inf. Blocks of queries that cannot see the
keys, because of a causal mask or a window's left bound, are not visited.

dq is stored in the order in which the threads hold it: four adjacent numbers in memory belong to one thread, so an addition
covers 16 bytes at a time. With `order_ptr`, additions wait for those of preceding blocks of keys, and the sum has the same bits
every time.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilewright.kernels.attention.backward.sm90_mainloop import (
    add,
    as_operand,
    begin_with,
    columns_of,
    finish,
    first_products,
    flat,
    near_end,
    part_of_dq,
    scores,
    scores_ahead,
    share,
    unknown,
    weigh,
)
from tilewright.kernels.attention.backward.sm90_schedule import (
    PLACE,
    ROWS,
    SLOT,
    deal_tiles,
    keys_of,
    load_one,
    load_tiles,
    store_tiles,
)
from tilewright.kernels.hopper.primitives import release, take
from tilewright.kernels.hopper.ring import barriers

__all__ = ["attention_backward_sm90_kernel"]


# ---- consumers


@gluon.jit
def _gradients(
    bufs, bars, results, shape, scale, scale_log2, place, it, n,
    wg: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, AHEAD: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Process a warpgroup's 64 of the 128 keys of the n-th tile. Returns `it`, the number of blocks of queries so far."""
    q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, _p_bufs, _lse_bufs, delta_bufs = bufs
    _kv_full, _q_full, q_empty, do_full, do_empty, ds_full = bars[:6]
    STAGES: gl.constexpr = q_bufs.shape[0]
    M: gl.constexpr = q_bufs.shape[2]
    D: gl.constexpr = q_bufs.shape[3]
    PARTS: gl.constexpr = KEYS // ROWS
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    block, _, _, first, last = place
    key = block * KEYS + wg * ROWS
    kv = n % SETS if SETS > 1 else 0
    phase = n // SETS & 1 if SETS > 0 else 0
    near = near_end(shape, key)
    dk = gl.zeros([ROWS, D], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, D], gl.float32, D_LAYOUT)
    mbarrier.wait(bars[0].index(kv), phase)
    end = it + shape[3] * (last - first)
    if AHEAD:
        s = scores_ahead(bufs, bars, it, end, kv * PARTS + wg, 0, M)
        s = warpgroup_mma_wait(0, deps=(s,))
    for member in range(shape[3]):
        for j in range(first, last):
            stage = it % STAGES
            side = it & 1
            if SETS > 0:
                kv = unknown(kv)
            own = kv * PARTS + wg
            if AHEAD:
                mbarrier.wait(do_full.index(stage), it // STAGES & 1)
                dp = scores(flat(v_bufs.index(own)), flat(do_bufs.index(stage)), begin_with(delta_bufs.index(stage)))
            else:
                s, dp = first_products(bufs, bars, it, own, 0, M)
            p, dp = weigh(s, dp, key, j * M, near, shape, scale_log2, bars[0].index(kv), phase, CAUSAL, LEFT)
            weights = as_operand(p.to(ds_bufs.dtype), dv)
            dv = warpgroup_mma(weights, flat(do_bufs.index(stage)), dv, is_async=True)
            ds = (p * dp).to(ds_bufs.dtype)
            ds_bufs.index(side * PARTS + wg).store(ds)
            share(ds_full.index(side))
            of_scores = as_operand(ds, dk)
            it += 1
            if AHEAD:
                s = scores_ahead(bufs, bars, it, end, own, 0, M)
            mbarrier.wait(ds_full.index(side), it - 1 >> 1 & 1)
            dq = part_of_dq(ds_bufs, side, k_bufs, kv, wg, 64 if M * D >= 8192 else 32)
            dk = warpgroup_mma(of_scores, flat(q_bufs.index(stage)), dk, is_async=True)
            # dq is added to memory while the product for dk runs.
            if AHEAD:
                dq, dv, weights, s = warpgroup_mma_wait(1, deps=(dq, dv, weights, s))
            else:
                dq, dv, weights = warpgroup_mma_wait(1, deps=(dq, dv, weights))
            release(do_empty.index(stage), PRODUCTS=True)
            add(results, place, member, j, dq, shape, wg, KEYS, M, CAUSAL)
            dk, of_scores = warpgroup_mma_wait(0, deps=(dk, of_scores))
            release(q_empty.index(stage), PRODUCTS=True)
    finish(bufs, bars, results, dk * scale, dv, place, key, 0, shape, kv, phase, wg, D, SETS)
    return it


@gluon.jit
def _gradients_wide(
    bufs, bars, results, shape, scale, scale_log2, place, it, n,
    wg: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Process a warpgroup's half of the dims for the tile's 64 keys. Each warpgroup computes the weights of half of the
    queries, and shares them."""
    q_bufs, do_bufs, k_bufs, _v_bufs, ds_bufs, p_bufs, _lse_bufs, _delta_bufs = bufs
    kv_full, _q_full, q_empty, _do_full, do_empty, ds_full = bars[:6]
    STAGES: gl.constexpr = q_bufs.shape[0]
    M: gl.constexpr = q_bufs.shape[2]
    D: gl.constexpr = q_bufs.shape[3]
    HALF: gl.constexpr = M // 2
    COLS: gl.constexpr = D // 2
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    block, _, _, first, last = place
    key = block * KEYS
    phase = n & 1 if SETS > 0 else 0
    zero = 0
    near = near_end(shape, key)
    dk = gl.zeros([ROWS, COLS], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, COLS], gl.float32, D_LAYOUT)
    mbarrier.wait(kv_full.index(0), phase)
    for member in range(shape[3]):
        for j in range(first, last):
            stage = it % STAGES
            side = it & 1
            zero = unknown(zero)
            s, dp = first_products(bufs, bars, it, zero, wg * HALF, HALF)
            bar = kv_full.index(0)
            p, dp = weigh(s, dp, key, j * M + wg * HALF, near, shape, scale_log2, bar, phase, CAUSAL, LEFT)
            p_bufs.index(side).slice(wg * HALF, HALF, dim=1).store(p.to(p_bufs.dtype))
            ds_bufs.index(side).slice(wg * HALF, HALF, dim=1).store((p * dp).to(ds_bufs.dtype))
            share(ds_full.index(side))
            mbarrier.wait(ds_full.index(side), it >> 1 & 1)
            dv = warpgroup_mma(p_bufs.index(side), columns_of(do_bufs.index(stage), wg, COLS), dv, is_async=True)
            dq = part_of_dq(ds_bufs, side, k_bufs, zero, wg, COLS)
            dk = warpgroup_mma(ds_bufs.index(side), columns_of(q_bufs.index(stage), wg, COLS), dk, is_async=True)
            dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
            release(do_empty.index(stage), PRODUCTS=True)
            add(results, place, member, j, dq, shape, wg, KEYS, M, CAUSAL)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            release(q_empty.index(stage), PRODUCTS=True)
            it += 1
    finish(bufs, bars, results, dk * scale, dv, place, key, wg * COLS, shape, 0, phase, wg, D, SETS)
    return it


@gluon.jit
def _multiply(
    bufs, bars, work,
    wg: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, AHEAD: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Process the tiles of a program, in one of its two warpgroups."""
    results, shape, scale, scale_log2, total, slots_ptr = work
    M: gl.constexpr = bufs[0].shape[2]
    numbers = (shape, scale, scale_log2)
    it = 0
    n = 0
    if SETS == 0:
        place = keys_of(gl.program_id(0), gl.num_programs(0), shape, KEYS, M, CAUSAL, LEFT, results[3])
        _tile(bufs, bars, results, numbers, place, it, n, wg, KEYS, CAUSAL, LEFT, AHEAD, SETS)
    else:
        tile, place = take(n, slots_ptr, bars[8][0], bars[8][1], SLOT, PLACE)
        while tile < total:
            it = _tile(bufs, bars, results, numbers, place, it, n, wg, KEYS, CAUSAL, LEFT, AHEAD, SETS)
            n += 1
            tile, place = take(n, slots_ptr, bars[8][0], bars[8][1], SLOT, PLACE)


@gluon.jit
def _tile(
    bufs, bars, results, numbers, place, it, n,
    wg: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, AHEAD: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    shape, scale, scale_log2 = numbers
    if KEYS == ROWS:
        it = _gradients_wide(
            bufs, bars, results, shape, scale, scale_log2, place, it, n, wg, KEYS, CAUSAL, LEFT, SETS
        )  # fmt: skip
    else:
        it = _gradients(
            bufs, bars, results, shape, scale, scale_log2, place, it, n, wg, KEYS, CAUSAL, LEFT, AHEAD, SETS
        )  # fmt: skip
    return it


# ---- kernel


@gluon.jit
def _buffers(
    descs, KEYS: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr
):  # fmt: skip
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descs
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = KEYS // ROWS
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, D], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, D], do_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [HELD * PARTS, 1, ROWS, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [HELD * PARTS, 1, ROWS, D], v_desc.layout)
    ds_bufs = gl.allocate_shared_memory(dtype, [2 * PARTS, ROWS, BLOCK_M], DS_LAYOUT)
    p_bufs = ds_bufs
    if PARTS == 1:
        p_bufs = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_M], DS_LAYOUT)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    return q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, p_bufs, lse_bufs, delta_bufs


@gluon.jit(do_not_specialize=["tiles", "key_blocks", "section", "KV_H", "GROUP", "max_q", "max_k", "left"])
def attention_backward_sm90_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, order_ptr,
    ends_ptr, counter_ptr, slots_ptr, tiles, key_blocks, section, KV_H, GROUP, max_q, max_k, left,
    q_head_stride, do_head_stride, k_head_stride, v_head_stride,
    scale, scale_log2, KEYS: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, LEFT: gl.constexpr, AHEAD: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4; the other partitions bring their own warps.

    SETS: 0: launch `tiles` programs with one tile each. Otherwise launch at most one persistent program per SM, which processes
    one tile after another with SETS sets of buffers for keys and values; the additions to dq then have no fixed order.
    tiles: key_blocks per key/value head of each sequence. section: key/value heads that are computed at a time. left: with
    LEFT, the number of keys before its own that a query sees. GROUP: query heads per key/value head. lse_desc: -lse / scale,
    delta_desc: -delta, BLOCK_M rows for every block of every query head. dq_ptr: float32 zeros, BLOCK_M * D per block, in parts
    of 64 rows. order_ptr: None, or int32 zeros, one per part. ends_ptr: None, or int32 [max_k], where the document of each
    token ends; then queries and keys are the same tokens, under a causal mask. dk_desc, dv_desc: for SETS 2, else None.
    counter_ptr: one int32 zero, which is zero again at the end; slots_ptr: int32, 2 * SLOT per program; both None if SETS is 0.
    """
    HELD: gl.constexpr = SETS if SETS > 1 else 1
    descs = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    bufs = _buffers(descs, KEYS, BLOCK_M, D, STAGES, HELD)
    q_bars = (barriers(STAGES, 1), barriers(STAGES, 2))
    do_bars = (barriers(STAGES, 1), barriers(STAGES, 2))
    bars = (barriers(HELD, 1),) + q_bars + do_bars + (barriers(2, 2),)
    if SETS == 1:
        bars = bars + (barriers(1, 2), (), (barriers(2, 1), barriers(2, 3), barriers(1, 1)))
    if SETS == 2:
        bars = bars + (barriers(2, 1), (barriers(2, 2), barriers(2, 2)), (barriers(2, 1), barriers(2, 4), barriers(1, 1)))
    results = (dq_ptr, dk_ptr, dv_ptr, order_ptr)
    shape = (key_blocks, section, KV_H, GROUP, max_q, max_k, left, ends_ptr)
    strides = (q_head_stride, do_head_stride, k_head_stride, v_head_stride)
    if SETS > 0:
        slots_ptr += gl.program_id(0) * (2 * SLOT)
    work = (results, shape, scale, scale_log2, tiles, slots_ptr)
    if SETS == 0:
        gl.warp_specialize([
            (_multiply, (bufs, bars, work, 0, KEYS, CAUSAL, LEFT, AHEAD, SETS)),
            (_multiply, (bufs, bars, work, 1, KEYS, CAUSAL, LEFT, AHEAD, SETS)),
            (load_one, (descs, bufs, bars, shape, strides, order_ptr, KEYS, CAUSAL, LEFT)),
        ], [4, 1], [240, 24])  # fmt: skip
    elif SETS == 1:
        gl.warp_specialize([
            (_multiply, (bufs, bars, work, 0, KEYS, CAUSAL, LEFT, AHEAD, SETS)),
            (_multiply, (bufs, bars, work, 1, KEYS, CAUSAL, LEFT, AHEAD, SETS)),
            (load_tiles, (descs, bufs, bars, shape, tiles, slots_ptr, strides, KEYS, SETS)),
            (deal_tiles, (bars, shape, tiles, counter_ptr, slots_ptr, KEYS, BLOCK_M, CAUSAL, LEFT)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (bufs, bars, work, 0, KEYS, CAUSAL, LEFT, AHEAD, SETS)),
            (_multiply, (bufs, bars, work, 1, KEYS, CAUSAL, LEFT, AHEAD, SETS)),
            (load_tiles, (descs, bufs, bars, shape, tiles, slots_ptr, strides, KEYS, SETS)),
            (deal_tiles, (bars, shape, tiles, counter_ptr, slots_ptr, KEYS, BLOCK_M, CAUSAL, LEFT)),
            (store_tiles, (dk_desc, dv_desc, bufs, bars, tiles, slots_ptr, KEYS, SETS)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
