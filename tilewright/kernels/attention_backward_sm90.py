"""The gradients of attention for Hopper, scheduled by hand in Gluon: the kernel that walks the queries for a block of keys.

attention_backward.py has the formulae. bf16 or fp16; equal lengths; the host side (attention_backward_sm90_launch.py) refuses
what does not fit, prepares a number or two for each row of queries, and rounds dq in the end.

A program has KEYS keys of one key/value head, and dk and dv of these in registers. Limited by the tensor cores, and where D is
64 as much by exponentials, hence the schedule of FlashAttention-3 (Shah et al., 2024):

    producer    one warp: has the copy engine (TMA) fetch K and V once, and blocks of Q and dO as far ahead as there are stages
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
# Gluon reads `name: gl.constexpr = value` as "known to the compiler"; to a type checker it is a value of another type.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.hopper import block_barrier, load_box

__all__ = ["attention_backward_sm90_kernel"]


ROWS = gl.constexpr(64)  # of a product: what the tensor cores take at once

# ---- which work a program has


@gluon.jit
def _work(shape, KEYS: gl.constexpr, M: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, order_ptr):
    """(block of keys, key/value head, sequence, first block of queries that sees the keys, one past the last, blocks in all).

    Heads go in sections whose queries fit L2 together; inside of one the longest blocks come first under a diagonal, but where
    additions keep an order: nobody may wait for a program that begins later.
    """
    key_blocks, section, KV_H, _GROUP, max_q, max_k, left = shape
    before = gl.program_id(0) // (section * key_blocks) * section
    within = gl.program_id(0) % (section * key_blocks)
    heads = gl.num_programs(0) // key_blocks
    width = gl.minimum(section, heads - before)
    block = within // width
    # The last heads first: what was prepared last is still in L2, and what is rounded first will be.
    head = heads - 1 - before - within % width
    first = 0
    blocks = gl.cdiv(max_q, M)
    last = blocks
    if CAUSAL:
        if order_ptr is not None:
            block = key_blocks - 1 - block
        first = gl.maximum(block * KEYS - (max_k - max_q), 0) // M
    if LEFT:
        last = gl.minimum(gl.cdiv(gl.maximum(block * KEYS + KEYS + left - (max_k - max_q), 0), M), blocks)
        last = gl.maximum(last, first)
    return block, head % KV_H, head // KV_H, first, last, blocks


@gluon.jit
def _turn(block, j, shape, KEYS: gl.constexpr, M: gl.constexpr, CAUSAL: gl.constexpr):
    """How many other blocks of keys add to the j-th block of queries before this one.

    Under a diagonal the last keys that it sees come first: these begin with it, and the others come to it in their order.
    """
    if CAUSAL:
        key_blocks, _section, _KV_H, _GROUP, max_q, max_k, _left = shape
        # The last block of keys whose first block of queries is the j-th or one before.
        last = gl.minimum(((j + 1) * M - 1 + max_k - max_q) // KEYS, key_blocks - 1)
        return last - block
    else:
        return block


# ---- producer


@gluon.jit
def _load(
    descs, bufs, bars, shape, head_strides, order_ptr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr
):  # fmt: skip
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descs
    q_bufs, do_bufs, k_bufs, v_bufs, _ds_bufs, _p_bufs, lse_bufs, delta_bufs = bufs
    q_head_stride, do_head_stride, k_head_stride, v_head_stride = head_strides
    kv_full, q_full, q_empty, do_full, do_empty, _ds_full = bars
    STAGES: gl.constexpr = q_bufs.shape[0]
    M: gl.constexpr = q_bufs.shape[2]
    D: gl.constexpr = q_bufs.shape[3]
    block, kv_head, b, first, last, blocks = _work(shape, KEYS, M, CAUSAL, LEFT, order_ptr)
    GROUP = shape[3]
    heads = shape[2] * GROUP
    mbarrier.expect(kv_full.index(0), 2 * KEYS * D * 2)
    for i in gl.static_range(KEYS // ROWS):
        key = block * KEYS + i * ROWS
        load_box(k_desc, [b, key, kv_head * k_head_stride], kv_full.index(0), k_bufs.index(i))
        load_box(v_desc, [b, key, kv_head * v_head_stride], kv_full.index(0), v_bufs.index(i))
    it = 0
    for member in range(GROUP):
        h = kv_head * GROUP + member
        for j in range(first, last):
            stage = it % STAGES
            phase = it // STAGES & 1 ^ 1
            row = ((b * heads + h) * blocks + j) * M
            mbarrier.wait(q_empty.index(stage), phase)
            mbarrier.expect(q_full.index(stage), M * D * 2 + M * 4)
            load_box(q_desc, [b, j * M, h * q_head_stride], q_full.index(stage), q_bufs.index(stage))
            load_box(lse_desc, [row], q_full.index(stage), lse_bufs.index(stage))
            mbarrier.wait(do_empty.index(stage), phase)
            mbarrier.expect(do_full.index(stage), M * D * 2 + M * 4)
            load_box(do_desc, [b, j * M, h * do_head_stride], do_full.index(stage), do_bufs.index(stage))
            load_box(delta_desc, [row], do_full.index(stage), delta_bufs.index(stage))
            it += 1


# ---- consumers


@gluon.jit
def _flat(box):
    """The matrix in a box of one sequence."""
    return box.reshape([box.shape[1], box.shape[2]])


@gluon.jit
def _begin(line):
    """[64, M] whose rows all are the line [M] in shared memory: what scores begin with."""
    M: gl.constexpr = line.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    row = gl.expand_dims(line.load(gl.SliceLayout(0, layout)), 0)
    every = gl.broadcast(row, gl.zeros([ROWS, M], gl.float32, layout))[0]
    # Copied here, and not between two products, where the assembler would wait for the first one.
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [every], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _scores(rows, others, begin):
    """begin + rows [64, D] times a block of queries or of dO [M, D]: [64, M], in flight."""
    return warpgroup_mma(rows, others.permute((1, 0)), begin, is_async=True)


@gluon.jit
def _visible(s, key, query, offset, max_k, left, CAUSAL: gl.constexpr, LEFT: gl.constexpr):
    """Scores [keys, queries] with -inf where a query does not see a key. offset: keys before the first query's."""
    layout: gl.constexpr = s.type.layout
    keys = key + gl.expand_dims(gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    if CAUSAL:
        queries = query + gl.expand_dims(gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout)), 0)
        seen = (keys <= queries + offset) & (keys < max_k)
        if LEFT:
            seen &= keys >= queries + (offset - left)
        return gl.where(seen, s, float("-inf"))
    else:
        return gl.where(keys < max_k, s, float("-inf"))


@gluon.jit
def _as_operand(x, acc):
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _add_to(ptr, block):
    """Add [64, N] to float32 memory, in the order in which the threads have it."""
    N: gl.constexpr = block.shape[1]
    # What wgmma deals out: 16 rows a warp; a thread has rows 8 apart and pairs of columns 8 apart.
    line = block.reshape([4, 2, 8, N // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * N])
    layout: gl.constexpr = line.type.layout
    gl.atomic_add(ptr + gl.arange(0, ROWS * N, layout=layout), line, sem="relaxed")


@gluon.jit
def _add(dq_ptr, order_ptr, part, dq, turn):
    """Add a part of dq to its place, where additions keep an order after `turn` others."""
    to = dq_ptr + part.to(gl.int64) * (dq.shape[0] * dq.shape[1])
    if order_ptr is None:
        _add_to(to, dq)
    else:
        while gl.atomic_add(order_ptr + part, 0, sem="acquire") < turn:
            pass
        _add_to(to, dq)
        # One thread passes the turn on for all: every thread's numbers must be out before.
        block_barrier()
        gl.atomic_add(order_ptr + part, 1, sem="release")


@gluon.jit
def _columns(box, part: gl.constexpr, COLS: gl.constexpr):
    """A part of the columns of a matrix in shared memory, or all."""
    matrix = _flat(box)
    if matrix.shape[1] == COLS:
        return matrix
    else:
        return matrix.slice(part * COLS, COLS, dim=1)


@gluon.jit
def _part_of_dq(ds_bufs, side, k_bufs, part: gl.constexpr, COLS: gl.constexpr):
    """[64, COLS] of dS K for a block of queries, in flight: of 128 rows 64, else a part of the columns."""
    M: gl.constexpr = ds_bufs.shape[2]
    PARTS: gl.constexpr = k_bufs.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    dq = gl.zeros([ROWS, COLS], gl.float32, layout)
    for i in gl.static_range(PARTS):
        ds = ds_bufs.index(side * PARTS + i)
        rows = ds.slice(part * ROWS, ROWS, dim=1) if M == 2 * ROWS else ds
        dq = warpgroup_mma(rows.permute((1, 0)), _columns(k_bufs.index(i), part, COLS), dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _store(ptr, x, b, kv_head, key, col, shape, D: gl.constexpr):
    """Store those rows of x [64, N] that are keys, from column `col` of their head on."""
    KV_H, max_k = shape[2], shape[5]
    layout: gl.constexpr = x.type.layout
    at = key + gl.expand_dims(gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    ptr += (b * max_k).to(gl.int64) * (KV_H * D) + kv_head * D + col
    gl.store(ptr + at.to(gl.int64) * (KV_H * D) + cols, x.to(ptr.dtype.element_ty), mask=at < max_k)


@gluon.jit
def _first_products(bufs, bars, it, part: gl.constexpr, begin: gl.constexpr, rows: gl.constexpr):
    """(scores, done; dO V^T, in flight) of a warpgroup's keys and `rows` queries of the it-th block, from `begin` on."""
    q_bufs, do_bufs, k_bufs, v_bufs, _ds_bufs, _p_bufs, lse_bufs, delta_bufs = bufs
    STAGES: gl.constexpr = q_bufs.shape[0]
    stage = it % STAGES
    mbarrier.wait(bars[1].index(stage), it // STAGES & 1)
    mbarrier.wait(bars[3].index(stage), it // STAGES & 1)
    s = _begin(lse_bufs.index(stage).slice(begin, rows))
    dp = _begin(delta_bufs.index(stage).slice(begin, rows))
    s = _scores(_flat(k_bufs.index(part)), _flat(q_bufs.index(stage)).slice(begin, rows), s)
    dp = _scores(_flat(v_bufs.index(part)), _flat(do_bufs.index(stage)).slice(begin, rows), dp)
    s = warpgroup_mma_wait(1, deps=(s,))
    return s, dp


@gluon.jit
def _scores_ahead(bufs, bars, it, total, part: gl.constexpr):
    """Scores of the it-th block, in flight. Behind the last block these are scores of nothing, for nobody."""
    STAGES: gl.constexpr = bufs[0].shape[0]
    if it < total:
        mbarrier.wait(bars[1].index(it % STAGES), it // STAGES & 1)
    return _scores(_flat(bufs[2].index(part)), _flat(bufs[0].index(it % STAGES)), _begin(bufs[6].index(it % STAGES)))


@gluon.jit
def _weigh(s, dp, key, query, shape, scale_log2, kv_full, CAUSAL: gl.constexpr, LEFT: gl.constexpr):
    """(weights, dO V^T, done)."""
    max_q, max_k, left = shape[4], shape[5], shape[6]
    own = query + max_k - max_q
    if (own < key + ROWS - 1 and CAUSAL) or key + ROWS > max_k or (own + s.shape[1] - 1 > key + left and LEFT):
        s = _visible(s, key, query, max_k - max_q, max_k, left, CAUSAL, LEFT)
    p = gl.exp2(s * scale_log2)
    # The assembler would wait for dO V before the exponentials, but moves nothing across a loop. This one ends at once.
    mbarrier.wait(kv_full.index(0), 0)
    dp, p = warpgroup_mma_wait(0, deps=(dp, p))
    return p, dp


@gluon.jit
def _share(bar):
    """Let the other warpgroup, and the tensor cores, see what this one has stored."""
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(bar)


@gluon.jit
def _gradients(
    bufs, bars, results, shape, scale, scale_log2,
    wg: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 of 128 keys."""
    q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, _p_bufs, _lse_bufs, delta_bufs = bufs
    kv_full, _q_full, q_empty, do_full, do_empty, ds_full = bars
    dq_ptr, dk_ptr, dv_ptr, order_ptr = results
    STAGES: gl.constexpr = q_bufs.shape[0]
    M: gl.constexpr = q_bufs.shape[2]
    D: gl.constexpr = q_bufs.shape[3]
    PART: gl.constexpr = 64 if M * D >= 8192 else 32
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    block, kv_head, b, first, last, blocks = _work(shape, KEYS, M, CAUSAL, LEFT, order_ptr)
    GROUP = shape[3]
    key = block * KEYS + wg * ROWS
    dk = gl.zeros([ROWS, D], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, D], gl.float32, D_LAYOUT)
    mbarrier.wait(kv_full.index(0), 0)
    it = 0
    if AHEAD:
        s = _scores_ahead(bufs, bars, it, GROUP * (last - first), wg)
        s = warpgroup_mma_wait(0, deps=(s,))
    for member in range(GROUP):
        for j in range(first, last):
            stage = it % STAGES
            side = it & 1
            if AHEAD:
                mbarrier.wait(do_full.index(stage), it // STAGES & 1)
                dp = _scores(_flat(v_bufs.index(wg)), _flat(do_bufs.index(stage)), _begin(delta_bufs.index(stage)))
            else:
                s, dp = _first_products(bufs, bars, it, wg, 0, M)
            p, dp = _weigh(s, dp, key, j * M, shape, scale_log2, kv_full, CAUSAL, LEFT)
            weights = _as_operand(p.to(ds_bufs.dtype), dv)
            dv = warpgroup_mma(weights, _flat(do_bufs.index(stage)), dv, is_async=True)
            ds = (p * dp).to(ds_bufs.dtype)
            ds_bufs.index(side * (KEYS // ROWS) + wg).store(ds)
            _share(ds_full.index(side))
            of_scores = _as_operand(ds, dk)
            it += 1
            if AHEAD:
                s = _scores_ahead(bufs, bars, it, GROUP * (last - first), wg)
            mbarrier.wait(ds_full.index(side), it - 1 >> 1 & 1)
            dq = _part_of_dq(ds_bufs, side, k_bufs, wg, PART)
            dk = warpgroup_mma(of_scores, _flat(q_bufs.index(stage)), dk, is_async=True)
            # dq goes out while the product for dk runs.
            if AHEAD:
                dq, dv, weights, s = warpgroup_mma_wait(1, deps=(dq, dv, weights, s))
            else:
                dq, dv, weights = warpgroup_mma_wait(1, deps=(dq, dv, weights))
            mbarrier.arrive(do_empty.index(stage))
            part = (((b * shape[2] + kv_head) * GROUP + member) * blocks + j) * 2 + wg
            _add(dq_ptr, order_ptr, part, dq, _turn(block, j, shape, KEYS, M, CAUSAL))
            dk, of_scores = warpgroup_mma_wait(0, deps=(dk, of_scores))
            mbarrier.arrive(q_empty.index(stage))
    _store(dv_ptr, dv, b, kv_head, key, 0, shape, D)
    _store(dk_ptr, dk * scale, b, kv_head, key, 0, shape, D)


@gluon.jit
def _gradients_wide(
    bufs, bars, results, shape, scale, scale_log2,
    wg: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """A warpgroup's half of the dims for 64 keys. Weights are computed by halves of the queries, and shared."""
    q_bufs, do_bufs, k_bufs, _v_bufs, ds_bufs, p_bufs, _lse_bufs, _delta_bufs = bufs
    kv_full, _q_full, q_empty, _do_full, do_empty, ds_full = bars
    dq_ptr, dk_ptr, dv_ptr, order_ptr = results
    STAGES: gl.constexpr = q_bufs.shape[0]
    M: gl.constexpr = q_bufs.shape[2]
    D: gl.constexpr = q_bufs.shape[3]
    HALF: gl.constexpr = M // 2
    COLS: gl.constexpr = D // 2
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    block, kv_head, b, first, last, blocks = _work(shape, KEYS, M, CAUSAL, LEFT, order_ptr)
    GROUP = shape[3]
    key = block * KEYS
    dk = gl.zeros([ROWS, COLS], gl.float32, D_LAYOUT)
    dv = gl.zeros([ROWS, COLS], gl.float32, D_LAYOUT)
    mbarrier.wait(kv_full.index(0), 0)
    it = 0
    for member in range(GROUP):
        for j in range(first, last):
            stage = it % STAGES
            side = it & 1
            s, dp = _first_products(bufs, bars, it, 0, wg * HALF, HALF)
            p, dp = _weigh(s, dp, key, j * M + wg * HALF, shape, scale_log2, kv_full, CAUSAL, LEFT)
            p_bufs.index(side).slice(wg * HALF, HALF, dim=1).store(p.to(p_bufs.dtype))
            ds_bufs.index(side).slice(wg * HALF, HALF, dim=1).store((p * dp).to(ds_bufs.dtype))
            _share(ds_full.index(side))
            mbarrier.wait(ds_full.index(side), it >> 1 & 1)
            dv = warpgroup_mma(p_bufs.index(side), _columns(do_bufs.index(stage), wg, COLS), dv, is_async=True)
            dq = _part_of_dq(ds_bufs, side, k_bufs, wg, COLS)
            dk = warpgroup_mma(ds_bufs.index(side), _columns(q_bufs.index(stage), wg, COLS), dk, is_async=True)
            dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
            mbarrier.arrive(do_empty.index(stage))
            part = (((b * shape[2] + kv_head) * GROUP + member) * blocks + j) * 2 + wg
            _add(dq_ptr, order_ptr, part, dq, _turn(block, j, shape, KEYS, M, CAUSAL))
            dk = warpgroup_mma_wait(0, deps=(dk,))
            mbarrier.arrive(q_empty.index(stage))
            it += 1
    _store(dv_ptr, dv, b, kv_head, key, wg * COLS, shape, D)
    _store(dk_ptr, dk * scale, b, kv_head, key, wg * COLS, shape, D)


# ---- kernel


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["key_blocks", "section", "KV_H", "GROUP", "max_q", "max_k", "left"])
def attention_backward_sm90_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_ptr, dk_ptr, dv_ptr, order_ptr,
    key_blocks, section, KV_H, GROUP, max_q, max_k, left, q_head_stride, do_head_stride, k_head_stride, v_head_stride,
    scale, scale_log2, KEYS: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, LEFT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4 on key_blocks programs a key/value head of each sequence; the others bring their own warps.

    section: key/value heads that go together. left: with LEFT, the keys before its own that a query sees. GROUP: query heads a
    key/value head. lse_desc: -lse / scale, delta_desc: -delta, of BLOCK_M rows for every block of every query head. dq_ptr:
    float32 zeros, BLOCK_M * D a block, in parts of 64 rows. order_ptr: None, or int32 zeros, one a part.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = KEYS // ROWS
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, D], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, D], do_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [PARTS, 1, ROWS, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [PARTS, 1, ROWS, D], v_desc.layout)
    ds_bufs = gl.allocate_shared_memory(dtype, [2 * PARTS, ROWS, BLOCK_M], DS_LAYOUT)
    p_bufs = ds_bufs
    if PARTS == 1:
        p_bufs = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_M], DS_LAYOUT)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    q_bars = (_barriers(STAGES, 1), _barriers(STAGES, 2))
    do_bars = (_barriers(STAGES, 1), _barriers(STAGES, 2))
    bars = (_barriers(1, 1),) + q_bars + do_bars + (_barriers(2, 2),)
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, p_bufs, lse_bufs, delta_bufs)
    descs = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    results = (dq_ptr, dk_ptr, dv_ptr, order_ptr)
    shape = (key_blocks, section, KV_H, GROUP, max_q, max_k, left)
    strides = (q_head_stride, do_head_stride, k_head_stride, v_head_stride)
    if PARTS == 1:
        gl.warp_specialize([
            (_gradients_wide, (bufs, bars, results, shape, scale, scale_log2, 0, KEYS, CAUSAL, LEFT)),
            (_gradients_wide, (bufs, bars, results, shape, scale, scale_log2, 1, KEYS, CAUSAL, LEFT)),
            (_load, (descs, bufs, bars, shape, strides, order_ptr, KEYS, CAUSAL, LEFT)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_gradients, (bufs, bars, results, shape, scale, scale_log2, 0, KEYS, CAUSAL, LEFT, AHEAD)),
            (_gradients, (bufs, bars, results, shape, scale, scale_log2, 1, KEYS, CAUSAL, LEFT, AHEAD)),
            (_load, (descs, bufs, bars, shape, strides, order_ptr, KEYS, CAUSAL, LEFT)),
        ], [4, 1], [240, 24])  # fmt: skip
