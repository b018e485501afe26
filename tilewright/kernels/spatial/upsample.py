"""Resizing of channels-last images: nearest neighbour, and linear or cubic interpolation along both axes.

    nearest: y[n, o, c] = x[n, floor(o num / den), c]
    linear:  y[n, o, c] = (1 - f) x[n, i, c] + f x[n, i + 1, c] along each axis, with i + f = t(o).
             t(o) = (o + 1/2) num / den - 1/2, or o num / den with `corners`, where the corners of both images coincide.
             t(o) is clamped to at least 0, and i + 1 to the last position
    cubic:   the positions i - 1 to i + 2, clamped at both ends, weighted by Keys' kernel with a = -3/4, as in torch and OpenCV
             (Keys, "Cubic convolution interpolation", 1981); t(o) is not clamped

    # N images, H W height and width, C channels

    x: [N, H, W, C] bf16, fp16 or fp32, contiguous; a signal has H = 1. y: [N, *out, C]. num / den: the step in x per step in y,
    along each axis. Positions and fractions are computed with integers. torch rounds o * (1 / factor) in float32 and may end up
    on the wrong side of a whole number; this implementation does not. Interpolated in float32, rounded once.

Memory-bound: x is read once, y is written once. Not supported: area interpolation, antialiasing, volumes (two calls:
ops/upsample.py), sizes whose products with `num` do not fit in 31 bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.spatial.inputs import upsample_arguments
from tilewright.kernels.spatial.pooling import SPACE, Problem, place_of
from tilewright.op import Args, Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = [
    "CASES", "NUMBERS", "Case", "around", "keys_weight", "neighbours", "resampling", "upsample_op", "upsample_problem",
]  # fmt: skip

# ---- reference


def resampling(size: int, out: int, mode: str, num: int, den: int, corners: bool) -> Tensor:
    """The weight of each position of x (columns) in each position of y (rows) along an axis: float64 [out, size]."""
    o, weights = torch.arange(out), torch.zeros(out, size, dtype=torch.float64)
    if mode == "nearest":
        weights[o, (o * num // den).clamp(max=size - 1)] = 1.0
        return weights
    t = 2 * o * num if corners else (2 * o + 1) * num - den
    if mode == "cubic":
        first, fraction = t // (2 * den), (t % (2 * den)).double() / (2 * den)
        for tap in range(-1, 3):
            weights[o, (first + tap).clamp(0, size - 1)] += _keys((fraction - tap).abs())
        return weights
    t = t.clamp(min=0)
    first, fraction = (t // (2 * den)).clamp(max=size - 1), (t % (2 * den)).double() / (2 * den)
    weights[o, first] = 1 - fraction
    weights[o, (first + 1).clamp(max=size - 1)] += fraction
    return weights


def _keys(d: Tensor) -> Tensor:
    return torch.where(d <= 1, (1.25 * d - 2.25) * d * d + 1, ((-0.75 * d + 3.75) * d - 6) * d + 3)


def _reference(x: Tensor, out: list[int], mode: str, num: list[int], den: list[int], corners: bool) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    for axis in range(2):
        weights = resampling(x.shape[axis + 1], out[axis], mode, num[axis], den[axis], corners).to(wide)
        wide = (wide.movedim(axis + 1, -1) @ weights.mT).movedim(-1, axis + 1)
    return wide.to(x.dtype).contiguous()


def _fake(x: Tensor, out: list[int], mode: str, num: list[int], den: list[int], corners: bool) -> Tensor:
    return x.new_empty((x.shape[0], *out, x.shape[3]))


def _cost(x: Tensor, out: list[int], mode: str, *more: Any) -> Cost:
    places = x.shape[0] * out[0] * out[1] * x.shape[3]
    return Cost(flops={"nearest": 0, "linear": 8, "cubic": 40}[mode] * places, bytes=x.nbytes + places * x.element_size())


# ---- examples


def upsample_problem(x: Tensor, out: list[int], mode: str, *more: Any) -> Problem:
    """The properties that a layer fixes. The number and the size of the images are not part of it."""
    return Problem(x.dtype, x.shape[3], ())


class Case(NamedTuple):
    """An example of resizing: x's shape, the output's size, the steps."""

    label: str
    shape: tuple[int, int, int, int]
    out: list[int]
    mode: str
    num: list[int]
    den: list[int]
    corners: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("linear", (2, 2, 3, 24), [4, 6], "linear", [2, 3], [4, 6]),
    Case("corners", (1, 2, 3, 5), [4, 5], "linear", [1, 2], [3, 4], True, torch.float32),
    Case("nearest", (2, 3, 5, 20), [6, 8], "nearest", [1, 2], [2, 3]),
    Case("down", (1, 9, 7, 8), [4, 3], "linear", [9, 7], [4, 3], False, torch.float16),
    Case("eightfold", (1, 1, 2, 16), [1, 16], "linear", [1, 2], [1, 16]),
    Case("cubic", (1, 4, 3, 8), [7, 5], "cubic", [4, 3], [7, 5]),
    Case("cubic, down", (2, 7, 5, 3), [3, 6], "cubic", [3, 4], [1, 5], True, torch.float32),
    Case("one", (1, 1, 1, 1), [2, 3], "linear", [0, 0], [1, 2], True, torch.float32),
)


@Example.of
def _example(inputs: Inputs, case: Case) -> Args:
    return inputs.randn(*case.shape, dtype=case.dtype), case.out, case.mode, case.num, case.den, case.corners


# ---- kernel

NUMBERS = ["n_rows", "height", "width", "out_h", "out_w", "num_h", "num_w", "den_h", "den_w"]


@triton.jit
def neighbours(o, size, num, den, CORNERS: tl.constexpr):
    """(first position, fraction towards the next) of linear interpolation along an axis."""
    t = 2 * o * num if CORNERS else (2 * o + 1) * num - den
    t = tl.maximum(t, 0)
    return tl.minimum(t // (2 * den), size - 1), (t % (2 * den)).to(tl.float32) / (2 * den).to(tl.float32)


@triton.jit
def around(o, num, den, CORNERS: tl.constexpr):
    """(position at or before t(o), which may be -1; fraction towards the next) of cubic interpolation along an axis."""
    t = 2 * o * num if CORNERS else (2 * o + 1) * num - den
    t += 2 * den  # keeps t from being negative, because integer division rounds towards 0
    return t // (2 * den) - 1, (t % (2 * den)).to(tl.float32) / (2 * den).to(tl.float32)


@triton.jit
def keys_weight(fraction, tap: tl.constexpr):
    """The weight of the position that is `tap` positions (-1 to 2) after the one at or before t(o)."""
    if tap == 0 or tap == 1:
        d = fraction if tap == 0 else 1 - fraction
        return (1.25 * d - 2.25) * d * d + 1
    else:
        d = fraction + 1 if tap == -1 else 2 - fraction
        return ((-0.75 * d + 3.75) * d - 6) * d + 3


@triton.jit
def _cubic(image_ptr, live, h, w, height, width, num_h, num_w, den_h, den_w, C: tl.constexpr, CORNERS: tl.constexpr):
    top, down = around(h, num_h, den_h, CORNERS)
    left, right = around(w, num_w, den_w, CORNERS)
    y = tl.zeros(live.shape, tl.float32)
    for i in tl.static_range(-1, 3):
        row = tl.minimum(tl.maximum(top + i, 0), height - 1) * width
        line = tl.zeros(live.shape, tl.float32)
        for j in tl.static_range(-1, 3):
            place = (row + tl.minimum(tl.maximum(left + j, 0), width - 1)).to(tl.int64) * C
            x = tl.load(image_ptr + place[:, None], mask=live, other=0.0).to(tl.float32)
            line += keys_weight(right, j)[:, None] * x
        y += keys_weight(down, i)[:, None] * line
    return y


@triton.jit(do_not_specialize=NUMBERS)
def _upsample_kernel(
    x_ptr, y_ptr, n_rows, height, width, out_h, out_w, num_h, num_w, den_h, den_w,
    C: tl.constexpr, MODE: tl.constexpr, CORNERS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    rows = (tl.program_id(0) // TILES) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = (tl.program_id(0) % TILES) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    live = (rows < n_rows)[:, None] & (cols < C)
    n, _, h, w = place_of(rows, 1, out_h, out_w)
    image_ptr = x_ptr + (n.to(tl.int64) * (height * width) * C)[:, None] + cols
    if MODE == "cubic":
        y = _cubic(image_ptr, live, h, w, height, width, num_h, num_w, den_h, den_w, C, CORNERS)
    elif MODE == "linear":
        top, down = neighbours(h, height, num_h, den_h, CORNERS)
        left, right = neighbours(w, width, num_w, den_w, CORNERS)
        top_row = top * width
        bottom_row = tl.minimum(top + 1, height - 1) * width
        next_left = tl.minimum(left + 1, width - 1)
        a = tl.load(image_ptr + ((top_row + left).to(tl.int64) * C)[:, None], mask=live, other=0.0).to(tl.float32)
        b = tl.load(image_ptr + ((top_row + next_left).to(tl.int64) * C)[:, None], mask=live, other=0.0).to(tl.float32)
        c = tl.load(image_ptr + ((bottom_row + left).to(tl.int64) * C)[:, None], mask=live, other=0.0).to(tl.float32)
        d = tl.load(image_ptr + ((bottom_row + next_left).to(tl.int64) * C)[:, None], mask=live, other=0.0).to(tl.float32)
        down, right = down[:, None], right[:, None]
        y = (1 - down) * ((1 - right) * a + right * b) + down * ((1 - right) * c + right * d)
    else:
        place = tl.minimum(h * num_h // den_h, height - 1) * width + tl.minimum(w * num_w // den_w, width - 1)
        y = tl.load(image_ptr + (place.to(tl.int64) * C)[:, None], mask=live, other=0.0)
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * C + cols, y.to(y_ptr.dtype.element_ty), mask=live)


def _launch(config: Config, x: Tensor, out: list[int], mode: str, num: list[int], den: list[int], corners: bool) -> Tensor:
    y = _fake(x, out, mode, num, den, corners)
    (_, height, width, channels), rows = x.shape, y.shape[0] * out[0] * out[1]
    if y.numel():
        grid = (triton.cdiv(rows, config["BLOCK_P"]) * triton.cdiv(channels, config["BLOCK_C"]),)
        _upsample_kernel[grid](
            x, y, rows, height, width, *out, *num, *den, C=channels, MODE=mode, CORNERS=corners, **config
        )  # fmt: skip
    return y


upsample_op = Op(
    name="upsample",
    reference=_reference,
    problem=upsample_problem,
    cost=_cost,
    examples=tuple(_example(case.label, case) for case in CASES),
    make=upsample_arguments,
    fake=_fake,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)
