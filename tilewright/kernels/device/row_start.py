"""Where the rows of a strided tensor start. The compiler learns the alignment without a separate binary per kind of stride.

Triton compiles one binary for an integer argument of 1, another for multiples of 16, and a third for all other numbers. A row
stride may be any of these, and a tensor of one row does not show which. So a server that has compiled for one kind might have
to compile for another in the middle of a request. Therefore kernels declare row strides as `do_not_specialize`, and derive
their alignment from the width of a row, which is a compile-time constant. `shapes.rows_ready` copies rows that are not aligned
in this way.
"""

import triton
import triton.language as tl

__all__ = ["head_start", "row_start"]


@triton.jit
def row_start(row, stride, D: tl.constexpr):
    """row * stride, the start of a row of D columns; row is int64. The compiler sees a multiple of `shapes.row_unit(D)`."""
    # From the shifts the compiler concludes that it is a multiple. It merges them into one instruction.
    SHIFT: tl.constexpr = (D % 2 == 0) + (D % 4 == 0) + (D % 8 == 0)
    return row * ((stride >> SHIFT) << SHIFT)


@triton.jit
def head_start(row, stride, D: tl.constexpr, HEADS: tl.constexpr):
    """The start of a row if each row of a wider matrix consists of HEADS such rows; `stride` is that of the wider matrix."""
    if HEADS == 1:
        return row_start(row, stride, D)
    else:
        return row_start(row // HEADS, stride, D) + row % HEADS * D
