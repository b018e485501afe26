"""Copies of matrices into rows that the copy engine (TMA) can address: dense, each starting at a multiple of 16 bytes.

One launch for both operands of a product. Limited by bytes: each element is read once and written once, in 16 bytes a thread.
"""
# Gluon reads `name: gl.constexpr = value` as "known to the compiler"; to a type checker it is a value of another type.
# pyright: reportAssignmentType=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["align", "is_aligned"]


@gluon.jit
def _copy_block(
    src_ptr, dst_ptr, block, rows, cols, src_stride, dst_stride, ROWS: gl.constexpr, COLS: gl.constexpr, TRANSPOSE: gl.constexpr
):  # fmt: skip
    """One block of src [rows, cols], any alignment, to dst or its transpose, whose rows are dst_stride * 8 elements."""
    # Neighbouring threads read neighbouring elements and write 16 bytes each; in between, the block goes through shared memory.
    read: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    along: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
    write: gl.constexpr = along if TRANSPOSE else gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    across = gl.cdiv(cols, COLS)
    first_row = block // across * ROWS
    first_col = block % across * COLS
    r = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, read)), 1)
    c = gl.expand_dims(first_col + gl.arange(0, COLS, layout=gl.SliceLayout(0, read)), 0)
    x = gl.load(src_ptr + r.to(gl.int64) * src_stride + c, mask=(r < rows) & (c < cols), other=0.0)
    x = gl.convert_layout(x, write)
    r = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, write)), 1)
    c = gl.expand_dims(first_col + gl.arange(0, COLS, layout=gl.SliceLayout(0, write)), 0)
    width = dst_stride * 8  # tells the compiler what divides it; what pads the rows is written too, so that stores stay whole
    if TRANSPOSE:
        gl.store(dst_ptr + c.to(gl.int64) * width + r, x, mask=(r < width) & (c < cols))
    else:
        gl.store(dst_ptr + r.to(gl.int64) * width + c, x, mask=(r < rows) & (c < width))


@gluon.jit(do_not_specialize=["x_rows", "x_cols", "x_stride", "x_width", "x_blocks", "w_rows", "w_cols", "w_stride", "w_width"])
def _align_kernel(
    x_ptr, x_dst_ptr, x_rows, x_cols, x_stride, x_width, x_blocks,
    w_ptr, w_dst_ptr, w_rows, w_cols, w_stride, w_width, TRANSPOSE_W: gl.constexpr,
):  # fmt: skip
    """Copies of x and w, each dense along its last dimension (a None is left out); that of w may be its transpose."""
    block = gl.program_id(0)
    if block < x_blocks:
        if x_ptr is not None:
            _copy_block(x_ptr, x_dst_ptr, block, x_rows, x_cols, x_stride, x_width, 16, 256, False)
    else:
        if w_ptr is not None:
            if TRANSPOSE_W:
                _copy_block(w_ptr, w_dst_ptr, block - x_blocks, w_rows, w_cols, w_stride, w_width, 64, 64, True)
            else:
                _copy_block(w_ptr, w_dst_ptr, block - x_blocks, w_rows, w_cols, w_stride, w_width, 16, 256, False)


def is_aligned(t: Tensor) -> bool:
    """Whether the copy engine can address a matrix that is dense along its last dimension."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(1) == 1


def align(x: Tensor | None, w: Tensor | None, transpose_w: bool) -> tuple[Tensor | None, Tensor | None]:
    """Copies of x and w (dense along their last dimension; None stays None) whose rows start at multiples of 16 bytes."""

    def target(t: Tensor | None, transpose: bool) -> tuple[Tensor | None, tuple[int, int, int, int], int]:
        if t is None:
            return None, (0, 0, 0, 0), 0
        rows, cols = t.shape
        made_rows, made_cols, block = (cols, rows, (64, 64)) if transpose else (rows, cols, (16, 256))
        width = -(-made_cols // 8)
        made = torch.empty((made_rows, width * 8), dtype=t.dtype, device=t.device)[:, :made_cols]
        return made, (rows, cols, t.stride(0), width), -(-rows // block[0]) * -(-cols // block[1])

    x_made, x_sizes, x_blocks = target(x, False)
    w_made, w_sizes, w_blocks = target(w, transpose_w)
    _align_kernel[(x_blocks + w_blocks,)](
        x, x_made, *x_sizes, x_blocks, w, w_made, *w_sizes, TRANSPOSE_W=transpose_w, num_warps=4
    )
    return x_made, w_made
