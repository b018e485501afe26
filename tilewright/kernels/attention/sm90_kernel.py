"""Forward attention for Hopper, written in Gluon.

    out[t, h] = sum_s p[s] v[s, g],   p = softmax_s(scale * q[t, h] . k[s, g]),   g = h // (query heads per KV head)

bf16 or fp16. The operands q [T, H, D], k and v [S, KV, D] are packed: sequence b has rows cu_q[b]..cu_q[b + 1] of q, and rows
cu_k[b]..cu_k[b + 1] of k and v. Without cu_q and cu_k all sequences have the same length. Causal masks and windows align the
last query with the last key. A row that sees no key is zero, and its log-sum-exp is -inf. Not supported: soft caps, biases,
prefixes, paged KV; the host side (sm90.py) refuses them. sm90_schedule.py assigns the tiles to the programs.

attention.py has the formulae of the incremental softmax. Here the blocks of keys are visited from the last to the first. The
kernel is limited by the tensor cores, and for D = 64 equally by the exponentials: an SM computes 16 exponentials or 2048
multiply-adds per cycle, and each exponential comes with 2 D multiply-adds. Hence the schedule of FlashAttention-3 (Shah et al.,
2024):

    scheduler   one warp: assigns tiles to the other warps, by an atomic counter because tiles differ in length
    producer    one warp: loads Q by TMA once per tile, and blocks of K and V as many blocks ahead as there are pipeline stages
    consumers   two or three warpgroups of 64 query rows each. With OVERLAP a warpgroup issues Q K^T of the next block, then P V
                of this one, and computes the softmax of the next block while P V runs. P stays in registers: it is the first
                operand of its product. The first scores of the next tile are computed while the result of this tile is stored.
                Forcing the warpgroups to issue their products in turns, so that one computes its softmax while another
                multiplies, was between 4 % slower and 1 % faster: without it they already drift apart

Masking is applied only to blocks that a mask or the end of the keys cuts. Blocks outside the window are not visited.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# T query rows, S key rows, H query heads, D head dim, M rows per tile, N keys per block

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.attention.sm90_schedule import PLACE, ROWS, SLOT, deal_tiles, load_tiles
from tilewright.kernels.hopper.primitives import (
    block_barrier,
    clear_end,
    release,
    row_parts,
    scaled_rows,
    store_box,
    take,
    viewed,
)
from tilewright.kernels.hopper.ring import barriers

__all__ = ["attend", "attention_sm90_kernel", "barriers"]


# ---- consumers


@gluon.jit
def _masked(s, n, row, offset, k_len, window, RIGHT: gl.constexpr, LEFT: gl.constexpr, PACK: gl.constexpr):
    """Scores of block n, set to -inf where a row does not see the key. offset: keys before the first query's own key."""
    layout: gl.constexpr = s.type.layout
    left, right = window
    cols = gl.expand_dims(gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    start = n * s.shape[1]
    if RIGHT or LEFT:
        rows = gl.expand_dims(gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, layout)), 1)
        own = row // PACK + offset - start + rows // PACK
        end = gl.minimum(own + (right + 1), k_len - start) if RIGHT else k_len - start
        s = gl.where(cols < end, s, float("-inf"))
        if LEFT:
            s = gl.where(cols < own - left, float("-inf"), s)
        return s
    else:
        return gl.where(cols < k_len - start, s, float("-inf"))


@gluon.jit
def _exponentials(s, m, scale, CHECK: gl.constexpr):
    """(p, m', 2^(m - m')) of a block's scores. CHECK: a row may have seen no key yet, so that its m is -inf."""
    high = gl.maximum(m, gl.max(s, 1))
    base = high
    if CHECK:
        base = gl.where(high == float("-inf"), 0.0, high)
    p = gl.exp2(s * scale - gl.expand_dims(base * scale, 1))
    # Subtract first, then scale: if the maximum did not change, the factor is exactly 1 however the products round. So a block
    # that a row does not see leaves the row unchanged.
    return p, high, gl.exp2((m - base) * scale)


@gluon.jit
def _as_operand(p, o, dtype: gl.constexpr):
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o.type.layout, k_width=2)
    return gl.convert_layout(p.to(dtype), layout, assert_trivial=True)


@gluon.jit
def _product(q_buf, k_buf, q_tail, k_tail, TAIL: gl.constexpr):
    """Issue Q K^T, and return it in flight. TAIL: the product includes the columns in q_tail and k_tail."""
    N: gl.constexpr = k_buf.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    zero = gl.zeros([ROWS, N], gl.float32, layout)
    s = warpgroup_mma(q_buf, k_buf.permute((1, 0)), zero, use_acc=False, is_async=True)
    if TAIL:
        s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _scores(bufs, slot, k_full, it, TAIL: gl.constexpr):
    """Issue Q K^T for the it-th block of keys, and return it in flight."""
    q_bufs, k_bufs, _, _, q_tails, k_tails = bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    stage = it % STAGES
    mbarrier.wait(k_full.index(stage), it // STAGES & 1)
    return _product(q_bufs.index(slot), k_bufs.index(stage), q_tails.index(slot), k_tails.index(stage), TAIL)


@gluon.jit
def _weigh(o, p, v_bufs, v_full, it):
    """Issue o + P V for the it-th block of keys, and return it in flight."""
    STAGES: gl.constexpr = v_bufs.shape[0]
    mbarrier.wait(v_full.index(it % STAGES), it // STAGES & 1)
    return warpgroup_mma(p, v_bufs.index(it % STAGES), o, is_async=True)


@gluon.jit
def _floor(sinks_ptr, head, scale, layout: gl.constexpr, PACK: gl.constexpr):
    """The initial maximum of each row: the sink of its head, expressed as an unscaled q . k, or -inf without sinks."""
    if sinks_ptr is not None:
        heads = head * PACK + gl.arange(0, ROWS, layout=layout) % PACK
        return gl.load(sinks_ptr + heads).to(gl.float32) * 1.4426950408889634 / scale
    else:
        return gl.full([ROWS], float("-inf"), gl.float32, layout)


@gluon.jit
def _begin(s, v_bufs, v_full, it, seen, floor, scale, RIGHT: gl.constexpr, LEFT: gl.constexpr, PACK: gl.constexpr):
    """The softmax of a tile's first block, which contains its last keys. Returns (weights, m, l)."""
    STAGES: gl.constexpr = v_bufs.shape[0]
    N: gl.constexpr = v_bufs.shape[1]
    row, offset, k_len, last, whole, _cut, window = seen
    if RIGHT or LEFT:
        s = _masked(s, last, row, offset, k_len, window, RIGHT, LEFT, PACK)
    else:
        if last >= whole:
            s = _masked(s, last, row, offset, k_len, window, RIGHT, LEFT, PACK)
    e, m, _ = _exponentials(s, floor, scale, True)
    if k_len - last * N < N:
        mbarrier.wait(v_full.index(it % STAGES), it // STAGES & 1)
        clear_end(v_bufs.index(it % STAGES), k_len - last * N, 8)
    return e, m, row_parts(e)


@gluon.jit
def _step(
    bufs, slot, bars, o, p, m, l, it, n, seen, scale,
    RIGHT: gl.constexpr, LEFT: gl.constexpr, OVERLAP: gl.constexpr, TAIL: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """P V of the preceding block, and the softmax of the it-th block, whose keys begin at n * N. Returns (o, p, m, l)."""
    v_bufs = bufs[2]
    STAGES: gl.constexpr = v_bufs.shape[0]
    k_full, k_empty, v_full, v_empty = bars[2], bars[3], bars[4], bars[5]
    row, offset, k_len, _last, whole, cut, window = seen
    before = it - 1
    if OVERLAP:
        s = _scores(bufs, slot, k_full, it, TAIL)
        o = _weigh(o, p, v_bufs, v_full, before)
        s = warpgroup_mma_wait(1, deps=(s,))
    else:
        o = _weigh(o, p, v_bufs, v_full, before)
        s = _scores(bufs, slot, k_full, it, TAIL)
        o, p, s = warpgroup_mma_wait(0, deps=(o, p, s))
        release(v_empty.index(before % STAGES))
    release(k_empty.index(it % STAGES))
    if RIGHT:
        if n >= whole:
            s = _masked(s, n, row, offset, k_len, window, RIGHT, False, PACK)
    if LEFT:
        if n < cut:
            s = _masked(s, n, row, offset, k_len, window, False, LEFT, PACK)
    e, m, alpha = _exponentials(s, m, scale, RIGHT or LEFT)
    l = scaled_rows(l, alpha) + row_parts(e)
    if OVERLAP:
        # ptxas would move the wait for P V before the exponentials, but it moves nothing across a loop. The wait on a barrier
        # is a loop, and ends at once here because `_weigh` has already waited for this barrier.
        mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
        o, p, e = warpgroup_mma_wait(0, deps=(o, p, e))
        release(v_empty.index(before % STAGES))
    p = _as_operand(e, o, v_bufs.dtype)
    return scaled_rows(o, alpha), p, m, l


@gluon.jit
def _store_rows(o_buf, out, row, head, q_start, q_len, PACK: gl.constexpr):
    """Store those of the consumer's rows that exist, with ordinary stores of the threads instead of TMA."""
    o_desc, out_ptr, _, total_q, out_row_stride, out_head_stride, _ = out
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at = row + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(gl.arange(0, o_buf.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    token = q_start + at // PACK
    live = at < q_len * PACK
    if len(o_desc.block_type.shape) == 3:
        live &= (token >= 0) & (token < total_q)
    heads = head * PACK + at % PACK
    ptrs = out_ptr + token.to(gl.int64) * out_row_stride + heads * out_head_stride + cols
    gl.store(ptrs, o_buf.load(layout), mask=live)


@gluon.jit
def _finish(o, m, l, o_buf, out, row, head, q_start, q_len, floor, scale, PACK: gl.constexpr):
    """Divide, round, and store those of the consumer's rows that exist, through shared memory."""
    o_desc, out_ptr, lse_ptr, total_q, _, out_head_stride, sinks_ptr = out
    weight = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    if sinks_ptr is not None:
        weight += gl.convert_layout(gl.exp2((floor - m) * scale), weight.type.layout, assert_trivial=True)
    o = o * gl.expand_dims(gl.where(weight == 0.0, 0.0, 1.0 / weight), 1)
    tma.store_wait(pendings=0)
    block_barrier()
    o_buf.store(o.to(out_ptr.dtype.element_ty))
    if lse_ptr is not None:
        rows = row + gl.arange(0, ROWS, layout=m.type.layout)
        total = gl.convert_layout(weight, m.type.layout, assert_trivial=True)
        # scale already includes log2(e)
        lse = (m * scale + gl.log2(total)) * 0.6931471805599453
        gl.store(lse_ptr + head.to(gl.int64) * total_q + q_start + rows, lse, mask=rows < q_len)
    if row + ROWS <= q_len * PACK:
        fence_async_shared()
        block_barrier()
        if len(o_desc.block_type.shape) == 3:
            PANEL: gl.constexpr = o_desc.block_type.shape[2]
            PANELS: gl.constexpr = o_buf.shape[1] // PANEL
            LAYOUT: gl.constexpr = o_desc.layout
            boxes = viewed(o_buf, o_buf.dtype, [PANELS, ROWS // PACK, PACK, PANEL], LAYOUT)
            for panel in gl.static_range(PANELS):
                store_box(o_desc, [q_start + row // PACK, head * PACK, panel * PANEL], boxes.index(panel))
        else:
            store_box(o_desc, [q_start + row, head * out_head_stride], o_buf)
    else:
        _store_rows(o_buf, out, row, head, q_start, q_len, PACK)


@gluon.jit
def _first_scores(
    bufs, bars, it, n, tile, total, wg: gl.constexpr, CONSUMERS: gl.constexpr, TAIL: gl.constexpr
):  # fmt: skip
    """Issue Q K^T for a tile's first block, and return it in flight. After the last tile the result is garbage and unused."""
    q_bufs, k_bufs, _, _, q_tails, k_tails = bufs
    q_full, k_full = bars[0], bars[2]
    STAGES: gl.constexpr = k_bufs.shape[0]
    Q_BUFS: gl.constexpr = q_bufs.shape[0] // CONSUMERS
    slot = n % Q_BUFS * CONSUMERS + wg
    stage = it % STAGES
    if tile < total:
        mbarrier.wait(q_full.index(slot), n // Q_BUFS & 1)
        mbarrier.wait(k_full.index(stage), it // STAGES & 1)
    s = _product(q_bufs.index(slot), k_bufs.index(stage), q_tails.index(slot), k_tails.index(stage), TAIL)
    return s


@gluon.jit
def attend(
    bufs, bars, out, slots_ptr, where, scale,
    wg: gl.constexpr, CONSUMERS: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
    OVERLAP: gl.constexpr, SHARE_Q: gl.constexpr, TAIL: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """A consumer's rows of all the tiles of its program.

    PACK: number of query heads that share a KV head and are packed into one tile. The rows of a tile are the PACK heads of
    query 0, then those of query 1, and so on; `head` counts groups of PACK heads.
    """
    q_bufs, k_bufs, v_bufs, o_bufs, _, _ = bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    DV: gl.constexpr = v_bufs.shape[2]
    Q_BUFS: gl.constexpr = q_bufs.shape[0] // CONSUMERS
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    q_empty, k_empty, v_full, v_empty, tile_full, tile_empty = bars[1], bars[3], bars[4], bars[5], bars[6], bars[7]
    total = where[0][0] * where[0][1]
    it = 0
    n = 0
    tile, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)
    s = _first_scores(bufs, bars, it, n, tile, total, wg, CONSUMERS, TAIL)
    s = warpgroup_mma_wait(0, deps=(s,))
    while tile < total:
        release(k_empty.index(it % STAGES))
        row, head, q_start, q_len, _k_start, k_len, last, count, whole, cut = place
        row += wg * ROWS
        slot = n % Q_BUFS * CONSUMERS + wg
        seen = (row, k_len - q_len, k_len, last, whole, cut, where[2])
        floor = _floor(out[6], head, scale, gl.SliceLayout(1, s.type.layout), PACK)
        e, m, l = _begin(s, v_bufs, v_full, it, seen, floor, scale, RIGHT, LEFT, PACK)
        o = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
        p = _as_operand(e, o, v_bufs.dtype)
        it += 1
        for j in range(1, count):
            o, p, m, l = _step(
                bufs, slot, bars, o, p, m, l, it, last - j, seen, scale, RIGHT, LEFT, OVERLAP, TAIL, PACK,
            )  # fmt: skip
            it += 1
        if not SHARE_Q:
            release(q_empty.index(slot))
        o = _weigh(o, p, v_bufs, v_full, it - 1)
        n += 1
        tile, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        release(v_empty.index((it - 1) % STAGES))
        if SHARE_Q:
            _finish(o, m, l, o_bufs.index(wg), out, row, head, q_start, q_len, floor, scale, PACK)
            tma.store_wait(pendings=0)
            fence_async_shared()
            release(q_empty.index(slot))
        # The next tile's first scores are computed while this one's result is divided, rounded and stored.
        s = _first_scores(bufs, bars, it, n, tile, total, wg, CONSUMERS, TAIL)
        if not SHARE_Q:
            _finish(o, m, l, o_bufs.index(wg), out, row, head, q_start, q_len, floor, scale, PACK)
        s = warpgroup_mma_wait(0, deps=(s,))
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["blocks", "heads", "section", "H", "GROUP", "total_q", "max_q", "max_k", "left", "right"])
def attention_sm90_kernel(
    q_desc, k_desc, v_desc, o_desc, q_tail_desc, k_tail_desc,
    out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, counter_ptr, slots_ptr,
    blocks, heads, section, H, GROUP, total_q, max_q, max_k, left, right,
    q_head_stride, k_head_stride, v_head_stride, out_row_stride, out_head_stride, scale,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    RIGHT: gl.constexpr, LEFT: gl.constexpr,
    OVERLAP: gl.constexpr, Q_BUFS: gl.constexpr, SHARE_Q: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4, on at most as many programs as there are tiles; the other partitions bring their own warps.

    blocks: tiles of the longest sequence of queries. heads: sequences times H. section: heads that are computed at a time.
    GROUP: query heads per KV head. max_q, max_k: the lengths of every sequence, if cu_q_ptr and cu_k_ptr are None. scale:
    already multiplied by log2(e). lse_ptr: None, or float32 [H, total_q]. sinks_ptr: None, or [H]. counter_ptr: one int32 zero;
    it is zero again at the end. slots_ptr: int32, 2 * SLOT per program. D, TAIL: a head of queries or keys has D columns, and
    TAIL more that are loaded through descriptors of their own (the width of a tile is a power of two). DV: columns of a head of
    values. RIGHT, LEFT: whether a row sees keys only up to `right` after its own key, and only from `left` before it.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_bufs = gl.allocate_shared_memory(dtype, [Q_BUFS * CONSUMERS, ROWS, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DV], v_desc.layout)
    o_bufs = q_bufs if SHARE_Q else gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, DV], o_desc.layout)
    q_bars = (barriers(Q_BUFS * CONSUMERS, 1), barriers(Q_BUFS * CONSUMERS, 1))
    k_bars = (barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    v_bars = (barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    bars = q_bars + k_bars + v_bars + (barriers(2, 1), barriers(2, CONSUMERS + 1), barriers(1, 1))
    q_tails = q_bufs
    k_tails = k_bufs
    if TAIL:
        q_tails = gl.allocate_shared_memory(dtype, [Q_BUFS * CONSUMERS, ROWS, TAIL], q_tail_desc.layout)
        k_tails = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, TAIL], k_tail_desc.layout)
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs, q_tails, k_tails)
    out = (o_desc, out_ptr, lse_ptr, total_q, out_row_stride, out_head_stride, sinks_ptr)
    strides = (q_head_stride, k_head_stride, v_head_stride)
    descs = (q_desc, k_desc, v_desc, q_tail_desc, k_tail_desc)
    slots_ptr += gl.program_id(0) * (2 * SLOT)
    where = ((blocks, heads, section, H), (cu_q_ptr, cu_k_ptr, max_q, max_k), (left, right))
    if CONSUMERS == 2:
        gl.warp_specialize([
            (attend, (bufs, bars, out, slots_ptr, where, scale, 0, CONSUMERS, RIGHT, LEFT, OVERLAP, SHARE_Q, TAIL, 1)),
            (attend, (bufs, bars, out, slots_ptr, where, scale, 1, CONSUMERS, RIGHT, LEFT, OVERLAP, SHARE_Q, TAIL, 1)),
            (load_tiles, (descs, bufs, bars, slots_ptr, where, GROUP, strides, CONSUMERS)),
            (deal_tiles, (bars, counter_ptr, slots_ptr, where, CONSUMERS * ROWS, BLOCK_N, RIGHT, LEFT)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (attend, (bufs, bars, out, slots_ptr, where, scale, 0, CONSUMERS, RIGHT, LEFT, OVERLAP, SHARE_Q, TAIL, 1)),
            (attend, (bufs, bars, out, slots_ptr, where, scale, 1, CONSUMERS, RIGHT, LEFT, OVERLAP, SHARE_Q, TAIL, 1)),
            (attend, (bufs, bars, out, slots_ptr, where, scale, 2, CONSUMERS, RIGHT, LEFT, OVERLAP, SHARE_Q, TAIL, 1)),
            (load_tiles, (descs, bufs, bars, slots_ptr, where, GROUP, strides, CONSUMERS)),
            (deal_tiles, (bars, counter_ptr, slots_ptr, where, CONSUMERS * ROWS, BLOCK_N, RIGHT, LEFT)),
        ], [4, 4, 1, 1], [160, 160, 32, 32])  # fmt: skip
