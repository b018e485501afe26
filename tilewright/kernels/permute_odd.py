"""permute: tiles of 1- and 2-byte elements where rows of a side start anywhere (an odd number of elements, say).

    y's rows start anywhere     stores of STORE_BYTES at multiples of them, by classes of rows. V = STORE_BYTES / itemsize: rows
                                of y that lie V apart start equally far behind such a multiple, whatever their length. They are
                                a class, and in a tile they begin that far to the left. So each class takes other columns b of
                                x: it loads words of 4 bytes and keeps its own elements of them (L1 serves the others). The up
                                to V - 1 elements at either end of a row go one by one
    x's rows start anywhere     the aligned words of 4 bytes that hold a row, two and two shifted together by the row's own
                                offset: loads of 4 bytes instead of one element
    both                        both

The classes are joined in registers to one tile, which is transposed through shared memory as any other.
No byte outside of x is read: tiles whose words may begin before x or end behind it make them of single elements.

Refuses elements of 4 and 8 bytes, rows that stay whole, and sides that both can be accessed by 4 bytes or more as they are.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.permute_common import BITS, Problem, form_of, plan_of, refuse_form, tile_of
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["CLASSES"]

_WORD_BYTES = 4

# ---- space


# (BLOCK_A, BLOCK_B) by (bytes of an element, whether y takes stores of 16 bytes as it is). A tile begins no row of y at a
# sector's start, so each of its rows has two partial sectors: where y starts anywhere, rows are long.
_TILES = {
    (1, False): ((64, 256), (32, 512)),
    (1, True): ((128, 128), (64, 256), (32, 512)),
    (2, False): ((32, 256), (32, 512)),
    (2, True): ((128, 64), (64, 128), (32, 256)),
}


def _default(device: Device, problem: Problem) -> Config:
    # Not measured.
    whole = problem.y_bytes == 16
    block_a, block_b = _TILES[problem.itemsize, whole][0]
    return {"BLOCK_A": block_a, "BLOCK_B": block_b, "STORE_BYTES": 16 if whole else 4, "num_warps": 8}


def _refusal(device: Device, problem: Problem, c: Config) -> str | None:
    whole = problem.y_bytes == 16
    if (c["BLOCK_A"], c["BLOCK_B"]) not in _TILES[problem.itemsize, whole]:
        return "a tile of another form than those listed"
    if whole and c["STORE_BYTES"] != 16:
        return "y takes stores of 16 bytes as it is"
    if problem.itemsize == 2 and not whole and c["BLOCK_B"] == 512 and c["STORE_BYTES"] == 16:
        return "spills on sm_80"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_A": (32, 64, 128), "BLOCK_B": (64, 128, 256, 512), "STORE_BYTES": (4, 8, 16), "num_warps": (8,)},
    refusal=_refusal,
)

# ---- kernel
# A tile of words is [BLOCK_B, BLOCK_A / V]: of a row of x, word i holds U elements, those from a0 + V i + U q on, q < V / U.
# Addresses are a multiply-add of 32 x 32 to 64 bits each: powers of two go with the small factor, not with the stride.


@triton.jit
def _aligned_words(ptr, x_b, b0, B, word, left, Q: tl.constexpr, COUNT: tl.constexpr, BLOCK_B: tl.constexpr,
                   UNIT: tl.constexpr):  # fmt: skip
    """int32 [BLOCK_B, COUNT]: every Q-th word from word `word` on, of which rows have `left`; anything where there is none.

    ptr: where row b0 begins, by bytes; b0 may be negative. x_b: from one row to the next, in UNIT bytes.
    """
    j = tl.arange(0, BLOCK_B)
    w = word + tl.arange(0, COUNT) * Q
    rows = (ptr + (j * UNIT).to(tl.int64) * x_b).to(tl.pointer_type(tl.int32), bitcast=True)
    mask = ((b0 + j).to(tl.uint32, bitcast=True) < B.to(tl.uint32, bitcast=True))[:, None] & (w < left)[None, :]
    return tl.load(rows[:, None] + w[None, :], mask=mask)


@triton.jit
def _joined_words(ptr, x_b, b0, B, word, left, Q: tl.constexpr, COUNT: tl.constexpr, BLOCK_B: tl.constexpr,
                  SIZE: tl.constexpr):  # fmt: skip
    """The same of rows that begin anywhere, with `left` elements of SIZE bytes, from the aligned words that hold them."""
    j = tl.arange(0, BLOCK_B)
    w = word + tl.arange(0, COUNT) * Q
    at = ptr.to(tl.int64) + (j * SIZE).to(tl.int64) * x_b
    behind = (at.to(tl.int32) & 3)[:, None]
    words = (at >> 2 << 2).to(tl.pointer_type(tl.int32))[:, None] + w[None, :]
    rows = ((b0 + j).to(tl.uint32, bitcast=True) < B.to(tl.uint32, bitcast=True))[:, None]
    low = tl.load(words, mask=rows & (w * 4 < left * SIZE)[None, :])
    high = tl.load(words + 1, mask=rows & ((w * 4 + 4)[None, :] < left * SIZE + behind))
    shift = (behind * 8).to(tl.uint32, bitcast=True)
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    return ((low >> shift) | ((high << 1) << (31 - shift))).to(tl.int32, bitcast=True)


@triton.jit
def _gathered_words(ptr, x_b, b0, B, word, left, Q: tl.constexpr, COUNT: tl.constexpr, BLOCK_B: tl.constexpr,
                    SIZE: tl.constexpr):  # fmt: skip
    """The same from single elements. ptr: by elements."""
    U: tl.constexpr = 4 // SIZE
    j = tl.arange(0, BLOCK_B)
    w = word + tl.arange(0, COUNT) * Q
    rows = ((b0 + j).to(tl.uint32, bitcast=True) < B.to(tl.uint32, bitcast=True))[:, None]
    words = tl.zeros([BLOCK_B, COUNT], tl.int32)
    for e in tl.static_range(U):
        mask = rows & (w * U + e < left)[None, :]
        one = tl.load(ptr + ((j.to(tl.int64) * x_b)[:, None] + (w * U + e)[None, :]), mask=mask, other=0).to(tl.int32)
        words |= (one & ((1 << (8 * SIZE)) - 1)) << (8 * SIZE * e)
    return words


@triton.jit
def _words(x_ptr, base, x_b, b0, B, tile_a, a_units, q: tl.constexpr, V: tl.constexpr, U: tl.constexpr,
           BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, X_VECTOR: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """int32 [BLOCK_B, BLOCK_A / V] of rows b0, b0 + 1 ... of x; some of them may be outside of it.

    base, x_b, a_units: in X_VECTOR elements. WAY: "aligned", "joined" or "gathered" words, above.
    """
    Q: tl.constexpr = V // U
    COUNT: tl.constexpr = BLOCK_A // V
    SIZE: tl.constexpr = 4 // U
    ptr = x_ptr + ((base + b0.to(tl.int64) * x_b) * X_VECTOR + tile_a * BLOCK_A)
    left = tl.minimum(a_units - tile_a * BLOCK_A, BLOCK_A + U)
    if WAY == "aligned":
        words = a_units * (X_VECTOR // U) - tile_a * (BLOCK_A // U)
        ptr = ptr.to(tl.pointer_type(tl.int8), bitcast=True)
        return _aligned_words(ptr, x_b, b0, B, q, words, Q, COUNT, BLOCK_B, SIZE * X_VECTOR)
    elif WAY == "joined":
        ptr = ptr.to(tl.pointer_type(tl.int8), bitcast=True)
        return _joined_words(ptr, x_b, b0, B, q, left, Q, COUNT, BLOCK_B, SIZE)
    else:
        return _gathered_words(ptr, x_b, b0, B, q, left, Q, COUNT, BLOCK_B, SIZE)


@triton.jit
def _unpacked(words, U: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Elements FIRST, FIRST + STEP ... of words [b, i], in new last dimensions, low bits of their number last."""
    if STEP == U:
        return (words >> (32 // U * FIRST)).to(tl.int8 if U == 4 else tl.int16)
    else:
        return tl.join(_unpacked(words, U, FIRST, 2 * STEP), _unpacked(words, U, FIRST + STEP, 2 * STEP))


@triton.jit
def _classes(x_ptr, base, x_b, b0, B, tile_a, a_units, y_row, y_step, V: tl.constexpr, U: tl.constexpr, FIRST: tl.constexpr,
             STEP: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, X_VECTOR: tl.constexpr,
             WAY: tl.constexpr):  # fmt: skip
    """Classes FIRST, FIRST + STEP ... of the tile, each with its own shift of b, likewise."""
    if STEP == V:
        shift = (y_row.to(tl.int32) + FIRST * y_step.to(tl.int32)) & (V - 1)
        words = _words(x_ptr, base, x_b, b0 - shift, B, tile_a, a_units, FIRST // U,
                       V, U, BLOCK_A, BLOCK_B, X_VECTOR, WAY)  # fmt: skip
        return (words >> (32 // U * (FIRST % U))).to(tl.int8 if U == 4 else tl.int16)
    else:
        even = _classes(x_ptr, base, x_b, b0, B, tile_a, a_units, y_row, y_step,
                        V, U, FIRST, 2 * STEP, BLOCK_A, BLOCK_B, X_VECTOR, WAY)  # fmt: skip
        odd = _classes(x_ptr, base, x_b, b0, B, tile_a, a_units, y_row, y_step,
                       V, U, FIRST + STEP, 2 * STEP, BLOCK_A, BLOCK_B, X_VECTOR, WAY)  # fmt: skip
        return tl.join(even, odd)


@triton.jit
def _tile(x_ptr, base, x_b, b0, B, tile_a, a_units, y_row, y_step, V: tl.constexpr, U: tl.constexpr, SHIFTED: tl.constexpr,
          BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, X_VECTOR: tl.constexpr, WAY: tl.constexpr):  # fmt: skip
    """[BLOCK_B, BLOCK_A]: the tile, column a of it from row b0 of x on, or from as far before it as its class says."""
    if SHIFTED:
        x = _classes(x_ptr, base, x_b, b0, B, tile_a, a_units, y_row, y_step,
                     V, U, 0, 1, BLOCK_A, BLOCK_B, X_VECTOR, WAY)  # fmt: skip
    else:
        x = _unpacked(_words(x_ptr, base, x_b, b0, B, tile_a, a_units, 0, U, U, BLOCK_A, BLOCK_B, X_VECTOR, WAY), U, 0, 1)
    return tl.reshape(x, [BLOCK_B, BLOCK_A])


@triton.jit
def _reaches_out(x_ptr, x_words, base, x_b, b0, B, tile_a, a, V: tl.constexpr, U: tl.constexpr, BLOCK_A: tl.constexpr,
                 BLOCK_B: tl.constexpr):  # fmt: skip
    """Whether a word that holds elements of the tile, or the next, may lie partly outside of x's memory.

    x_words: whole words from x_ptr to its end.
    """
    SIZE: tl.constexpr = 4 // U
    begin = x_ptr.to(tl.int64)
    at = begin + (base + tile_a * BLOCK_A) * SIZE
    first = at + tl.maximum(b0 - (V - 1), 0).to(tl.int64) * x_b * SIZE
    last = at + (tl.minimum(b0 + BLOCK_B, B) - 1).to(tl.int64) * x_b * SIZE
    end = last + tl.minimum(a - tile_a * BLOCK_A, BLOCK_A + U) * SIZE
    return (first >> 2 << 2 < begin) | ((end + 3) >> 2 << 2 > begin + x_words.to(tl.int64) * 4)


@triton.jit
def _copy_end(x_ptr, y_ptr, b, B, x_b, left, x, y, y_a, V: tl.constexpr, BLOCK_A: tl.constexpr):
    """Of columns b [V] of the tile's rows of y, those outside of the rows' whole vectors.

    x, y: elements to where the tile's first row of y begins. x_b, y_a: elements from one b to the next, from one a to the next.
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
def _classes_kernel(
    x_ptr, y_ptr, x_words, a_units, b_units, n0, n1, n2, x_b, y_a, x0, x1, x2, x3, y0, y1, y2, y3,
    U: tl.constexpr, X_VECTOR: tl.constexpr, Y_VECTOR: tl.constexpr, SHIFTED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, STORE_BYTES: tl.constexpr,
):  # fmt: skip
    """Sizes and strides come divided by their side's vector. U: elements of a word; ALIGNED: x's rows consist of them."""
    V: tl.constexpr = STORE_BYTES * U // 4
    LOG_V: tl.constexpr = (V >= 4) + (V >= 8) + (V >= 16) + 1
    A, B = a_units * X_VECTOR, b_units * Y_VECTOR
    y_step = y_a.to(tl.int64) * Y_VECTOR
    tiles_b = tl.cdiv(B + V - 1, BLOCK_B) if SHIFTED else tl.cdiv(B, BLOCK_B)
    tile_a, tile_b, i0, i1, i2, i3 = tile_of(tl.cdiv(A, BLOCK_A), tiles_b, n0, n1, n2)
    base = i0 * x0 + i1 * x1 + i2 * x2 + i3 * x3
    y_base = (i0 * y0 + i1 * y1 + i2 * y2 + i3 * y3) * Y_VECTOR
    y_row = y_base + (tile_a * BLOCK_A).to(tl.int64) * y_step
    b0 = tile_b * BLOCK_B
    if ALIGNED:
        x = _tile(x_ptr, base, x_b, b0, B, tile_a, a_units, y_row, y_step,
                  V, U, SHIFTED, BLOCK_A, BLOCK_B, X_VECTOR, "aligned")  # fmt: skip
    elif _reaches_out(x_ptr, x_words, base, x_b, b0, B, tile_a, A, V, U, BLOCK_A, BLOCK_B):
        x = _tile(x_ptr, base, x_b, b0, B, tile_a, a_units, y_row, y_step,
                  V, U, SHIFTED, BLOCK_A, BLOCK_B, X_VECTOR, "gathered")  # fmt: skip
    else:
        x = _tile(x_ptr, base, x_b, b0, B, tile_a, a_units, y_row, y_step,
                  V, U, SHIFTED, BLOCK_A, BLOCK_B, X_VECTOR, "joined")  # fmt: skip
    a = tl.arange(0, BLOCK_A)
    j = tl.arange(0, BLOCK_B)
    left = A - tile_a * BLOCK_A
    at = y_row + (a * Y_VECTOR).to(tl.int64) * y_a
    behind = at.to(tl.int32) & (V - 1)
    column = (b0 + j // V * V)[None, :] - behind[:, None]  # of a vector's first element
    whole = column.to(tl.uint32, bitcast=True) < tl.maximum(B - (V - 1), 0).to(tl.uint32, bitcast=True)
    columns = y_ptr + (b0 + j)
    tl.store(columns[None, :] + ((at >> LOG_V) * V)[:, None], tl.trans(x), mask=(a < left)[:, None] & whole)
    if SHIFTED:
        end = tl.arange(0, V)
        x_at, x_step = base * X_VECTOR + tile_a * BLOCK_A, x_b.to(tl.int64) * X_VECTOR
        if tile_b == 0:
            _copy_end(x_ptr, y_ptr, end, B, x_step, left, x_at, y_row, y_step, V, BLOCK_A)
        if tile_b == tiles_b - 1:
            _copy_end(x_ptr, y_ptr, B - V + end, B, x_step, left, x_at, y_row, y_step, V, BLOCK_A)


# ---- launcher


def _launch(config: Config, x: Tensor, dims: list[int]) -> Tensor:
    y = torch.empty([x.shape[d] for d in dims], dtype=x.dtype, device=x.device)
    form = form_of(x.shape, x.stride(), dims)
    if not x.numel() or form is None:
        return y
    plan, size = plan_of(x, form), x.element_size()
    aligned = plan.x_vector * size >= _WORD_BYTES and (x.is_meta or x.data_ptr() % _WORD_BYTES == 0)
    xv, yv = plan.x_vector if aligned else 1, plan.y_vector
    v, shifted = config["STORE_BYTES"] // size, yv * size < config["STORE_BYTES"]
    span = 1 + sum((n - 1) * step for n, step in zip(form.sizes, form.strides, strict=True))
    tiles = triton.cdiv(plan.a, config["BLOCK_A"]) * triton.cdiv(plan.b + (v - 1 if shifted else 0), config["BLOCK_B"])
    numbers = [span * size // _WORD_BYTES, plan.a // xv, plan.b // yv, *plan.counts[:3], plan.x_b // xv, plan.y_a // yv]
    numbers += [step // xv for step in plan.x_steps] + [step // yv for step in plan.y_steps]
    _classes_kernel[(tiles * math.prod(plan.counts),)](
        *(x.view(BITS[size]), y.view(BITS[size]), *numbers),
        U=_WORD_BYTES // size, X_VECTOR=xv, Y_VECTOR=yv, SHIFTED=shifted, ALIGNED=aligned, **config,
    )  # fmt: skip
    return y


def _refuse(device: Device, problem: Problem) -> str | None:
    if reason := refuse_form(problem):
        return reason
    if problem.itemsize > 2:
        return f"is for elements of 1 and 2 bytes, not {problem.itemsize}"
    if problem.rows:
        return "is for tiles, not for rows that stay whole"
    if min(problem.x_bytes, problem.y_bytes) >= _WORD_BYTES:
        return "is for rows of x or y that do not start at multiples of 4 bytes"
    return None


CLASSES = Impl(name="classes", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True)
