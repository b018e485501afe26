"""Where the rows of a strided tensor start, told to the compiler without a binary for every kind of stride.

Triton compiles one binary for an integer argument of 1, another for multiples of 16, and a third for all other numbers. The
stride of a problem's rows may be any of them, and a tensor of one row does not tell it: a server that had met one kind would
compile for another in the middle of a request. So kernels take row strides unspecialised (`do_not_specialize`) and learn their
alignment from the width of a row, a constant of the binary. `shapes.rows_ready` copies rows that start elsewhere.
"""

import triton
import triton.language as tl

__all__ = ["head_start", "row_start"]


@triton.jit
def row_start(row, stride, D: tl.constexpr):
    """row * stride, row in int64: where a row of D columns starts. The compiler sees a multiple of `shapes.row_unit(D)`."""
    # A shift and a product: the compiler sees a multiple, and makes one instruction of both.
    SHIFT: tl.constexpr = (D % 2 == 0) + (D % 4 == 0) + (D % 8 == 0)
    return row * ((stride >> SHIFT) << SHIFT)


@triton.jit
def head_start(row, stride, D: tl.constexpr, HEADS: tl.constexpr):
    """`row_start` of a matrix in whose rows HEADS of ours lie beside each other, stride elements from HEADS to the next."""
    if HEADS == 1:
        return row_start(row, stride, D)
    else:
        return row_start(row // HEADS, stride, D) + row % HEADS * D
