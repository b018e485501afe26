"""The gradients of layer_norm and rms_norm for rows that do not fit in registers. backward.py launches these kernels.

In the first kernel, each program processes one row. It reads the row once for its sums, and again to write dx. The second read
comes from L1 and L2 as far as the row is still there. The kernel stores the mean and 1 / deviation of each row, or reads those
that the forward pass saved. In the second kernel, each program processes columns. It sums dweight and dbias over rows, in two
steps (device/partial_sums.py). So such rows are read from memory twice; narrow rows are read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import device_of
from tilewright.kernels.device.dot import two_sums
from tilewright.kernels.device.multi_pass_rows import load_block, store_block
from tilewright.kernels.device.partial_sums import column_sums
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.shapes import ceil_div, rows_of
from tilewright.kernels.norm.layer_norm import join_lanes, moments
from tilewright.tune.space import Config

__all__ = ["wide_gradients"]


@triton.jit
def _products(dy, x, weight_ptr, shift, block, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Each lane's sums of w dy and of w dy (x - shift) over a block. dy and w are 0 beyond the end of the row."""
    weight = load_block(weight_ptr, block, D, BLOCK_D, MASKED, "shared", 0.0)
    given = weight.to(tl.float32) * dy.to(tl.float32)
    return tl.sum(given, axis=1), tl.sum(given * (x.to(tl.float32) - shift[:, None]), axis=1)


@triton.jit
def _write(
    dy, x, weight_ptr, more_ptr, dx_ptr, mean, scale, c1, c2, block,
    D: tl.constexpr, HAS_MORE: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    weight = load_block(weight_ptr, block, D, BLOCK_D, MASKED, "shared", 0.0)
    dx = (weight.to(tl.float32) * dy.to(tl.float32) - c1 - (x.to(tl.float32) - mean) * c2) * scale
    if HAS_MORE:
        dx += load_block(more_ptr, block, D, BLOCK_D, MASKED, "last time", 0.0).to(tl.float32)
    store_block(dx_ptr, block, dx, D, BLOCK_D, MASKED)


@triton.jit
def _row_numbers(shift, first, second, given, crossed, eps, D: tl.constexpr, CENTERED: tl.constexpr, BLOCK_D: tl.constexpr):
    """(mean, 1 / deviation, c1, c2) of a row, from the sums of its lanes. c1 and c2 are the coefficients in `_write`."""
    if CENTERED:
        mean, variance = join_lanes(shift, first, second, D, BLOCK_D)
        c1 = tl.sum(given, axis=0) / D
        crossed += (shift - mean) * given
    else:
        mean, variance, c1 = 0.0, tl.sum(second, axis=0) / D, 0.0
    scale = tl.rsqrt(variance + eps)
    return mean, scale, c1, tl.sum(crossed, axis=0) * scale * scale / D


@triton.jit(do_not_specialize=["n_rows", "dy_row_stride", "x_row_stride", "more_row_stride"])
def _wide_kernel(
    dy_ptr, x_ptr, weight_ptr, more_ptr, dx_ptr, stats_ptr, n_rows, dy_row_stride, x_row_stride, more_row_stride, eps,
    D: tl.constexpr, CENTERED: tl.constexpr, HAS_MORE: tl.constexpr, KEPT: tl.constexpr, BLOCK_D: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """stats_ptr: the mean and 1 / deviation of each row. With KEPT they are read, otherwise written.

    KEPT requires CENTERED and excludes HAS_MORE.
    """
    LAST: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D - 1
    FIRST_HELD: tl.constexpr = LAST + 1 - min(HELD, LAST)
    RAGGED: tl.constexpr = D % BLOCK_D != 0
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row_start(row, dy_row_stride, D)
    x_ptr += row_start(row, x_row_stride, D)
    more_ptr += row_start(row, more_row_stride, D)
    dx_ptr += row * D
    shift = tl.zeros([BLOCK_D // 8], tl.float32)
    if KEPT:
        mean, scale = tl.load(stats_ptr + row), tl.load(stats_ptr + n_rows + row)
        shift += mean
    elif CENTERED:
        shift = tl.sum(load_block(x_ptr, 0, D, BLOCK_D, False, "again", 0.0).to(tl.float32), axis=1) / 8
    first, second = tl.zeros([BLOCK_D // 8], tl.float32), tl.zeros([BLOCK_D // 8], tl.float32)
    given, crossed = tl.zeros([BLOCK_D // 8], tl.float32), tl.zeros([BLOCK_D // 8], tl.float32)
    for i in range(FIRST_HELD):
        x = load_block(x_ptr, i, D, BLOCK_D, False, "again", 0.0)
        dy = load_block(dy_ptr, i, D, BLOCK_D, False, "again", 0.0)
        if not KEPT:
            more_first, more_second = moments(x, shift, i, D, BLOCK_D, False)
            first, second = first + more_first, second + more_second
        more_given, more_crossed = _products(dy, x, weight_ptr, shift, i, D, BLOCK_D, False)
        given, crossed = given + more_given, crossed + more_crossed
    held = ()
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        x = load_block(x_ptr, block, D, BLOCK_D, RAGGED and block == LAST, "once", 0.0)
        dy = load_block(dy_ptr, block, D, BLOCK_D, RAGGED and block == LAST, "once", 0.0)
        held = held + (x, dy)
        if not KEPT:
            more_first, more_second = moments(x, shift, block, D, BLOCK_D, RAGGED and block == LAST)
            first, second = first + more_first, second + more_second
        more_given, more_crossed = _products(dy, x, weight_ptr, shift, block, D, BLOCK_D, RAGGED and block == LAST)
        given, crossed = given + more_given, crossed + more_crossed
    if KEPT:
        c1, c2 = two_sums(given[None, :], crossed[None, :])
        c1, c2 = c1 / D, c2 * scale * scale / D
    else:
        mean, scale, c1, c2 = _row_numbers(shift, first, second, given, crossed, eps, D, CENTERED, BLOCK_D)
        tl.store(stats_ptr + row, mean)
        tl.store(stats_ptr + n_rows + row, scale)
    for block in tl.static_range(LAST, FIRST_HELD - 1, -1):
        x, dy = held[2 * (block - FIRST_HELD)], held[2 * (block - FIRST_HELD) + 1]
        _write(
            dy, x, weight_ptr, more_ptr, dx_ptr, mean, scale, c1, c2, block, D, HAS_MORE, BLOCK_D, RAGGED and block == LAST
        )  # fmt: skip
    for i in range(FIRST_HELD):
        j = FIRST_HELD - 1 - i
        x = load_block(x_ptr, j, D, BLOCK_D, False, "last time", 0.0)
        dy = load_block(dy_ptr, j, D, BLOCK_D, False, "last time", 0.0)
        _write(dy, x, weight_ptr, more_ptr, dx_ptr, mean, scale, c1, c2, j, D, HAS_MORE, BLOCK_D, False)


@triton.jit(do_not_specialize=["n_rows", "dy_row_stride", "x_row_stride"])
def _weights_kernel(
    dy_ptr, x_ptr, stats_ptr, of_weight_ptr, of_bias_ptr, n_rows, dy_row_stride, x_row_stride,
    D: tl.constexpr, CENTERED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Partial sums of dweight, and of dbias where CENTERED.

    Grid axis 0 selects the columns. The programs of axis 1 process the blocks of rows in turn.
    """
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    of_weight = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    of_bias = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in tl.range(tl.program_id(1) * BLOCK_T, n_rows, tl.num_programs(1) * BLOCK_T, num_stages=2):
        rows = (start + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        mask = (rows < n_rows) & (cols < D)
        dy = tl.load(dy_ptr + row_start(rows, dy_row_stride, D) + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row_start(rows, x_row_stride, D) + cols, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(stats_ptr + rows, mask=rows < n_rows, other=0.0)
        scale = tl.load(stats_ptr + n_rows + rows, mask=rows < n_rows, other=0.0)
        of_weight += dy * ((x - mean) * scale)
        of_bias += dy
    at = tl.program_id(1).to(tl.int64) * D + cols
    tl.store(of_weight_ptr + at, tl.sum(of_weight, axis=0, keep_dims=True), mask=cols < D)
    if CENTERED:
        tl.store(of_bias_ptr + at, tl.sum(of_bias, axis=0, keep_dims=True), mask=cols < D)


_WEIGHT_ROWS, _WEIGHT_COLS = 4, 512


def wide_gradients(
    config: Config, dy: Tensor, x: Tensor, weight: Tensor, more: Tensor | None, eps: float, centered: bool,
    kept: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dx, dweight, dbias), without dbias unless `centered`. There is at least one row, and rows are wider than BLOCK_D.

    kept: the saved mean and 1 / deviation of each row, float32 [2, rows]. Only with `centered` and without `more`.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (rows, x_row_stride), (_, dy_row_stride) = rows_of(x), rows_of(dy)
    cols = x.shape[-1]
    stats = torch.empty(2, rows, dtype=torch.float32, device=x.device) if kept is None else kept
    _wide_kernel[(rows,)](
        dy, x, weight, x if more is None else more, dx, stats,
        rows, dy_row_stride, x_row_stride, 0 if more is None else rows_of(more)[1], eps,
        D=cols, CENTERED=centered, HAS_MORE=more is not None, KEPT=kept is not None, BLOCK_D=config["BLOCK_D"],
        HELD=config["HELD"], num_warps=config["num_warps"],
    )  # fmt: skip
    groups = ceil_div(cols, _WEIGHT_COLS)
    # Eight programs per SM fill a card. More programs would only write more partial sums.
    splits = min(ceil_div(rows, _WEIGHT_ROWS), ceil_div(8 * device_of(x.get_device()).sms, groups))
    parts = [torch.empty(splits, cols, dtype=torch.float32, device=x.device) for _ in range(1 + centered)]
    _weights_kernel[(groups, splits)](
        dy, x, stats, parts[0], parts[-1], rows, dy_row_stride, x_row_stride,
        D=cols, CENTERED=centered, BLOCK_T=_WEIGHT_ROWS, BLOCK_D=_WEIGHT_COLS, num_warps=4,
    )  # fmt: skip
    return dx, *column_sums(weight.dtype, *parts)
