"""`sm90` for caches of 8-bit codes: the products of decode_sm90_kernel.py, in fp16, with codes as wgmma's register operand.

The M operands, K [64 keys, D] and V^T [D, 64 keys], are stored as codes. A thread loads words of four codes, widens them to
fp16 (device/dequant.py, exact), and multiplies from registers. No converted number passes through shared memory, the codes of V
are already stored by columns, and the scales of keys apply to the rows of S^T: 64 per tile. A word contains four adjacent
codes, but the register operand needs two pairs that are eight columns apart. So both products go through their inner
dimension in an order that differs from memory:

    dims of K      32 c + 16 i + 4 q + 2 h + j  (16 c + 4 q + 2 h + j of 64)  at step (i, q), place 8 h + 2 c + j; queries are
                   stored in that order. A thread loads 16 bytes at once, and eight neighbouring threads use all banks of shared
                   memory
    keys of V^T    16 b + 4 c + 2 h + j at step b, place 8 h + 2 c + j; the rows of S^T are keys in that order

A bf16 query is divided by a power of two of its own so that it fits fp16, and weights times the values' scales are multiplied
by 2^8 (tile_mainloop.py).

As in decode_sm90_kernel.py, barriers (a), (b) and (c) separate the writers and readers of shared memory. The differences:

    keys          read into registers by all warps before (b), and released after it, together with the scales of the tile. The
                  32 lanes of the producer load the scales by cp.async: their arrivals, and the arrival for the bytes of the
                  boxes, complete the barrier
    values        read into registers by all warps before (c), and released after it
    weights       written again after (b) of the next tile, which a warp reaches only when its O^T is complete: there is no (d)
    past the end  codes are finite for any bits, and keys that do not exist have scale 0: nothing is cleared
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# B sequences, H query heads, G key/value heads, D head dim, S tokens per page, N columns: queries times heads, padded

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from tilewright.kernels.attention.paged.decode_sm90_kernel import (
    column_maxima,
    decode,
    only_seen,
    pairs_of_rows,
    tall_sums,
    weigh,
)
from tilewright.kernels.attention.paged.decode_sm90_split_kv import ROWS, page_rows
from tilewright.kernels.device.dequant import widen
from tilewright.kernels.hopper.primitives import load_box, release, viewed

__all__ = ["paged_sm90_codes_kernel"]


LANES = gl.constexpr(32)  # of the producer
# Keeps weights times scales above fp16's subnormals; allows scales up to 255 and values up to 32,000.
RAISED = gl.constexpr(256.0)

# ---- producer


@gluon.jit
def _fetch_scales(
    k_scale_ptr, v_scale_ptr, k_scales, v_scales, full, rows, key, kv_len, held,
    S: gl.constexpr, HEAD_SCALES: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Load the scales of a tile's keys, 0 where there is no key; each lane arrives when its own loads are complete."""
    STEP: gl.constexpr = ROWS // BOXES
    at = gl.arange(0, ROWS, layout=gl.BlockedLayout([2], [LANES], [1], [0]))
    row = rows[0] + at
    for i in gl.static_range(1, BOXES):
        row = gl.where(at >= i * STEP, rows[i] + at - i * STEP, row)
    head = row // S  # a key/value head of a page: its scales are HEAD_SCALES numbers after those of the preceding head
    inside = (key + at < kv_len) & (head < held)
    places = head.to(gl.int64) * HEAD_SCALES + row % S
    async_copy.async_copy_global_to_shared(k_scales, k_scale_ptr + places, mask=inside)
    async_copy.async_copy_global_to_shared(v_scales, v_scale_ptr + places, mask=inside)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _fetch_tile(
    source, bars, row_ptr, key, kv_len, g, j, held, G: gl.constexpr, D: gl.constexpr, S: gl.constexpr, BOXES: gl.constexpr,
    HEAD_SCALES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    descs, scale_ptrs, bufs = source
    k_desc, v_desc = descs
    k_scale_ptr, v_scale_ptr = scale_ptrs
    k_bufs, v_bufs, k_scales, v_scales = bufs
    k_full, v_full, k_empty, v_empty = bars
    V_ROWS: gl.constexpr = v_desc.block_type.shape[0]
    # The block table is read before the wait for a free stage.
    rows = page_rows(row_ptr, key, kv_len, g, G, S, ROWS // BOXES, BOXES)
    stage = j % STAGES
    phase = j // STAGES & 1 ^ 1
    mbarrier.wait(k_empty.index(stage), phase)
    mbarrier.expect(k_full.index(stage), ROWS * D)
    for n in gl.static_range(BOXES):
        load_box(k_desc, [rows[n], 0], k_full.index(stage), k_bufs.index(stage * BOXES + n))
    _fetch_scales(
        k_scale_ptr, v_scale_ptr, k_scales.index(stage), v_scales.index(stage), k_full.index(stage), rows, key,
        kv_len, held, S, HEAD_SCALES, BOXES,
    )  # fmt: skip
    mbarrier.wait(v_empty.index(stage), phase)
    mbarrier.expect(v_full.index(stage), ROWS * D)
    for n in gl.static_range(BOXES):
        # A page's values are [D, S]: a box is the whole page, or 64 tokens of each dim. A row NOWHERE stays out of bounds.
        place = [rows[n] // S * V_ROWS, rows[n] % S // 4]
        load_box(v_desc, place, v_full.index(stage), v_bufs.index(stage * BOXES + n))


# ---- consumer


@constexpr_function
def _key_words(dim: int) -> gl.DistributedLinearLayout:
    """The layout of the words of K [64 keys, dim / 4]."""
    wide = [[0, 4]] if dim == 128 else []
    lanes = [[0, dim // 16], [0, dim // 8], [1, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *wide, [2, 0]], lanes, [[16, 0], [32, 0]], [], [64, dim // 4])


@constexpr_function
def _key_scales() -> gl.DistributedLinearLayout:
    """The layout of one number per key, for 64 keys: each thread holds those of its rows of `_key_words`."""
    return gl.DistributedLinearLayout([[2]], [[0], [0], [1], [4], [8]], [[16], [32]], [], [64])


@constexpr_function
def _value_words(dim: int, words: int, dims: int, boxes: int) -> gl.DistributedLinearLayout:
    """The layout of the words of V [boxes * dim / dims, dims * words]: a row contains `dims` dims of `words` words each."""

    def of_dim(n: int) -> list[int]:
        return [0, n * words] if n < dims else [n // dims, 0]

    wide = [[0, 4 << i] for i in range((words // 4).bit_length() - 1)]
    own = [of_dim(8), *([of_dim(64)] if dim == 128 else []), *wide]
    own += [[dim // dims << i, 0] for i in range(boxes.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], of_dim(1), of_dim(2), of_dim(4)]
    return gl.DistributedLinearLayout(own, lanes, [of_dim(16), of_dim(32)], [], [boxes * dim // dims, dims * words])


@gluon.jit
def _keys_operand(words, like, FORMAT: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of K [64, D / 4] as [64, D] in fp16, with rows and dims in the order of the products."""
    D: gl.constexpr = words.shape[1] * 4
    k = widen(words, words, FORMAT, like)
    k = k.reshape([4, 4, 2, 2, 4, D // 64, 4, 2, 2]).permute([0, 2, 1, 3, 5, 6, 7, 4, 8])
    return gl.convert_layout(k.reshape([ROWS, D]), LAYOUT, assert_trivial=True)


@gluon.jit
def _values_operand(words, like, FORMAT: gl.constexpr, D: gl.constexpr, BOXES: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of V as [D, 64] in fp16, with keys in the order of the products."""
    STEPS: gl.constexpr = ROWS // BOXES // 16  # steps of 16 keys per box
    DIMS: gl.constexpr = words.shape[1] // (STEPS * 4)
    v = widen(words, words, FORMAT, like)
    v = v.reshape([BOXES, D // DIMS, DIMS, STEPS, 4, 2, 2]).permute([1, 2, 0, 3, 5, 4, 6])
    return gl.convert_layout(v.reshape([D, ROWS]), LAYOUT, assert_trivial=True)


@gluon.jit
def _by_row(x, layout: gl.constexpr):
    """One number per key, in the layout of `_key_scales`, as a column for the rows of S^T [64, N]."""
    x = x.reshape([4, 4, 2, 2]).permute([0, 2, 1, 3]).reshape([ROWS])
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def _store_queries(q_buf, q):
    """Store the queries [N, D] within fp16's range, dims in the order of the products. Returns the powers of two that the
    queries were divided by, [N]."""
    N: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    power = gl.full([N], 1.0, gl.float32, gl.SliceLayout(1, q.type.layout))
    if q.dtype == gl.bfloat16:
        # Elements that become too small for fp16 are less than 2^-24 of the query's largest element.
        wide = q.to(gl.float32)
        power = (gl.max(gl.abs(wide), 1).to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        power = gl.where((power > 0.0) & (power < float("inf")), power, 1.0)
        q = (wide / gl.expand_dims(power, 1)).to(gl.float16)
    q_buf.store(q.reshape([N, 4, D // 64, 4, 2, 2]).permute([0, 2, 3, 4, 1, 5]).reshape([N, D]))
    return power


@gluon.jit
def _walk(
    tiles, own, bars, power, scale, j, first, count, kv_len, q_len, window,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    FORMAT: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Process `count` tiles from key `first` on. Returns (O^T [D, N], m [N], l [N], the number of the next tile).

    m is in units of scaled scores. power: [N], what `_store_queries` returned.
    """
    scales = gl.convert_layout(power * scale, gl.SliceLayout(0, tall_sums(N)))
    LAYOUT: gl.constexpr = tall_sums(N)
    TALL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    k_tiles, v_tiles, k_scales, v_scales = tiles
    q_buf, p_buf, tops = own
    k_full, v_full, k_empty, v_empty = bars
    q = q_buf.permute((1, 0))
    weights = p_buf.permute((1, 0))
    DIMS: gl.constexpr = v_tiles.shape[2] * 4 // (ROWS // BOXES)
    V_WORDS: gl.constexpr = _value_words(D, ROWS // BOXES // 4, DIMS, BOXES)
    like = gl.zeros([1], gl.float16, COLUMNS)
    o = gl.zeros([D, N], gl.float32, LAYOUT)
    sums = pairs_of_rows(gl.zeros([ROWS, N], gl.float32, LAYOUT))
    m = gl.full([N], float("-inf"), gl.float32, COLUMNS)
    at = gl.expand_dims(kv_len - q_len + gl.arange(0, N, layout=COLUMNS) // GROUP, 0)
    rows = _by_row(gl.arange(0, ROWS, layout=_key_scales()), LAYOUT)
    for i in range(count):
        stage = j % STAGES
        phase = j // STAGES & 1
        start = first + i * ROWS
        mbarrier.wait(k_full.index(stage), phase)
        k = _keys_operand(k_tiles.index(stage).load(_key_words(D)), like, FORMAT, TALL)
        k_scale = _by_row(k_scales.index(stage).load(_key_scales()), LAYOUT)
        v_scale = _by_row(v_scales.index(stage).load(_key_scales()), LAYOUT)
        s = gl.zeros([ROWS, N], gl.float32, LAYOUT)
        s = warpgroup_mma(k, q, s, use_acc=False, is_async=True)
        s, k = warpgroup_mma_wait(0, deps=(s, k))
        s = s * (k_scale * gl.expand_dims(scales, 0))
        s = only_seen(s, start + rows, at, start, kv_len, window, QUERIES, HAS_WINDOW)
        high = gl.maximum(m, column_maxima(s, tops))
        release(k_empty.index(stage))
        p, alpha, sums = weigh(s, m, high, sums)
        m = high
        o = o * gl.expand_dims(alpha, 0)
        weights.store((p * (v_scale * RAISED)).to(gl.float16))
        mbarrier.wait(v_full.index(stage), phase)
        v = _values_operand(v_tiles.index(stage).load(V_WORDS), like, FORMAT, D, BOXES, TALL)
        fence_async_shared()
        release(v_empty.index(stage))  # (c)
        o = warpgroup_mma(v, weights, o, is_async=True)
        o, v = warpgroup_mma_wait(0, deps=(o, v))
        j += 1
    return o * (1.0 / RAISED), m, gl.convert_layout(gl.sum(gl.sum(sums, 1), 0), COLUMNS), j


@gluon.jit(do_not_specialize=["batch", "tokens", "room", "window", "held", "q_row_stride", "table_row_stride"])
def paged_sm90_codes_kernel(
    k_desc, v_desc, k_scale_ptr, v_scale_ptr, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, table_ptr, kv_lens_ptr, cu_q_ptr,
    batch, tokens, room, window, held, q_row_stride, table_row_stride, scale,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, N: gl.constexpr, S: gl.constexpr, QUERIES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr, STAGES: gl.constexpr,
    LONGER: gl.constexpr, FORMAT: gl.constexpr, HEAD_SCALES: gl.constexpr, RELEASES: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4, those of the consumer; the producer brings its own warp.

    k_desc: the keys in words of four codes, [P * G * S, D / 4], in boxes of min(S, 64) rows. v_desc: likewise the values, as
    [P * G * D, S / 4] in boxes of D rows by 16 if S is 64 or more, else as [P * G * D * S / 128, 32] in boxes of one page.
    held: P * G. FORMAT: "int8" or "e4m3". HEAD_SCALES: numbers from the scales of one head of a page to those of the next.
    RELEASES: whether the launches that follow may start early.
    """
    if RELEASES:
        gdc_launch_dependents()
    BOXES: gl.constexpr = ROWS // k_desc.block_type.shape[0]
    V_ROWS: gl.constexpr = v_desc.block_type.shape[0]
    V_COLS: gl.constexpr = v_desc.block_type.shape[1]
    K_LAYOUT: gl.constexpr = k_desc.layout
    V_LAYOUT: gl.constexpr = v_desc.layout
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_bufs = gl.allocate_shared_memory(gl.int32, [STAGES * BOXES, ROWS // BOXES, D // 4], K_LAYOUT)
    v_bufs = gl.allocate_shared_memory(gl.int32, [STAGES * BOXES, V_ROWS, V_COLS], V_LAYOUT)
    k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    tiles = (
        viewed(k_bufs, gl.int32, [STAGES, ROWS, D // 4], K_LAYOUT),
        viewed(v_bufs, gl.int32, [STAGES, BOXES * V_ROWS, V_COLS], V_LAYOUT),
        k_scales,
        v_scales,
    )
    source = ((k_desc, v_desc), (k_scale_ptr, v_scale_ptr), (k_bufs, v_bufs, k_scales, v_scales))
    decode(
        tiles, source, q_ptr, o_ptr, part_ptr, ticket_ptr, sink_ptr, table_ptr, kv_lens_ptr,
        cu_q_ptr, batch, tokens, room, window, held, q_row_stride, table_row_stride, scale, G, GROUP, D, N,
        S, QUERIES, HAS_WINDOW, HAS_SINKS, BLOCK_R, AT_ONCE, STAGES, LONGER, FORMAT, BOXES, HEAD_SCALES, gl.float16, 1 + LANES,
        _fetch_tile, _store_queries, _walk,
    )  # fmt: skip
