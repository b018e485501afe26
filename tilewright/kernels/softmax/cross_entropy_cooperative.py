"""Losses and gradients of cross-entropy for wide rows that several programs share: the implementation `split`.

A program holds 64 KB of a row in the dtype in which it was loaded. It passes its maximum, and its sum of exponentials relative
to that maximum, to the other programs of the row, and then computes the gradient from what it holds (device/cooperative_rows.py
explains how programs wait, and how rows that start at any address are read). Both implementations use `row_ends` to compute the
loss from a row's sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.device.cooperative_rows import PART_BYTES, packed, places, start_of, starts
from tilewright.kernels.launch.shapes import ceil_div, rows_of
from tilewright.kernels.softmax.cooperative import joined, own_sums, take_part
from tilewright.tune.space import Config

__all__ = ["launch_split", "refuse_split", "row_ends"]

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def row_ends(top, mass, total, chosen, target, ignore_index, smoothing, z_loss, V: tl.constexpr):
    """(loss, lse) of rows from their sums."""
    lse = top + tl.log(mass)
    loss = lse - (1.0 - smoothing) * chosen - smoothing / V * total + z_loss * lse * lse
    loss = tl.where((target >= 0) & (target < V), loss, float("nan"))
    return tl.where(target == ignore_index, 0.0, loss), lse


@triton.jit
def _write(
    y_ptr, held, ends, at, edge, part, lead, target, chosen, valid, ignored, top, rate, level, hit,
    V: tl.constexpr, WIDTH: tl.constexpr, LEAD: tl.constexpr, SLABS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write exp(x - top) rate - level, minus `hit` in the target's column; zeros where ignored."""
    if ignored:
        for slab in tl.static_range(SLABS):
            cols, mask = places(part, slab, lead, V, WIDTH, LEAD, BLOCK)
            tl.store(y_ptr + cols, tl.zeros_like(held[slab]), mask=mask, cache_modifier=".cs")
        if LEAD:
            tl.store(y_ptr + at, tl.zeros_like(ends).to(y_ptr.dtype.element_ty), mask=edge)
    else:
        for slab in tl.static_range(SLABS):
            cols, mask = places(part, slab, lead, V, WIDTH, LEAD, BLOCK)
            y = tl.exp2((packed(held[slab]).to(tl.float32) - top) * _LOG2E) * rate - level
            tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
        if LEAD:
            y = tl.exp2((ends - top) * _LOG2E) * rate - level
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=edge)
        # The target's column is written separately, by the program that has it: cheaper than comparing each column with the
        # target.
        own = lead + target
        tl.debug_barrier()
        has_it = own // WIDTH == part
        if LEAD:
            # Part 0 writes it too, after its own ends, in addition to the part that has the column by its number: the same
            # bits.
            has_it = has_it | (part == 0)
        y = tl.exp2((chosen - top) * _LOG2E) * rate - level - hit
        tl.store(y_ptr + own, y.to(y_ptr.dtype.element_ty), mask=valid & has_it)


@triton.jit(
    do_not_specialize=["n_rows", "x_row_stride", "y_row_stride", "scale_stride", "ignore_index"],
    do_not_specialize_on_alignment=["targets_ptr", "scale_ptr"],
)
def _split_kernel(
    x_ptr, targets_ptr, scale_ptr, loss_ptr, y_ptr, parts_ptr, counters_ptr,
    n_rows, x_row_stride, y_row_stride, scale_stride, ignore_index, smoothing, z_loss,
    V: tl.constexpr, SMOOTHED: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program processes one part of one row, WIDTH columns, in slabs; a thread holds 8 adjacent columns of each slab."""
    SLABS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    LEAD: tl.constexpr = STARTS == "lead"
    row, part, lead, x_ptr, held, at, edge, ends = take_part(
        x_ptr, counters_ptr, x_row_stride, V, PARTS, WIDTH, STARTS, LEAD, SLABS, BLOCK
    )
    target = tl.load(targets_ptr + row)
    scale = tl.load(scale_ptr + row * scale_stride)
    valid = (target >= 0) & (target < V)
    chosen = tl.load(x_ptr + lead + target, mask=valid, other=0.0).to(tl.float32)
    top, mass, total = own_sums(held, ends, edge, part, lead, V, SMOOTHED, WIDTH, LEAD, SLABS, BLOCK)
    if PARTS > 1:
        sums = n_rows.to(tl.int64) * PARTS
        top, mass, total = joined(
            parts_ptr + row * PARTS, sums, counters_ptr + 1 + row, part, top, mass, total, SMOOTHED, PARTS
        )  # fmt: skip
    loss, lse = row_ends(top, mass, total, chosen, target, ignore_index, smoothing, z_loss, V)
    if part == 0:
        tl.store(loss_ptr + row, loss)
    rate = tl.where(valid, scale * (1.0 + 2.0 * z_loss * lse) / mass, float("nan"))
    _write(
        y_ptr + start_of(row, y_row_stride, lead, STARTS), held, ends, at, edge, part, lead, target, chosen, valid,
        target == ignore_index, top, rate, scale * smoothing / V, scale * (1.0 - smoothing), V, WIDTH, LEAD, SLABS, BLOCK,
    )  # fmt: skip


def refuse_split(device: Device, problem: Any) -> str | None:
    """Why programs do not share rows of this width, or None."""
    most = PART_BYTES // problem.dtype.itemsize
    if 2 * problem.vocab <= most:
        return "is for wider rows only: a single program can hold this one"
    return (
        "the row is too wide: the card cannot hold all its parts at the same time"
        if problem.vocab > most * device.sms - 7
        else None
    )


def launch_split(
    config: Config, logits: Tensor, targets: Tensor, scale: Tensor, grad: Tensor, ignore_index: int, smoothing: float,
    z_loss: float,
) -> Tensor:  # fmt: skip
    """The losses. The gradient of the logits is written to `grad`, which may be the logits."""
    rows, vocab = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    where = starts(logits, grad)
    parts = ceil_div(vocab + 7 * (where == "lead"), PART_BYTES // logits.element_size())
    if rows:
        sums = torch.empty(2 + (smoothing != 0), rows, parts, dtype=torch.float32, device=logits.device)
        counters = torch.zeros(1 + rows, dtype=torch.int32, device=logits.device)
        _split_kernel[(rows * parts,)](
            logits, targets, scale, loss, grad, sums, counters,
            rows, rows_of(logits)[1], rows_of(grad)[1], scale.stride(0), ignore_index, smoothing, z_loss,
            V=vocab, SMOOTHED=smoothing != 0, PARTS=parts, STARTS=where,
            WIDTH=ceil_div(vocab + 7 * (where == "lead"), 8 * parts) * 8,
            maxnreg=1024 // config["num_warps"], **config,
        )  # fmt: skip
    return loss
