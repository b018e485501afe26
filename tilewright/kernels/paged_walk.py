"""The inner loop of paged attention: online softmax over keys that a block table scatters over pages. No launchers.

Per query row it keeps the maximum m, the sum l of exp2(s - m) and the weighted values acc (paged_attention.py tells why).
"""

import triton
import triton.language as tl

from tilewright.kernels.reduce import dot

__all__ = ["walk"]


@triton.jit
def _tile_step(
    q, acc, m, l, k_cache_ptr, v_cache_ptr, table_ptr, start, end, at, scale_log2, window,
    PAGE_STRIDE: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Take the keys start .. start + BLOCK_N into (m, l, acc). k_cache_ptr and v_cache_ptr point at the head."""
    dims = tl.arange(0, BLOCK_D)
    keys = start + tl.arange(0, BLOCK_N)
    inside = keys < end
    if MASKED:
        page = tl.load(table_ptr + keys // S, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & (dims < D)[None, :]
    else:
        page = tl.load(table_ptr + keys // S).to(tl.int64)
        mask = (dims < D)[None, :]
    offsets = (page * PAGE_STRIDE + (keys % S) * D)[:, None] + dims[None, :]
    if D == BLOCK_D and not MASKED:
        k = tl.load(k_cache_ptr + offsets)
    else:
        k = tl.load(k_cache_ptr + offsets, mask=mask, other=0.0)
    s = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32)) * scale_log2
    if MASKED:
        seen = inside[None, :] & (keys[None, :] <= at[:, None])
        if HAS_WINDOW:
            seen &= keys[None, :] > at[:, None] - window
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen no key yet has m = -inf; subtracting 0 instead keeps its weights exp2(-inf) = 0, not NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    if D == BLOCK_D and not MASKED:
        v = tl.load(v_cache_ptr + offsets)
    else:
        v = tl.load(v_cache_ptr + offsets, mask=mask, other=0.0)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, l


@triton.jit
def walk(
    q, k_cache_ptr, v_cache_ptr, table_ptr, first, last, end, at, first_at, scale_log2, window,
    PAGE_STRIDE: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted values over the keys first .. last, `first` a multiple of BLOCK_N. No key from `end` on is read.

    `first_at` is the position of the tile's first query: tiles of keys wholly before it need no mask.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        plain_end = first
    else:
        plain_end = tl.maximum(first, tl.minimum(last, first_at + 1) // BLOCK_N * BLOCK_N)
    for start in tl.range(first, plain_end, BLOCK_N):
        acc, m, l = _tile_step(
            q, acc, m, l, k_cache_ptr, v_cache_ptr, table_ptr, start, end, at, scale_log2, window,
            PAGE_STRIDE, S, D, BLOCK_N, BLOCK_D, False, HAS_WINDOW,
        )  # fmt: skip
    for start in tl.range(plain_end, last, BLOCK_N):
        acc, m, l = _tile_step(
            q, acc, m, l, k_cache_ptr, v_cache_ptr, table_ptr, start, end, at, scale_log2, window,
            PAGE_STRIDE, S, D, BLOCK_N, BLOCK_D, True, HAS_WINDOW,
        )  # fmt: skip
    return acc, m, l
