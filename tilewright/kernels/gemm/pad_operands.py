"""Copies of matrices with rows that the copy engine (TMA) can address, and the few rows and columns beyond whole tiles.

The copies are dense and their rows start at multiples of 128 bytes. TMA only needs multiples of 16 bytes, but then each line of
a box spans two cache lines of L2, which makes the product up to 40 % slower. One launch copies both operands. It is limited by
memory bandwidth: each element is read once and written once, with 16-byte stores.

If a product has a few rows or columns more than fit into whole tiles (for example 2049), it would need whole tiles for them.
When a launch that copies is needed anyway, additional programs of it multiply the last few rows of x by all of the weight, and
the last few rows of the weight by all of x, with the epilogue of `linear`. The product then computes only whole tiles. This is
not done with a gate. The sums are in float32, in a fixed order.
"""
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportCallIssue=false

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from tilewright.kernels.hopper.epilogue import activate

__all__ = ["MOST_LEFT_OVER", "Border", "align", "aligned_base", "class_count", "is_aligned"]

MOST_LEFT_OVER = 4
"""The most rows or columns beyond whole tiles that the copying launch computes, by multiply and add on CUDA cores."""
_ROWS, _COLS = 8, 512  # rows, and columns of K per step, of a program that computes some of them
_ROW_BYTES = 128


class Border(NamedTuple):
    """The rest of y [M, N] = activation(x @ w^T + bias) + residual beyond whole tiles: the last `rows` rows and `cols` columns.

    x and w are dense along K, of any alignment.
    """

    x: Tensor
    w: Tensor
    y: Tensor
    bias: Tensor | None
    residual: Tensor | None
    activation: str
    rows: int
    cols: int


@gluon.jit
def _load_block(src_ptr, first_row, first_col, rows, cols, src_stride, ROWS: gl.constexpr, COLS: gl.constexpr):
    """A block of src [rows, cols] of any alignment. Neighbouring threads read neighbouring elements."""
    read: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    r = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, read)), 1)
    c = gl.expand_dims(first_col + gl.arange(0, COLS, layout=gl.SliceLayout(0, read)), 0)
    return gl.load(src_ptr + r.to(gl.int64) * src_stride + c, mask=(r < rows) & (c < cols), other=0.0)


@gluon.jit
def _copy_block(
    src_ptr, dst_ptr, block, rows, cols, src_stride, dst_width, ROWS: gl.constexpr, COLS: gl.constexpr, TRANSPOSE: gl.constexpr
):  # fmt: skip
    """Copy one block of src [rows, cols] to dst, transposed if TRANSPOSE. Rows of dst have dst_width * 64 elements."""
    # Threads write 16 bytes each. Between the read and the write, the block goes through shared memory.
    along: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
    write: gl.constexpr = along if TRANSPOSE else gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    across = gl.cdiv(cols, COLS)
    first_row = block // across * ROWS
    first_col = block % across * COLS
    x = gl.convert_layout(_load_block(src_ptr, first_row, first_col, rows, cols, src_stride, ROWS, COLS), write)
    r = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, write)), 1)
    c = gl.expand_dims(first_col + gl.arange(0, COLS, layout=gl.SliceLayout(0, write)), 0)
    # The factor 64 tells the compiler what divides the width. The padding of rows is written too, so that stores stay wide.
    width = dst_width * 64
    if TRANSPOSE:
        gl.store(dst_ptr + c.to(gl.int64) * width + r, x, mask=(r < width) & (c < cols))
    else:
        gl.store(dst_ptr + r.to(gl.int64) * width + c, x, mask=(r < rows) & (c < width))


@gluon.jit
def _load_whole(row_ptrs, first, whole, live, COLS: gl.constexpr, layout: gl.constexpr):
    """COLS columns of rows that start at multiples of 16 bytes; zeros from column `whole` on, which is a multiple of 8."""
    c = first + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    # The mask is constant over groups of 8 columns, so that loads keep their full width.
    return gl.load(row_ptrs + gl.expand_dims(c, 0), mask=live & gl.expand_dims(c // 8 * 8 < whole, 0), other=0.0)


@gluon.jit
def _multiply_rows(
    src_ptr, lead, classes, block, rows, cols, src_stride, others_ptr, others, others_stride, y_ptr, y_row_step, y_step,
    bias_ptr, bias_row_step, bias_step, residual_ptr, residual_row_step, residual_step,
    ROWS: gl.constexpr, COLS: gl.constexpr, OTHERS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Multiply some rows of src [rows, cols] by the `others` rows at others_ptr, apply the epilogue and store to y.

    In y, the results of neighbouring rows of src are y_row_step apart, those of neighbouring other rows y_step. src starts
    `lead` elements after src_ptr, which is 16-byte aligned. A program takes ROWS rows that are `classes` apart and therefore
    have the same alignment. From the first 16-byte boundary on it uses 16-byte loads; the rest is loaded element by element.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    kind = block % classes
    begin = (8 - (lead + kind * src_stride) % 8) % 8
    whole = gl.maximum(cols - begin, 0) // 8 * 8
    r = kind + (block // classes * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))) * classes
    starts = (lead + begin + r.to(gl.int64) * src_stride) // 8 * 8  # no change; tells the compiler that 8 divides it
    row_ptrs = src_ptr + gl.expand_dims(starts, 1)
    live = gl.expand_dims(r < rows, 1)
    ahead = _load_whole(row_ptrs, 0, whole, live, COLS, wide)
    # The remaining columns: at most 7 before the aligned part and 7 after it.
    at = gl.arange(0, 16, layout=gl.SliceLayout(0, narrow))
    k = gl.where(at < begin, at, at + whole)
    n = kind + (block // classes * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, narrow))) * classes
    edge_ptrs = src_ptr + gl.expand_dims(lead + n.to(gl.int64) * src_stride, 1) + gl.expand_dims(k, 0)
    edge = gl.load(edge_ptrs, mask=gl.expand_dims(n < rows, 1) & gl.expand_dims(k < cols, 0), other=0.0).to(gl.float32)
    sums = ()
    for t in gl.static_range(OTHERS):
        beside = gl.load(others_ptr + t * others_stride + k, mask=(k < cols) & (t < others), other=0.0).to(gl.float32)
        sums += (gl.convert_layout(gl.sum(edge * gl.expand_dims(beside, 0), axis=1), gl.SliceLayout(1, wide)),)
    for first in range(0, whole, COLS):
        x = ahead.to(gl.float32)
        ahead = _load_whole(row_ptrs, first + COLS, whole, live, COLS, wide)
        c = first + gl.arange(0, COLS, layout=gl.SliceLayout(0, wide))
        added = ()
        for t in gl.static_range(OTHERS):
            more = sums[t]
            if t < others:
                other = gl.load(others_ptr + t * others_stride + begin + c, mask=c < whole, other=0.0).to(gl.float32)
                more += gl.sum(x * gl.expand_dims(other, 0), axis=1)
            added += (more,)
        sums = added
    row = r.to(gl.int64)
    for t in gl.static_range(OTHERS):
        if t < others:
            y = sums[t]
            if bias_ptr is not None:
                y += gl.load(bias_ptr + r * bias_row_step + t * bias_step, mask=r < rows, other=0.0).to(gl.float32)
            y = activate(y, ACTIVATION)
            if residual_ptr is not None:
                place = residual_ptr + row * residual_row_step + t * residual_step
                y += gl.load(place, mask=r < rows, other=0.0).to(gl.float32)
            gl.store(y_ptr + row * y_row_step + t * y_step, y.to(y_ptr.dtype.element_ty), mask=r < rows)


@gluon.jit
def _border_block(
    block, x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, M, N, K, x_lead, w_lead, x_classes, w_classes, x_stride, w_stride,
    y_stride, residual_stride, left_rows, left_cols, row_blocks,
    ROWS: gl.constexpr, COLS: gl.constexpr, OTHERS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute a block of y's border: some columns of its last rows, or some rows of its last columns (above those rows)."""
    first_row = M - left_rows
    first_col = N - left_cols
    if block < row_blocks:
        row = first_row.to(gl.int64)
        residual_row_ptr = None if residual_ptr is None else residual_ptr + row * residual_stride
        _multiply_rows(
            w_ptr, w_lead, w_classes, block, N, K, w_stride, x_ptr + x_lead + row * x_stride, left_rows, x_stride,
            y_ptr + row * y_stride, 1, y_stride, bias_ptr, 1, 0, residual_row_ptr, 1, residual_stride,
            ROWS, COLS, OTHERS, ACTIVATION,
        )  # fmt: skip
    else:
        others_ptr = w_ptr + w_lead + first_col.to(gl.int64) * w_stride
        bias_col_ptr = None if bias_ptr is None else bias_ptr + first_col
        residual_col_ptr = None if residual_ptr is None else residual_ptr + first_col
        _multiply_rows(
            x_ptr, x_lead, x_classes, block - row_blocks, first_row, K, x_stride, others_ptr, left_cols, w_stride,
            y_ptr + first_col, y_stride, 1, bias_col_ptr, 0, 1, residual_col_ptr, residual_stride, 1,
            ROWS, COLS, OTHERS, ACTIVATION,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        *("x_rows", "x_cols", "x_stride", "x_width", "x_blocks", "w_rows", "w_cols", "w_stride", "w_width", "M", "N", "K"),
        *("x_lead", "w_lead", "x_classes", "w_classes", "all_x_stride", "all_w_stride", "y_stride", "residual_stride"),
        *("left_rows", "left_cols", "row_blocks", "border_blocks"),
    ]
)
def _align_kernel(
    x_ptr, x_dst_ptr, x_rows, x_cols, x_stride, x_width, x_blocks,
    w_ptr, w_dst_ptr, w_rows, w_cols, w_stride, w_width,
    all_x_ptr, all_w_ptr, y_ptr, bias_ptr, residual_ptr, M, N, K, x_lead, w_lead, x_classes, w_classes,
    all_x_stride, all_w_stride, y_stride, residual_stride, left_rows, left_cols, row_blocks, border_blocks,
    TRANSPOSE_W: gl.constexpr, ACTIVATION: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, OTHERS: gl.constexpr,
):  # fmt: skip
    """Copy x and w, each dense along its last dimension; None is skipped. The copy of w may be transposed.

    With y_ptr, also compute the last left_rows rows and left_cols columns of y. The programs for these take longest, so they
    come first.
    """
    gdc_launch_dependents()
    block = gl.program_id(0) - border_blocks
    if block < 0:
        if y_ptr is not None:
            _border_block(
                gl.program_id(0), all_x_ptr, all_w_ptr, y_ptr, bias_ptr, residual_ptr, M, N, K, x_lead, w_lead, x_classes,
                w_classes, all_x_stride, all_w_stride, y_stride, residual_stride, left_rows, left_cols, row_blocks,
                ROWS, COLS, OTHERS, ACTIVATION,
            )  # fmt: skip
    elif block < x_blocks:
        if x_ptr is not None:
            _copy_block(x_ptr, x_dst_ptr, block, x_rows, x_cols, x_stride, x_width, 16, 256, False)
    else:
        if w_ptr is not None:
            if TRANSPOSE_W:
                _copy_block(w_ptr, w_dst_ptr, block - x_blocks, w_rows, w_cols, w_stride, w_width, 64, 64, True)
            else:
                _copy_block(w_ptr, w_dst_ptr, block - x_blocks, w_rows, w_cols, w_stride, w_width, 16, 256, False)


def is_aligned(t: Tensor) -> bool:
    """Whether the copy engine (TMA) can address a matrix: dense along its last dimension, rows at multiples of 16 bytes."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(1) == 1


def class_count(t: Tensor) -> int:
    """The number of alignment classes of t's rows (16-bit elements): rows that far apart are a multiple of 16 bytes apart."""
    return next(c for c in (1, 2, 4, 8) if c * t.stride(0) % 8 == 0)


def aligned_base(t: Tensor) -> tuple[Tensor, int]:
    """(a tensor that starts at the last 16-byte boundary at or before t; elements from there to t), for 16-bit elements."""
    lead = t.data_ptr() % 16 // 2
    return t.as_strided((1, 1), (1, 1), t.storage_offset() - lead), lead


def align(
    x: Tensor | None, w: Tensor | None, transpose_w: bool, border: Border | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Copies of x and w (dense along their last dimension; None stays None) whose rows start at multiples of 128 bytes.

    With a border, its part of y is computed too.
    """

    def target(t: Tensor | None, transpose: bool) -> tuple[Tensor | None, tuple[int, int, int, int], int]:
        if t is None:
            return None, (0, 0, 0, 0), 0
        rows, cols = t.shape
        made_rows, made_cols, block = (cols, rows, (64, 64)) if transpose else (rows, cols, (16, 256))
        per_row = _ROW_BYTES // t.element_size()
        width = -(-made_cols // per_row)
        made = torch.empty((made_rows, width * per_row), dtype=t.dtype, device=t.device)[:, :made_cols]
        return made, (rows, cols, t.stride(0), width), -(-rows // block[0]) * -(-cols // block[1])

    x_made, x_sizes, x_blocks = target(x, False)
    w_made, w_sizes, w_blocks = target(w, transpose_w)
    function, blocks, beside = "none", 0, (*(None,) * 5, *(0,) * 15)
    if border is not None:
        (m, k), n, function = border.x.shape, border.w.shape[0], border.activation
        x_base, x_lead = aligned_base(border.x)
        w_base, w_lead = aligned_base(border.w)
        x_classes, w_classes = class_count(border.x), class_count(border.w)
        row_blocks = w_classes * -(-n // (w_classes * _ROWS)) if border.rows else 0
        blocks = row_blocks + (x_classes * -(-(m - border.rows) // (x_classes * _ROWS)) if border.cols else 0)
        beside = (
            x_base, w_base, border.y, border.bias, border.residual, m, n, k, x_lead, w_lead, x_classes, w_classes,
            border.x.stride(0), border.w.stride(0), border.y.stride(0),
            0 if border.residual is None else border.residual.stride(0), border.rows, border.cols, row_blocks, blocks,
        )  # fmt: skip
    _align_kernel[(blocks + x_blocks + w_blocks,)](
        x, x_made, *x_sizes, x_blocks, w, w_made, *w_sizes, *beside,
        TRANSPOSE_W=transpose_w, ACTIVATION=function, ROWS=_ROWS, COLS=_COLS, OTHERS=MOST_LEFT_OVER, num_warps=4,
    )  # fmt: skip
    return x_made, w_made
