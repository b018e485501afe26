"""Paged attention of any number of queries for Hopper, written in Gluon: `paged_attention`'s `varlen_sm90`.

The consumer warpgroups are those of attention/sm90_kernel.py; their inputs differ. A tile packs the heads that share keys:
query 0 of each head, then query 1 of each head, and so on. So a decoding sequence beside a chunk of a prompt reads its keys
once for all its heads. Keys and values come from pages: the producer, one warp, reads the block table and loads a block of keys
by TMA, box by box, where each box lies in one page.

Sequence b owns the tiles from cu_q[b] // BLOCK_Q + b on, at least ceil(its queries / BLOCK_Q) of them; superfluous tiles are
skipped. A scheduler warp in each program draws its tiles from an atomic counter. The last tiles, which see the most keys, come
first. If all sequences have one query each, sequence b owns tile b: with 256 sequences a binary search takes eight dependent
trips to L2, longer than a block of keys. Such a tile has at most 64 rows. With CONSUMERS = 1 one warpgroup multiplies them; a
second one would compute only rows that are not stored, and use half of the tensor cores' time. The rows of a warpgroup go
through the same instructions in both cases, and have the same bits.

Limited by the tensor cores if sequences have many queries. The host side is prefill_sm90.py, which refuses problems that this
kernel does not support.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# T tokens of B sequences, H query heads, G key/value heads, D head dim, S tokens per page; a unit: PACK query heads

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.kernels.attention.paged.decode_sm90_split_kv import PANEL, boxes_joined, page_rows
from tilewright.kernels.attention.sm90_kernel import attend
from tilewright.kernels.attention.sm90_schedule import PLACE, ROWS, SLOT
from tilewright.kernels.hopper.primitives import hand_out, load_box, next_tile, release, take
from tilewright.kernels.hopper.ring import barriers

__all__ = ["paged_varlen_sm90_kernel"]


BEHIND = gl.constexpr(4)  # blocks left to load when the next tile is requested: finding it takes several trips to L2
Q_BUFS = gl.constexpr(2)  # the queries of the next tile are loaded while this tile ends


@gluon.jit
def _tile_of(
    ticket, grid, lengths, left, PACK: gl.constexpr, N: gl.constexpr, LEFT: gl.constexpr, CONSUMERS: gl.constexpr
):  # fmt: skip
    """(first row, unit, start of q, queries, sequence, keys, last block, blocks, whole, cut) of a tile.

    The last four are as in attention/sm90_schedule.py. A query counts as PACK rows, one per head. For a superfluous tile the
    first row is beyond the queries.
    """
    tiles, units, single = grid
    kv_lens_ptr, cu_q_ptr, batch, room = lengths
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS // PACK
    tile = tiles - 1 - ticket // units
    b = tile * single
    high = gl.where(single > 0, 0, batch)
    while b + 1 < high:
        middle = (b + high) // 2
        begins = gl.load(cu_q_ptr + middle) // BLOCK_Q + middle <= tile
        b = gl.where(begins, middle, b)
        high = gl.where(begins, high, middle)
    q_start = gl.load(cu_q_ptr + b)
    q_len = gl.load(cu_q_ptr + b + 1) - q_start
    k_len = gl.minimum(gl.maximum(gl.load(kv_lens_ptr + b), 0), room)
    query = (tile - (q_start // BLOCK_Q * (1 - single) + b)) * BLOCK_Q
    own = query + k_len - q_len  # the first query's own key
    seen = gl.minimum(k_len, own + BLOCK_Q)
    whole = gl.minimum(k_len, gl.maximum(own + 1, 0)) // N
    # A tile that sees no key visits one block, with all keys masked.
    last = gl.maximum(gl.cdiv(gl.maximum(seen, 0), N) - 1, 0)
    count = last + 1
    cut = gl.cdiv(gl.maximum(own + BLOCK_Q - 1 - left, 0), N)
    if LEFT:
        count -= gl.minimum(gl.maximum(own - left, 0) // N, last)
    return query * PACK, ticket % units, q_start, q_len, b, k_len, last, count, whole, cut


@gluon.jit
def _next(
    ticket, counter_ptr, grid, lengths, left,
    PACK: gl.constexpr, N: gl.constexpr, LEFT: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """(ticket, tile) of the first tile, from `ticket` on, that has queries. Draws further tickets while a tile has none."""
    total = grid[0] * grid[1]
    place = _tile_of(gl.minimum(ticket, total - 1), grid, lengths, left, PACK, N, LEFT, CONSUMERS)
    while (ticket < total) & (place[0] >= place[3] * PACK):
        ticket = next_tile(counter_ptr, total)
        place = _tile_of(gl.minimum(ticket, total - 1), grid, lengths, left, PACK, N, LEFT, CONSUMERS)
    return ticket, place


@gluon.jit
def _fetch_boxes(desc, bufs, full, empty, rows, it, STAGES: gl.constexpr):
    BOXES: gl.constexpr = len(rows)
    PANELS: gl.constexpr = bufs.shape[0] // (STAGES * BOXES)
    stage = it % STAGES
    mbarrier.wait(empty.index(stage), it // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(stage), BOXES * PANELS * bufs.shape[1] * PANEL * 2)
    for i in gl.static_range(BOXES):
        for panel in gl.static_range(PANELS):
            load_box(desc, [rows[i], panel * PANEL], full.index(stage), bufs.index((stage * PANELS + panel) * BOXES + i))


@gluon.jit
def _fetch(
    descs, boxes, bars, table_ptr, key, k_len, g, it,
    G: gl.constexpr, S: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the it-th block of keys and of values, from `key` on, each as soon as its stage is free."""
    _, k_desc, v_desc = descs
    _, k_boxes, v_boxes = boxes
    k_full, k_empty, v_full, v_empty = bars[2], bars[3], bars[4], bars[5]
    STEP: gl.constexpr = S if S < N else N
    # The block table is read before the wait for a free stage.
    rows = page_rows(table_ptr, key, k_len, g, G, S, STEP, N // STEP)
    _fetch_boxes(k_desc, k_boxes, k_full, k_empty, rows, it, STAGES)
    _fetch_boxes(v_desc, v_boxes, v_full, v_empty, rows, it, STAGES)


@gluon.jit
def _load(
    descs, boxes, bars, slots_ptr, grid, table_ptr, table_row_stride,
    G: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    q_desc, q_boxes = descs[0], boxes[0]
    q_full, q_empty, tile_full, tile_empty = bars[0], bars[1], bars[6], bars[7]
    PANELS: gl.constexpr = q_boxes.shape[0] // (Q_BUFS * CONSUMERS)
    total = grid[0] * grid[1]
    it = 0
    n = 0
    ticket, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)
    while ticket < total:
        row, unit, q_start, _q_len, b, k_len, last, count, _whole, _cut = place
        slot = n % Q_BUFS * CONSUMERS
        for wg in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(slot + wg), n // Q_BUFS & 1 ^ 1)
            mbarrier.expect(q_full.index(slot + wg), PANELS * ROWS * PANEL * 2)
            for panel in gl.static_range(PANELS):
                place_of = [q_start + row // PACK + wg * (ROWS // PACK), unit * PACK, panel * PANEL]
                load_box(q_desc, place_of, q_full.index(slot + wg), q_boxes.index((slot + wg) * PANELS + panel))
        g = unit // (GROUP // PACK)
        row_ptr = table_ptr + b.to(gl.int64) * table_row_stride
        early = gl.maximum(count - BEHIND, 0)
        for j in range(early):
            _fetch(descs, boxes, bars, row_ptr, (last - j) * N, k_len, g, it + j, G, S, N, STAGES)
        release(bars[8].index(0))
        for j in range(early, count):
            _fetch(descs, boxes, bars, row_ptr, (last - j) * N, k_len, g, it + j, G, S, N, STAGES)
        it += count
        n += 1
        ticket, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)


@gluon.jit
def _deal(
    bars, counter_ptr, slots_ptr, grid, lengths, left,
    PACK: gl.constexpr, N: gl.constexpr, LEFT: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    tile_full, tile_empty, asked = bars[6], bars[7], bars[8]
    total = grid[0] * grid[1]
    n = 0
    ticket, place = _next(gl.program_id(0), counter_ptr, grid, lengths, left, PACK, N, LEFT, CONSUMERS)
    hand_out(ticket, place, n, slots_ptr, tile_full, tile_empty, SLOT)
    while ticket < total:
        mbarrier.wait(asked.index(0), n & 1)
        n += 1
        ticket = next_tile(counter_ptr, total)
        ticket, place = _next(ticket, counter_ptr, grid, lengths, left, PACK, N, LEFT, CONSUMERS)
        hand_out(ticket, place, n, slots_ptr, tile_full, tile_empty, SLOT)


@gluon.jit(do_not_specialize=["tiles", "units", "single", "batch", "tokens", "room", "left", "table_row_stride"])
def paged_varlen_sm90_kernel(
    q_desc, k_desc, v_desc, o_desc, out_ptr, sinks_ptr, table_ptr, kv_lens_ptr, cu_q_ptr, counter_ptr, slots_ptr,
    tiles, units, single, batch, tokens, room, left, table_row_stride, scale,
    G: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, S: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, LEFT: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4, on at most tiles * units programs; the other partitions bring their own warps.

    q_desc, o_desc: q and the result [T, H, D], in boxes of 64 / PACK queries, PACK heads, 64 columns. k_desc, v_desc: the
    caches as [P * G * S, D], in boxes of min(S, BLOCK_N) rows and 64 columns. single: 1 if all sequences have one query, else
    0. CONSUMERS: 2, or 1 with `single`. tiles: B with `single`, else T // (128 / PACK) + B. units: H / PACK. room: keys that a
    row of the block table has pages for. scale: already multiplied by log2(e). sinks_ptr: None, or [H]. counter_ptr: one int32
    zero; it is zero again at the end. slots_ptr: int32, 2 * SLOT per program. LEFT: whether a row sees keys only from `left`
    before its own key.
    """
    dtype: gl.constexpr = q_desc.dtype
    PANELS: gl.constexpr = D // PANEL
    BOX: gl.constexpr = k_desc.block_type.shape[0]
    Q_COUNT: gl.constexpr = Q_BUFS * CONSUMERS
    O_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_boxes = gl.allocate_shared_memory(dtype, [Q_COUNT * PANELS, ROWS // PACK, PACK, PANEL], q_desc.layout)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * PANELS * (BLOCK_N // BOX), BOX, PANEL], k_desc.layout)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES * PANELS * (BLOCK_N // BOX), BOX, PANEL], v_desc.layout)
    o_bufs = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D], O_LAYOUT)
    q_bars = (barriers(Q_COUNT, 1), barriers(Q_COUNT, 1))
    k_bars = (barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    v_bars = (barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    bars = q_bars + k_bars + v_bars + (barriers(2, 1), barriers(2, CONSUMERS + 1), barriers(1, 1))
    q_bufs = boxes_joined(q_boxes, Q_COUNT, ROWS, D)
    k_bufs = boxes_joined(k_boxes, STAGES, BLOCK_N, D)
    v_bufs = boxes_joined(v_boxes, STAGES, BLOCK_N, D)
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs, q_bufs, k_bufs)
    out = (o_desc, out_ptr, None, tokens, G * GROUP * D, D, sinks_ptr)
    slots_ptr += gl.program_id(0) * (2 * SLOT)
    grid = (tiles, units, single)
    lengths = (kv_lens_ptr, cu_q_ptr, batch, room)
    descs = (q_desc, k_desc, v_desc)
    boxes = (q_boxes, k_boxes, v_boxes)
    where = (grid, lengths, (left, 0))
    if CONSUMERS == 1:
        gl.warp_specialize([
            (attend, (bufs, bars, out, slots_ptr, where, scale, 0, CONSUMERS, True, LEFT, OVERLAP, False, 0, PACK)),
            (_load, (descs, boxes, bars, slots_ptr, grid, table_ptr, table_row_stride, G, S, GROUP, PACK, BLOCK_N, STAGES, 1)),
            (_deal, (bars, counter_ptr, slots_ptr, grid, lengths, left, PACK, BLOCK_N, LEFT, 1)),
        ], [1, 1], [48, 48])  # fmt: skip
    else:
        gl.warp_specialize([
            (attend, (bufs, bars, out, slots_ptr, where, scale, 0, CONSUMERS, True, LEFT, OVERLAP, False, 0, PACK)),
            (attend, (bufs, bars, out, slots_ptr, where, scale, 1, CONSUMERS, True, LEFT, OVERLAP, False, 0, PACK)),
            (_load, (descs, boxes, bars, slots_ptr, grid, table_ptr, table_row_stride, G, S, GROUP, PACK, BLOCK_N, STAGES, 2)),
            (_deal, (bars, counter_ptr, slots_ptr, grid, lengths, left, PACK, BLOCK_N, LEFT, 2)),
        ], [4, 1, 1], [232, 48, 48])  # fmt: skip
