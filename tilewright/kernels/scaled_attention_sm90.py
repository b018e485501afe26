"""Attention over float8 codes for Hopper, scheduled by hand in Gluon.

scaled_attention.py has the definition; attention_sm90.py the schedule, which is the same here: a producer warp has the copy
engine fetch queries, and blocks of keys and values from the last to the first (scaled_attention_sm90_tiles.py); two warpgroups
of 64 query rows each multiply. What 8 bits change:

    queries     arrive as they are. Under a tile's last product the consumer codes the next tile's, row by row
    operands    float8 products read both operands with the summed dimension dense, so the values come transposed [D, keys]
    weights     P stays in the registers. Its product wants four neighbouring keys in a thread, where the scores' product left
                two and two of 16: the quantiser has put the keys of the values into that order, a renaming of P's columns
    scales      of a query and of 128 keys: a factor of the exponent. The values' scale is a power of two for 128 keys, and goes
                into the factor by which a new maximum corrects the sum so far
    maxima      are rounded up to whole numbers (in the exponent of 2), so corrections are exact, and a weight is rounded to
                the same float8 number whatever the maximum was when its block came by
    sums        stay in the tensor core, which adds float8 products with some 14 bits: adding each block in float32 changed the
                error against float32 operands by less than 1 % of it at 16384 keys
    overlap     under a block's softmax run both the product with the values of the block before and the scores of the block
                behind: no softmax waits for its scores

Not supported: what scaled_attention_sm90_launch.py refuses.
"""
# Gluon reads `name: gl.constexpr = value` as "known to the compiler"; to a type checker it is a value of another type.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false

# D head dim, N keys of a block, B sequences, H query heads, G key/value heads

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.hopper import block_barrier, store_box
from tilewright.kernels.scaled_attention_sm90_tiles import KEYS, ROWS, SLOT, load_tiles, take

__all__ = ["scaled_attention_sm90_kernel"]


_PACK = gl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"
)
_LARGEST = gl.constexpr(448.0)
_SMALLEST = gl.constexpr(2.0**-40)  # of a largest magnitude: products of two scales are no denormal numbers
_TOP = gl.constexpr(8.0)  # weights go up to 2^8: float8 has numbers from 2^-9 to 448

# ---- consumers


@gluon.jit
def _along(dim: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """0, 1 .. size - 1 along one of four dimensions."""
    if dim == 0:
        x = gl.arange(0, size, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)
    elif dim == 1:
        x = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3)
    elif dim == 2:
        x = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 3)
    else:
        x = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2)


@gluon.jit
def _masked(s, n, row, offset, keys, CAUSAL: gl.constexpr):
    """Scores of block n with -inf where a row does not see a key. offset: keys before the first query's."""
    # Column 8 i + 2 j + k: i and k are known to the compiler, j is the thread's. A whole column number would be 32 registers.
    apart = s.reshape([ROWS, KEYS // 8, 4, 2])
    layout: gl.constexpr = apart.type.layout
    end = keys - n * KEYS
    if CAUSAL:
        end = gl.minimum(row + offset - n * KEYS + 1 + _along(0, ROWS, layout), end)
    known = 8 * _along(1, KEYS // 8, layout) + _along(3, 2, layout)
    apart = gl.where(known < end - 2 * _along(2, 4, layout), apart, float("-inf"))
    return gl.convert_layout(apart.reshape([ROWS, KEYS]), s.type.layout, assert_trivial=True)


@gluon.jit
def _row_parts(p):
    """Sums along the rows of what each thread has: [rows, 4], one column for each of the threads that share a row."""
    # What wgmma deals out: a thread has pairs of columns, 8 apart.
    apart = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(apart, 3), 1)


@gluon.jit
def _exponentials(s, m, factor, CHECK: gl.constexpr):
    """(2^8 p, m', 2^(m - m')) of a block's scores; m' is whole. CHECK: a row may have seen no key yet; its m is -inf."""
    high = gl.maximum(m, gl.ceil(gl.max(s, 1) * factor))
    base = high
    if CHECK:
        base = gl.where(high == float("-inf"), 0.0, high)
    return gl.exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(base - _TOP, 1)), high, gl.exp2(m - base)


@gluon.jit
def _scaled_rows(x, alpha):
    """x [rows, any] times alpha [rows]. Each thread has the alphas of its rows."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(alpha, layout, assert_trivial=True), 1)


@gluon.jit
def _packed(e):
    """Weights [rows, keys] in float8, four neighbours of the values' order in each int32: [rows, keys / 16, 4].

    Packed, for what a loop carries as single numbers of 8 bits has a register for each.
    """
    apart = e.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(apart)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return gl.inline_asm_elementwise(_PACK, "=r,r,r,r,r", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _byte(packed, i: gl.constexpr):
    return ((packed >> 8 * i) & 0xFF).to(gl.int8).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _as_operand(packed, D: gl.constexpr):
    """Packed weights as the first operand of the product with the values: the same registers, no instruction."""
    parent: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=parent, k_width=4)
    low = gl.join(_byte(packed, 0), _byte(packed, 1))
    high = gl.join(_byte(packed, 2), _byte(packed, 3))
    p = gl.join(low, high).permute((0, 1, 2, 4, 3)).reshape([ROWS, KEYS])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def _code_queries(q_bufs, raw_bufs, raw_full, raw_empty, n, wg: gl.constexpr, scale):
    """The consumer's queries of its n-th tile as codes in q_bufs; scale times each row's own scale."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    # Rows as the scores have them, four neighbours a thread.
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores, k_width=4)
    mbarrier.wait(raw_full.index(wg), n & 1)
    x = raw_bufs.index(wg).load(layout).to(gl.float32)
    amax = gl.maximum(gl.max(gl.abs(x), 1), _SMALLEST)
    inverse = gl.div_rn(gl.full([ROWS], _LARGEST, gl.float32, amax.type.layout), amax)
    q_bufs.index(wg).store((x * gl.expand_dims(inverse, 1)).to(gl.float8e4nv))
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(raw_empty.index(wg))
    return gl.convert_layout(amax * (scale / _LARGEST), gl.SliceLayout(1, scores), assert_trivial=True)


@gluon.jit
def _product(q_buf, k_buf):
    """Q K^T, in flight."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return warpgroup_mma(q_buf, k_buf.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weigh(p, v_buf, o, use_acc):
    """P V, in flight, added to o; alone without use_acc."""
    return warpgroup_mma(_as_operand(p, o.shape[1]), v_buf.permute((1, 0)), o, use_acc=use_acc, is_async=True)


@gluon.jit
def _step(bufs, wg: gl.constexpr, bars, state, it, j, place, seen, scale_ptrs, of_group, factor, CAUSAL: gl.constexpr):
    """The softmax of a tile's j-th block; under it, P V of the block before and the scores of the block behind.

    A tile's first block has none before it, its last none behind: those products are of whatever the memory holds, the one left
    out of the sum, the other not read.
    """
    s, o, p, m, l, k_scale, v_scale = state
    q_bufs, k_bufs, v_bufs, _, _ = bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    full, empty = bars[2], bars[3]
    row, offset, keys = seen
    n = place[2] - j
    stage = it % STAGES
    phase = it // STAGES & 1
    mbarrier.wait(full.index(stage), phase)
    # In this order: the other way round was 3 % slower.
    ahead = _product(q_bufs.index(wg), k_bufs.index(stage))
    o = _weigh(p, v_bufs.index(stage), o, j > 1)
    own_v_scale = gl.load(scale_ptrs[1] + of_group + n)
    next_k_scale = gl.load(scale_ptrs[0] + of_group + gl.maximum(n - 1, 0))
    if n >= place[3]:
        s = _masked(s, n, row, offset, keys, CAUSAL)
    e, m, alpha = _exponentials(s, m, factor * k_scale, CAUSAL)
    l = _scaled_rows(l, alpha) + _row_parts(e)
    # The assembler would wait for the products before the exponentials, but moves nothing across a loop. This one ends at once.
    mbarrier.wait(full.index(stage), phase)
    o, ahead, e = warpgroup_mma_wait(0, deps=(o, ahead, e))
    mbarrier.arrive(empty.index(stage))
    o = _scaled_rows(o, alpha * (v_scale / own_v_scale))
    # Packed now: while a product is in flight no operand of the next one may be written, or the assembler makes them all wait.
    return ahead, o, _packed(e), m, l, next_k_scale, own_v_scale


@gluon.jit
def _finish(o, l, v_scale, o_buf, out, row, head, queries):
    """Divide, round, and store what exists of the consumer's rows, through shared memory."""
    o_desc, out_ptr, H = out
    D: gl.constexpr = o.shape[1]
    weight = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    o = o * gl.expand_dims(gl.where(weight == 0.0, 0.0, v_scale / weight), 1)
    tma.store_wait(pendings=0)
    block_barrier()
    o_buf.store(o.to(out_ptr.dtype.element_ty))
    start = head // H * queries
    col = head % H * D
    if row + ROWS <= queries:
        fence_async_shared()
        block_barrier()
        store_box(o_desc, [start + row, col], o_buf)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        at = row + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
        cols = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, layout)), 0)
        ptrs = out_ptr + (start + at).to(gl.int64) * (H * D) + col + cols
        block_barrier()
        gl.store(ptrs, o_buf.load(layout), mask=at < queries)


@gluon.jit
def _scales_of(tile, place, total, k_scale_ptr, v_scale_ptr, padded_k, SHARED):
    """A tile's (scale of its first keys, of its first values, place of its head's scales)."""
    _row, head, last, _whole = place
    of_group = head // SHARED * (padded_k // KEYS)
    k_scale = gl.load(k_scale_ptr + of_group + last, mask=tile < total, other=0.0)
    v_scale = gl.load(v_scale_ptr + of_group + last, mask=tile < total, other=0.0)
    return k_scale, v_scale, of_group


@gluon.jit
def _attend(
    bufs, bars, out, slots_ptr, where, k_scale_ptr, v_scale_ptr, scale, padded_k, SHARED,
    wg: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs, o_bufs, raw_bufs = bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    D: gl.constexpr = v_bufs.shape[1]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    raw_full, raw_empty, full, empty, tile_full, tile_empty = bars
    blocks, heads, _section, queries, keys = where
    total = blocks * heads
    scales = (k_scale_ptr, v_scale_ptr)
    it = 0
    n = 0
    tile, place = take(n, slots_ptr, tile_full, tile_empty)
    k_scale, v_scale, of_group = _scales_of(tile, place, total, k_scale_ptr, v_scale_ptr, padded_k, SHARED)
    factor = _code_queries(q_bufs, raw_bufs, raw_full, raw_empty, n, wg, scale)
    mbarrier.wait(full.index(0), 0)
    s = _product(q_bufs.index(wg), k_bufs.index(0))
    s = warpgroup_mma_wait(0, deps=(s,))
    while tile < total:
        mbarrier.arrive(empty.index(it % STAGES))
        it += 1
        row, head, last, _whole = place
        row += wg * ROWS
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
        l = _row_parts(gl.zeros_like(s))
        o = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        state = (s, o, _packed(gl.zeros_like(s)), m, l, k_scale, v_scale)
        seen = (row, keys - queries, keys)
        # By two, or the scores ahead would be moved to where this block's are, a register at a time.
        for j in range(0, last, 2):
            state = _step(bufs, wg, bars, state, it, j, place, seen, scales, of_group, factor, CAUSAL)
            state = _step(bufs, wg, bars, state, it + 1, j + 1, place, seen, scales, of_group, factor, CAUSAL)
            it += 2
        if last % 2 == 0:
            state = _step(bufs, wg, bars, state, it, last, place, seen, scales, of_group, factor, CAUSAL)
            it += 1
        s, o, p, m, l, k_scale, v_scale = state
        of_result = v_scale
        mbarrier.wait(full.index(it % STAGES), it // STAGES & 1)
        o = _weigh(p, v_bufs.index(it % STAGES), o, last > 0)
        n += 1
        tile, place = take(n, slots_ptr, tile_full, tile_empty)
        k_scale, v_scale, of_group = _scales_of(tile, place, total, k_scale_ptr, v_scale_ptr, padded_k, SHARED)
        if tile < total:
            factor = _code_queries(q_bufs, raw_bufs, raw_full, raw_empty, n, wg, scale)
        o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(empty.index(it % STAGES))
        it += 1
        # The next tile's first scores are computed while this one's result is divided, rounded and stored. Beyond the last tile
        # they are of whatever the memory holds, and nobody reads them.
        if tile < total:
            mbarrier.wait(full.index(it % STAGES), it // STAGES & 1)
        s = _product(q_bufs.index(wg), k_bufs.index(it % STAGES))
        _finish(o, l, of_result, o_bufs.index(wg), out, row, head, queries)
        s = warpgroup_mma_wait(0, deps=(s,))
    tma.store_wait(pendings=0)


# ---- kernel


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["blocks", "heads", "section", "H", "SHARED", "queries", "keys", "padded_k"])
def scaled_attention_sm90_kernel(
    q_desc, k_desc, v_desc, o_desc, out_ptr, k_scale_ptr, v_scale_ptr, counter_ptr, slots_ptr,
    blocks, heads, section, H, SHARED, queries, keys, padded_k, q_head_stride, scale,
    STAGES: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4 on at most as many programs as there are tiles; the others bring their own warps.

    blocks: tiles of 128 queries a head. heads: sequences times H. section: heads that are computed at a time. SHARED: query
    heads a KV head. padded_k: rows of codes a head. scale: times log2(e). counter_ptr: one int32 of zero, left as zero.
    slots_ptr: int32, 2 * SLOT a program.
    """
    q_bufs = gl.allocate_shared_memory(
        gl.float8e4nv, [2, ROWS, D], gl.NVMMASharedLayout.get_default_for([ROWS, D], gl.float8e4nv)
    )
    k_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, KEYS, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, D, KEYS], v_desc.layout)
    o_bufs = gl.allocate_shared_memory(o_desc.dtype, [2, ROWS, D], o_desc.layout)
    raw_bufs = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, D], q_desc.layout)
    bars = (_barriers(2, 1), _barriers(2, 1), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(2, 1), _barriers(2, 2))
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs, raw_bufs)
    descs = (q_desc, k_desc, v_desc, o_desc)
    out = (o_desc, out_ptr, H)
    slots_ptr += gl.program_id(0) * (2 * SLOT)
    where = (blocks, heads, section, queries, keys)
    ks = k_scale_ptr
    vs = v_scale_ptr
    gl.warp_specialize([
        (_attend, (bufs, bars, out, slots_ptr, where, ks, vs, scale, padded_k, SHARED, 0, CAUSAL)),
        (_attend, (bufs, bars, out, slots_ptr, where, ks, vs, scale, padded_k, SHARED, 1, CAUSAL)),
        (load_tiles, (descs, bufs, bars, counter_ptr, slots_ptr, where, H, SHARED, q_head_stride, padded_k, CAUSAL)),
    ], [4, 1], [240, 24])  # fmt: skip
