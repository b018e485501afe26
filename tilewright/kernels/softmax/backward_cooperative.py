"""The gradient of softmax for rows that several programs share: the implementation `split` of backward.py.

A program holds 32 KB of a row's dy and as much of y, packed in the dtype in which they were loaded. There are two programs per
SM: one waits for the sum of its row while the other loads. device/cooperative_rows.py explains how they wait.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.device.cooperative_rows import draw, edges, lead_of, meet, mine, packed, start_of, starts
from tilewright.kernels.launch.row_space import row_space
from tilewright.kernels.launch.shapes import ceil_div, rows_of
from tilewright.tune.space import Config

__all__ = ["SPLIT_SPACE", "gradient", "launch_split", "refuse_split", "term"]

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def term(dy, y, LOG: tl.constexpr):
    """The summand of the row's sum."""
    return dy.to(tl.float32) if LOG else dy.to(tl.float32) * y.to(tl.float32)


@triton.jit
def gradient(dy, y, total, LOG: tl.constexpr):
    """dx, where `total` is the row's sum of `term`."""
    dy, y = dy.to(tl.float32), y.to(tl.float32)
    return dy - tl.exp2(y * _LOG2E) * total if LOG else y * (dy - total)


@triton.jit(do_not_specialize=["dy_row_stride", "y_row_stride"])
def _split_kernel(
    dy_ptr, y_ptr, dx_ptr, parts_ptr, counters_ptr, dy_row_stride, y_row_stride,
    D: tl.constexpr, LOG: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, STARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each program processes one part of one row, WIDTH columns. A thread holds 8 adjacent columns at a time."""
    place = draw(counters_ptr)
    row, part = (place // PARTS).to(tl.int64), place % PARTS
    LEAD: tl.constexpr = STARTS == "lead"
    lead = lead_of(row, D, STARTS)
    lane = part * WIDTH + tl.arange(0, BLOCK_D // 8)[:, None] * 8
    cols = lane + tl.arange(0, 8)[None, :]  # counted from a multiple of 8 at or before the row's start
    mask = mine(lane, cols, (part + 1) * WIDTH, lead, D, LEAD)
    dy_ptr += start_of(row, dy_row_stride, lead, STARTS)
    y_ptr += start_of(row, y_row_stride, lead, STARTS)
    dy = tl.load(dy_ptr + cols, mask=mask, other=0.0, cache_modifier=".cg")
    y = tl.load(y_ptr + cols, mask=mask, other=0.0, cache_modifier=".cg")
    sums = tl.sum(tl.sum(term(dy, y, LOG), axis=1), axis=0)
    if LEAD:
        at, edge = edges(part, lead, D)
        dy_end = tl.load(dy_ptr + at, mask=edge, other=0.0)
        y_end = tl.load(y_ptr + at, mask=edge, other=0.0)
        sums += tl.sum(term(dy_end, y_end, LOG), axis=0)
    tl.store(parts_ptr + row * PARTS + part, sums)
    meet(counters_ptr + 1 + row, PARTS)
    others = tl.arange(0, triton.next_power_of_2(PARTS))
    total = tl.sum(tl.load(parts_ptr + row * PARTS + others, mask=others < PARTS, other=0.0, cache_modifier=".cg"), axis=0)
    dx = gradient(packed(dy), packed(y), total, LOG)
    dx_ptr += start_of(row, D, lead, STARTS)
    tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
    if LEAD:
        tl.store(dx_ptr + at, gradient(dy_end, y_end, total, LOG).to(dx_ptr.dtype.element_ty), mask=edge)


def _default(device: Device, problem: Any) -> Config:
    return {"BLOCK_D": 32768 // problem.dtype.itemsize, "num_warps": 16}


SPLIT_SPACE = row_space(_default, BLOCK_D=(8192, 16384), num_warps=(16,))


def refuse_split(device: Device, problem: Any) -> str | None:
    """Why programs do not share rows of this width, or None."""
    block = 32768 // problem.dtype.itemsize
    if problem.cols <= block:
        return "is for wider rows only: a single program can hold this one"
    return (
        "the row is too wide: the card cannot hold all its parts at the same time"
        if problem.cols > block * device.sms - 7
        else None
    )


def launch_split(config: Config, dy: Tensor, y: Tensor, log: bool) -> Tensor:
    """The gradient of rows wider than BLOCK_D."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    (rows, dy_row_stride), (_, y_row_stride), cols = rows_of(dy), rows_of(y), y.shape[-1]
    where = starts(dy, y, dx)
    parts = ceil_div(cols + 7 * (where == "lead"), config["BLOCK_D"])
    if rows:
        sums = torch.empty(rows, parts, dtype=torch.float32, device=y.device)
        counters = torch.zeros(1 + rows, dtype=torch.int32, device=y.device)
        _split_kernel[(rows * parts,)](
            dy, y, dx, sums, counters, dy_row_stride, y_row_stride,
            D=cols, LOG=log, PARTS=parts, WIDTH=ceil_div(cols + 7 * (where == "lead"), 8 * parts) * 8, STARTS=where,
            maxnreg=1024 // config["num_warps"], **config,
        )  # fmt: skip
    return dx
