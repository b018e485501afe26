"""The gradient of layer_norm for wide rows whose statistics the forward pass saved: the implementation `kept`.

Several programs share a row, by the scheme of backward_cooperative.py. Three blocks of rows are in shared memory: the first is
being loaded, the partial sums of the second are written, and the third is finished. mean and 1 / deviation (scale) are known
(stats, layer_norm.py). With

    h = (x - mean) scale,     c1[t] = mean of w dy,     c2[t] = mean of w dy h,     dx = scale (w dy - c1 - h c2)

only two plain sums are needed: each part writes two numbers per row and adds those of all parts. Other savings:

- A thread adds up its own columns of each row. The sums of the threads are then redistributed through shared memory, so that
  one warp adds all sums of one kind of one row. This takes 5 shuffles per warp. If every warp reduced its columns of every row,
  it would take 5 shuffles per row and sum.
- The sums of the parts are added in the same way: one warp adds one kind of sum of one row and broadcasts the result through
  shared memory.

H100, bf16, fraction of the speed of a copy: 8192 x 16384 0.93, 4096 x 32768 0.91, 2048 x 65536 0.90, 4096 x 131072 0.92,
2048 x 262144 0.87. This is 1.2 to 1.5 times as fast as `split` (docs/log.md).

Refused: the rows that backward_cooperative.py refuses, calls without stats, and float32 where a program has less than 100 KB of
shared memory.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportCallIssue=false
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tilewright.hw.device import Device
from tilewright.kernels.device.partial_sums import column_sums
from tilewright.kernels.hopper.primitives import block_barrier
from tilewright.kernels.launch.shapes import rows_of
from tilewright.kernels.norm.backward_cooperative import (
    aligned_rows,
    fetch_block,
    memory_of,
    own_columns,
    refuse_rows,
    wait_for,
)
from tilewright.tune.space import Config, Space

__all__ = ["KEPT_SPACE", "kept_gradients", "refuse_kept"]


@gluon.jit
def _own_sums(x, BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr, VECTOR: gl.constexpr):
    """[BLOCK_T, BLOCK_D] -> [BLOCK_T, threads]: for each row, the sum of the elements that a thread holds."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    return gl.sum(gl.sum(gl.reshape(x, [BLOCK_T, BLOCK_D // (VECTOR * THREADS), THREADS, VECTOR]), axis=3), axis=1)


@gluon.jit
def _unpacked(weight):
    """The weight in float32.

    With more than 8 columns per thread, 16-bit weights first pass through a `mov` that is opaque to the compiler. Otherwise it
    would keep float32 copies of the weights, which need twice the registers and spill. With 8 columns the copies fit and save
    24 instructions per block.
    """
    if weight.dtype.primitive_bitwidth == 16 and weight.shape[1] > 8 * 32 * gl.num_warps():
        weight = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weight], dtype=weight.dtype, is_pure=False, pack=2)
    return weight.to(gl.float32)


@gluon.jit
def _publish(
    bufs, stage, weight, mean, parts_ptr, sums, counters_ptr, start, n_rows, part,
    PARTS: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr, VECTOR: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write this part's sums of w dy and w dy (x - mean) for the rows of a block, then increment the block's counter."""
    # The weight is 0 in columns that do not exist.
    given = _unpacked(weight) * bufs.index(2 * stage).load(LAYOUT).to(gl.float32)
    gap = bufs.index(2 * stage + 1).load(LAYOUT).to(gl.float32) - gl.expand_dims(mean, 1)
    own = gl.join(_own_sums(given, BLOCK_T, BLOCK_D, VECTOR), _own_sums(given * gap, BLOCK_T, BLOCK_D, VECTOR))
    own = gl.reshape(gl.permute(own, (2, 0, 1)), [2 * BLOCK_T, 32 * gl.num_warps()])
    warp_a_row: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    both = gl.sum(gl.convert_layout(own, warp_a_row), axis=1)
    place = gl.arange(0, 2 * BLOCK_T, layout=gl.SliceLayout(1, warp_a_row))
    rows = start + place % BLOCK_T
    at = parts_ptr + rows.to(gl.int64) * PARTS + part
    gl.store(at + gl.where(place < BLOCK_T, 0, sums), both, mask=rows < n_rows)
    block_barrier()  # one thread executes the release below; the writes of all threads must come before it
    gl.atomic_add(counters_ptr + 1 + start // BLOCK_T, 1, sem="release")


@gluon.jit
def _joined(
    parts_ptr, sums, start, n_rows, PARTS: gl.constexpr, PARTS_2: gl.constexpr, BLOCK_T: gl.constexpr, OUT: gl.constexpr
):
    """The sums of w dy and of w dy (x - mean) of each row, [BLOCK_T] each, from all parts."""
    layout: gl.constexpr = gl.BlockedLayout([1, max(1, PARTS_2 // 32)], [1, 32], [gl.num_warps(), 1], [1, 0])
    place = gl.expand_dims(gl.arange(0, 2 * BLOCK_T, layout=gl.SliceLayout(1, layout)), 1)
    others = gl.expand_dims(gl.arange(0, PARTS_2, layout=gl.SliceLayout(0, layout)), 0)
    rows = start + place % BLOCK_T
    at = parts_ptr + gl.where(place < BLOCK_T, 0, sums) + rows.to(gl.int64) * PARTS + others
    each = gl.load(at, mask=(rows < n_rows) & (others < PARTS), other=0.0, cache_modifier=".cg")
    everyone: gl.constexpr = gl.BlockedLayout([2, BLOCK_T], [1, 32], [1, gl.num_warps()], [1, 0])
    both = gl.convert_layout(gl.reshape(gl.sum(each, axis=1), [2, BLOCK_T]), everyone)
    # Each thread holds both sums of every row, so the compiler resolves this selection at no cost.
    which = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(1, everyone)), 1)
    given = gl.sum(gl.where(which == 0, both, 0.0), axis=0)
    crossed = gl.sum(gl.where(which == 1, both, 0.0), axis=0)
    return gl.convert_layout(given, OUT), gl.convert_layout(crossed, OUT)


@gluon.jit
def _finish(
    bufs, stage, weight, inside, of_weight, of_bias, mean, scale, c1, c2, dx_ptr, start, n_rows, cols,
    D: gl.constexpr, BLOCK_T: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write dx of a block. Returns the column sums with the rows of the block added."""
    below = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, LAYOUT))
    rows = gl.expand_dims((start + below).to(gl.int64), 1)
    given = bufs.index(2 * stage).load(LAYOUT).to(gl.float32)
    mean, scale = gl.expand_dims(mean, 1), gl.expand_dims(scale, 1)
    h = (bufs.index(2 * stage + 1).load(LAYOUT).to(gl.float32) - mean) * scale
    of_weight += gl.expand_dims(gl.sum(given * h, axis=0), 0)
    of_bias += gl.expand_dims(gl.sum(given, axis=0), 0)
    dx = (_unpacked(weight) * given - gl.expand_dims(c1, 1)) * scale - h * gl.expand_dims(c2, 1)
    gl.store(dx_ptr + rows * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=(rows < n_rows) & inside)
    return of_weight, of_bias


@gluon.jit(do_not_specialize=["n_rows", "dy_row_step", "x_row_step"])
def _kept_kernel(
    dy_ptr, x_ptr, weight_ptr, stats_ptr, dx_ptr, of_weight_ptr, of_bias_ptr, parts_ptr, counters_ptr,
    n_rows, dy_row_step, x_row_step,
    D: gl.constexpr, PARTS: gl.constexpr, PARTS_2: gl.constexpr, WIDTH: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Row steps are strides in units of 8 columns.

    The loads of statistics overlap the wait for other programs: the scales of this block, and the means of the block after the
    next.
    """
    VECTOR: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [1, gl.num_warps()], [1, 0])
    bufs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [6, BLOCK_T, BLOCK_D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    below = gl.arange(0, BLOCK_T, layout=of_rows)
    group, part, step, _width, inside, cols, weight, of_weight, of_bias = own_columns(
        weight_ptr, counters_ptr, D, PARTS, WIDTH, BLOCK_T, BLOCK_D, layout
    )
    sums = n_rows.to(gl.int64) * PARTS
    first = group * BLOCK_T
    fetch_block(bufs, 0, dy_ptr, x_ptr, dy_row_step, x_row_step, first + below, n_rows, cols, inside)
    fetch_block(bufs, 1, dy_ptr, x_ptr, dy_row_step, x_row_step, first + step + below, n_rows, cols, inside)
    mean = gl.load(stats_ptr + first + below, mask=first + below < n_rows, other=0.0)
    mean_after = gl.load(stats_ptr + first + step + below, mask=first + step + below < n_rows, other=0.0)
    async_copy.wait_group(1)
    _publish(bufs, 0, weight, mean, parts_ptr, sums, counters_ptr, first, n_rows, part, PARTS, BLOCK_T, BLOCK_D, VECTOR, layout)
    stage = 0
    for start in range(first, n_rows, step):
        after = (stage + 1) % 3
        # No barrier is needed: each thread overwrites only elements that it has read itself.
        far = start + 2 * step + below
        fetch_block(bufs, (stage + 2) % 3, dy_ptr, x_ptr, dy_row_step, x_row_step, far, n_rows, cols, inside)
        async_copy.wait_group(1)
        _publish(
            bufs, after, weight, mean_after, parts_ptr, sums, counters_ptr, start + step, n_rows, part,
            PARTS, BLOCK_T, BLOCK_D, VECTOR, layout,
        )  # fmt: skip
        mean_far = gl.load(stats_ptr + far, mask=far < n_rows, other=0.0)
        # For a row that does not exist the scale is 0, so that the row adds 0 to the sums.
        scale = gl.load(stats_ptr + n_rows + start + below, mask=start + below < n_rows, other=0.0)
        wait_for(counters_ptr + 1 + start // BLOCK_T, PARTS)
        given, crossed = _joined(parts_ptr, sums, start, n_rows, PARTS, PARTS_2, BLOCK_T, of_rows)
        of_weight, of_bias = _finish(
            bufs, stage, weight, inside, of_weight, of_bias, mean, scale, given / D, crossed * scale * scale / D,
            dx_ptr, start, n_rows, cols, D, BLOCK_T, layout,
        )  # fmt: skip
        stage, mean, mean_after = after, mean_after, mean_far
    async_copy.wait_group(0)
    at = group.to(gl.int64) * D + cols
    gl.store(of_weight_ptr + at, of_weight, mask=inside)
    gl.store(of_bias_ptr + at, of_bias, mask=inside)


def _shared_bytes(config: Config, problem: Any) -> int:
    """Shared memory for three blocks of x and dy, and for the redistribution of both sums: one number per thread and row."""
    return config["BLOCK_T"] * (6 * config["BLOCK_D"] * problem.dtype.itemsize + 2 * 4 * 32 * config["num_warps"])


def _default(device: Device, problem: Any) -> Config:
    config = {"BLOCK_T": 8 // problem.dtype.itemsize, "BLOCK_D": 2048, "PER_SM": 2, "num_warps": 8}
    return config if _shared_bytes(config, problem) <= device.smem_bytes else {**config, "BLOCK_T": 2}


def _config_refusal(device: Device, problem: Any, config: Config) -> str | None:
    if _shared_bytes(config, problem) > device.smem_bytes:
        return "more shared memory than the device has"
    # The card reserves 1 KB more for each program.
    if config["PER_SM"] * (_shared_bytes(config, problem) + 1024) > 228 * 1024:
        return "PER_SM programs need more shared memory than an SM of sm_90 has"
    return None


KEPT_SPACE = Space(
    default=_default,
    axes={"BLOCK_T": (2, 4), "BLOCK_D": (2048, 4096), "PER_SM": (2, 3), "num_warps": (8,)},
    refusal=_config_refusal,
)


def refuse_kept(device: Device, problem: Any) -> str | None:
    """Why this implementation refuses such rows, or None."""
    if not problem.kept:
        return "needs the statistics that the forward pass can save: none were given"
    # The default is the smallest config: if it does not fit, no config does.
    return refuse_rows(device, problem) or _config_refusal(device, problem, _default(device, problem))


def kept_gradients(config: Config, dy: Tensor, x: Tensor, weight: Tensor, stats: Tensor) -> tuple[Tensor, ...]:
    """(dx, dweight, dbias). There is at least one row."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy, x = aligned_rows(dy), aligned_rows(x)
    parts, sums, counters, constants = memory_of(config, x, 2, 2)
    rows, x_row_stride = rows_of(x)
    _kept_kernel[(len(parts[0]) * constants["PARTS"],)](
        dy, x, weight, stats, dx, *parts, sums, counters, rows, rows_of(dy)[1] // 8, x_row_stride // 8, **constants
    )
    return dx, *column_sums(weight.dtype, *parts)
