"""Attention over float8 codes for Hopper, written in Gluon.

attention.py has the definition. A producer warp loads queries by TMA, and blocks of keys and values from the last to the first
(sm90_schedule.py); three consumer warpgroups have 64 query rows each. The differences from the 16-bit kernel
(attention/sm90_kernel.py):

    schedule    a product takes half as long as the exponentials that run beside it, so one warpgroup gains little by
    overlapping
                its own work (docs/log.md#8-bits); more warpgroups are better. With three, a thread has 160 registers, which
                scores and sums of 128 dims fill. So each warpgroup works sequentially, and the warpgroups overlap each other
    diagonal    a warpgroup begins with the last block of keys that one of its own rows sees, and masks only for its own rows
    queries     are loaded in 16 bits. Before a consumer stores a tile's result, it quantises the next tile's queries, row by
    row operands    float8 products need both operands contiguous in the summed dimension, so the values are transposed [D,
    keys] weights     P stays in registers. Its product needs four adjacent keys per thread, but the scores' product leaves two
    pairs
                out of 16. The quantiser has stored the values in that order of keys, so P's columns need no data movement
    scales      per query and per 128 keys: factors of the exponent. The scale of values is a power of two per 128 keys, and is
                included in the factor by which a new maximum corrects the sum so far
    maxima      are rounded up to whole numbers (in the exponent of 2). So corrections are exact, and a weight is rounded to the
                same float8 number whatever the maximum was when its block was processed. Maxima seldom change: a warp skips the
                multiplications if the factors of all its rows are 1
    sums        stay in the tensor core, which adds float8 products with some 14 bits. Adding each block in float32 instead
                changed the error against float32 operands by less than 1 % of it at 16384 keys

Not supported: problems that sm90.py refuses.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# D head dim, N keys per block, B sequences, H query heads, G key/value heads

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.attention.fp8.sm90_schedule import CONSUMERS, KEYS, PLACE, ROWS, SLOT, deal_tiles, load_tiles
from tilewright.kernels.hopper.primitives import block_barrier, release, row_parts, scaled_rows, store_box, take
from tilewright.kernels.hopper.ring import barriers

__all__ = ["scaled_attention_sm90_kernel"]


_PACK = gl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"
)
_LARGEST = gl.constexpr(448.0)
_SMALLEST = gl.constexpr(2.0**-40)  # lower bound of a largest magnitude: the product of two scales is not a denormal number
_TOP = gl.constexpr(8.0)  # weights go up to 2^8: float8 has numbers from 2^-9 to 448


def _correction(numbers: int) -> str:
    """PTX that multiplies a thread's numbers by the factors of their rows, unless the factors are 1 in all lanes of the warp.

    Operands: results, numbers, and a factor for each number. A thread has two rows, and alternates two numbers of each.
    """
    copies = " ".join(f"mov.f32 ${i}, ${numbers + i};" for i in range(numbers))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * numbers + i};" for i in range(numbers))
    one, other = f"${2 * numbers}", f"${2 * numbers + 2}"
    moved = f"setp.ne.f32 a, {one}, 0f3F800000; setp.ne.or.f32 a, {other}, 0f3F800000, a; vote.sync.any.pred a, a, 0xffffffff;"
    return f"{{ .reg .pred a; {copies} {moved} @!a bra DONE; {products} DONE: }}"


def _operands(numbers: int) -> str:
    return ",".join(["=f"] * numbers + ["f"] * (2 * numbers))


_CORRECTION_32 = gl.constexpr(_correction(32))
_CORRECTION_64 = gl.constexpr(_correction(64))
_OPERANDS_32 = gl.constexpr(_operands(32))
_OPERANDS_64 = gl.constexpr(_operands(64))

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
    """Scores of block n, set to -inf where a row does not see the key. offset: keys before the first query's own key."""
    # Column 8 i + 2 j + k: i and k are compile-time constants, j belongs to the thread. Full column numbers need 32 registers.
    apart = s.reshape([ROWS, KEYS // 8, 4, 2])
    layout: gl.constexpr = apart.type.layout
    end = keys - n * KEYS
    if CAUSAL:
        end = gl.minimum(row + offset - n * KEYS + 1 + _along(0, ROWS, layout), end)
    known = 8 * _along(1, KEYS // 8, layout) + _along(3, 2, layout)
    apart = gl.where(known < end - 2 * _along(2, 4, layout), apart, float("-inf"))
    return gl.convert_layout(apart.reshape([ROWS, KEYS]), s.type.layout, assert_trivial=True)


@gluon.jit
def _exponentials(s, m, factor, CHECK: gl.constexpr):
    """(2^8 p, m', 2^(m - m')) of a block's scores; m' is whole. CHECK: a row may have seen no key yet, so that its m is
    -inf."""
    high = gl.maximum(m, gl.ceil(gl.max(s, 1) * factor))
    base = high
    if CHECK:
        base = gl.where(high == float("-inf"), 0.0, high)
    return gl.exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(base - _TOP, 1)), high, gl.exp2(m - base)


@gluon.jit
def _corrected(o, factor):
    """o [rows, D] times factor [rows]; a warp whose factors are all 1 skips the multiplications."""
    layout: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    f = gl.expand_dims(gl.convert_layout(factor, layout, assert_trivial=True), 1).broadcast_to(o.shape)
    if o.shape[1] == 64:
        return gl.inline_asm_elementwise(_CORRECTION_32, _OPERANDS_32, [o, f], dtype=gl.float32, is_pure=True, pack=32)
    else:
        return gl.inline_asm_elementwise(_CORRECTION_64, _OPERANDS_64, [o, f], dtype=gl.float32, is_pure=True, pack=64)


@gluon.jit
def _packed(e):
    """Weights [rows, keys] in float8, packed: each int32 contains four neighbours in the values' order, [rows, keys / 16, 4].

    Packed, because a loop that carries single 8-bit numbers uses a register for each.
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
    """Quantise the queries of the consumer's n-th tile into q_bufs. Returns scale times each row's own scale."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    # The rows of the scores' layout, four adjacent numbers per thread.
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores, k_width=4)
    mbarrier.wait(raw_full.index(wg), n & 1)
    x = raw_bufs.index(wg).load(layout).to(gl.float32)
    amax = gl.maximum(gl.max(gl.abs(x), 1), _SMALLEST)
    inverse = gl.div_rn(gl.full([ROWS], _LARGEST, gl.float32, amax.type.layout), amax)
    q_bufs.index(wg).store((x * gl.expand_dims(inverse, 1)).to(gl.float8e4nv))
    fence_async_shared()
    release(raw_empty.index(wg))
    return gl.convert_layout(amax * (scale / _LARGEST), gl.SliceLayout(1, scores), assert_trivial=True)


@gluon.jit
def _product(q_buf, k_buf):
    """Issue Q K^T, and return it in flight."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32])
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return warpgroup_mma(q_buf, k_buf.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weigh(p, v_buf, o):
    """Issue o + P V, and return it in flight."""
    return warpgroup_mma(_as_operand(p, o.shape[1]), v_buf.permute((1, 0)), o, is_async=True)


@gluon.jit
def _step(bufs, wg: gl.constexpr, bars, state, it, n, seen, scale_ptrs, factor, CAUSAL: gl.constexpr):
    """The softmax and P V of block n, and the scores of the following block; both from unit `it` of the ring.

    After the last block there is no following block: its scores are garbage and unused.
    """
    s, o, m, l, k_scale, v_scale = state
    q_bufs, k_bufs, v_bufs, _, _ = bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    full, empty = bars[2], bars[3]
    row, offset, keys, whole = seen
    stage = it % STAGES
    own_v_scale = gl.load(scale_ptrs[1] + n)
    next_k_scale = gl.load(scale_ptrs[0] + gl.maximum(n - 1, 0))
    if n >= whole:
        s = _masked(s, n, row, offset, keys, CAUSAL)
    e, m, alpha = _exponentials(s, m, factor * k_scale, CAUSAL)
    l = scaled_rows(l, alpha) + row_parts(e)
    # This wait comes before the weights are packed, so that ptxas keeps packing and exponentials apart.
    mbarrier.wait(full.index(stage), it // STAGES & 1)
    p = _packed(e)
    o = _corrected(o, alpha * (v_scale / own_v_scale))
    o = _weigh(p, v_bufs.index(stage), o)
    if v_bufs.shape[1] == 64:
        s = _product(q_bufs.index(wg), k_bufs.index(stage))
        o, p, s = warpgroup_mma_wait(0, deps=(o, p, s))
    else:
        # P, sums and the next scores together need more than 160 registers: ptxas would then serialise all products.
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        s = _product(q_bufs.index(wg), k_bufs.index(stage))
        s = warpgroup_mma_wait(0, deps=(s,))
    release(empty.index(stage))
    return s, o, m, l, next_k_scale, own_v_scale


@gluon.jit
def _finish(o, l, v_scale, o_buf, out, row, head, queries):
    """Divide, round, and store those of the consumer's rows that exist, through shared memory."""
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
def _own_blocks(row, last, queries, keys, CAUSAL: gl.constexpr):
    """(last block of keys that one of a consumer's rows sees, first block with keys to mask). row: the consumer's first row."""
    whole = keys // KEYS
    if CAUSAL:
        own = row + keys - queries  # the first row's own key
        last = gl.minimum(gl.maximum(own + ROWS - 1, 0) // KEYS, last)
        whole = gl.minimum(gl.maximum(own + 1, 0) // KEYS, whole)
    return last, whole


@gluon.jit
def _first_scores(
    bufs, bars, n, it, place, wg: gl.constexpr, scale_ptrs, scale, padded_k, where, SHARED, CAUSAL: gl.constexpr
):  # fmt: skip
    """Prepare a consumer's n-th tile. Returns (unit of its first keys, its last block, `whole`, factor, scales and pointers).

    Quantises its queries, skips the units of keys that none of its rows sees, and waits for the first unit that one row sees.
    """
    _, _, _, queries, keys = where
    raw_full, raw_empty, full, empty = bars[0], bars[1], bars[2], bars[3]
    STAGES: gl.constexpr = bufs[1].shape[0]
    row, head, last = place
    own_last, whole = _own_blocks(row + wg * ROWS, last, queries, keys, CAUSAL)
    k_scale_ptr = scale_ptrs[0] + head // SHARED * (padded_k // KEYS)
    v_scale_ptr = scale_ptrs[1] + head // SHARED * (padded_k // KEYS)
    k_scale = gl.load(k_scale_ptr + own_last)
    v_scale = gl.load(v_scale_ptr + own_last)
    factor = _code_queries(bufs[0], bufs[4], raw_full, raw_empty, n, wg, scale)
    for i in range(it, it + last - own_last):
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        release(empty.index(i % STAGES))
    it += last - own_last
    mbarrier.wait(full.index(it % STAGES), it // STAGES & 1)
    return it, own_last, whole, factor, k_scale, v_scale, k_scale_ptr, v_scale_ptr


@gluon.jit
def _attend(
    bufs, bars, out, slots_ptr, where, scale_ptrs, scale, padded_k, SHARED, wg: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """A consumer's rows of all the tiles of its program."""
    q_bufs, k_bufs, v_bufs, o_bufs, _ = bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    D: gl.constexpr = v_bufs.shape[1]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    empty, tile_full, tile_empty = bars[3], bars[4], bars[5]
    blocks, heads, _section, queries, keys = where
    total = blocks * heads
    n = 0
    tile, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)
    first = _first_scores(bufs, bars, n, 0, place, wg, scale_ptrs, scale, padded_k, where, SHARED, CAUSAL)
    it, own_last, whole, factor, k_scale, v_scale, k_scale_ptr, v_scale_ptr = first
    s = _product(q_bufs.index(wg), k_bufs.index(it % STAGES))
    s = warpgroup_mma_wait(0, deps=(s,))
    while tile < total:
        release(empty.index(it % STAGES))
        it += 1
        row, head, _last = place
        row += wg * ROWS
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
        l = row_parts(gl.zeros_like(s))
        o = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        state = (s, o, m, l, k_scale, v_scale)
        seen = (row, keys - queries, keys, whole)
        of_group = (k_scale_ptr, v_scale_ptr)
        for j in range(own_last + 1):
            state = _step(bufs, wg, bars, state, it + j, own_last - j, seen, of_group, factor, CAUSAL)
        it += own_last + 1
        s, o, m, l, _k_scale, of_result = state
        n += 1
        tile, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)
        if tile < total:
            first = _first_scores(bufs, bars, n, it, place, wg, scale_ptrs, scale, padded_k, where, SHARED, CAUSAL)
            it, own_last, whole, factor, k_scale, v_scale, k_scale_ptr, v_scale_ptr = first
        # The next tile's first scores are computed while this tile's result is divided, rounded and stored. After the last tile
        # they are garbage and unused.
        s = _product(q_bufs.index(wg), k_bufs.index(it % STAGES))
        _finish(o, l, of_result, o_bufs.index(wg), out, row, head, queries)
        s = warpgroup_mma_wait(0, deps=(s,))
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["blocks", "heads", "section", "H", "SHARED", "queries", "keys", "padded_k"])
def scaled_attention_sm90_kernel(
    q_desc, k_desc, v_desc, o_desc, out_ptr, k_scale_ptr, v_scale_ptr, counter_ptr, slots_ptr,
    blocks, heads, section, H, SHARED, queries, keys, padded_k, q_head_stride, scale,
    STAGES: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4, on at most as many programs as there are tiles; the other partitions bring their own warps.

    blocks: tiles of 192 queries per head. heads: sequences times H. section: heads that are computed at a time. SHARED: query
    heads per KV head. padded_k: rows of codes per head. scale: already multiplied by log2(e). counter_ptr: one int32 zero; it
    is zero again at the end. slots_ptr: int32, 2 * SLOT per program.
    """
    q_bufs = gl.allocate_shared_memory(
        gl.float8e4nv, [CONSUMERS, ROWS, D], gl.NVMMASharedLayout.get_default_for([ROWS, D], gl.float8e4nv)
    )
    k_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, KEYS, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, D, KEYS], v_desc.layout)
    o_bufs = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS, ROWS, D], o_desc.layout)
    raw_bufs = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, D], q_desc.layout)
    raw_bars = (barriers(CONSUMERS, 1), barriers(CONSUMERS, 1))
    ring_bars = (barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    bars = raw_bars + ring_bars + (barriers(2, 1), barriers(2, CONSUMERS + 1), barriers(1, 1))
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs, raw_bufs)
    descs = (q_desc, k_desc, v_desc, o_desc)
    out = (o_desc, out_ptr, H)
    slots_ptr += gl.program_id(0) * (2 * SLOT)
    where = (blocks, heads, section, queries, keys)
    scales = (k_scale_ptr, v_scale_ptr)
    gl.warp_specialize([
        (_attend, (bufs, bars, out, slots_ptr, where, scales, scale, padded_k, SHARED, 0, CAUSAL)),
        (_attend, (bufs, bars, out, slots_ptr, where, scales, scale, padded_k, SHARED, 1, CAUSAL)),
        (_attend, (bufs, bars, out, slots_ptr, where, scales, scale, padded_k, SHARED, 2, CAUSAL)),
        (load_tiles, (descs, bufs, bars, slots_ptr, where, H, SHARED, q_head_stride, padded_k)),
        (deal_tiles, (bars, counter_ptr, slots_ptr, where, CAUSAL)),
    ], [4, 4, 1, 1], [160, 160, 32, 32])  # fmt: skip
