"""The inner loop of paged attention: online softmax over keys in pages, which a block table lists. No launchers.

For each query row it keeps the maximum m, the sum l of exp2(s - m) and the weighted values acc (explained in attention.py).
With a cache of 8-bit codes (dequant.py), the scale of a key multiplies its scores, and the scale of a value multiplies its
weights: the tensor cores multiply the codes themselves, as fp16 if the queries have 16 bits. Codes of values are stored by
columns, [D, S] for a page and head, because tensor cores need the numbers that they sum to be adjacent, and the instructions
that transpose tiles in shared memory work only on pairs of bytes.
"""

import triton
import triton.language as tl

from tilewright.kernels.attention.paged.dequant import unit, widen
from tilewright.kernels.device.dot import dot

__all__ = ["length_of", "normalise", "pages_of", "sequence_of", "walk"]

# Keeps weights times scales above fp16's subnormals; allows scales up to 255 and values up to 32,000.
_RAISED = tl.constexpr(256.0)


@triton.jit
def length_of(kv_lens_ptr, b, live, room):
    """The tokens of a sequence, 0 if not `live`: never more than the `room` in its row of the block table."""
    return tl.minimum(tl.maximum(tl.load(kv_lens_ptr + b, mask=live, other=0), 0), room)


@triton.jit
def sequence_of(tile, batch, cu_q_ptr, BLOCK_Q: tl.constexpr):
    """(sequence, its first token, its tokens) of a tile of BLOCK_Q queries."""
    # Sequence b owns the tiles from cu_q[b] // BLOCK_Q + b on: at least ceil(its queries / BLOCK_Q) of them.
    b = tl.full((), 0, tl.int32)
    high = batch
    while b + 1 < high:
        middle = (b + high) // 2
        if tl.load(cu_q_ptr + middle) // BLOCK_Q + middle <= tile:
            b = middle
        else:
            high = middle
    q_begin = tl.load(cu_q_ptr + b)
    return b, q_begin, tl.load(cu_q_ptr + b + 1) - q_begin


@triton.jit
def pages_of(table_ptr, start, end, pages, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each key start .. start + BLOCK_N; 0 from `end` on, and never outside the cache."""
    keys = start + tl.arange(0, BLOCK_N)
    page = tl.load(table_ptr + keys // S, mask=keys < end, other=0)
    return tl.minimum(tl.maximum(page, 0), pages - 1)


@triton.jit
def _scales_of(k_scale_ptr, v_scale_ptr, places, inside):
    """The scales of keys and of values; 0 where not `inside`."""
    return tl.load(k_scale_ptr + places, mask=inside, other=0.0), tl.load(v_scale_ptr + places, mask=inside, other=0.0)


@triton.jit
def _columns(
    v_cache_ptr, places, S: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Codes of values [BLOCK_D, BLOCK_N]; `places`: the offset of each token's first code."""
    dims = tl.arange(0, BLOCK_D)
    columns = places[None, :] + (dims * S)[:, None]
    if S % 16 == 0 and BLOCK_N % 16 == 0:
        # Sixteen tokens of one page are adjacent. The compiler cannot know this, because the page numbers are loaded.
        columns = tl.max_contiguous(tl.multiple_of(columns, [1, 16]), [1, 16])
    if D == BLOCK_D:
        v = tl.load(v_cache_ptr + columns)
    else:
        v = tl.load(v_cache_ptr + columns, mask=(dims < D)[:, None], other=0)
    return v


@triton.jit
def _tile_step(
    q, acc, m, l, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, pages, start, end, at, scales, cap_log2, window,
    PAGE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Add the keys start .. start + BLOCK_N to (m, l, acc). The pointers to caches and scales are those of the head."""
    # Whether scores are scaled before the mask; otherwise they are scaled when the maximum is subtracted.
    SCALED: tl.constexpr = CODED or cap_log2 is not None  # pyright: ignore[reportAssignmentType]
    dims = tl.arange(0, BLOCK_D)
    keys = start + tl.arange(0, BLOCK_N)
    inside = keys < end
    page = pages.to(tl.int64)
    if MASKED and not CODED:
        mask = inside[:, None] & (dims < D)[None, :]
    else:
        # Codes are finite for any bits, and those after the end have scale 0.
        mask = (dims < D)[None, :]
    base = page * PAGE_STRIDE
    offsets = (base + (keys % S) * D)[:, None] + dims[None, :]
    if D == BLOCK_D and (CODED or not MASKED):
        k = tl.load(k_cache_ptr + offsets)
    else:
        k = tl.load(k_cache_ptr + offsets, mask=mask, other=0)
    s = dot(q, tl.trans(widen(k, q)), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
    if CODED:
        k_scale, v_scale = _scales_of(k_scale_ptr, v_scale_ptr, page * SCALE_STRIDE + keys % S, inside)
        s *= scales[:, None] * k_scale[None, :]
    if cap_log2 is not None:
        s = cap_log2 * (1.0 - 2.0 / (tl.exp2(s * scales) + 1.0))  # cap tanh(x) log2(e); `scales` is 2 scale log2(e) / cap
    if MASKED:
        seen = inside[None, :] & (keys[None, :] <= at[:, None])
        if HAS_WINDOW:
            seen &= keys[None, :] > at[:, None] - window
        s = tl.where(seen, s, float("-inf"))
    top = tl.max(s, 1)
    if not SCALED:
        top *= scales
    m_new = tl.maximum(m, top)
    # A row that has seen no key yet has m = -inf; subtracting 0 instead keeps its weights exp2(-inf) = 0, not NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    if SCALED:
        p = tl.exp2(s - shift[:, None])
    else:
        # An explicit fma, so that a tile without a mask has the same bits as one with a mask.
        p = tl.exp2(tl.fma(s, scales, -shift[:, None]))
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    if CODED:
        p *= v_scale[None, :] * _RAISED
        v = _columns(v_cache_ptr, base + keys % S, S, D, BLOCK_N, BLOCK_D)
        acc = dot(p.to(q.dtype), tl.trans(widen(v, q)), acc * alpha[:, None])
    else:
        if D == BLOCK_D and not MASKED:
            v = tl.load(v_cache_ptr + offsets)
        else:
            v = tl.load(v_cache_ptr + offsets, mask=mask, other=0)
        acc = dot(p.to(q.dtype), v, acc * alpha[:, None])
    return acc, m_new, l


@triton.jit
def walk(
    q, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, table_ptr, pages_held, first, last, end, at, first_at, scale_log2,
    cap_log2, window, PAGE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr, CODED: tl.constexpr,
    SKIP_MASKS: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted values over the keys first .. last, `first` a multiple of BLOCK_N. No key from `end` on is read.

    `end` is at most the tokens of the table's row (`length_of`). A page number outside the `pages_held` pages of the cache
    is replaced by the nearest valid one.

    `first_at` is the position of the tile's first query. SKIP_MASKS: a separate loop without masks processes the tiles of keys
    that end at or before `first_at`. Each of the two loops fills its own pipeline, so short walks use only one loop. cap_log2:
    None, or the cap of scores times log2(e); `scale_log2` is then the factor of the tanh argument, 2 scale log2(e) / cap.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if CODED:
        scales = tl.zeros([BLOCK_M], tl.float32) + scale_log2
        if q.dtype == tl.bfloat16:
            # Codes widen to fp16 in fewer instructions than to bf16, and scaled weights are rounded less. A power of two brings
            # each row of q into fp16's range. Elements that become too small are less than 2^-24 of the row's largest element.
            wide = q.to(tl.float32)
            power = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            power = tl.where((power > 0.0) & (power < float("inf")), power, 1.0)
            rows = (wide / power[:, None]).to(tl.float16)
            scales *= power
        else:
            rows = q
        UNIT: tl.constexpr = unit(k_cache_ptr.dtype.element_ty, rows.dtype)
        scales *= UNIT
    else:
        rows = q
        scales = scale_log2
    # The page numbers of a tile are read one tile ahead. Otherwise its keys would wait for two loads, one after the other.
    pages = pages_of(table_ptr, first, end, pages_held, S, BLOCK_N)
    plain_end = first
    if SKIP_MASKS and not HAS_WINDOW:
        plain_end = tl.maximum(first, tl.minimum(last, first_at + 1) // BLOCK_N * BLOCK_N)
        for start in tl.range(first, plain_end, BLOCK_N):
            following = pages_of(table_ptr, start + BLOCK_N, end, pages_held, S, BLOCK_N)
            acc, m, l = _tile_step(
                rows, acc, m, l, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, pages, start, end, at, scales,
                cap_log2, window, PAGE_STRIDE, SCALE_STRIDE, S, D, BLOCK_N, BLOCK_D, False, HAS_WINDOW, CODED,
            )  # fmt: skip
            pages = following
    for start in tl.range(plain_end, last, BLOCK_N):
        # With a cap there are not enough registers to read page numbers ahead.
        following = pages_of(table_ptr, start + (BLOCK_N if cap_log2 is None else 0), end, pages_held, S, BLOCK_N)
        acc, m, l = _tile_step(
            rows, acc, m, l, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, pages if cap_log2 is None else following,
            start, end, at, scales, cap_log2, window, PAGE_STRIDE, SCALE_STRIDE, S, D, BLOCK_N, BLOCK_D, True, HAS_WINDOW,
            CODED,
        )  # fmt: skip
        if cap_log2 is None:
            pages = following
    if CODED:
        acc *= UNIT / _RAISED
    return acc, m, l


@triton.jit
def normalise(acc, m, l, sink_ptr, heads, live, HAS_SINKS: tl.constexpr):
    """acc / l of each row; zeros for a row without keys. sink_ptr: [H], logits that take part in the softmax without a
    value."""
    if HAS_SINKS:
        sink = tl.load(sink_ptr + heads, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634  # log2(e)
        top = tl.maximum(m, sink)
        fade = tl.exp2(m - top)
        return acc * (fade / (l * fade + tl.exp2(sink - top)))[:, None]
    else:
        return acc / tl.where(l == 0.0, 1.0, l)[:, None]
