"""layer_norm and rms_norm of wide rows, where several programs share a row: the implementations `split`.

A program keeps a part of a row, 64 KB, in registers, in slabs of BLOCK columns and in the dtype of x. It writes the sums of its
part to memory, waits for the other programs of the row (device/cooperative_rows.py), and computes the result from its
registers. So x is read once and y is written once, whatever the width.

The variance is never a difference of two large sums. Each part contributes its own mean and the sum of squares about that
mean; Chan's formula combines them (Chan, Golub and LeVeque, 1983).

In layer_norm a program may process parts of ROWS rows. The parts are then narrower by this factor, and weight and bias are read
once for all of them.

Refused: widths that are no multiple of 8 columns, because then not all rows start at multiples of 16 bytes. Not here:
add_rms_norm. A program would have to hold two rows, which spill (0.64 of the speed of a copy, against 0.92).
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.device.cooperative_rows import PART_BYTES, SPLIT_SPACE, draw, meet, packed, start_of, starts
from tilewright.kernels.launch.shapes import ceil_div, rows_of
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["LAYER_SPLIT", "LAYER_STATS_SPLIT", "RMS_SPLIT", "split_first"]


@triton.jit
def _places(part, slab, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(columns of a slab of a part, mask of the columns that exist)."""
    lane = part * WIDTH + slab * BLOCK + tl.arange(0, BLOCK // 8)[:, None] * 8
    return lane + tl.arange(0, 8)[None, :], lane < tl.minimum((part + 1) * WIDTH, D)


@triton.jit
def _add(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _sums(terms):
    """The sum of each of one, two or four vectors. The reductions share one round of barriers."""
    if len(terms) == 1:
        return (tl.sum(terms[0], axis=0),)
    elif len(terms) == 2:
        return tl.reduce(terms, 0, _add)
    else:
        return tl.reduce(terms, 0, _add_four)


@triton.jit
def _squares(held, first, mean, part, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of squares about the mean, one per 8 neighbouring columns, of a part whose slabs begin at held[first]."""
    lanes = tl.zeros([BLOCK // 8], tl.float32)
    for slab in tl.static_range((WIDTH + BLOCK - 1) // BLOCK):
        _, mask = _places(part, slab, D, WIDTH, BLOCK)
        gap = tl.where(mask, packed(held[first + slab]).to(tl.float32) - mean, 0.0)
        lanes += tl.sum(gap * gap, axis=1)
    return lanes


@triton.jit
def _joined(of_row, n_rows, there, D: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """(mean, sum of squares about the mean) of a row, from all its parts. Both are zero if the row does not exist."""
    others = tl.arange(0, triton.next_power_of_2(PARTS))
    mine = (others < PARTS) & there
    every = tl.load(of_row + others, mask=mine, other=0.0, cache_modifier=".cg")
    each = tl.load(of_row + n_rows.to(tl.int64) * PARTS + others, mask=mine, other=0.0, cache_modifier=".cg")
    mean = tl.sum(every, axis=0) / D
    count = tl.maximum(tl.minimum(WIDTH, D - others * WIDTH), 1).to(tl.float32)
    away = tl.where(mine, every / count - mean, 0.0)
    return mean, tl.sum(each + away * away * count, axis=0)


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def _layer_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, parts_ptr, counters_ptr, stats_ptr, n_rows, x_row_stride, eps,
    D: tl.constexpr, HAS_BIAS: tl.constexpr, STARTS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Processes the same part of ROWS rows, of which only the first surely exists. Reads weight and bias once for all rows."""
    SLABS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    place = draw(counters_ptr)
    group, part = (place // PARTS).to(tl.int64), place % PARTS
    first = group * ROWS
    held = ()
    for r in tl.static_range(ROWS):
        for slab in tl.static_range(SLABS):
            cols, mask = _places(part, slab, D, WIDTH, BLOCK)
            mask = mask if r == 0 else mask & (first + r < n_rows)
            x = tl.load(x_ptr + start_of(first + r, x_row_stride, 0, STARTS) + cols, mask=mask, other=0.0, cache_modifier=".cg")
            held = held + (x,)
    totals = ()
    for r in tl.static_range(ROWS):
        lanes = tl.zeros([BLOCK // 8], tl.float32)
        for slab in tl.static_range(SLABS):
            lanes += tl.sum(packed(held[r * SLABS + slab]).to(tl.float32), axis=1)
        totals = totals + (lanes,)
    totals = _sums(totals)
    squares = ()
    for r in tl.static_range(ROWS):
        mean = totals[r] / tl.minimum(WIDTH, D - part * WIDTH)
        squares = squares + (_squares(held, r * SLABS, mean, part, D, WIDTH, BLOCK),)
    squares = _sums(squares)
    if PARTS > 1:
        for r in tl.static_range(ROWS):
            of_row = parts_ptr + (first + r) * PARTS
            there = None if r == 0 else first + r < n_rows
            tl.store(of_row + part, totals[r], mask=there)
            tl.store(of_row + n_rows.to(tl.int64) * PARTS + part, squares[r], mask=there)
        meet(counters_ptr + 1 + group, PARTS)
    means, scales = (), ()
    for r in tl.static_range(ROWS):
        mean, square = totals[r] / D, squares[r]
        there = True if r == 0 else first + r < n_rows
        if PARTS > 1:
            mean, square = _joined(parts_ptr + (first + r) * PARTS, n_rows, there, D, PARTS, WIDTH)
        scale = tl.rsqrt(square / D + eps)
        if stats_ptr is not None:
            mine = part == 0 if r == 0 else (part == 0) & there
            tl.store(stats_ptr + first + r, mean, mask=mine)
            tl.store(stats_ptr + n_rows + first + r, scale, mask=mine)
        means, scales = means + (mean,), scales + (scale,)
    for slab in tl.static_range(SLABS):
        cols, mask = _places(part, slab, D, WIDTH, BLOCK)
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32) if HAS_BIAS else weight
        for r in tl.static_range(ROWS):
            y = (packed(held[r * SLABS + slab]).to(tl.float32) - means[r]) * scales[r] * weight
            if HAS_BIAS:
                y += bias
            there = mask if r == 0 else mask & (first + r < n_rows)
            tl.store(y_ptr + (first + r) * D + cols, y.to(y_ptr.dtype.element_ty), mask=there, cache_modifier=".cs")


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def _rms_kernel(
    x_ptr, weight_ptr, y_ptr, parts_ptr, counters_ptr, n_rows, x_row_stride, eps,
    D: tl.constexpr, STARTS: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    SLABS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    place = draw(counters_ptr)
    row, part = (place // PARTS).to(tl.int64), place % PARTS
    held = ()
    for slab in tl.static_range(SLABS):
        cols, mask = _places(part, slab, D, WIDTH, BLOCK)
        x = tl.load(x_ptr + start_of(row, x_row_stride, 0, STARTS) + cols, mask=mask, other=0.0, cache_modifier=".cg")
        held = held + (x,)
    squares = tl.zeros([BLOCK // 8], tl.float32)
    for slab in tl.static_range(SLABS):
        x = packed(held[slab]).to(tl.float32)
        squares += tl.sum(x * x, axis=1)
    square = tl.sum(squares, axis=0)
    if PARTS > 1:
        tl.store(parts_ptr + row * PARTS + part, square)
        meet(counters_ptr + 1 + row, PARTS)
        others = tl.arange(0, triton.next_power_of_2(PARTS))
        every = tl.load(parts_ptr + row * PARTS + others, mask=others < PARTS, other=0.0, cache_modifier=".cg")
        square = tl.sum(every, axis=0)
    scale = tl.rsqrt(square / D + eps)
    for slab in tl.static_range(SLABS):
        cols, mask = _places(part, slab, D, WIDTH, BLOCK)
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        y = packed(held[slab]).to(tl.float32) * scale * weight
        tl.store(y_ptr + row * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")


def _plan(config: Config, x: Tensor, sums: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """((memory for the sums of the parts, counters), constants of both kernels)."""
    rows, cols, together = rows_of(x)[0], x.shape[-1], config.get("ROWS", 1)
    parts = ceil_div(together * cols * x.element_size(), PART_BYTES)
    memory = torch.empty(sums, rows, parts, dtype=torch.float32, device=x.device)
    counters = torch.zeros(1 + ceil_div(rows, together), dtype=torch.int32, device=x.device)
    width = ceil_div(cols, 8 * parts) * 8
    constants = {"D": cols, "PARTS": parts, "WIDTH": width, "maxnreg": 1024 // config["num_warps"], **config}
    return (memory, counters), constants


def _layer(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, stats: Tensor | None = None) -> Tensor:
    """Return the norm. Write the mean and 1 / deviation of each row to stats, float32 [2, rows], if given."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, stride = rows_of(x)
    if rows:
        memory, constants = _plan(config, x, 2)
        _layer_kernel[(ceil_div(rows, config["ROWS"]) * constants["PARTS"],)](
            x, weight, weight if bias is None else bias, y, *memory, stats, rows, stride, eps, HAS_BIAS=bias is not None,
            STARTS=starts(x), **constants,
        )  # fmt: skip
    return y


def _layer_stats(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    stats = torch.empty(2, rows_of(x)[0], dtype=torch.float32, device=x.device)
    return _layer(config, x, weight, bias, eps, stats), stats


def _rms(config: Config, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, stride = rows_of(x)
    if rows:
        memory, constants = _plan(config, x, 1)
        _rms_kernel[(rows * constants["PARTS"],)](x, weight, y, *memory, rows, stride, eps, STARTS=starts(x), **constants)
    return y


def split_first(device: Device, problem: Any) -> str | None:
    """Choose `split` where it is faster: for rows so wide that L2 cannot hold one row per SM.

    H100, bf16, fraction of the speed of a copy; in brackets with one program per row:

        columns     layer_norm     rms_norm
        262144      0.91 (0.75)    0.92 (0.77)
        131072      0.92 (0.91)    0.90 (0.92)
    """
    return "split" if problem.cols * problem.dtype.itemsize > 4 * PART_BYTES else None


def _refuse(device: Device, problem: Any) -> str | None:
    size = problem.cols * problem.dtype.itemsize
    if problem.cols % 8:
        return f"needs a row length that is a multiple of 8, not {problem.cols}"
    if 2 * size <= PART_BYTES:
        return "is for wider rows only: a single program can hold this one"
    return (
        "the row is too wide: the card cannot hold all its parts at the same time" if size > PART_BYTES * device.sms else None
    )


def _split(launch: Callable[..., Any], space: Space) -> Impl:
    return Impl(name="split", launch=launch, space=space, refuse=_refuse, batch_invariant=True, interpretable=False)


def _too_wide(device: Device, problem: Any, config: Config) -> str | None:
    parts = -(-config["ROWS"] * problem.cols * problem.dtype.itemsize // PART_BYTES)
    return "the row is too wide: the card cannot hold all its parts at the same time" if parts > device.sms else None


def _layer_default(device: Device, problem: Any) -> Config:
    # H100, bf16, us with ROWS = 1, 2, 4: 2048 x 262144 852, 789, 783; 4096 x 131072 861, 775, 771; 1024 x 524288 847, 790, 849.
    parts = -(-problem.cols * problem.dtype.itemsize // PART_BYTES)
    most = min(32, device.sms)
    return {"BLOCK": 2048, "num_warps": 8, "ROWS": 4 if 4 * parts <= most else 2 if 2 * parts <= most else 1}


_LAYER_SPACE = Space(
    default=_layer_default,
    axes={"BLOCK": (2048,), "num_warps": (8,), "ROWS": (1, 2, 4)},
    refusal=_too_wide,
)
LAYER_SPLIT = _split(_layer, _LAYER_SPACE)
LAYER_STATS_SPLIT = _split(_layer_stats, _LAYER_SPACE)
RMS_SPLIT = _split(_rms, SPLIT_SPACE)
