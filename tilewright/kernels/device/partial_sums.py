"""The second half of a sum over rows: adds the partial sums that programs wrote, in the order of program numbers. No op.

The gradient of a weight is a sum over all rows of a batch. Each program of such a kernel adds its own rows in registers and
writes one row of float32. The kernel here adds these rows, for one or two such sums at once. The order of the additions does
not depend on which program finished first, so the bits are the same every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.shapes import ceil_div

__all__ = ["column_sums"]

_ROWS = 32


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _column_sums_kernel(first_ptr, second_ptr, a_ptr, b_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    parts_ptr, sums_ptr = first_ptr, a_ptr
    if tl.program_id(1) == 1:
        parts_ptr, sums_ptr = second_ptr, b_ptr
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n_rows, ROWS):
        mask = (start + rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        total += tl.load(parts_ptr + (start + rows).to(tl.int64)[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(sums_ptr + cols, tl.sum(total, axis=0).to(sums_ptr.dtype.element_ty), mask=cols < n_cols)


def column_sums(dtype: torch.dtype, *parts: Tensor) -> tuple[Tensor, ...]:
    """The sums over P of one or two float32 tensors [P, D]; each result is [D], of `dtype`."""
    rows, cols = parts[0].shape
    sums = tuple(torch.empty(cols, dtype=dtype, device=part.device) for part in parts)
    block = 64 if cols <= 8192 else 512  # narrow rows have many parts, wide rows have few
    if cols:
        operands, constants = (parts[0], parts[-1], sums[0], sums[-1]), {"ROWS": _ROWS, "COLS": block, "num_warps": 8}
        launch(_column_sums_kernel, (ceil_div(cols, block), len(parts)), operands, (rows, cols), constants)
    return sums
