"""Forward attention for Hopper, scheduled by hand in Gluon.

    out[t, h] = sum_s p[s] v[s, g],   p = softmax_s(scale * q[t, h] . k[s, g]),   g = h // (query heads a KV head)

bf16 or fp16; q [T, H, D], k and v [S, KV, D] packed: sequence b has rows cu_q[b]..cu_q[b + 1] of q, cu_k[b]..cu_k[b + 1] of k
and v; without cu_q and cu_k all are of equal length. Causal masks align the last query with the last key. A row that sees no
key is zero, its log-sum-exp -inf. Not supported: windows, sinks, soft-cap, bias, paged KV; the host side
(attention_sm90_launch.py) refuses what does not fit.

attention.py has the formulae of the incremental softmax; here the blocks of keys come from the last to the first. Limited by
the tensor cores, and where D is 64 as much by exponentials: each has 2 D multiply-adds, and an SM does 16 exponentials or 2048
multiply-adds a cycle. Hence the schedule of FlashAttention-3 (Shah et al., 2024):

    producer    one warp: hands out tiles (an atomic counter: tiles differ in length), and has the copy engine (TMA) fetch Q
                once a tile, and blocks of K and V as far ahead as there are stages
    consumers   two or three warpgroups of 64 query rows each. With OVERLAP one issues Q K^T of the next block, then P V of this
                one, and computes the softmax of the next while P V runs. P never leaves the registers: it is the first operand
                of its product. Between two tiles nothing overlaps: the next one's first scores under the last product
                of this one spilled, and lost

Only blocks that the diagonal or the end of the keys cuts are masked.
"""
# Gluon reads `name: gl.constexpr = value` as "known to the compiler"; to a type checker it is a value of another type.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false

# T query rows, S key rows, H query heads, D head dim, M rows of a tile, N keys of a block

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["attention_sm90_kernel"]

_load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # triton 3.9 has a new name
_store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # 3.9 has a new name
_block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # triton 3.7 renamed it

ROWS = gl.constexpr(64)  # of a consumer: what the tensor cores take at once

# ---- which work a program has


@gluon.jit
def _span(b, cu_ptr, length):
    """(start, length) of sequence b."""
    start = b * length
    if cu_ptr is not None:
        start = gl.load(cu_ptr + b)
        length = gl.load(cu_ptr + b + 1) - start
    return start, length


@gluon.jit
def _tile(tile, grid, lengths, BLOCK_M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """(first row, head, start and length of q, start and length of k, blocks of keys, whole ones) of a tile.

    Heads go in sections whose keys fit L2 together; inside of one the longest tiles come first.
    """
    blocks, heads, section, H = grid
    cu_q_ptr, cu_k_ptr, max_q, max_k = lengths
    first = tile // (section * blocks) * section
    within = tile % (section * blocks)
    width = gl.minimum(section, heads - first)
    block = within // width
    if CAUSAL:
        block = blocks - 1 - block
    head = first + within % width
    b = head // H
    q_start, q_len = _span(b, cu_q_ptr, max_q)
    k_start, k_len = _span(b, cu_k_ptr, max_k)
    row = block * BLOCK_M
    seen = k_len
    whole = k_len // N
    if CAUSAL:
        seen = gl.minimum(k_len, row + BLOCK_M + k_len - q_len)
        whole = gl.maximum(gl.minimum(whole, (row + 1 + k_len - q_len) // N), 0)
        whole = gl.where(row + 1 + k_len - q_len < 0, 0, whole)
    # A tile that sees no key goes through one block, all masked: its result is zero by the same formulae.
    # So does one beyond the rows of its sequence, and stores nothing.
    n_blocks = gl.where(row < q_len, gl.maximum(gl.cdiv(gl.maximum(seen, 0), N), 1), 1)
    return row, head % H, q_start, q_len, k_start, k_len, n_blocks, whole


@gluon.jit
def _next_tile(counter_ptr, total):
    """The next tile, or one past the last. A launch draws `total` tickets in all: who draws the last one sets them back."""
    ticket = gl.atomic_add(counter_ptr, 1)
    if ticket == total - 1:
        gl.store(counter_ptr, 0)
    return gl.minimum(gl.num_programs(0) + ticket, total)


@gluon.jit
def _hand_out(tile, n, slots_ptr, tile_full, tile_empty):
    mbarrier.wait(tile_empty.index(n & 1), n >> 1 & 1 ^ 1)
    gl.store(slots_ptr + (n & 1), tile)
    mbarrier.arrive(tile_full.index(n & 1))


@gluon.jit
def _take(n, slots_ptr, tile_full, tile_empty):
    mbarrier.wait(tile_full.index(n & 1), n >> 1 & 1)
    tile = gl.load(slots_ptr + (n & 1), volatile=True)
    mbarrier.arrive(tile_empty.index(n & 1))
    return tile


# ---- producer


@gluon.jit
def _load_tiles(
    descs, bufs, bars, counter_ptr, slots_ptr, grid, lengths, GROUP, head_strides,
    CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc = descs
    q_bufs, k_bufs, v_bufs, _ = bufs
    q_head_stride, k_head_stride, v_head_stride = head_strides
    STAGES: gl.constexpr = k_bufs.shape[0]
    N: gl.constexpr = k_bufs.shape[1]
    D: gl.constexpr = k_bufs.shape[2]
    Q_BUFS: gl.constexpr = q_bufs.shape[0] // CONSUMERS
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty = bars
    total = grid[0] * grid[1]
    it = 0
    n = 0
    tile = gl.program_id(0)
    _hand_out(tile, n, slots_ptr, tile_full, tile_empty)
    while tile < total:
        after = _next_tile(counter_ptr, total)
        n += 1
        # Known to the consumers before they begin with this one.
        _hand_out(after, n, slots_ptr, tile_full, tile_empty)
        row, head, q_start, _q_len, k_start, _k_len, n_blocks, _whole = _tile(tile, grid, lengths, CONSUMERS * ROWS, N, CAUSAL)
        slot = (n - 1) % Q_BUFS * CONSUMERS
        q_phase = (n - 1) // Q_BUFS & 1
        for wg in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(slot + wg), q_phase ^ 1)
            mbarrier.expect(q_full.index(slot + wg), ROWS * D * 2)
            at = [q_start + row + wg * ROWS, head * q_head_stride]
            _load_box(q_desc, at, q_full.index(slot + wg), q_bufs.index(slot + wg))
        kv_head = head // GROUP
        for j in range(n_blocks):
            key = k_start + (n_blocks - 1 - j) * N
            stage = it % STAGES
            phase = it // STAGES & 1 ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), N * D * 2)
            _load_box(k_desc, [key, kv_head * k_head_stride], k_full.index(stage), k_bufs.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), N * D * 2)
            _load_box(v_desc, [key, kv_head * v_head_stride], v_full.index(stage), v_bufs.index(stage))
            it += 1
        tile = after


# ---- consumers


@gluon.jit
def _clear_end(v_buf, rows):
    """Zero what a block of V holds beyond its first `rows`: other sequences' rows (0 * inf would be NaN)."""
    CHUNK: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for j in gl.static_range(v_buf.shape[0] // CHUNK):
        if rows < (j + 1) * CHUNK:
            part = v_buf.slice(j * CHUNK, CHUNK, dim=0)
            at = j * CHUNK + gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout)), 1)
            v = part.load(layout)
            part.store(gl.where(at < rows, v, 0.0).to(v.dtype))
    fence_async_shared()
    _block_barrier()


@gluon.jit
def _masked(s, n, row, offset, k_len, CAUSAL: gl.constexpr):
    """Scores of block n with -inf where a row does not see a key. offset: keys before the first query's."""
    layout: gl.constexpr = s.type.layout
    cols = gl.expand_dims(gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    end = k_len - n * s.shape[1]
    if CAUSAL:
        rows = row + gl.expand_dims(gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout)), 1)
        return gl.where(cols < gl.minimum(rows + (offset + 1 - n * s.shape[1]), end), s, float("-inf"))
    else:
        return gl.where(cols < end, s, float("-inf"))


@gluon.jit
def _row_parts(p):
    """Sums along the rows of what each thread has: [rows, 4], one column for each of the threads that share a row."""
    # What wgmma deals out: a thread has pairs of columns, 8 apart.
    apart = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(apart, 3), 1)


@gluon.jit
def _exponentials(s, m, scale, CHECK: gl.constexpr):
    """(p, m', 2^(m - m')) of a block's scores. CHECK: a row may have seen no key yet; its m is -inf."""
    high = gl.maximum(m, gl.max(s, 1))
    base = high * scale
    if CHECK:
        base = gl.where(high == float("-inf"), 0.0, base)
    p = gl.exp2(s * scale - gl.expand_dims(base, 1))
    return p, high, gl.exp2(m * scale - base)


@gluon.jit
def _scaled_rows(x, alpha):
    """x [rows, any] times alpha [rows]. Each thread has the alphas of its rows."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(alpha, layout, assert_trivial=True), 1)


@gluon.jit
def _as_operand(p, o, dtype: gl.constexpr):
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o.type.layout, k_width=2)
    return gl.convert_layout(p.to(dtype), layout, assert_trivial=True)


@gluon.jit
def _scores(q_buf, k_bufs, k_full, it):
    """Q K^T of the it-th block of keys, in flight."""
    STAGES: gl.constexpr = k_bufs.shape[0]
    N: gl.constexpr = k_bufs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    zero = gl.zeros([ROWS, N], gl.float32, layout)
    mbarrier.wait(k_full.index(it % STAGES), it // STAGES & 1)
    return warpgroup_mma(q_buf, k_bufs.index(it % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weigh(o, p, v_bufs, v_full, it):
    """o + P V of the it-th block of keys, in flight."""
    STAGES: gl.constexpr = v_bufs.shape[0]
    mbarrier.wait(v_full.index(it % STAGES), it // STAGES & 1)
    return warpgroup_mma(p, v_bufs.index(it % STAGES), o, is_async=True)


@gluon.jit
def _begin(s, v_bufs, v_full, it, n, row, offset, k_len, scale, CAUSAL: gl.constexpr):
    """The softmax of a tile's first block, which is the last of its keys: (weights, m, l)."""
    STAGES: gl.constexpr = v_bufs.shape[0]
    N: gl.constexpr = v_bufs.shape[1]
    s = _masked(s, n, row, offset, k_len, CAUSAL)
    none = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
    e, m, _ = _exponentials(s, none, scale, True)
    if k_len - n * N < N:
        mbarrier.wait(v_full.index(it % STAGES), it // STAGES & 1)
        _clear_end(v_bufs.index(it % STAGES), k_len - n * N)
    return e, m, _row_parts(e)


@gluon.jit
def _step(
    q_buf, k_bufs, v_bufs, bars, o, p, m, l, it, n, row, offset, k_len, scale, whole,
    CAUSAL: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """P V of the block before and the softmax of the it-th, which is keys n * N and on: (o, p, m, l).

    The first `whole` blocks of the keys are not masked.
    """
    STAGES: gl.constexpr = k_bufs.shape[0]
    k_full, k_empty, v_full, v_empty = bars[2], bars[3], bars[4], bars[5]
    before = it - 1
    if not OVERLAP:
        o = _weigh(o, p, v_bufs, v_full, before)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        mbarrier.arrive(v_empty.index(before % STAGES))
    s = _scores(q_buf, k_bufs, k_full, it)
    if OVERLAP:
        o = _weigh(o, p, v_bufs, v_full, before)
    s = warpgroup_mma_wait(1 if OVERLAP else 0, deps=(s,))
    mbarrier.arrive(k_empty.index(it % STAGES))
    if CAUSAL:
        if n >= whole:
            s = _masked(s, n, row, offset, k_len, CAUSAL)
    e, m, alpha = _exponentials(s, m, scale, CAUSAL)
    l = _scaled_rows(l, alpha) + _row_parts(e)
    if OVERLAP:
        # The assembler would wait for P V before the exponentials, but moves nothing across a loop. This one ends at once.
        mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
        o, p, e = warpgroup_mma_wait(0, deps=(o, p, e))
        mbarrier.arrive(v_empty.index(before % STAGES))
    p = _as_operand(e, o, v_bufs.dtype)
    return _scaled_rows(o, alpha), p, m, l


@gluon.jit
def _finish(o, m, l, o_buf, out, row, head, q_start, q_len, scale):
    """Divide, round, and store what exists of the consumer's rows, through shared memory."""
    o_desc, out_ptr, lse_ptr, total_q, out_row_stride, out_head_stride = out
    D: gl.constexpr = o.shape[1]
    weight = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    o = o * gl.expand_dims(gl.where(weight == 0.0, 0.0, 1.0 / weight), 1)
    tma.store_wait(pendings=0)
    _block_barrier()
    o_buf.store(o.to(out_ptr.dtype.element_ty))
    if lse_ptr is not None:
        rows = row + gl.arange(0, ROWS, layout=m.type.layout)
        total = gl.convert_layout(weight, m.type.layout, assert_trivial=True)
        # scale is in the domain of exp2
        lse = (m * scale + gl.log2(total)) * 0.6931471805599453
        gl.store(lse_ptr + head.to(gl.int64) * total_q + q_start + rows, lse, mask=rows < q_len)
    if row + ROWS <= q_len:
        fence_async_shared()
        _block_barrier()
        _store_box(o_desc, [q_start + row, head * out_head_stride], o_buf)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        at = row + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
        cols = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, layout)), 0)
        ptrs = out_ptr + (q_start + at).to(gl.int64) * out_row_stride + head * out_head_stride + cols
        gl.store(ptrs, o_buf.load(layout), mask=at < q_len)


@gluon.jit
def _attend(
    bufs, bars, out, slots_ptr, grid, lengths, scale,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, OVERLAP: gl.constexpr, SHARE_Q: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    N: gl.constexpr = k_bufs.shape[1]
    D: gl.constexpr = k_bufs.shape[2]
    Q_BUFS: gl.constexpr = q_bufs.shape[0] // CONSUMERS
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty = bars
    total = grid[0] * grid[1]
    it = 0
    n = 0
    tile = _take(n, slots_ptr, tile_full, tile_empty)
    row, head, q_start, q_len, _k_start, k_len, n_blocks, whole = _tile(tile, grid, lengths, CONSUMERS * ROWS, N, CAUSAL)
    while tile < total:
        row += wg * ROWS
        slot = n % Q_BUFS * CONSUMERS + wg
        mbarrier.wait(q_full.index(slot), n // Q_BUFS & 1)
        s = _scores(q_bufs.index(slot), k_bufs, k_full, it)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(it % STAGES))
        e, m, l = _begin(s, v_bufs, v_full, it, n_blocks - 1, row, k_len - q_len, k_len, scale, CAUSAL)
        o = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        p = _as_operand(e, o, v_bufs.dtype)
        it += 1
        n += 1
        # What the next tile is, asked for long before it begins: the answer takes two trips to L2.
        after = _take(n, slots_ptr, tile_full, tile_empty)
        later = _tile(gl.minimum(after, total - 1), grid, lengths, CONSUMERS * ROWS, N, CAUSAL)
        for j in range(1, n_blocks):
            o, p, m, l = _step(
                q_bufs.index(slot), k_bufs, v_bufs, bars, o, p, m, l, it, n_blocks - 1 - j, row, k_len - q_len, k_len, scale,
                whole, CAUSAL, OVERLAP,
            )  # fmt: skip
            it += 1
        last = it - 1
        if not SHARE_Q:
            mbarrier.arrive(q_empty.index(slot))
        o = _weigh(o, p, v_bufs, v_full, last)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        mbarrier.arrive(v_empty.index(last % STAGES))
        _finish(o, m, l, o_bufs.index(wg), out, row, head, q_start, q_len, scale)
        if SHARE_Q:
            tma.store_wait(pendings=0)
            fence_async_shared()
            _block_barrier()
            mbarrier.arrive(q_empty.index(slot))
        tile = after
        row, head, q_start, q_len, _k_start, k_len, n_blocks, whole = later
    tma.store_wait(pendings=0)


# ---- kernel


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["blocks", "heads", "section", "H", "GROUP", "total_q", "max_q", "max_k"])
def attention_sm90_kernel(
    q_desc, k_desc, v_desc, o_desc, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, counter_ptr, slots_ptr,
    blocks, heads, section, H, GROUP, total_q, max_q, max_k,
    q_head_stride, k_head_stride, v_head_stride, out_row_stride, out_head_stride, scale,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    OVERLAP: gl.constexpr, Q_BUFS: gl.constexpr, SHARE_Q: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4 on at most as many programs as there are tiles; the others bring their own warps.

    blocks: tiles of the longest sequence of queries. heads: sequences times H. section: heads whose keys fit L2 together.
    GROUP: query heads a KV head. max_q, max_k: of every sequence, where cu_q_ptr and cu_k_ptr are None. scale: times log2(e).
    lse_ptr: None, or float32 [H, total_q]. counter_ptr: one int32 of zero, left as zero. slots_ptr: int32, two a program.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_bufs = gl.allocate_shared_memory(dtype, [Q_BUFS * CONSUMERS, ROWS, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    o_bufs = q_bufs if SHARE_Q else gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D], o_desc.layout)
    q_bars = (_barriers(Q_BUFS * CONSUMERS, 1), _barriers(Q_BUFS * CONSUMERS, 1))
    k_bars = (_barriers(STAGES, 1), _barriers(STAGES, CONSUMERS))
    v_bars = (_barriers(STAGES, 1), _barriers(STAGES, CONSUMERS))
    bars = q_bars + k_bars + v_bars + (_barriers(2, 1), _barriers(2, CONSUMERS))
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs)
    out = (o_desc, out_ptr, lse_ptr, total_q, out_row_stride, out_head_stride)
    grid = (blocks, heads, section, H)
    lengths = (cu_q_ptr, cu_k_ptr, max_q, max_k)
    strides = (q_head_stride, k_head_stride, v_head_stride)
    descs = (q_desc, k_desc, v_desc)
    slots_ptr += gl.program_id(0) * 2
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_attend, (bufs, bars, out, slots_ptr, grid, lengths, scale, 0, CONSUMERS, CAUSAL, OVERLAP, SHARE_Q)),
            (_attend, (bufs, bars, out, slots_ptr, grid, lengths, scale, 1, CONSUMERS, CAUSAL, OVERLAP, SHARE_Q)),
            (_load_tiles, (descs, bufs, bars, counter_ptr, slots_ptr, grid, lengths, GROUP, strides, CONSUMERS, CAUSAL)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (bufs, bars, out, slots_ptr, grid, lengths, scale, 0, CONSUMERS, CAUSAL, OVERLAP, SHARE_Q)),
            (_attend, (bufs, bars, out, slots_ptr, grid, lengths, scale, 1, CONSUMERS, CAUSAL, OVERLAP, SHARE_Q)),
            (_attend, (bufs, bars, out, slots_ptr, grid, lengths, scale, 2, CONSUMERS, CAUSAL, OVERLAP, SHARE_Q)),
            (_load_tiles, (descs, bufs, bars, counter_ptr, slots_ptr, grid, lengths, GROUP, strides, CONSUMERS, CAUSAL)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
