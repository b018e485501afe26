"""Device functions that the Hopper kernels of paged attention share: ranges of keys, pages, and the combination of parts.

The keys of all (sequence, key/value head) pairs are concatenated, in tiles of 64, and each program processes an equal range of
these tiles, as in split_kv.py. If a range does not contain a whole pair, the program stores its (m, l, o) of that pair in
scratch memory. The program that draws the last ticket of the pair combines the parts, in the order of the ranges: the bits are
the same in every run. m is in units of the scaled scores times log2(e). No launchers.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# B sequences, H query heads, G key/value heads, D head dim, S tokens per page

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.kernels.hopper.primitives import block_barrier, viewed

__all__ = ["PANEL", "ROWS", "boxes_joined", "clear", "end_pair", "page_rows", "range_of", "stretch"]


ROWS = gl.constexpr(64)  # keys per tile
PANEL = gl.constexpr(64)  # columns of a TMA box: 128 bytes
NOWHERE = gl.constexpr(1 << 30)  # a row beyond any cache: TMA reads nothing and fills in zeros
ONE_BY_ONE = gl.constexpr(8)  # up to so many sequences are counted in a loop, without reductions that synchronise all threads
COUNTED = gl.constexpr(256)  # sequences whose lengths are read at a time

# ---- the range of keys of a program


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _tiles(kv_lens_ptr, cu_q_ptr, b, batch, room, window, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr):
    """(length, queries, first key that is needed, tiles of keys) of each sequence b.

    A sequence has at least one tile, unless each has one query: then there is none for a sequence without keys, and `clear`
    writes its zeros. There are none from `batch` on.
    """
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
    LEAST: gl.constexpr = 0 if QUERIES == 1 else 1
    tiles = gl.where(live, gl.maximum(LEAST, gl.cdiv(kv_len - begin, ROWS)), 0)
    return kv_len, q_len, begin, tiles


@gluon.jit
def clear(o_ptr, kv_lens_ptr, batch, tokens, room, WIDTH: gl.constexpr):
    """Write zeros for the sequences without keys, each of which has one query. One warp of each program does a part of them.

    They are in no range. A captured step has them at its end, as padding: as pairs of one tile they would be all in one range,
    and its program would take longest. WIDTH: numbers in a row of o.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    lane = gl.arange(0, 256, layout=LAYOUT)
    zeros = gl.zeros([256], o_ptr.dtype.element_ty, layout=LAYOUT)
    for b in range(gl.program_id(0), batch, gl.num_programs(0)):
        if gl.minimum(gl.load(kv_lens_ptr + b), room) <= 0:
            for start in range(0, WIDTH, 256):
                at = start + lane
                gl.store(o_ptr + b.to(gl.int64) * WIDTH + at, zeros, mask=(at < WIDTH) & (b < tokens))


@gluon.jit
def range_of(
    kv_lens_ptr, cu_q_ptr, batch, room, window, G: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr,
    LONGER: gl.constexpr,
):  # fmt: skip
    """The range of this program, counted in tiles of the concatenation.

    Returns (first tile, end, sequence of the first tile, tiles of one head before that sequence, tiles per range).
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    lanes = gl.arange(0, COUNTED, layout=LAYOUT)
    total = batch * 0
    longest = batch * 0
    if batch <= ONE_BY_ONE:
        for b in range(batch):
            tiles = _tiles(kv_lens_ptr, cu_q_ptr, b, batch, room, window, QUERIES, HAS_WINDOW)[3]
            total += tiles
            longest = gl.maximum(longest, tiles)
    else:
        for start in range(0, batch, COUNTED):
            tiles = _tiles(kv_lens_ptr, cu_q_ptr, start + lanes, batch, room, window, QUERIES, HAS_WINDOW)[3]
            total += gl.sum(tiles, 0)
            longest = gl.maximum(longest, gl.max(tiles, 0))
    line = total * G
    share = gl.maximum(gl.cdiv(line, gl.num_programs(0)), 1)
    # If rounding a range up to whole pairs adds few tiles, round it up: then no parts are left to combine. Only if all pairs
    # are of about the same length: otherwise ranges of whole average pairs cut pairs all the same, and are longer.
    pair = gl.maximum(gl.cdiv(total, batch), 1)
    whole = gl.cdiv(share, pair) * pair
    share = gl.where((longest <= pair) & (whole - share <= LONGER + share // 32), whole, share)
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
def stretch(
    at, stop, b, before, kv_lens_ptr, cu_q_ptr, batch, room, window,
    G: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The part of this range that belongs to the pair at tile `at`.

    Returns (head, first key, tiles, length, queries, first tile of the pair, tiles of the pair).
    """
    kv_len, q_len, begin, tiles = _tiles(kv_lens_ptr, cu_q_ptr, b, batch, room, window, QUERIES, HAS_WINDOW)
    g = (at - before * G) // gl.maximum(tiles, 1)
    pair_at = before * G + g * tiles
    first = begin + (at - pair_at) * ROWS
    return g, first, gl.minimum(stop, pair_at + tiles) - at, kv_len, q_len, pair_at, tiles


# ---- pages and memory


@gluon.jit
def _page_row(table_ptr, key, kv_len, g, G: gl.constexpr, S: gl.constexpr):
    """The row of the cache [P * G * S, D] that contains `key`; NOWHERE if the key or the page does not exist."""
    inside = key < kv_len
    page = gl.load(table_ptr + key // S, mask=inside, other=0)
    return gl.where(inside & (page >= 0), (page * G + g) * S + key % S, NOWHERE)


@gluon.jit
def page_rows(table_ptr, key, kv_len, g, G: gl.constexpr, S: gl.constexpr, STEP: gl.constexpr, COUNT: gl.constexpr):
    """The rows of the cache [P * G * S, D] that contain the keys `key`, `key` + STEP, ...: COUNT of them."""
    rows = (_page_row(table_ptr, key, kv_len, g, G, S),)
    for i in gl.static_range(1, COUNT):
        rows += (_page_row(table_ptr, key + i * STEP, kv_len, g, G, S),)
    return rows


@gluon.jit
def boxes_joined(boxes, COUNT: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """The boxes of each of COUNT buffers as one tile [N, D]: all rows of a panel, then the next panel."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return viewed(boxes, boxes.dtype, [COUNT, N, D], LAYOUT)


# ---- the end of a pair


@gluon.jit
def _normalise(o, m, l, sink_ptr, heads, live, HAS_SINKS: gl.constexpr):
    """o / l of each row; zeros for a row without keys. sink_ptr: [H], logits that take part in the softmax without a value."""
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
    """Write the result of the first HELD rows of a pair, whose weighted sums are o [rows, D]."""
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
    """Store one part of a pair at index `place`: o [HELD, D] at part_ptr, m and l at sums_ptr."""
    LAYOUT: gl.constexpr = o.type.layout
    D: gl.constexpr = o.shape[1]
    rows = gl.arange(0, o.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims((place * HELD + rows) * D, 1) + gl.expand_dims(dims, 0)
    gl.store(part_ptr + at, o, mask=gl.expand_dims(rows < HELD, 1))
    row = gl.arange(0, o.shape[0], layout=m.type.layout)
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
        # The first part is at the end of its range (index 1), the others at the beginning of theirs (index 0).
        place = (owner + i) * 2 + gl.where(i == 0, 1, 0)
        # .cg skips this SM's L1, which may be stale: other SMs wrote these. All loads are issued before any result is used.
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
def end_pair(
    o, m, l, at, count, share, b, g, pair_at, tiles, q_begin, q_len, tokens, part_ptr, ticket_ptr, o_ptr, sink_ptr,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, HELD: gl.constexpr, HAS_SINKS: gl.constexpr,
    BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Finish the tiles at .. at + count of a pair that consists of `tiles` tiles from pair_at on.

    o: [rows, D], of which HELD rows are real; m and l likewise.
    """
    sums_ptr = part_ptr + 2 * gl.num_programs(0) * HELD * D
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
