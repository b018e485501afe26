"""`permute` by words of 4 bytes, for tiles of 1- and 2-byte elements with unaligned rows (of odd length, say): `words`.

A word has U = 4 / itemsize elements. In registers and in shared memory a tile consists of words only:

    load        Rows of x are loaded as words of U elements along a. If rows of x are unaligned, the aligned words that contain
                a row are loaded, and each pair of neighbouring words is combined with a shift by the row's own offset.
    transpose   U words of U different rows become U words of U elements along b. This happens in registers.
    gather      Through shared memory. Row a of y begins some elements after a multiple of 32 bytes (a sector). Its piece of the
                tile is shifted to the left by the same number of elements. So different words are gathered for each row, and
                pairs of neighbouring words are combined with a shift. The result consists of whole vectors of 16 bytes, and the
                piece of a row begins and ends at a sector boundary.
    store       By vectors. The elements at either end of a row that fill no vector (up to 16 / itemsize - 1) are copied one by
                one.

A tile loads one sector more along b than it stores. If rows of y consist of whole vectors, nothing is shifted, and the words
are transposed like any tile. No byte outside of x is read: where words might begin before x or end after it, the tile assembles
its words from single elements.

Refuses elements of 4 and 8 bytes, rows that stay whole, and problems where both sides allow accesses of 4 bytes or more.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.layout.problem import BITS, Problem, form_of, plan_of, refuse_form, tile_of
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["WORDS"]

_WORD_BYTES = 4
_VECTOR_BYTES = 16

# ---- space


# (BLOCK_A, BLOCK_B, num_warps) by (bytes per element, sides whose rows are unaligned), the default first. BLOCK_A is at least
# 32 words: fewer do not use all banks of shared memory. The comments give the fraction of the speed of a copy (H100, Triton
# 3.6). For (1, "x") the first two are equally fast. The default is the one that needs fewer than 128 registers with Triton
# 3.7.1 too: 92, not 155.
_TILES = {
    (1, "x"): ((128, 256, 16), (128, 256, 8), (128, 128, 4)),  # 16384 x 8193: 0.871, 0.873, 0.864 (`triton`: 0.772)
    (1, "y"): ((128, 128, 8), (128, 256, 8), (128, 256, 16)),  # 8193 x 16384: 0.888, 0.882, 0.876 (0.529)
    (1, "both"): ((128, 256, 16), (128, 256, 8)),  # 8193 x 16383: 0.932, 0.924 (0.675)
    (2, "x"): ((64, 128, 8), (64, 128, 4), (128, 64, 8)),  # 8192 x 4097: 0.909, 0.909, 0.906 (0.908)
    (2, "y"): ((64, 128, 8), (64, 128, 4), (128, 128, 8)),  # 4097 x 8192: 0.920, 0.918, 0.917 (0.794)
    (2, "both"): ((64, 128, 8), (64, 128, 4), (64, 256, 8)),  # 4097 x 8191: 1.062, 1.005, 1.000 (0.704)
}
# Pieces of rows of y begin at multiples of a sector. If they begin at multiples of 16 bytes, so also inside a sector, the same
# tiles reach 0.78 instead of 0.91 (bf16 64 x 256) and 0.71 instead of 0.88 (int8 128 x 256). With multiples of 64 bytes they
# reach 0.91 and 0.87.
_SECTOR_BYTES = 32


def _tiles(problem: Problem) -> tuple[tuple[int, int, int], ...]:
    if problem.y_bytes == _VECTOR_BYTES:
        return _TILES[problem.itemsize, "x"]
    return _TILES[problem.itemsize, "both" if problem.x_bytes < _WORD_BYTES else "y"]


def _default(device: Device, problem: Problem) -> Config:
    block_a, block_b, warps = _tiles(problem)[0]
    return {"BLOCK_A": block_a, "BLOCK_B": block_b, "num_warps": warps}


def _refusal(device: Device, problem: Problem, c: Config) -> str | None:
    listed = (c["BLOCK_A"], c["BLOCK_B"], c["num_warps"]) in _tiles(problem)
    return None if listed else "not one of the tiles for this element size and alignment"


SPACE = Space(
    default=_default,
    axes={"BLOCK_A": (64, 128), "BLOCK_B": (64, 128, 256), "num_warps": (4, 8, 16)},
    refusal=_refusal,
)

# ---- kernel
# K = BLOCK_B / U, W = BLOCK_A / U. A tile of words is [K, W]. Its words run along a at first, and along b once transposed.
# Each address is one multiply-add of 32 x 32 to 64 bits: powers of two are put into the small factor, not into the stride.


@triton.jit
def _joined(low, high, shift):
    """int32: the 32 bits from bit `shift` on of the 64-bit number high:low. 0 <= shift < 32."""
    both = high.to(tl.int64) << 32 | low.to(tl.uint32, bitcast=True).to(tl.int64)
    return (both >> shift.to(tl.int64)).to(tl.int32)


@triton.jit
def _columns(K: tl.constexpr, W: tl.constexpr, SWIZZLED: tl.constexpr):
    """int32 [K, W]: for each place in a row of W words, which word it holds. SWIZZLED: XOR with 8 * ((k // 4) % 4).

    So the accesses in `_shifted` use all 32 banks: four lanes read words of one row that are 4 apart, and this for eight
    neighbouring rows.
    """
    k, w = tl.arange(0, K), tl.arange(0, W)
    turn = (k >> 2 & 3) * 8 if SWIZZLED else k * 0
    return tl.max_contiguous(tl.multiple_of(w[None, :] ^ turn[:, None], [1, 8]), [1, 8])


@triton.jit
def _aligned_words(ptr, x_b, b0, B, w, left, U: tl.constexpr, UNIT: tl.constexpr):
    """int32 in the shape of w: words w of rows b0, b0 + U ... A row has `left` words. Undefined where there is no word.

    ptr: byte pointer to the start of row b0; b0 may be negative. x_b: stride of the rows, in units of UNIT bytes.
    """
    j = tl.arange(0, w.shape[0]) * U
    rows = (ptr + (j * UNIT).to(tl.int64) * x_b).to(tl.pointer_type(tl.int32), bitcast=True)
    mask = ((b0 + j).to(tl.uint32, bitcast=True) < B.to(tl.uint32, bitcast=True))[:, None] & (w < left)
    return tl.load(rows[:, None] + w, mask=mask)


@triton.jit
def _joined_words(ptr, x_b, b0, B, w, left, U: tl.constexpr, SIZE: tl.constexpr):
    """The same for unaligned rows of `left` elements of SIZE bytes, from the aligned words that contain them.

    Reads up to 7 bytes beyond the end of a row.
    """
    j = tl.arange(0, w.shape[0]) * U
    at = ptr.to(tl.int64) + (j * SIZE).to(tl.int64) * x_b
    behind = (at.to(tl.int32) & 3)[:, None]
    words = (at >> 2 << 2).to(tl.pointer_type(tl.int32))[:, None] + w
    rows = ((b0 + j).to(tl.uint32, bitcast=True) < B.to(tl.uint32, bitcast=True))[:, None]
    mask = rows & (w * 4 < left * SIZE)
    return _joined(tl.load(words, mask=mask), tl.load(words + 1, mask=mask), behind * 8)


@triton.jit
def _gathered_words(ptr, x_b, b0, B, w, left, U: tl.constexpr, SIZE: tl.constexpr):
    """The same, assembled from single elements. ptr: pointer to elements."""
    j = tl.arange(0, w.shape[0]) * U
    rows = ((b0 + j).to(tl.uint32, bitcast=True) < B.to(tl.uint32, bitcast=True))[:, None]
    words = tl.zeros(w.shape, tl.int32)
    for e in tl.static_range(U):
        at = (j.to(tl.int64) * x_b)[:, None] + (w * U + e)
        one = tl.load(ptr + at, mask=rows & (w * U + e < left), other=0).to(tl.int32)
        words |= (one & ((1 << (8 * SIZE)) - 1)) << (8 * SIZE * e)
    return words


@triton.jit
def _words(x_ptr, base, x_b, b0, B, tile_a, a_units, r: tl.constexpr, U: tl.constexpr, BLOCK_A: tl.constexpr,
           BLOCK_B: tl.constexpr, X_VECTOR: tl.constexpr, SWIZZLED: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """int32 [K, W]: the words of rows b0 + r, b0 + r + U ... of x. Some of these rows may be outside of x.

    base, x_b, a_units: in units of X_VECTOR elements. WAY: which of the functions above loads the words: "aligned", "joined" or
    "gathered".
    """
    SIZE: tl.constexpr = 4 // U
    w = _columns(BLOCK_B // U, BLOCK_A // U, SWIZZLED)
    first = b0 + r
    ptr = x_ptr + ((base + first.to(tl.int64) * x_b) * X_VECTOR + tile_a * BLOCK_A)
    left = tl.minimum(a_units * X_VECTOR - tile_a * BLOCK_A, BLOCK_A + U)
    if WAY == "aligned":
        words = a_units * (X_VECTOR // U) - tile_a * (BLOCK_A // U)
        return _aligned_words(ptr.to(tl.pointer_type(tl.int8), bitcast=True), x_b, first, B, w, words, U, SIZE * X_VECTOR)
    elif WAY == "joined":
        return _joined_words(ptr.to(tl.pointer_type(tl.int8), bitcast=True), x_b, first, B, w, left, U, SIZE)
    else:
        return _gathered_words(ptr, x_b, first, B, w, left, U, SIZE)


@triton.jit
def _rows(x_ptr, base, x_b, b0, B, tile_a, a_units, U: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
          X_VECTOR: tl.constexpr, SWIZZLED: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """The words of all rows of the tile. Tensor r has rows r, r + U ... With U = 2 the last two tensors repeat the others."""
    w0 = _words(x_ptr, base, x_b, b0, B, tile_a, a_units, 0, U, BLOCK_A, BLOCK_B, X_VECTOR, SWIZZLED, WAY)
    w1 = _words(x_ptr, base, x_b, b0, B, tile_a, a_units, 1, U, BLOCK_A, BLOCK_B, X_VECTOR, SWIZZLED, WAY)
    if U == 2:
        return w0, w1, w0, w1
    w2 = _words(x_ptr, base, x_b, b0, B, tile_a, a_units, 2, U, BLOCK_A, BLOCK_B, X_VECTOR, SWIZZLED, WAY)
    w3 = _words(x_ptr, base, x_b, b0, B, tile_a, a_units, 3, U, BLOCK_A, BLOCK_B, X_VECTOR, SWIZZLED, WAY)
    return w0, w1, w2, w3


@triton.jit
def _reaches_out(x_ptr, x_words, base, x_b, b0, B, tile_a, a, U: tl.constexpr, BLOCK_A: tl.constexpr,
                 BLOCK_B: tl.constexpr):  # fmt: skip
    """Whether a word with elements of the tile, or the word after it, may lie outside of x's memory, even partly.

    x_words: number of whole words from x_ptr to the end of x.
    """
    SIZE: tl.constexpr = 4 // U
    begin = x_ptr.to(tl.int64)
    at = begin + (base + tile_a * BLOCK_A) * SIZE
    first = at + tl.maximum(b0, 0).to(tl.int64) * x_b * SIZE
    last = at + (tl.minimum(b0 + BLOCK_B, B) - 1).to(tl.int64) * x_b * SIZE
    end = last + tl.minimum(a - tile_a * BLOCK_A, BLOCK_A + U) * SIZE
    return (first >> 2 << 2 < begin) | (end + 7 > begin + x_words.to(tl.int64) * 4)


@triton.jit
def _interleaved(even, odd, SECOND: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr):
    """Pieces of WIDTH bits, from `even` and `odd` in turn: the first of each pair of pieces, or the second with SECOND.

    LOW: mask of all first pieces.
    """
    if SECOND:
        return (even >> WIDTH & LOW) | (odd & ~LOW)
    else:
        return (even & LOW) | (odd << WIDTH & ~LOW)


@triton.jit
def _column(w0, w1, w2, w3, e: tl.constexpr, U: tl.constexpr):
    """One word that consists of element e of the words of U rows."""
    if U == 2:
        return _interleaved(w0, w1, e, 16, 0xFFFF)
    else:
        first = _interleaved(w0, w1, e % 2, 8, 0x00FF00FF)
        second = _interleaved(w2, w3, e % 2, 8, 0x00FF00FF)
        return _interleaved(first, second, e // 2, 16, 0xFFFF)


@triton.jit
def _shifted(words, r, vector, start, U: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """int32 [N, 16]: four vectors of 4 U elements. Vector h begins at element start[n] + 4 U vector[n, h] of row r[n].

    The rows are those of words [W, K], which are passed swizzled and flat. A vector needs five words. The gather has eight
    indices; the last three results are not used.
    """
    LOG_U: tl.constexpr = U // 2
    k, behind = start >> LOG_U, start & (U - 1)
    # if a row starts with a whole word, the fifth word may not exist, and none of its bits is used
    e = tl.minimum(tl.minimum(tl.arange(0, 8), 4)[None, :], 3 + (behind != 0).to(tl.int32)[:, None])[:, None, :]
    q = (vector + (k >> 2)[:, None])[:, :, None]
    j, row = (k & 3)[:, None, None], r[:, None, None]
    here = (row ^ ((q & 3) * 8)) + q * (4 * W) + j * W
    turned = (row ^ ((q + 1 & 3) * 8)) + q * (4 * W) + j * W  # for words in the next group of four
    at = tl.where(j + e < 4, here, turned) + e * W
    w = tl.gather(words, tl.reshape(at, [N * 4 * 8]), 0)
    even, odd = tl.split(tl.reshape(w, [N, 4, 2, 2, 2]))
    w04, w26 = tl.split(even)
    w15, w37 = tl.split(odd)
    w0, w4 = tl.split(w04)
    w1, _ = tl.split(w15)
    w2, _ = tl.split(w26)
    w3, _ = tl.split(w37)
    s = (behind * (32 // U))[:, None]
    even = tl.join(_joined(w0, w1, s), _joined(w2, w3, s))
    odd = tl.join(_joined(w1, w2, s), _joined(w3, w4, s))
    return tl.reshape(tl.join(even, odd), [N, 16])


@triton.jit
def _store_shifted(y_ptr, words, y_row, y_a, b0, B, left, e: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
                   K: tl.constexpr, Y_VECTOR: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Store rows e, e + U ... of the tile of y from their words [K, W]. `left`: rows of y from the tile's first row on.

    y_row, y_a: offset of the tile's first row of y, and stride of its rows, in units of Y_VECTOR elements. b0: first column of
    the tile in x. In y, the piece of a row begins ALIGN elements later, minus the distance of the start of the row from the
    multiple of ALIGN before it.
    """
    V: tl.constexpr = 4 * U
    VECTORS: tl.constexpr = (K - ALIGN // U) // 4  # vectors per row that are stored
    N: tl.constexpr = W * K // 16
    LOG_ALIGN: tl.constexpr = 4 + (ALIGN > 16)
    # 16 words per line n, so that a warp stores lines of eight rows. n goes over the rows of y, then to their next 16 words.
    n = tl.arange(0, N)
    r, first = n % W, n // W * 4
    a = r * U + e
    at = (y_row + a.to(tl.int64) * y_a) * Y_VECTOR
    behind = at.to(tl.int32) & (ALIGN - 1)
    vector = tl.minimum(first[:, None] + tl.arange(0, 4)[None, :], VECTORS - 1)
    out = _shifted(tl.reshape(words, [K * W]), r, vector, ALIGN - behind, U, W, N)
    h = tl.arange(0, 16)
    vector = first[:, None] + (h // 4)[None, :]
    column = b0 + ALIGN + vector * V - behind[:, None]  # column of a vector's first element
    whole = column.to(tl.uint32, bitcast=True) < tl.maximum(B - (V - 1), 0).to(tl.uint32, bitcast=True)
    whole = whole & (vector < VECTORS) & (a < left)[:, None]
    y = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (b0 + ALIGN) // U
    tl.store(y + (((at >> LOG_ALIGN) * (ALIGN // U) + first * 4)[:, None] + h[None, :]), out, mask=whole)


@triton.jit
def _store_whole(y_ptr, words, y_row, y_a, b0, B, left, e: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
                 K: tl.constexpr, Y_VECTOR: tl.constexpr):  # fmt: skip
    """The same if rows of y consist of whole vectors."""
    m, a = tl.arange(0, K), tl.arange(0, W) * U + e
    rows = (y_row + a.to(tl.int64) * y_a) * (Y_VECTOR // U)
    y = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + b0 // U
    tl.store(y + (rows[:, None] + m[None, :]), tl.trans(words), mask=(a < left)[:, None] & (m // 4 * (4 * U) < B - b0)[None, :])


@triton.jit
def _copy_end(x_ptr, y_ptr, b, B, x_b, left, x, y, y_a, V: tl.constexpr, BLOCK_A: tl.constexpr):
    """Copy those of the columns b [V] that are in no whole vector of their row of y, for the tile's rows of y.

    x, y: offsets of the start of the tile's first row of y, in elements of x and of y. x_b: stride of b in x. y_a: stride of a
    in y.
    """
    a = tl.arange(0, BLOCK_A)
    at = y + a.to(tl.int64) * y_a
    behind = at.to(tl.int32) & (V - 1)
    first = (behind[None, :] + b[:, None]) // V * V - behind[None, :]  # column of the vector that holds b
    mask = ((b >= 0) & (b < B))[:, None] & (a < left)[None, :] & ((first < 0) | (first + V > B))
    one = tl.load(x_ptr + x + ((b.to(tl.int64) * x_b)[:, None] + a[None, :]), mask=mask)
    tl.store(y_ptr + (at[None, :] + b[:, None]), one, mask=mask)


@triton.jit(
    do_not_specialize=[
        *("x_words", "a_units", "b_units", "n0", "n1", "n2", "x_b", "y_a"),
        *("x0", "x1", "x2", "x3", "y0", "y1", "y2", "y3"),
    ]
)
def _words_kernel(
    x_ptr, y_ptr, x_words, a_units, b_units, n0, n1, n2, x_b, y_a, x0, x1, x2, x3, y0, y1, y2, y3,
    U: tl.constexpr, X_VECTOR: tl.constexpr, Y_VECTOR: tl.constexpr, ALIGNED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Sizes and strides are passed divided by the vector of their side. U: elements per word. ALIGNED: rows of x are words.

    ALIGN: elements per sector, or 0 if rows of y consist of whole vectors.
    """
    V: tl.constexpr = 4 * U
    STEP: tl.constexpr = BLOCK_B - ALIGN
    W: tl.constexpr = BLOCK_A // U
    K: tl.constexpr = BLOCK_B // U
    A, B = a_units * X_VECTOR, b_units * Y_VECTOR
    tiles_b = tl.cdiv(B + ALIGN - 1, STEP) if ALIGN else tl.cdiv(B, STEP)
    tile_a, tile_b, i0, i1, i2, i3 = tile_of(tl.cdiv(A, BLOCK_A), tiles_b, n0, n1, n2, CHECKED=True)
    base = i0 * x0 + i1 * x1 + i2 * x2 + i3 * x3
    y_row = i0 * y0 + i1 * y1 + i2 * y2 + i3 * y3 + (tile_a * BLOCK_A).to(tl.int64) * y_a
    b0, left = tile_b * STEP - ALIGN, A - tile_a * BLOCK_A
    if ALIGNED:
        w0, w1, w2, w3 = _rows(x_ptr, base, x_b, b0, B, tile_a, a_units,
                               U, BLOCK_A, BLOCK_B, X_VECTOR, ALIGN > 0, "aligned")  # fmt: skip
    elif _reaches_out(x_ptr, x_words, base, x_b, b0, B, tile_a, A, U, BLOCK_A, BLOCK_B):
        w0, w1, w2, w3 = _rows(x_ptr, base, x_b, b0, B, tile_a, a_units,
                               U, BLOCK_A, BLOCK_B, X_VECTOR, ALIGN > 0, "gathered")  # fmt: skip
    else:
        w0, w1, w2, w3 = _rows(x_ptr, base, x_b, b0, B, tile_a, a_units,
                               U, BLOCK_A, BLOCK_B, X_VECTOR, ALIGN > 0, "joined")  # fmt: skip
    for e in tl.static_range(U):
        words = _column(w0, w1, w2, w3, e, U)
        if ALIGN:
            _store_shifted(y_ptr, words, y_row, y_a, b0, B, left, e, U, W, K, Y_VECTOR, ALIGN)
        else:
            _store_whole(y_ptr, words, y_row, y_a, b0, B, left, e, U, W, K, Y_VECTOR)
    if ALIGN:
        end, x_at, x_step = tl.arange(0, V), base * X_VECTOR + tile_a * BLOCK_A, x_b.to(tl.int64) * X_VECTOR
        y_at, y_step = y_row * Y_VECTOR, y_a.to(tl.int64) * Y_VECTOR
        if tile_b == 0:
            _copy_end(x_ptr, y_ptr, end, B, x_step, left, x_at, y_at, y_step, V, BLOCK_A)
        if tile_b == tiles_b - 1:
            _copy_end(x_ptr, y_ptr, B - V + end, B, x_step, left, x_at, y_at, y_step, V, BLOCK_A)


def _launch(config: Config, x: Tensor, dims: list[int]) -> Tensor:
    y = torch.empty([x.shape[d] for d in dims], dtype=x.dtype, device=x.device)
    form = form_of(x.shape, x.stride(), dims)
    if not x.numel() or form is None:
        return y
    plan, size = plan_of(x, form), x.element_size()
    aligned = plan.x_vector * size >= _WORD_BYTES and (x.is_meta or x.data_ptr() % _WORD_BYTES == 0)
    xv, yv = plan.x_vector if aligned else 1, plan.y_vector
    align = 0 if yv * size == _VECTOR_BYTES else _SECTOR_BYTES // size
    tiles = triton.cdiv(plan.a, config["BLOCK_A"]) * triton.cdiv(plan.b + max(align - 1, 0), config["BLOCK_B"] - align)
    span = 1 + sum((n - 1) * step for n, step in zip(form.sizes, form.strides, strict=True))
    numbers = [span * size // _WORD_BYTES, plan.a // xv, plan.b // yv, *plan.counts[:3], plan.x_b // xv, plan.y_a // yv]
    numbers += [step // xv for step in plan.x_steps] + [step // yv for step in plan.y_steps]
    _words_kernel[(tiles * math.prod(plan.counts),)](
        *(x.view(BITS[size]), y.view(BITS[size]), *numbers), U=_WORD_BYTES // size, X_VECTOR=xv, Y_VECTOR=yv,
        ALIGNED=aligned, ALIGN=align, **config,
    )  # fmt: skip
    return y


def _refuse(device: Device, problem: Problem) -> str | None:
    if reason := refuse_form(problem):
        return reason
    if problem.itemsize > 2:
        return f"supports elements of 1 and 2 bytes only, not {problem.itemsize}"
    if problem.rows:
        return "is for permutations that move the last dimension: here whole rows are copied"
    if min(problem.x_bytes, problem.y_bytes) >= _WORD_BYTES:
        return "is only for rows of x or y that do not start at multiples of 4 bytes"
    return None


WORDS = Impl(name="words", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True)
