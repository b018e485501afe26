"""softmax and log_softmax of wide rows that several programs share: the implementation `split`.

A program holds 64 KB of a row in the dtype in which it was loaded, in slabs. It passes its maximum, and its sum of exponentials
relative to that maximum, to the other programs of the row (device/cooperative_rows.py explains how programs wait, and how rows
that start at any address are read). Each row is read once and written once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.device.cooperative_rows import (
    PART_BYTES,
    SPLIT_SPACE,
    draw,
    edges,
    lead_of,
    meet,
    packed,
    places,
    start_of,
    starts,
)
from tilewright.kernels.launch.shapes import ceil_div, rows_of
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["LOG_SPLIT", "SPLIT", "joined", "own_sums", "split_first", "take_part"]

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def take_part(
    x_ptr, counters_ptr, x_row_stride, D: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, STARTS: tl.constexpr,
    LEAD: tl.constexpr, SLABS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a ticket and load a program's part of a row.

    Returns (row, part, lead, pointer from which columns are counted, the slabs of the part as loaded, the columns at the row's
    ends, which of those belong to this part, their values in float32).
    """
    place = draw(counters_ptr)
    row, part = (place // PARTS).to(tl.int64), place % PARTS
    lead = lead_of(row, D, STARTS)
    x_ptr += start_of(row, x_row_stride, lead, STARTS)
    held = ()
    for slab in tl.static_range(SLABS):
        cols, mask = places(part, slab, lead, D, WIDTH, LEAD, BLOCK)
        held = held + (tl.load(x_ptr + cols, mask=mask, other=float("-inf"), cache_modifier=".cg"),)
    at, edge = edges(part, lead, D)
    ends = tl.load(x_ptr + at, mask=edge, other=float("-inf")).to(tl.float32) if LEAD else 0.0
    return row, part, lead, x_ptr, held, at, edge, ends


@triton.jit
def own_sums(
    held, ends, edge, part, lead,
    V: tl.constexpr, SMOOTHED: tl.constexpr, WIDTH: tl.constexpr, LEAD: tl.constexpr, SLABS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The maximum of a part, its sum of exponentials relative to that maximum, and if SMOOTHED its plain sum."""
    # If a part contains only -inf, it must not subtract -inf from -inf. So its maximum is at least the lowest finite float.
    tops = tl.full([BLOCK // 8], _LOWEST, tl.float32)
    for slab in tl.static_range(SLABS):
        tops = tl.maximum(tops, tl.max(packed(held[slab]).to(tl.float32), axis=1))
    top = tl.max(tops, axis=0)
    if LEAD:
        top = tl.maximum(top, tl.max(ends, axis=0))
    masses, totals = tl.zeros([BLOCK // 8], tl.float32), tl.zeros([BLOCK // 8], tl.float32)
    for slab in tl.static_range(SLABS):
        x = packed(held[slab]).to(tl.float32)
        masses += tl.sum(tl.exp2((x - top) * _LOG2E), axis=1)
        if SMOOTHED:
            _cols, mask = places(part, slab, lead, V, WIDTH, LEAD, BLOCK)
            totals += tl.sum(tl.where(mask, x, 0.0), axis=1)
    mass, total = tl.sum(masses, axis=0), 0.0
    if SMOOTHED:
        total = tl.sum(totals, axis=0)
    if LEAD:
        mass += tl.sum(tl.exp2((ends - top) * _LOG2E), axis=0)
        if SMOOTHED:
            total += tl.sum(tl.where(edge, ends, 0.0), axis=0)
    return top, mass, total


@triton.jit
def joined(of_row, sums, counter_ptr, part, top, mass, total, SMOOTHED: tl.constexpr, PARTS: tl.constexpr):
    """The same three numbers for the whole row, combined from all its parts."""
    others = tl.arange(0, triton.next_power_of_2(PARTS))
    tl.store(of_row + part, top)
    tl.store(of_row + sums + part, mass)
    if SMOOTHED:
        tl.store(of_row + 2 * sums + part, total)
    meet(counter_ptr, PARTS)
    every = tl.load(of_row + others, mask=others < PARTS, other=_LOWEST, cache_modifier=".cg")
    each = tl.load(of_row + sums + others, mask=others < PARTS, other=0.0, cache_modifier=".cg")
    top = tl.max(every, axis=0)
    mass = tl.sum(each * tl.exp2((every - top) * _LOG2E), axis=0)
    if SMOOTHED:
        total = tl.sum(tl.load(of_row + 2 * sums + others, mask=others < PARTS, other=0.0, cache_modifier=".cg"), axis=0)
    return top, mass, total


@triton.jit
def _probability(x, top, rate, LOG: tl.constexpr):
    """exp(x - top) rate, or x - top - rate."""
    return x - top - rate if LOG else tl.exp2((x - top) * _LOG2E) * rate


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def _split_kernel(
    x_ptr, y_ptr, parts_ptr, counters_ptr, n_rows, x_row_stride,
    D: tl.constexpr, LOG: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program processes one part of one row, WIDTH columns, in slabs; a thread holds 8 adjacent columns of each slab."""
    SLABS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    LEAD: tl.constexpr = STARTS == "lead"
    row, part, lead, _x_ptr, held, at, edge, ends = take_part(
        x_ptr, counters_ptr, x_row_stride, D, PARTS, WIDTH, STARTS, LEAD, SLABS, BLOCK
    )
    top, mass, _total = own_sums(held, ends, edge, part, lead, D, False, WIDTH, LEAD, SLABS, BLOCK)
    if PARTS > 1:
        sums = n_rows.to(tl.int64) * PARTS
        top, mass, _total = joined(parts_ptr + row * PARTS, sums, counters_ptr + 1 + row, part, top, mass, 0.0, False, PARTS)
    rate = tl.log(mass) if LOG else 1.0 / mass
    y_ptr += start_of(row, D, lead, STARTS)
    for slab in tl.static_range(SLABS):
        cols, mask = places(part, slab, lead, D, WIDTH, LEAD, BLOCK)
        y = _probability(packed(held[slab]).to(tl.float32), top, rate, LOG)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
    if LEAD:
        tl.store(y_ptr + at, _probability(ends, top, rate, LOG).to(y_ptr.dtype.element_ty), mask=edge)


def _run(config: Config, x: Tensor, log: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (rows, stride), cols, where = rows_of(x), x.shape[-1], starts(x, y)
    parts = ceil_div((cols + 7 * (where == "lead")) * x.element_size(), PART_BYTES)
    if rows:
        memory = torch.empty(2, rows, parts, dtype=torch.float32, device=x.device)
        counters = torch.zeros(1 + rows, dtype=torch.int32, device=x.device)
        _split_kernel[(rows * parts,)](
            x, y, memory, counters, rows, stride,
            D=cols, LOG=log, PARTS=parts, WIDTH=ceil_div(cols + 7 * (where == "lead"), 8 * parts) * 8, STARTS=where,
            maxnreg=1024 // config["num_warps"], **config,
        )  # fmt: skip
    return y


def _refuse(device: Device, problem: Any) -> str | None:
    size = problem.cols * problem.dtype.itemsize
    if 2 * size <= PART_BYTES:
        return "is for wider rows only: a single program can hold this one"
    return (
        "the row is too wide: the card cannot hold all its parts at the same time"
        if size > PART_BYTES * device.sms - 64
        else None
    )


def split_first(device: Device, problem: Any) -> str | None:
    """Prefers `split` where it is faster: for rows so wide that L2 cannot hold one per SM, and for rows that may start at any
    address.

    H100, bf16, relative to a copy's speed: 262144 columns 0.92 (one program: 0.79), 50257 0.86 (0.69), but 131072 0.92 (0.96).
    """
    size = problem.cols * problem.dtype.itemsize
    return "split" if size > 4 * PART_BYTES or size % 16 else None


def _split(log: bool) -> Impl:
    return Impl(
        name="split", launch=lambda config, x: _run(config, x, log), space=SPLIT_SPACE, refuse=_refuse, batch_invariant=True,
        interpretable=False,
    )  # fmt: skip


SPLIT, LOG_SPLIT = _split(False), _split(True)
