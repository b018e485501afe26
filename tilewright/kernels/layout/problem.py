"""Shared by the implementations of `permute`: the form of a copy, the problem, and the tile that a program copies.

A tile is BLOCK_A elements of the dimension that is dense in x by BLOCK_B elements of the result's last dimension (in the form
`rows`: of the dimension before it). A program copies one tile, at one index of each of the other dimensions. These are called
the walked dimensions; there are at most four.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.launch.shapes import next_pow2

__all__ = ["BITS", "Form", "Plan", "Problem", "form_of", "plan_of", "problem_of", "refuse_form", "tile_of"]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype that it is copied as."""

# ---- the form of a copy


class Form(NamedTuple):
    """A permutation after merging. Its dimensions are in the order of the result. `a` is the one that is dense in x."""

    sizes: tuple[int, ...]
    """Sizes of the dimensions; none is 1."""
    strides: tuple[int, ...]
    """Strides of the dimensions in x, in elements."""
    a: int
    """Which of them has stride 1 in x."""
    b: int
    """The other dimension of the tile: the result's last, or in rows the one before it."""


def form_of(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> Form | None:
    """The form of a copy, or None if x has no dense dimension. For an empty tensor the result has no meaning."""
    sizes: list[int] = []
    steps: list[int] = []
    for d in reversed(dims):
        size, step = shape[d], strides[d]
        if size == 1:
            continue
        if sizes and step == sizes[0] * steps[0]:
            sizes[0] *= size
        else:
            sizes.insert(0, size)
            steps.insert(0, step)
    if not sizes:
        sizes, steps = [1], [1]
    last = len(sizes) - 1
    dense = [i for i, step in enumerate(steps) if step == 1]
    if not dense:
        return None
    a = dense[-1]
    if a != last:
        return Form(tuple(sizes), tuple(steps), a, last)
    if not last:  # a single dimension is one row
        sizes, steps, last = [1, *sizes], [0, *steps], 1
    return Form(tuple(sizes), tuple(steps), last, last - 1)


def _vectors(itemsize: int, form: Form) -> tuple[int, int]:
    """(elements per access of x, of y): the widest of up to 16 bytes that divide all sizes and strides of their side."""
    x = math.gcd(form.sizes[form.a], *(step for i, step in enumerate(form.strides) if i != form.a))
    return math.gcd(16 // itemsize, x), math.gcd(16 // itemsize, form.sizes[-1])


class Problem(NamedTuple):
    """Everything that a config may depend on."""

    itemsize: int
    rows: bool
    """Whether the dense dimension stays the last."""
    a: int
    """Elements of the tile's dimension that is dense in x, rounded up to a power of two, at most 1024. 0 if none is dense."""
    b: int
    """Elements of the tile's other dimension, in the same way."""
    walked: int
    """Number of the remaining dimensions."""
    x_bytes: int
    """Bytes of the widest access with which x can be read."""
    y_bytes: int
    """Bytes of the widest access with which y can be written."""


def problem_of(x: Tensor, dims: list[int]) -> Problem:
    if not x.numel():
        return Problem(x.element_size(), True, 1, 1, 0, 16, 16)
    form, size = form_of(x.shape, x.stride(), dims), x.element_size()
    if form is None:
        return Problem(size, True, 0, 0, 0, size, size)
    a, b = (min(1024, next_pow2(form.sizes[i])) for i in (form.a, form.b))
    x_vector, y_vector = _vectors(size, form)
    return Problem(size, form.b < form.a, a, b, len(form.sizes) - 2, x_vector * size, y_vector * size)


def refuse_form(problem: Problem) -> str | None:
    """Why all kernels refuse this problem, or None."""
    if problem.itemsize not in BITS:
        return f"supports elements of 1, 2, 4 or 8 bytes only, not {problem.itemsize}"
    if not problem.a:
        return "needs one dimension of x to have stride 1; copy x first"
    return f"supports at most 6 dimensions that cannot be merged, not {problem.walked + 2}" if problem.walked > 4 else None


# ---- programs


class Plan(NamedTuple):
    """The numbers of a launch, in elements."""

    a: int
    """Size of the tile's dimension that is dense in x."""
    b: int
    """Size of the tile's other dimension."""
    counts: tuple[int, int, int, int]
    """Sizes of the walked dimensions, filled up with 1."""
    x_b: int
    """Stride of b in x."""
    y_a: int
    """Stride of a in y."""
    y_b: int
    """Stride of b in y: 1 unless rows are copied."""
    x_steps: tuple[int, int, int, int]
    """Strides in x of the walked dimensions."""
    y_steps: tuple[int, int, int, int]
    """Their strides in y."""
    x_vector: int
    """Elements per access of x, up to 16 bytes. It divides all sizes and strides above that belong to x."""
    y_vector: int


def plan_of(x: Tensor, form: Form) -> Plan:
    """The launch that copies x in this form."""
    sizes, steps, a, b = form
    ys = [1] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        ys[i] = ys[i + 1] * sizes[i + 1]
    walked = [i for i in range(len(sizes) - 1, -1, -1) if i not in (a, b)]
    none = [0] * (4 - len(walked))
    n0, n1, n2, n3 = [*(sizes[i] for i in walked), 1, 1, 1, 1][:4]
    x0, x1, x2, x3 = [*(steps[i] for i in walked), *none]
    y0, y1, y2, y3 = [*(ys[i] for i in walked), *none]
    vectors = _vectors(x.element_size(), form)
    return Plan(sizes[a], sizes[b], (n0, n1, n2, n3), steps[b], ys[a], ys[b], (x0, x1, x2, x3), (y0, y1, y2, y3), *vectors)


_GROUP = tl.constexpr(8)  # so many tiles that are neighbours in y are copied in succession: L2 joins their pieces of a row


@triton.jit
def tile_of(tiles_a, tiles_b, n0, n1, n2, CHECKED: tl.constexpr = False):
    """(tile_a, tile_b, and the indices of the four walked dimensions) of this program.

    CHECKED: skip the divisions if all four indices are 0, as for a matrix. This takes fewer instructions but more registers.
    """
    tile, rest = tl.program_id(0) % (tiles_a * tiles_b), tl.program_id(0) // (tiles_a * tiles_b)
    first_b = tile // (tiles_a * _GROUP) * _GROUP
    group = tl.minimum(tiles_b - first_b, _GROUP)
    tile_a, tile_b = tile % (tiles_a * _GROUP) // group, first_b + tile % (tiles_a * _GROUP) % group
    i0, i1, i2, i3 = rest, rest, rest, rest
    if rest > 0 or not CHECKED:
        i0, rest = rest % n0, rest // n0
        i1, rest = rest % n1, rest // n1
        i2, i3 = rest % n2, rest // n2
    return tile_a, tile_b, i0.to(tl.int64), i1.to(tl.int64), i2.to(tl.int64), i3.to(tl.int64)
