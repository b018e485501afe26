"""The gradients of attention for Hopper, scheduled by hand in Gluon: the kernel that walks the queries for a block of keys.

backward.py has the formulae. bf16 or fp16; equal lengths, or packed documents that attend to themselves; the host side
(sm90.py) refuses what does not fit, prepares a number or two for each row of queries, and rounds dq in the end.

A program has KEYS keys of one key/value head, and dk and dv of these in registers. Limited by the tensor cores, and where D is
64 as much by exponentials, hence the schedule of FlashAttention-3 (Shah et al., 2024):

    producer    one warp: has the copy engine (TMA) fetch K and V once, and blocks of Q and dO as far ahead as there are stages;
                sm90_schedule.py has it, and which keys a program has: one block, or one after the other
    consumers   two warpgroups. Scores are transposed, [keys, queries], so that weights and their gradients, which are there as
                accumulators, are at once the first operands of dv += P dO and dk += dS Q. The gradients of the scores go
                through shared memory as well, for dq, of which either warpgroup computes one half, and adds it to float32
                memory. Up to 128 dims a warpgroup has 64 keys; at 256 both have the same 64, and half of the dims each.
                There a half of dq is one product: in two that wait for each other it was 20 to 25 % slower

A score's product begins with -lse / scale in the accumulators, and that of dO and V with -delta: the subtractions cost nothing.
A row that sees no key, or is none, has -inf there. Blocks of queries that a causal mask or a window's left bound hides from
the keys are not visited.

dq is kept as each thread has it: four neighbours in memory are one thread's, so an addition takes 16 bytes at a time.
With `order_ptr` additions wait for those of the keys before, and the sum is the same every time.
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
    """A warpgroup's 64 of 128 keys of the n-th tile, from the it-th block of queries on; how many blocks there were then."""
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
            # dq goes out while the product for dk runs.
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
    """A warpgroup's half of the dims for 64 keys. Weights are computed by halves of the queries, and shared."""
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
    """The tiles of a program, by one of its two warpgroups."""
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
    """Launch with num_warps=4; the others bring their own warps. SETS 0: on `tiles` programs, else on at most as many as there
    are SMs, which stay and take tiles in turn, with so many sets of buffers for keys and values; no order of additions then.

    tiles: key_blocks a key/value head of each sequence.
    section: key/value heads that go together. left: with LEFT, the keys before its own that a query sees. GROUP: query heads a
    key/value head. lse_desc: -lse / scale, delta_desc: -delta, of BLOCK_M rows for every block of every query head. dq_ptr:
    float32 zeros, BLOCK_M * D a block, in parts of 64 rows. order_ptr: None, or int32 zeros, one a part. ends_ptr: None, or
    int32 [max_k], where the document of each token ends: queries and keys are the same tokens then, under a causal mask.
    dk_desc, dv_desc: with two sets, else None. counter_ptr: one int32 of zero, left as zero, and slots_ptr: int32, 2 * SLOT a
    program; None if SETS is 0.
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
