"""The gradients of layer_norm and rms_norm for wide rows, where several programs share a row: the implementation `split`.

Each program owns WIDTH columns. It loops over blocks of rows and holds its columns of a block in shared memory. The programs of
a group exchange partial sums to obtain the sums of each row (device/cooperative_rows.py). A program's sums of dweight and dbias
stay in registers to the end, as in backward.py, which does so for whole rows. So each element is read from memory once. The
next block is loaded meanwhile, by asynchronous copies that bypass the registers (this is why the kernel is written in Gluon). A
thread reads only the elements that it copied itself. Several programs share an SM.

The variance is never a difference of two large sums. Each part contributes its own mean and the sum of squares about that
mean; Chan's formula combines them (Chan, Golub and LeVeque, 1983).

Where the forward pass saved mean and 1 / deviation, backward_saved_stats.py uses the same scheme with fewer sums.
Refused: widths that are no multiple of 8 columns, because then not all rows start at multiples of 16 bytes.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportCallIssue=false
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tilewright.hw.device import Device, device_of
from tilewright.kernels.device.partial_sums import column_sums
from tilewright.kernels.hopper.primitives import block_barrier
from tilewright.kernels.launch.row_space import row_space
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of
from tilewright.tune.space import Config

__all__ = [
    "SPLIT_SPACE",
    "aligned_rows",
    "fetch_block",
    "memory_of",
    "own_columns",
    "refuse_rows",
    "refuse_split",
    "split_gradients",
    "wait_for",
]


@gluon.jit
def _add(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@gluon.jit
def _two_sums(a, b):
    """Row sums of two tiles, [BLOCK_T] each. The two reductions share one round of barriers."""
    return gl.reduce((a, b), 1, _add)


@gluon.jit
def _part(x, given, inside, width, CENTERED: gl.constexpr):
    """A part's sums for each row: x, w dy, (x - m)^2, w dy (x - m). m is the mean of the part, or 0 if not CENTERED."""
    if CENTERED:
        total, passed = _two_sums(x, given)
        x = gl.where(inside, x - gl.expand_dims(total / width, 1), 0.0)
        squares, crossed = _two_sums(x * x, given * x)
        return total, passed, squares, crossed
    else:
        squares, crossed = _two_sums(x * x, given * x)
        return squares, crossed, squares, crossed


@gluon.jit
def _joined(
    parts_ptr, sums, start, n_rows, D: gl.constexpr, WIDTH: gl.constexpr, PARTS: gl.constexpr, PARTS_2: gl.constexpr,
    CENTERED: gl.constexpr, BLOCK_T: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """(mean, mean of w dy, sum of (x - mean)^2, sum of w dy (x - mean)) of each row, [BLOCK_T] each, from all parts."""
    # Every warp adds all parts of all rows itself, so no barriers are needed.
    layout: gl.constexpr = gl.BlockedLayout([1, max(1, PARTS_2 // 32)], [1, 32], [1, gl.num_warps()], [1, 0])
    rows = start + gl.expand_dims(gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, layout)), 1)
    others = gl.expand_dims(gl.arange(0, PARTS_2, layout=gl.SliceLayout(0, layout)), 0)
    there = (rows < n_rows) & (others < PARTS)
    at = parts_ptr + rows.to(gl.int64) * PARTS + others
    squares = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
    crossed = gl.load(at + sums, mask=there, other=0.0, cache_modifier=".cg")
    if CENTERED:
        totals = gl.load(at + 2 * sums, mask=there, other=0.0, cache_modifier=".cg")
        given = gl.load(at + 3 * sums, mask=there, other=0.0, cache_modifier=".cg")
        mean, passed = _two_sums(totals, given)
        mean, passed = mean / D, passed / D
        count = gl.maximum(gl.minimum(D - others * WIDTH, WIDTH), 1).to(gl.float32)
        away = gl.where(there, totals / count - gl.expand_dims(mean, 1), 0.0)
        squares, crossed = _two_sums(squares + away * away * count, crossed + away * given)
        return (
            gl.convert_layout(mean, OUT), gl.convert_layout(passed, OUT),
            gl.convert_layout(squares, OUT), gl.convert_layout(crossed, OUT),
        )  # fmt: skip
    else:
        squares, crossed = _two_sums(squares, crossed)
        squares, crossed = gl.convert_layout(squares, OUT), gl.convert_layout(crossed, OUT)
        return squares * 0.0, squares * 0.0, squares, crossed


@gluon.jit
def own_columns(
    weight_ptr, counters_ptr, D: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Draw a number from the counter and derive the program's place and columns from it.

    Returns (group of programs that share rows, part of the rows, distance in rows to the group's next block, number of columns
    of the part, mask of the BLOCK_D columns that exist, columns, weight, accumulator of dweight, accumulator of dbias).
    """
    place = gl.atomic_add(counters_ptr, 1, sem="relaxed")
    group, part = place // PARTS, place % PARTS
    lane = gl.expand_dims(gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout)), 0)
    width = gl.multiple_of(gl.minimum(D - part * WIDTH, WIDTH), 8)
    inside = lane < width
    cols = part * WIDTH + lane
    weight = gl.load(weight_ptr + cols, mask=inside, other=0.0)
    of_weight = gl.zeros([1, BLOCK_D], gl.float32, layout=layout)
    of_bias = gl.zeros([1, BLOCK_D], gl.float32, layout=layout)
    return group, part, gl.num_programs(0) // PARTS * BLOCK_T, width, inside, cols, weight, of_weight, of_bias


@gluon.jit
def fetch_block(bufs, stage, dy_ptr, x_ptr, dy_row_step, x_row_step, rows, n_rows, cols, inside):
    """Start the copy of a block's columns of dy and x."""
    there = gl.expand_dims(rows < n_rows, 1)
    rows = gl.expand_dims(rows.to(gl.int64), 1)
    async_copy.async_copy_global_to_shared(bufs.index(2 * stage), dy_ptr + rows * (dy_row_step * 8) + cols, mask=there & inside)
    async_copy.async_copy_global_to_shared(
        bufs.index(2 * stage + 1), x_ptr + rows * (x_row_step * 8) + cols, mask=there & inside
    )
    async_copy.commit_group()


@gluon.jit
def _publish(
    bufs, stage, weight, inside, width, parts_ptr, sums, counters_ptr, start, n_rows, part,
    CENTERED: gl.constexpr, PARTS: gl.constexpr, BLOCK_T: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write this part's sums of the rows of a block, then increment the block's counter."""
    x, given = bufs.index(2 * stage + 1).load(LAYOUT).to(gl.float32), bufs.index(2 * stage).load(LAYOUT).to(gl.float32)
    total, passed, squares, crossed = _part(x, weight.to(gl.float32) * given, inside, width, CENTERED)
    rows = start + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, LAYOUT))
    there = rows < n_rows
    at = parts_ptr + rows.to(gl.int64) * PARTS + part
    gl.store(at, squares, mask=there)
    gl.store(at + sums, crossed, mask=there)
    if CENTERED:
        gl.store(at + 2 * sums, total, mask=there)
        gl.store(at + 3 * sums, passed, mask=there)
    block_barrier()  # one thread executes the release below; the writes of all threads must come before it
    gl.atomic_add(counters_ptr + 1 + start // BLOCK_T, 1, sem="release")


@gluon.jit
def wait_for(counter_ptr, MEMBERS: gl.constexpr):
    """Wait until MEMBERS programs have published."""
    came = gl.atomic_add(counter_ptr, 0, sem="acquire")
    while came < MEMBERS:
        came = gl.atomic_add(counter_ptr, 0, sem="acquire")


@gluon.jit
def _finish(
    bufs, stage, weight, inside, cols, of_weight, of_bias, mean, passed, squares, crossed, start, n_rows,
    more_ptr, dx_ptr, more_row_step, eps,
    D: gl.constexpr, CENTERED: gl.constexpr, HAS_MORE: gl.constexpr, BLOCK_T: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write dx of a block. Returns the column sums with the rows of the block added."""
    below = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, LAYOUT))
    # For a row that does not exist the scale is 0, whatever eps is, so that the row adds 0 to the sums.
    scale = gl.where(start + below < n_rows, gl.rsqrt(squares / D + eps), 0.0)
    rate = gl.expand_dims(crossed * scale * scale / D, 1)
    mean, passed, scale = gl.expand_dims(mean, 1), gl.expand_dims(passed, 1), gl.expand_dims(scale, 1)
    rows = gl.expand_dims((start + below).to(gl.int64), 1)
    live = (rows < n_rows) & inside
    h = (bufs.index(2 * stage + 1).load(LAYOUT).to(gl.float32) - mean) * scale
    given = bufs.index(2 * stage).load(LAYOUT).to(gl.float32)
    of_weight += gl.expand_dims(gl.sum(given * h, axis=0), 0)
    if CENTERED:
        of_bias += gl.expand_dims(gl.sum(given, axis=0), 0)
    dx = (weight.to(gl.float32) * given - passed) * scale - h * rate
    if HAS_MORE:
        dx += gl.load(more_ptr + rows * (more_row_step * 8) + cols, mask=live, other=0.0).to(gl.float32)
    gl.store(dx_ptr + rows * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=live)
    return of_weight, of_bias


@gluon.jit(do_not_specialize=["n_rows", "dy_row_step", "x_row_step", "more_row_step"])
def _split_kernel(
    dy_ptr, x_ptr, weight_ptr, more_ptr, dx_ptr, of_weight_ptr, of_bias_ptr, parts_ptr, counters_ptr,
    n_rows, dy_row_step, x_row_step, more_row_step, eps,
    D: gl.constexpr, CENTERED: gl.constexpr, HAS_MORE: gl.constexpr, PARTS: gl.constexpr, PARTS_2: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Row steps are strides in units of 8 columns.

    Three blocks of rows are in progress: the first is being loaded, the partial sums of the second are written, and the third
    is finished. So a program waits only for sums that the others wrote one block earlier.
    """
    VECTOR: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [1, gl.num_warps()], [1, 0])
    bufs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [6, BLOCK_T, BLOCK_D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    below = gl.arange(0, BLOCK_T, layout=of_rows)
    group, part, step, width, inside, cols, weight, of_weight, of_bias = own_columns(
        weight_ptr, counters_ptr, D, PARTS, WIDTH, BLOCK_T, BLOCK_D, layout
    )
    sums = n_rows.to(gl.int64) * PARTS
    first = group * BLOCK_T
    fetch_block(bufs, 0, dy_ptr, x_ptr, dy_row_step, x_row_step, first + below, n_rows, cols, inside)
    fetch_block(bufs, 1, dy_ptr, x_ptr, dy_row_step, x_row_step, first + step + below, n_rows, cols, inside)
    async_copy.wait_group(1)
    _publish(
        bufs, 0, weight, inside, width, parts_ptr, sums, counters_ptr, first, n_rows, part, CENTERED, PARTS, BLOCK_T, layout
    )
    stage = 0
    for start in range(first, n_rows, step):
        after = (stage + 1) % 3
        # No barrier is needed: each thread overwrites only elements that it has read itself.
        far = start + 2 * step + below
        fetch_block(bufs, (stage + 2) % 3, dy_ptr, x_ptr, dy_row_step, x_row_step, far, n_rows, cols, inside)
        async_copy.wait_group(1)
        _publish(
            bufs, after, weight, inside, width, parts_ptr, sums, counters_ptr, start + step, n_rows, part,
            CENTERED, PARTS, BLOCK_T, layout,
        )  # fmt: skip
        wait_for(counters_ptr + 1 + start // BLOCK_T, PARTS)
        mean, passed, squares, crossed = _joined(
            parts_ptr, sums, start, n_rows, D, WIDTH, PARTS, PARTS_2, CENTERED, BLOCK_T, of_rows
        )  # fmt: skip
        of_weight, of_bias = _finish(
            bufs, stage, weight, inside, cols, of_weight, of_bias, mean, passed, squares, crossed, start, n_rows,
            more_ptr, dx_ptr, more_row_step, eps, D, CENTERED, HAS_MORE, BLOCK_T, layout,
        )  # fmt: skip
        stage = after
    async_copy.wait_group(0)
    at = group.to(gl.int64) * D + cols
    gl.store(of_weight_ptr + at, of_weight, mask=inside)
    if CENTERED:
        gl.store(of_bias_ptr + at, of_bias, mask=inside)


def _default(device: Device, problem: Any) -> Config:
    # float32 needs twice the shared memory: three blocks of 4 rows would leave no room for a second program.
    return {"BLOCK_T": 8 // problem.dtype.itemsize, "BLOCK_D": 2048, "PER_SM": 2, "num_warps": 8}


SPLIT_SPACE = row_space(_default, BLOCK_T=(2, 4), BLOCK_D=(2048,), PER_SM=(2,), num_warps=(8,))


def refuse_split(device: Device, problem: Any) -> str | None:
    """Why this implementation refuses such rows, or None."""
    return "does not use saved statistics: `kept` is for them" if problem.kept else refuse_rows(device, problem)


def refuse_rows(device: Device, problem: Any) -> str | None:
    """Why programs do not share rows of this width, or None."""
    if problem.cols % 8:
        return f"needs a row length that is a multiple of 8, not {problem.cols}"
    if problem.cols <= 8192:
        return "is for wider rows only: a single program can hold this one"
    return (
        "the row is too wide: the card cannot hold all its parts at the same time" if problem.cols > 2048 * device.sms else None
    )


def aligned_rows(x: Tensor) -> Tensor:
    """x, or a copy if its rows do not start at multiples of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 and rows_of(x)[1] % 8 == 0 else x.clone(memory_format=torch.contiguous_format)


def memory_of(config: Config, x: Tensor, vectors: int, sums: int) -> tuple[list[Tensor], Tensor, Tensor, dict[str, int]]:
    """Memory and constants of a launch.

    Returns (a list of `vectors` float32 [groups, columns] for the column sums of each group of programs, float32
    [sums, rows, parts] for the partial sums of the rows, counters, constants).
    """
    (rows, _), cols, block_t, warps = rows_of(x), x.shape[-1], config["BLOCK_T"], config["num_warps"]
    parts, blocks = ceil_div(cols, config["BLOCK_D"]), ceil_div(rows, block_t)
    groups = max(1, min(blocks, config["PER_SM"] * device_of(x.get_device()).sms // parts))
    of_columns = [torch.empty(groups, cols, dtype=torch.float32, device=x.device) for _ in range(vectors)]
    of_parts = torch.empty(sums, rows, parts, dtype=torch.float32, device=x.device)
    counters = torch.zeros(1 + blocks + groups, dtype=torch.int32, device=x.device)
    constants = {
        "D": cols, "PARTS": parts, "PARTS_2": next_pow2(parts), "WIDTH": ceil_div(cols, 8 * parts) * 8, "BLOCK_T": block_t,
        "BLOCK_D": config["BLOCK_D"], "num_warps": warps,
        "maxnreg": 65536 // (32 * warps * config["PER_SM"]) // 8 * 8,  # registers are allocated in multiples of eight
    }  # fmt: skip
    return of_columns, of_parts, counters, constants


def split_gradients(
    config: Config, dy: Tensor, x: Tensor, weight: Tensor, more: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, ...]:
    """(dx, dweight, dbias), without dbias unless `centered`. There is at least one row."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy, x, more = aligned_rows(dy), aligned_rows(x), None if more is None else aligned_rows(more)
    parts, sums, counters, constants = memory_of(config, x, 1 + centered, 2 + 2 * centered)
    rows, x_row_stride = rows_of(x)
    _split_kernel[(len(parts[0]) * constants["PARTS"],)](
        dy, x, weight, x if more is None else more, dx, parts[0], parts[-1], sums, counters,
        rows, rows_of(dy)[1] // 8, x_row_stride // 8, 0 if more is None else rows_of(more)[1] // 8, eps,
        CENTERED=centered, HAS_MORE=more is not None, **constants,
    )  # fmt: skip
    return dx, *column_sums(weight.dtype, *parts)
