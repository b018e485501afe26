"""Paged attention with few queries per sequence on Hopper, written in Gluon: the kernel of `paged_attention`'s `sm90`.

Each program processes an equal range of all keys, tile by tile (decode_sm90_split_kv.py). Its warps have two roles:

    producer  one warp: loads tile after tile of keys and values by TMA into a ring of STAGES stages. Each box is part of one
              page. It continues with the next pair while the consumer still finishes the preceding one
    consumer  one warpgroup: S = Q K^T, softmax, O += P V, with both products transposed

In the transposed products, keys are the M dimension of wgmma, and the N queries that share them (8 or a few times 8) are the N
dimension: S^T [64, N] = K Q^T and O^T [D, N] = V^T P^T. If the queries were the 64 rows of wgmma, most of them would be
padding. This way little padding is multiplied, and a thread holds N / 2 scores and D N / 128 sums instead of 32 and D / 2.

One warpgroup processes the whole tile. A single warp could keep maxima of its own 16 keys; but the rows of O^T are dims, so
each warp's sums use the weights of all 64 keys, and all weights of a query must be relative to the same maximum. The shared
memory, and the barriers that guard it:

    keys, values  written by TMA, read by wgmma. Full: the barrier that counts the bytes. Empty: one arrival by the consumer,
                  after a barrier of its four warps, (b) for keys and (d) for values; before it each warp has waited for its own
                  products
    queries       written by all warps at the start of a pair; fence and barrier (a), then read by wgmma. Written again after
                  (b) of the pair's last tile: a warp reaches (b) only when its S^T is complete
    maxima        [4, N], one row per warp; barrier (b), then read by all. Written again after (c) and (d)
    weights       written by all warps; fence and barrier (c), then read by wgmma. Written again after (d): a warp reaches (d)
                  only when its O^T is complete
    end of V      rows after the last key are zeroed in shared memory; the fence and barrier of `clear_end`, then (c)

Limited by the bytes of the cache. The host side is decode_sm90.py, which refuses problems that this kernel does not support.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# B sequences, H query heads, G key/value heads, D head dim, S tokens per page, N columns: queries times heads, padded

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from tilewright.kernels.attention.paged.decode_sm90_split_kv import (
    PANEL,
    ROWS,
    boxes_joined,
    clear,
    end_pair,
    page_rows,
    range_of,
    stretch,
)
from tilewright.kernels.hopper.primitives import block_barrier, clear_end, load_box, release, viewed
from tilewright.kernels.hopper.ring import barriers

__all__ = ["WARPS", "column_maxima", "decode", "only_seen", "paged_sm90_kernel", "pairs_of_rows", "tall_sums", "weigh"]


WARPS = gl.constexpr(4)

# ---- producer


@gluon.jit
def _fetch(desc, bufs, full, empty, rows, j, BOXES: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr):
    """Load the j-th tile of keys or of values, as soon as its stage is free."""
    stage = j % STAGES
    mbarrier.wait(empty.index(stage), j // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(stage), ROWS * PANELS * PANEL * 2)
    for i in gl.static_range(BOXES):
        for panel in gl.static_range(PANELS):
            load_box(desc, [rows[i], panel * PANEL], full.index(stage), bufs.index((stage * PANELS + panel) * BOXES + i))


@gluon.jit
def _fetch_tile(
    source, bars, row_ptr, key, kv_len, g, j, held, G: gl.constexpr, D: gl.constexpr, S: gl.constexpr, BOXES: gl.constexpr,
    END_BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    descs, bufs = source
    k_desc, v_desc, k_end_desc, v_end_desc = descs
    k_bufs, v_bufs, k_end_bufs, v_end_bufs = bufs
    k_full, v_full, k_empty, v_empty = bars
    PANELS: gl.constexpr = D // PANEL
    # The block table is read before the wait for a free stage.
    if (END_BOXES > BOXES) & (key + ROWS > kv_len):
        end_rows = page_rows(row_ptr, key, kv_len, g, G, S, ROWS // END_BOXES, END_BOXES)
        _fetch(k_end_desc, k_end_bufs, k_full, k_empty, end_rows, j, END_BOXES, PANELS, STAGES)
        _fetch(v_end_desc, v_end_bufs, v_full, v_empty, end_rows, j, END_BOXES, PANELS, STAGES)
    else:
        rows = page_rows(row_ptr, key, kv_len, g, G, S, ROWS // BOXES, BOXES)
        _fetch(k_desc, k_bufs, k_full, k_empty, rows, j, BOXES, PANELS, STAGES)
        _fetch(v_desc, v_bufs, v_full, v_empty, rows, j, BOXES, PANELS, STAGES)


@gluon.jit
def _load(
    source, bars, at, stop, b, before, o_ptr, table_ptr, kv_lens_ptr, cu_q_ptr, batch, tokens, room, window, held,
    table_row_stride,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, S: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr,
    EXTRA: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    j = at * 0
    while at < stop:
        g, first, count, kv_len, _q_len, _pair_at, tiles = stretch(
            at, stop, b, before, kv_lens_ptr, cu_q_ptr, batch, room, window, G, QUERIES, HAS_WINDOW
        )  # fmt: skip
        row_ptr = table_ptr + b.to(gl.int64) * table_row_stride
        for i in range(count):
            FETCH(source, bars, row_ptr, first + i * ROWS, kv_len, g, j, held, G, D, S, BOXES, EXTRA, STAGES)
            j += 1
        at += count
        if at == (before + tiles) * G:
            before += tiles
            b += 1
    if QUERIES == 1:
        clear(o_ptr, kv_lens_ptr, batch, tokens, room, G * GROUP * D)


# ---- consumer


@constexpr_function
def tall_sums(columns: int) -> gl.NVMMADistributedLayout:
    """The layout of both accumulators: warps and lanes along the M dimension, pairs of columns in each thread."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@constexpr_function
def _every_warps(columns: int) -> gl.DistributedLinearLayout:
    """The layout of [4, columns]: each thread holds its columns of `tall_sums`, for all four warps."""
    wide = [[0, 1 << i] for i in range(3, columns.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout([[0, 1], *wide, [1, 0], [2, 0]], lanes, [[0, 0], [0, 0]], [], [4, columns])


@gluon.jit
def column_maxima(s, tops):
    """The maximum of each column of s [64, N], in all threads. The warps exchange their maxima through `tops`."""
    N: gl.constexpr = s.shape[1]
    tops.store(gl.max(s.reshape([WARPS, ROWS // WARPS, N]), 1))
    block_barrier()  # (b)
    every = gl.max(tops.load(_every_warps(N)), 0)
    return gl.convert_layout(every, gl.SliceLayout(0, s.type.layout), assert_trivial=True)


@gluon.jit
def pairs_of_rows(p):
    """p [64, N] as [4, 8, N]: the sums of the two rows that a thread holds in each column."""
    return gl.sum(p.reshape([WARPS, 2, ROWS // WARPS // 2, p.shape[1]]), 1)


@gluon.jit
def only_seen(s, keys, at, start, kv_len, window, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr):
    """Scores s [64, N] of the tile that begins at key `start`, set to -inf where the query at position `at` [1, N] does not see
    the key."""
    if QUERIES > 1 or HAS_WINDOW:
        seen = keys <= at
        if HAS_WINDOW:
            seen &= keys > at - window
        s = gl.where(seen & (keys < kv_len), s, float("-inf"))
    elif start + ROWS > kv_len:
        s = gl.where(keys < kv_len, s, float("-inf"))
    return s


@gluon.jit
def weigh(s, m, high, sums):
    """The weights of scores s, when the maxima change from m to `high`.

    Returns (weights [64, N], the factor for earlier sums [N], sums [4, 8, N]).
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, sums.type.layout))
    # A query that has seen no key has m = -inf; subtracting 0 keeps its weights 0, not NaN.
    base = gl.where(high == float("-inf"), 0.0, high)
    p = gl.exp2(s - gl.expand_dims(base, 0))
    alpha = gl.exp2(m - base)
    fade = gl.convert_layout(alpha, LAYOUT, assert_trivial=True)
    return p, alpha, sums * gl.expand_dims(gl.expand_dims(fade, 0), 0) + pairs_of_rows(p)


@gluon.jit
def _walk(
    tiles, own, bars, power, scale, j, first, count, kv_len, q_len, window,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    FORMAT: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Process `count` tiles from key `first` on. Returns (O^T [D, N], m [N], l [N], the number of the next tile).

    m is in units of scaled scores.
    """
    LAYOUT: gl.constexpr = tall_sums(N)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    k_tiles, v_tiles = tiles
    q_buf, p_buf, tops = own
    k_full, v_full, k_empty, v_empty = bars
    q = q_buf.permute((1, 0))
    weights = p_buf.permute((1, 0))
    o = gl.zeros([D, N], gl.float32, LAYOUT)
    sums = pairs_of_rows(gl.zeros([ROWS, N], gl.float32, LAYOUT))
    m = gl.full([N], float("-inf"), gl.float32, COLUMNS)
    at = gl.expand_dims(kv_len - q_len + gl.arange(0, N, layout=COLUMNS) // GROUP, 0)
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    for i in range(count):
        stage = j % STAGES
        phase = j // STAGES & 1
        start = first + i * ROWS
        mbarrier.wait(k_full.index(stage), phase)
        s = gl.zeros([ROWS, N], gl.float32, LAYOUT)
        s = warpgroup_mma(k_tiles.index(stage), q, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        s = s * scale
        s = only_seen(s, start + rows, at, start, kv_len, window, QUERIES, HAS_WINDOW)
        high = gl.maximum(m, column_maxima(s, tops))
        release(k_empty.index(stage))
        p, alpha, sums = weigh(s, m, high, sums)
        m = high
        o = o * gl.expand_dims(alpha, 0)
        weights.store(p.to(weights.dtype))
        mbarrier.wait(v_full.index(stage), phase)
        if start + ROWS > kv_len:
            clear_end(v_tiles.index(stage), kv_len - start, 16)
        fence_async_shared()
        block_barrier()  # (c)
        o = warpgroup_mma(v_tiles.index(stage).permute((1, 0)), weights, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        release(v_empty.index(stage))  # (d)
        j += 1
    return o, m, gl.convert_layout(gl.sum(gl.sum(sums, 1), 0), COLUMNS), j


@gluon.jit
def _store_queries(q_buf, q):
    q_buf.store(q)
    return 1.0


@gluon.jit
def _attend(
    tiles, own, bars, at, stop, b, before, share, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, kv_lens_ptr, cu_q_ptr,
    batch, tokens, room, window, q_row_stride, scale,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, N: gl.constexpr, QUERIES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr, FORMAT: gl.constexpr,
    BOXES: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr, WALK: gl.constexpr,
):  # fmt: skip
    HELD: gl.constexpr = QUERIES * GROUP
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, N, layout=gl.SliceLayout(1, Q_LAYOUT))
    dims = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, Q_LAYOUT)), 0)
    j = at * 0
    while at < stop:
        g, first, count, kv_len, q_len, pair_at, pair_tiles = stretch(
            at, stop, b, before, kv_lens_ptr, cu_q_ptr, batch, room, window, G, QUERIES, HAS_WINDOW
        )  # fmt: skip
        if QUERIES == 1:
            q_begin = b.to(gl.int64)
        else:
            q_begin = gl.load(cu_q_ptr + b).to(gl.int64)
        token = q_begin + rows // GROUP
        live = (rows < HELD) & (rows // GROUP < q_len) & (token >= 0) & (token < tokens)
        places = token * (q_row_stride // 8) * 8 + (g * GROUP + rows % GROUP) * D
        power = STORE(own[0], gl.load(q_ptr + gl.expand_dims(places, 1) + dims, mask=gl.expand_dims(live, 1), other=0.0))
        fence_async_shared()
        block_barrier()  # (a)
        o, m, l, j = WALK(
            tiles, own, bars, power, scale, j, first, count, kv_len, q_len, window,
            GROUP, QUERIES, HAS_WINDOW, D, N, FORMAT, BOXES, STAGES,
        )  # fmt: skip
        end_pair(
            o.permute((1, 0)), m, l, at, count, share, b, g, pair_at, pair_tiles, q_begin, q_len, tokens,
            part_ptr, ticket_ptr, o_ptr, sink_ptr, G, GROUP, D, HELD, HAS_SINKS, BLOCK_R, AT_ONCE,
        )  # fmt: skip
        at += count
        if at == (before + pair_tiles) * G:
            before += pair_tiles
            b += 1


# ---- kernel


@gluon.jit
def decode(
    tiles, source, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, table_ptr, kv_lens_ptr, cu_q_ptr,
    batch, tokens, room, window, held, q_row_stride, table_row_stride, scale,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, N: gl.constexpr, S: gl.constexpr, QUERIES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr, STAGES: gl.constexpr,
    LONGER: gl.constexpr, FORMAT: gl.constexpr, BOXES: gl.constexpr, EXTRA: gl.constexpr, dtype: gl.constexpr,
    ARRIVALS: gl.constexpr, FETCH: gl.constexpr, STORE: gl.constexpr, WALK: gl.constexpr,
):  # fmt: skip
    """Run both partitions of warps on the range of this program.

    tiles: the shared memory that the consumer reads. source: where the producer loads from, and its destination. ARRIVALS: the
    arrivals that complete the `full` barrier of keys. FETCH loads a tile, STORE stores the queries of a pair as `dtype`, WALK
    processes the tiles of a pair.
    """
    NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    own = (
        gl.allocate_shared_memory(dtype, [N, D], NARROW),
        gl.allocate_shared_memory(dtype, [N, ROWS], NARROW),
        gl.allocate_shared_memory(gl.float32, [WARPS, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
    )
    bars = (barriers(STAGES, ARRIVALS), barriers(STAGES), barriers(STAGES), barriers(STAGES))
    at, stop, b, before, share = range_of(kv_lens_ptr, cu_q_ptr, batch, room, window, G, QUERIES, HAS_WINDOW, LONGER)
    gl.warp_specialize([
        (_attend, (
            tiles, own, bars, at, stop, b, before, share, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, kv_lens_ptr, cu_q_ptr,
            batch, tokens, room, window, q_row_stride, scale,
            G, GROUP, D, N, QUERIES, HAS_WINDOW, HAS_SINKS, BLOCK_R, AT_ONCE, FORMAT, BOXES, STAGES, STORE, WALK,
        )),
        (_load, (
            source, bars, at, stop, b, before, o_ptr, table_ptr, kv_lens_ptr, cu_q_ptr, batch, tokens, room, window, held,
            table_row_stride, G, GROUP, D, S, QUERIES, HAS_WINDOW, EXTRA, BOXES, STAGES, FETCH,
        )),
    ], [1], [56])  # fmt: skip


@gluon.jit(do_not_specialize=["batch", "tokens", "room", "window", "q_row_stride", "table_row_stride"])
def paged_sm90_kernel(
    k_desc, v_desc, k_end_desc, v_end_desc, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, table_ptr, kv_lens_ptr, cu_q_ptr,
    batch, tokens, room, window, q_row_stride, table_row_stride, scale,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, N: gl.constexpr, S: gl.constexpr, QUERIES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr, STAGES: gl.constexpr,
    LONGER: gl.constexpr, RELEASES: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4, those of the consumer; the producer brings its own warp.

    k_desc, v_desc: the caches as [P * G * S, D], in boxes of min(S, 64) rows by 64. k_end_desc, v_end_desc: the same, or with
    boxes of fewer rows for the last tiles of sequences. scale: already multiplied by log2(e). N: a power of two, at least 8 and
    at least QUERIES * GROUP. LONGER: tiles by which a range may grow to hold whole pairs.
    RELEASES: whether the launches that follow may start early.
    """
    if RELEASES:
        gdc_launch_dependents()
    dtype: gl.constexpr = k_desc.dtype
    BOXES: gl.constexpr = ROWS // k_desc.block_type.shape[0]
    END_BOXES: gl.constexpr = ROWS // k_end_desc.block_type.shape[0]
    BUFS: gl.constexpr = STAGES * (D // PANEL)
    k_bufs = gl.allocate_shared_memory(dtype, [BUFS * BOXES, ROWS // BOXES, PANEL], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [BUFS * BOXES, ROWS // BOXES, PANEL], v_desc.layout)
    tiles = (boxes_joined(k_bufs, STAGES, ROWS, D), boxes_joined(v_bufs, STAGES, ROWS, D))
    end_shape: gl.constexpr = [BUFS * END_BOXES, ROWS // END_BOXES, PANEL]
    end_layout: gl.constexpr = k_end_desc.layout
    bufs = (k_bufs, v_bufs, viewed(k_bufs, dtype, end_shape, end_layout), viewed(v_bufs, dtype, end_shape, end_layout))
    decode(
        tiles, ((k_desc, v_desc, k_end_desc, v_end_desc), bufs), q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr,
        table_ptr, kv_lens_ptr, cu_q_ptr, batch, tokens, room, window, 0, q_row_stride, table_row_stride, scale, G, GROUP, D, N,
        S, QUERIES, HAS_WINDOW, HAS_SINKS, BLOCK_R, AT_ONCE, STAGES, LONGER, "", BOXES, END_BOXES, dtype, 1,
        _fetch_tile, _store_queries, _walk,
    )  # fmt: skip
