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

from tilewright.kernels.hopper import block_barrier, clear_end, load_box, viewed

__all__ = ["PANEL", "boxes_joined", "page_row", "paged_sm90_kernel"]


ROWS = gl.constexpr(64)  # keys of a tile, and rows of the products
PANEL = gl.constexpr(64)  # columns that a box of the copy engine has: 128 bytes
NOWHERE = gl.constexpr(1 << 30)  # a row that no cache has: the copy engine gives zeros and reads nothing
ONE_BY_ONE = gl.constexpr(8)  # sequences that are counted without sums over all threads, which wait for one another
COUNTED = gl.constexpr(256)  # sequences whose lengths are read at a time

# ---- which keys a program has


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _tiles(kv_lens_ptr, cu_q_ptr, b, batch, room, window, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr):
    """(length, queries, first key that is needed, tiles of keys) of each sequence b; at least one tile, past `batch` none."""
    live = b < batch
    kv_len = gl.load(kv_lens_ptr + b, mask=live, other=0)
    kv_len = gl.minimum(gl.maximum(kv_len, 0), room)
    if QUERIES == 1:
        q_len = gl.where(live, 1, 0)
    else:
        q_len = gl.load(cu_q_ptr + b + 1, mask=live, other=0) - gl.load(cu_q_ptr + b, mask=live, other=0)
        kv_len = gl.where(q_len > 0, kv_len, 0)
    begin = kv_len * 0
    if HAS_WINDOW:
        begin = gl.maximum(0, kv_len - q_len + 1 - window) // ROWS * ROWS
    tiles = gl.where(live, gl.maximum(1, gl.cdiv(kv_len - begin, ROWS)), 0)
    return kv_len, q_len, begin, tiles


@gluon.jit
def _range_of(
    kv_lens_ptr, cu_q_ptr, batch, room, window, G: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr
):  # fmt: skip
    """(First tile of this program on the line, end, sequence of the first, a head's tiles before it, a range's tiles)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    lanes = gl.arange(0, COUNTED, layout=LAYOUT)
    total = batch * 0
    if batch <= ONE_BY_ONE:
        for b in range(batch):
            total += _tiles(kv_lens_ptr, cu_q_ptr, b, batch, room, window, QUERIES, HAS_WINDOW)[3]
    else:
        for start in range(0, batch, COUNTED):
            total += gl.sum(_tiles(kv_lens_ptr, cu_q_ptr, start + lanes, batch, room, window, QUERIES, HAS_WINDOW)[3], 0)
    line = total * G
    share = gl.maximum(gl.cdiv(line, gl.num_programs(0)), 1)
    # Where whole pairs are hardly more than a share, a range takes whole pairs: nothing is left to combine.
    pair = gl.cdiv(total, batch)
    whole = gl.cdiv(share, pair) * pair
    share = gl.where(whole - share <= 1 + share // 32, whole, share)
    at = gl.minimum(gl.program_id(0) * share, line)
    stop = gl.minimum(at + share, line)
    b = batch * 0
    before = batch * 0
    counted = batch * 0
    if batch <= ONE_BY_ONE:
        for i in range(batch):
            counted += _tiles(kv_lens_ptr, cu_q_ptr, i, batch, room, window, QUERIES, HAS_WINDOW)[3]
            b = gl.where(counted * G <= at, i + 1, b)
            before = gl.where(counted * G <= at, counted, before)
    else:
        for start in range(0, batch, COUNTED):
            counts = _tiles(kv_lens_ptr, cu_q_ptr, start + lanes, batch, room, window, QUERIES, HAS_WINDOW)[3]
            ends = counted + gl.associative_scan(counts, 0, _sum)
            passed = (ends * G <= at) & (start + lanes < batch)
            b += gl.sum(passed.to(gl.int32), 0)
            before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
            counted += gl.sum(counts, 0)
    return at, stop, b, before, share


@gluon.jit
def _stretch(
    at, stop, b, before, kv_lens_ptr, cu_q_ptr, batch, room, window,
    G: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """What this range has of the pair at tile `at`: (head, first key, tiles, length, queries, pair's first tile, its tiles)."""
    kv_len, q_len, begin, tiles = _tiles(kv_lens_ptr, cu_q_ptr, b, batch, room, window, QUERIES, HAS_WINDOW)
    g = (at - before * G) // tiles
    pair_at = before * G + g * tiles
    first = begin + (at - pair_at) * ROWS
    return g, first, gl.minimum(stop, pair_at + tiles) - at, kv_len, q_len, pair_at, tiles


# ---- producer


@gluon.jit
def _fetch(desc, bufs, full, empty, rows, j, BOXES: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr):
    """The j-th tile of keys or of values, when its memory is free."""
    stage = j % STAGES
    mbarrier.wait(empty.index(stage), j // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(stage), ROWS * PANELS * PANEL * 2)
    for i in gl.static_range(BOXES):
        for panel in gl.static_range(PANELS):
            load_box(desc, [rows[i], panel * PANEL], full.index(stage), bufs.index((stage * PANELS + panel) * BOXES + i))


@gluon.jit
def page_row(table_ptr, key, kv_len, g, G: gl.constexpr, S: gl.constexpr):
    """Where a page's keys from `key` on begin, as a row of the cache [P * G * S, D]."""
    inside = key < kv_len
    page = gl.load(table_ptr + key // S, mask=inside, other=0)
    return gl.where(inside & (page >= 0), (page * G + g) * S + key % S, NOWHERE)


@gluon.jit
def _load(
    descs, bufs, bars, at, stop, b, before, table_ptr, kv_lens_ptr, cu_q_ptr, batch, room, window, table_row_stride,
    G: gl.constexpr, S: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr,
    BOXES: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_desc, v_desc = descs
    k_bufs, v_bufs = bufs
    k_full, v_full, k_empty, v_empty = bars
    STEP: gl.constexpr = ROWS // BOXES
    j = at * 0
    while at < stop:
        g, first, count, kv_len, _q_len, _pair_at, tiles = _stretch(
            at, stop, b, before, kv_lens_ptr, cu_q_ptr, batch, room, window, G, QUERIES, HAS_WINDOW
        )  # fmt: skip
        row_ptr = table_ptr + b.to(gl.int64) * table_row_stride
        for i in range(count):
            key = first + i * ROWS
            # The pages are read before the wait for free memory.
            if BOXES == 1:
                rows = (page_row(row_ptr, key, kv_len, g, G, S),)
            elif BOXES == 2:
                rows = (page_row(row_ptr, key, kv_len, g, G, S), page_row(row_ptr, key + STEP, kv_len, g, G, S))
            else:
                rows = (
                    page_row(row_ptr, key, kv_len, g, G, S), page_row(row_ptr, key + STEP, kv_len, g, G, S),
                    page_row(row_ptr, key + 2 * STEP, kv_len, g, G, S), page_row(row_ptr, key + 3 * STEP, kv_len, g, G, S),
                )  # fmt: skip
            _fetch(k_desc, k_bufs, k_full, k_empty, rows, j, BOXES, PANELS, STAGES)
            _fetch(v_desc, v_bufs, v_full, v_empty, rows, j, BOXES, PANELS, STAGES)
            j += 1
        at += count
        if at == (before + tiles) * G:
            before += tiles
            b += 1


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
def _normalise(o, m, l, sink_ptr, heads, live, HAS_SINKS: gl.constexpr):
    """o / l of each row; a row without keys gives zeros. sink_ptr: [H], logits that take weight and have no value."""
    if HAS_SINKS:
        sink = gl.load(sink_ptr + heads, mask=live, other=0.0).to(gl.float32) * 1.4426950408889634  # log2(e)
        top = gl.maximum(m, sink)
        fade = gl.exp2(m - top)
        return o * gl.expand_dims(fade / (l * fade + gl.exp2(sink - top)), 1)
    else:
        return o / gl.expand_dims(gl.where(l == 0.0, 1.0, l), 1)


@gluon.jit
def _answer(
    o, m, l, o_ptr, sink_ptr, g, q_begin, q_len, tokens,
    G: gl.constexpr, GROUP: gl.constexpr, HELD: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Write the result of a pair's first HELD rows, whose sums are o [rows, D]."""
    LAYOUT: gl.constexpr = o.type.layout
    D: gl.constexpr = o.shape[1]
    rows = gl.arange(0, o.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    token = q_begin + rows // GROUP
    live = (rows < HELD) & (rows // GROUP < q_len) & (token >= 0) & (token < tokens)
    heads = g * GROUP + rows % GROUP
    m = gl.convert_layout(m, gl.SliceLayout(1, LAYOUT))
    l = gl.convert_layout(l, gl.SliceLayout(1, LAYOUT))
    out = _normalise(o, m, l, sink_ptr, heads, live, HAS_SINKS).to(o_ptr.dtype.element_ty)
    places = gl.expand_dims((token * G * GROUP + heads) * D, 1) + gl.expand_dims(dims, 0)
    gl.store(o_ptr + places, out, mask=gl.expand_dims(live, 1))


@gluon.jit
def _leave(o, m, l, part_ptr, sums_ptr, place, HELD: gl.constexpr):
    """A pair's part to its place: o [HELD, D], then m and l apart."""
    LAYOUT: gl.constexpr = o.type.layout
    D: gl.constexpr = o.shape[1]
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims((place * HELD + rows) * D, 1) + gl.expand_dims(dims, 0)
    gl.store(part_ptr + at, o, mask=gl.expand_dims(rows < HELD, 1))
    row = gl.arange(0, ROWS, layout=m.type.layout)
    gl.store(sums_ptr + place * (2 * HELD) + row, m, mask=row < HELD)
    gl.store(sums_ptr + place * (2 * HELD) + HELD + row, l, mask=row < HELD)


@gluon.jit
def _combine(
    part_ptr, sums_ptr, o_ptr, sink_ptr, owner, parts, g, q_begin, q_len, tokens,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, HELD: gl.constexpr, HAS_SINKS: gl.constexpr,
    BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Combine the parts owner .. owner + parts of a pair, AT_ONCE at a time, and write the result."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([AT_ONCE, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    SUM_LAYOUT: gl.constexpr = gl.SliceLayout(0, ROW_LAYOUT)
    which = gl.expand_dims(gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, ROW_LAYOUT)), 1)
    rows = gl.expand_dims(gl.arange(0, BLOCK_R, layout=SUM_LAYOUT), 0)
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    dims = gl.expand_dims(gl.expand_dims(dims, 0), 0)
    m = gl.full([BLOCK_R], float("-inf"), gl.float32, SUM_LAYOUT)
    l = gl.zeros([BLOCK_R], gl.float32, SUM_LAYOUT)
    o = gl.zeros([BLOCK_R, D], gl.float32, gl.SliceLayout(0, LAYOUT))
    for start in range(0, parts, AT_ONCE):
        i = start + which
        there = (i < parts) & (rows < HELD)
        # The first range ends in the pair, the others begin in it.
        place = (owner + i) * 2 + gl.where(i == 0, 1, 0)
        # .cg: other SMs wrote these, so this SM's L1 must not answer. All are asked for before any is used.
        at = gl.expand_dims((place * HELD + rows) * D, 2) + dims
        o_i = gl.load(part_ptr + at, mask=gl.expand_dims(there, 2), other=0.0, cache_modifier=".cg")
        sums = sums_ptr + place * (2 * HELD) + rows
        m_i = gl.load(sums, mask=there, other=float("-inf"), cache_modifier=".cg")
        l_i = gl.load(sums + HELD, mask=there, other=0.0, cache_modifier=".cg")
        high = gl.maximum(m, gl.max(m_i, 0))
        base = gl.where(high == float("-inf"), 0.0, high)
        share = gl.exp2(m_i - gl.expand_dims(base, 0))
        fade = gl.exp2(m - base)
        l = l * fade + gl.sum(l_i * share, 0)
        fade = gl.convert_layout(fade, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)), assert_trivial=True)
        o = o * gl.expand_dims(fade, 1) + gl.sum(o_i * gl.expand_dims(share, 2), 0)
        m = high
    _answer(o, m, l, o_ptr, sink_ptr, g, q_begin, q_len, tokens, G, GROUP, HELD, HAS_SINKS)


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
    sums_ptr = part_ptr + 2 * gl.num_programs(0) * HELD * D
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, Q_LAYOUT))
    dims = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, Q_LAYOUT)), 0)
    j = at * 0
    while at < stop:
        g, first, count, kv_len, q_len, pair_at, tiles = _stretch(
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
        if (at == pair_at) & (count == tiles):
            _answer(o, m, l, o_ptr, sink_ptr, g, q_begin, q_len, tokens, G, GROUP, HELD, HAS_SINKS)
        else:
            _leave(o, m, l, part_ptr, sums_ptr, gl.program_id(0) * 2 + gl.where(at == pair_at, 1, 0), HELD)
            block_barrier()
            ticket = gl.atomic_add(ticket_ptr + b * G + g, 1, sem="acq_rel", scope="gpu")
            owner = pair_at // share
            parts = (pair_at + tiles - 1) // share - owner + 1
            if ticket == parts - 1:
                gl.store(ticket_ptr + b * G + g, 0)
                _combine(
                    part_ptr, sums_ptr, o_ptr, sink_ptr, owner, parts, g, q_begin, q_len, tokens,
                    G, GROUP, D, HELD, HAS_SINKS, BLOCK_R, AT_ONCE,
                )  # fmt: skip
        at += count
        if at == (before + tiles) * G:
            before += tiles
            b += 1


# ---- kernel


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def boxes_joined(boxes, COUNT: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """The boxes of each of COUNT buffers as one tile [N, D]: rows of a panel, then the next panel."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return viewed(boxes, boxes.dtype, [COUNT, N, D], LAYOUT)


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
    bars = (_barriers(STAGES), _barriers(STAGES), _barriers(STAGES), _barriers(STAGES))
    at, stop, b, before, share = _range_of(kv_lens_ptr, cu_q_ptr, batch, room, window, G, QUERIES, HAS_WINDOW)
    tiles = (boxes_joined(k_bufs, STAGES, ROWS, D), boxes_joined(v_bufs, STAGES, ROWS, D))
    descs = (k_desc, v_desc)
    bufs = (k_bufs, v_bufs)
    gl.warp_specialize([
        (_attend, (
            tiles, bars, at, stop, b, before, share, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, kv_lens_ptr, cu_q_ptr,
            batch, tokens, room, window, q_row_stride, scale,
            G, GROUP, D, QUERIES, HAS_WINDOW, HAS_SINKS, BLOCK_R, AT_ONCE, STAGES,
        )),
        (_load, (
            descs, bufs, bars, at, stop, b, before, table_ptr, kv_lens_ptr, cu_q_ptr, batch, room, window, table_row_stride,
            G, S, QUERIES, HAS_WINDOW, BOXES, PANELS, STAGES,
        )),
    ], [1], [56])  # fmt: skip
