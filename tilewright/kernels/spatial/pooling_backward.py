"""The gradients of max and average pooling (pooling.py), as a gather: each position of x reads the windows that contain it.

    max: dx[n, i, c] = sum over windows o of dy[n, o, c] where indices[n, o, c] = i
    avg: dx[n, i, c] = sum over windows o that contain i of dy[n, o, c] / divisor(o)

    dy, indices: [N, *out, C]; dx: [N, D, H, W, C], contiguous, channels last; geometry as in pooling.py. Sums are float32, in a
    fixed order. There are no atomics; a scatter would need them as soon as windows overlap.

Memory-bound: dy (and indices) are read once, dx is written once; where windows overlap, dy comes from L1 and L2.
Not supported: a gradient of the gradient.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.spatial.inputs import avg_pool_backward_arguments, max_pool_backward_arguments
from tilewright.kernels.spatial.pooling import (
    AVG_CASES,
    COUNTS,
    MAX_CASES,
    NONE,
    NUMBERS,
    ONES,
    SPACE,
    Case,
    count_of,
    divisor_of,
    dtype_problem,
    max_pool_op,
    place_of,
    widest,
    window_matrices,
    window_sizes,
    window_start,
    window_stop,
)
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["avg_pool_backward_op", "max_pool_backward_op"]


def _max_reference(
    dy: Tensor, indices: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    wide = dy.to(torch.promote_types(dy.dtype, torch.float32))
    dx = wide.new_zeros((dy.shape[0], size[0] * size[1] * size[2], dy.shape[4]))
    dx = dx.scatter_add(1, indices.flatten(1, 3).long(), wide.flatten(1, 3))
    return dx.unflatten(1, size).to(dy.dtype)


def _avg_reference(
    dy: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int], include_pad: bool,
    divisor: int | None,
) -> Tensor:  # fmt: skip
    wide, out = dy.to(torch.promote_types(dy.dtype, torch.float32)), list(dy.shape[1:4])
    wide = wide / window_sizes(size, out, kernel, stride, padding, include_pad, divisor).to(wide)
    for axis, inside in enumerate(window_matrices(size, out, kernel, stride, padding)):
        wide = (wide.movedim(axis + 1, -1) @ inside.to(wide)).movedim(-1, axis + 1)
    return wide.to(dy.dtype).contiguous()


def _avg_fake(dy: Tensor, size: list[int], *_: Any) -> Tensor:
    return dy.new_empty((dy.shape[0], *size, dy.shape[4]))


def _max_cost(dy: Tensor, indices: Tensor, size: list[int], *more: Any) -> Cost:
    return Cost(flops=dy.numel(), bytes=indices.nbytes + _avg_cost(dy, size).bytes)


def _avg_cost(dy: Tensor, size: list[int], *more: Any) -> Cost:
    places = dy.shape[0] * size[0] * size[1] * size[2] * dy.shape[4]
    return Cost(flops=2 * places, bytes=dy.nbytes + places * dy.element_size())


# ---- examples


@Example.of
def _max_example(inputs: Inputs, case: Case) -> tuple[Any, ...]:
    x = inputs.randn(*case.shape, scale=2.0).round()
    window = (case.kernel, case.stride, case.padding, case.dilation)
    indices = max_pool_op.reference(x.cpu(), case.out, *window, True)[1].to(x.device)
    return inputs.randn(*indices.shape, dtype=case.dtype), indices, list(case.shape[1:4]), *window


@Example.of
def _avg_example(inputs: Inputs, case: Case, include_pad: bool, divisor: int | None) -> tuple[Any, ...]:
    dy = inputs.randn(case.shape[0], *case.out, case.shape[4], dtype=case.dtype)
    return dy, list(case.shape[1:4]), case.kernel, case.stride, case.padding, include_pad, divisor


# ---- kernels


@triton.jit
def _last_window(i, size, out, stride, padding, ADAPTIVE: tl.constexpr):
    """The last window along an axis that may contain position i. The others come directly before it."""
    if ADAPTIVE:
        return ((i + 1) * out + size - 1) // size - 1
    else:
        return (i + padding) // stride


@triton.jit
def _holds(i, o, size, out, stride, padding, KERNEL: tl.constexpr, ADAPTIVE: tl.constexpr):
    """Whether window o contains position i."""
    start = window_start(o, size, out, stride, padding, ADAPTIVE)
    stop = window_stop(o, size, out, stride, padding, KERNEL, ADAPTIVE)
    return (o >= 0) & (o < out) & (start <= i) & (i < stop)


@triton.jit(do_not_specialize=NUMBERS)
def _pool_backward_kernel(
    dy_ptr, place_ptr, dx_ptr, n_rows, depth, height, width, out_d, out_h, out_w,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, divisor,
    C: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ND: tl.constexpr, NH: tl.constexpr,
    NW: tl.constexpr, ADAPTIVE: tl.constexpr, COUNT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """ND, NH, NW: how many windows may contain a position, along each axis.

    place_ptr: for a maximum, the indices, which tell whether a window chose the position. None for a mean.
    """
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    rows = (tl.program_id(0) // TILES) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = (tl.program_id(0) % TILES) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    n, d, h, w = place_of(rows, depth, height, width)
    own = ((d * height + h) * width + w)[:, None]
    last_d = _last_window(d, depth, out_d, stride_d, pad_d, ADAPTIVE)
    last_h = _last_window(h, height, out_h, stride_h, pad_h, ADAPTIVE)
    last_w = _last_window(w, width, out_w, stride_w, pad_w, ADAPTIVE)
    first = (n.to(tl.int64) * (out_d * out_h * out_w) * C)[:, None] + cols
    live = (rows < n_rows)[:, None] & (cols < C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for step in range(ND * NH):
        o_d, o_h = last_d - step // NH, last_h - step % NH
        if place_ptr is not None:
            row_in = (o_d >= 0) & (o_d < out_d) & (o_h >= 0) & (o_h < out_h)
        else:
            row_in = _holds(d, o_d, depth, out_d, stride_d, pad_d, KD, ADAPTIVE)
            row_in &= _holds(h, o_h, height, out_h, stride_h, pad_h, KH, ADAPTIVE)
        for i in tl.static_range(NW):
            o_w = last_w - i
            if place_ptr is not None:
                inside = (row_in & (o_w >= 0) & (o_w < out_w))[:, None] & live
            else:
                inside = row_in & _holds(w, o_w, width, out_w, stride_w, pad_w, KW, ADAPTIVE)
            offsets = first + ((o_d * out_h + o_h) * out_w + o_w).to(tl.int64)[:, None] * C
            if place_ptr is not None:
                dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
                total += tl.where(tl.load(place_ptr + offsets, mask=inside, other=-1) == own, dy, 0.0)
            else:
                share = divisor_of(
                    o_d, o_h, o_w, depth, height, width, out_d, out_h, out_w, stride_d, stride_h, stride_w, pad_d, pad_h,
                    pad_w, divisor, KD, KH, KW, ADAPTIVE, COUNT,
                )  # fmt: skip
                dy = tl.load(dy_ptr + offsets, mask=inside[:, None] & live, other=0.0).to(tl.float32)
                # The computed size of a window that does not exist may be 0.
                total += dy / tl.where(inside, share, 1.0)[:, None]
    tl.store(dx_ptr + rows.to(tl.int64)[:, None] * C + cols, total.to(dx_ptr.dtype.element_ty), mask=live)


# ---- launchers and ops


def _holders(size: list[int], out: list[int], kernel: list[int], stride: list[int], dilation: list[int]) -> list[int]:
    """How many windows may contain one position, along each axis."""
    if not kernel:
        return [-(-o // n) + 1 for n, o in zip(size, out, strict=True)]
    return [(k - 1) * d // s + 1 for k, s, d in zip(kernel, stride, dilation, strict=True)]


def _run(
    config: Config, dy: Tensor, indices: Tensor | None, size: list[int], kernel: list[int], stride: list[int],
    padding: list[int], dilation: list[int], include_pad: bool = False, divisor: int | None = None,
) -> Tensor:  # fmt: skip
    dx, out, channels = _avg_fake(dy, size), list(dy.shape[1:4]), dy.shape[4]
    rows = dx.numel() // channels if channels else 0
    (depth, height, width), (kd, kh, kw) = _holders(size, out, kernel, stride, dilation), kernel or widest(size, out)
    if rows:
        grid = (triton.cdiv(rows, config["BLOCK_P"]) * triton.cdiv(channels, config["BLOCK_C"]),)
        _pool_backward_kernel[grid](
            dy, indices, dx, rows, *size, *out, *(stride or ONES), *(padding or NONE),
            divisor or 1 if indices is None else None,
            C=channels, KD=kd, KH=kh, KW=kw, ND=depth, NH=height, NW=width, ADAPTIVE=not kernel,
            COUNT=count_of(kernel, include_pad, divisor), **config,
        )  # fmt: skip
    return dx


def _avg_launch(config: Config, dy: Tensor, size: list[int], kernel: list[int], *window: Any) -> Tensor:
    stride, padding, *count = window
    return _run(config, dy, None, size, kernel, stride, padding, ONES, *count)


max_pool_backward_op = Op(
    name="max_pool_backward",
    reference=_max_reference,
    problem=lambda dy, indices, size, kernel, *more: dtype_problem(dy, kernel),
    cost=_max_cost,
    examples=tuple(_max_example(case.label, case) for case in MAX_CASES),
    make=max_pool_backward_arguments,
    fake=lambda dy, indices, size, *_: dy.new_empty((dy.shape[0], *size, dy.shape[4])),
    impls=(Impl(name="triton", launch=_run, space=SPACE, batch_invariant=True),),
)

avg_pool_backward_op = Op(
    name="avg_pool_backward",
    reference=_avg_reference,
    problem=lambda dy, size, kernel, *more: dtype_problem(dy, kernel),
    cost=_avg_cost,
    examples=tuple(_avg_example(case.label, case, *count) for case, count in zip(AVG_CASES, COUNTS, strict=True)),
    make=avg_pool_backward_arguments,
    fake=_avg_fake,
    impls=(Impl(name="triton", launch=_avg_launch, space=SPACE, batch_invariant=True),),
)
