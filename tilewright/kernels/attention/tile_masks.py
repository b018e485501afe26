"""Tiles of a head's rows, and which queries see which keys: shared by the portable forward and backward kernels. No
launchers."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["capped", "load_rows", "queries_that_see", "seen_by", "sequence", "strides_of"]


def strides_of(*tensors: Tensor) -> list[int]:
    """The (sequence, row, head) strides of each tensor, concatenated. For packed tensors the sequence stride is 0."""
    return [stride for t in tensors for stride in ((0, *t.stride()) if t.dim() == 3 else t.stride())[:3]]


@triton.jit
def load_rows(ptr, rows, row_stride, D: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr, end):
    """Rows of a head as a tile, BLOCK_D wide, zero beyond D columns and, if BOUNDED, from row `end` on."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + rows[:, None].to(tl.int64) * row_stride + dims
    if BOUNDED:
        return tl.load(ptrs, mask=(rows < end)[:, None] & (dims < D), other=0.0)
    elif D == BLOCK_D:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=dims < D, other=0.0)


@triton.jit
def sequence(ptr, b, cu_ptr, length, batch_stride, row_stride):
    """(pointer to the first row of sequence b, rows of the sequences before it, its length)."""
    if cu_ptr is None:
        return ptr + b.to(tl.int64) * batch_stride, b.to(tl.int64) * length, length
    else:
        start = tl.load(cu_ptr + b)
        return ptr + start.to(tl.int64) * row_stride, start.to(tl.int64), tl.load(cu_ptr + b + 1) - start


@triton.jit
def capped(s, pre_scale):
    """tanh(s * pre_scale / (2 log2(e))): a capped score, in units of the cap."""
    return 1.0 - 2.0 / (tl.exp2(s * pre_scale) + 1.0)


@triton.jit
def seen_by(
    first, q_len, k_len, left, right, prefix,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """(own, begin, end) of the query rows from `first` on, and (start, cut, plain, last) of their tile.

    Row r sees the keys begin[r] .. end[r] - 1. The tile visits the keys from `start` to before `last`. All rows see the blocks
    from `cut` to before `plain` completely.
    """
    own = first + tl.arange(0, BLOCK_M) + (k_len - q_len)  # each row's own key, the last that it sees under a causal mask
    first_own = first + (k_len - q_len)
    begin = own - left
    end = tl.zeros([BLOCK_M], tl.int32) + k_len
    last = k_len
    plain = k_len
    if RIGHT:
        end = own + (right + 1)
        last = first_own + BLOCK_M + right
        plain = first_own + 1 + right
        if PREFIX:
            end = tl.maximum(end, prefix)
            last = tl.maximum(last, prefix)
            plain = tl.maximum(plain, prefix)
        end = tl.minimum(end, k_len)
        last = tl.minimum(last, k_len)
        plain = tl.maximum(tl.minimum(plain, k_len), 0)
    plain = plain // BLOCK_N * BLOCK_N
    start = 0
    cut = 0
    if LEFT:
        start = tl.maximum(first_own - left, 0) // BLOCK_N * BLOCK_N
        cut = (tl.maximum(first_own + BLOCK_M - 1 - left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        cut = tl.minimum(tl.maximum(cut, start), tl.maximum(last, start))
        plain = tl.maximum(plain, cut)
    return own, begin, end, start, cut, plain, last


@triton.jit
def queries_that_see(
    first, q_len, k_len, left, right, prefix,
    TILE: tl.constexpr, STEP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """(own, begin, end) of the keys from `first` on, and (start, plain, tail, last) of their tile.

    own: the query whose own key it is. The queries begin[j] .. end[j] - 1 see key j. The tile visits the queries from `start`
    to before `last`. The blocks of queries from `plain` to before `tail` see all keys of the tile.
    """
    own = first + tl.arange(0, TILE) - (k_len - q_len)
    first_own = first - (k_len - q_len)
    begin = tl.zeros([TILE], tl.int32)
    end = tl.zeros([TILE], tl.int32) + q_len
    start = 0
    plain = 0
    last = q_len
    tail = q_len
    if RIGHT:
        begin = own - right
        start = first_own - right
        plain = first_own + TILE - 1 - right
        if PREFIX:
            begin = tl.where(first + tl.arange(0, TILE) < prefix, 0, begin)
            start = tl.where(first < prefix, 0, start)
            plain = tl.where(first + TILE - 1 < prefix, 0, plain)
        start = tl.maximum(start, 0) // STEP * STEP
        plain = (tl.maximum(plain, 0) + STEP - 1) // STEP * STEP
    if LEFT:
        end = tl.minimum(own + (left + 1), q_len)
        last = tl.minimum(first_own + TILE + left, q_len)
        tail = tl.maximum(tl.minimum(first_own + left + 1, q_len), 0)
    tail = tl.maximum(tail // STEP * STEP, plain)
    return own, begin, end, start, plain, tail, last
