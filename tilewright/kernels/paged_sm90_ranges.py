"""What a program of paged attention's kernels for Hopper has of all keys, and the warp that fetches them. No launchers.

The keys of all (sequence, key/value head) pairs stand in a line, in tiles of 64, and each program takes an equal range of it,
as in paged_stream.py. The producer is one warp: it has the copy engine (TMA) fetch tile after tile of keys and values into a
ring of STAGES stages, box by box of one page, and goes on into the next pair while those who multiply still end the one before.
"""
# Gluon reads `name: gl.constexpr = value` as "known to the compiler"; to a type checker it is a value of another type.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false

# B sequences, H query heads, G key/value heads, D head dim, S tokens a page

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.kernels.hopper import load_box, viewed

__all__ = ["PANEL", "ROWS", "barriers", "boxes_joined", "load_tiles", "page_row", "range_of", "stretch"]


ROWS = gl.constexpr(64)  # keys of a tile
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
def range_of(
    kv_lens_ptr, cu_q_ptr, batch, room, window, G: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr,
    LONGER: gl.constexpr,
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
    share = gl.where(whole - share <= LONGER + share // 32, whole, share)
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
def load_tiles(
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
        g, first, count, kv_len, _q_len, _pair_at, tiles = stretch(
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


# ---- memory


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def boxes_joined(boxes, COUNT: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """The boxes of each of COUNT buffers as one tile [N, D]: rows of a panel, then the next panel."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return viewed(boxes, boxes.dtype, [COUNT, N, D], LAYOUT)
