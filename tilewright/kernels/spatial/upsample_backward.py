"""The gradient of resizing (upsample.py), as a gather: each position of x reads the positions of y that it contributed to.

    dx[n, i, c] = sum over o of weight(o, i) dy[n, o, c]

    dy: [N, out h, out w, C]; dx: [N, H, W, C], contiguous, channels last. Steps and modes are as in upsample.py; weights are
    computed from integers. Sums are float32, in a fixed order, without atomics.

Memory-bound: dy is read once, dx is written once. Positions of y that several positions of x share come from L1 and L2.
Not supported: a gradient of the gradient.
"""

# pyright: reportOperatorIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.spatial.inputs import upsample_backward_arguments
from tilewright.kernels.spatial.pooling import SPACE, place_of
from tilewright.kernels.spatial.upsample import (
    CASES,
    NUMBERS,
    Case,
    around,
    keys_weight,
    neighbours,
    resampling,
    upsample_problem,
)
from tilewright.op import Args, Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["upsample_backward_op"]


def _reference(dy: Tensor, size: list[int], mode: str, num: list[int], den: list[int], corners: bool) -> Tensor:
    wide = dy.to(torch.promote_types(dy.dtype, torch.float32))
    for axis in range(2):
        weights = resampling(size[axis], dy.shape[axis + 1], mode, num[axis], den[axis], corners).to(wide)
        wide = (wide.movedim(axis + 1, -1) @ weights).movedim(-1, axis + 1)
    return wide.to(dy.dtype).contiguous()


def _fake(dy: Tensor, size: list[int], mode: str, num: list[int], den: list[int], corners: bool) -> Tensor:
    return dy.new_empty((dy.shape[0], *size, dy.shape[3]))


def _cost(dy: Tensor, size: list[int], *more: Any) -> Cost:
    return Cost(flops=2 * dy.numel(), bytes=dy.nbytes + dy.shape[0] * size[0] * size[1] * dy.shape[3] * dy.element_size())


@Example.of
def _example(inputs: Inputs, case: Case) -> Args:
    dy = inputs.randn(case.shape[0], *case.out, case.shape[3], dtype=case.dtype)
    return dy, list(case.shape[1:3]), case.mode, case.num, case.den, case.corners


# ---- kernel


@triton.jit
def _first_user(i, num, den, MODE: tl.constexpr, CORNERS: tl.constexpr):
    """A position of y at or just before the first one that position i of x contributes to.

    From here on, at most MANY positions need to be examined. With interpolation, the first one is the first o where
    t(o) > i - 1 (linear) or t(o) > i - 2 (cubic).
    """
    step = tl.maximum(num, 1)
    if MODE == "nearest":
        return (i * den + num - 1) // step
    else:
        i = i - 2 if MODE == "cubic" else i - 1
        return tl.maximum(i * den // step if CORNERS else ((2 * i + 1) * den - num) // (2 * step), 0)


@triton.jit
def _weight(o, i, size, out, num, den, MODE: tl.constexpr, CORNERS: tl.constexpr):
    """The weight of position i of x in position o of y."""
    if MODE == "cubic":
        first, fraction = around(o, num, den, CORNERS)
        weight = tl.zeros(o.shape, tl.float32)
        for tap in tl.static_range(-1, 3):
            weight += tl.where(tl.minimum(tl.maximum(first + tap, 0), size - 1) == i, keys_weight(fraction, tap), 0.0)
    elif MODE == "linear":
        first, fraction = neighbours(o, size, num, den, CORNERS)
        weight = tl.where(first == i, 1 - fraction, 0.0) + tl.where(tl.minimum(first + 1, size - 1) == i, fraction, 0.0)
    else:
        weight = (tl.minimum(o * num // den, size - 1) == i).to(tl.float32)
    return tl.where(o < out, weight, 0.0)


@triton.jit(do_not_specialize=NUMBERS)
def _upsample_backward_kernel(
    dy_ptr, dx_ptr, n_rows, height, width, out_h, out_w, num_h, num_w, den_h, den_w,
    C: tl.constexpr, MODE: tl.constexpr, CORNERS: tl.constexpr, MANY_H: tl.constexpr, MANY_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    rows = (tl.program_id(0) // TILES) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = (tl.program_id(0) % TILES) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    live = (rows < n_rows)[:, None] & (cols < C)
    n, _, h, w = place_of(rows, 1, height, width)
    first_h, first_w = _first_user(h, num_h, den_h, MODE, CORNERS), _first_user(w, num_w, den_w, MODE, CORNERS)
    image_ptr = dy_ptr + (n.to(tl.int64) * (out_h * out_w) * C)[:, None] + cols
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for step in range(MANY_H * MANY_W):
        o_h, o_w = first_h + step // MANY_W, first_w + step % MANY_W
        weight = _weight(o_h, h, height, out_h, num_h, den_h, MODE, CORNERS)
        weight *= _weight(o_w, w, width, out_w, num_w, den_w, MODE, CORNERS)
        place = (o_h * out_w + o_w).to(tl.int64) * C
        dy = tl.load(image_ptr + place[:, None], mask=(weight != 0)[:, None] & live, other=0.0).to(tl.float32)
        total += weight[:, None] * dy
    tl.store(dx_ptr + rows.to(tl.int64)[:, None] * C + cols, total.to(dx_ptr.dtype.element_ty), mask=live)


# ---- launcher and op


def _many(out: int, mode: str, num: int, den: int) -> int:
    """The number of positions of y that are examined for a position of x."""
    if not num:
        return out
    return min(out, -(-den // num) + 1 if mode == "nearest" else -(-(4 if mode == "cubic" else 2) * den // num) + 2)


def _launch(config: Config, dy: Tensor, size: list[int], mode: str, num: list[int], den: list[int], corners: bool) -> Tensor:
    dx = _fake(dy, size, mode, num, den, corners)
    (_, *out, channels), rows = dy.shape, dx.shape[0] * size[0] * size[1]
    many_h, many_w = (_many(o, mode, a, b) for o, a, b in zip(out, num, den, strict=True))
    if dx.numel():
        grid = (triton.cdiv(rows, config["BLOCK_P"]) * triton.cdiv(channels, config["BLOCK_C"]),)
        _upsample_backward_kernel[grid](
            dy, dx, rows, *size, *out, *num, *den,
            C=channels, MODE=mode, CORNERS=corners, MANY_H=many_h, MANY_W=many_w, **config,
        )  # fmt: skip
    return dx


upsample_backward_op = Op(
    name="upsample_backward",
    reference=_reference,
    problem=upsample_problem,
    cost=_cost,
    examples=tuple(_example(case.label, case) for case in CASES),
    make=upsample_backward_arguments,
    fake=_fake,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)
