"""Small device functions shared by kernels. No launchers."""

import triton
import triton.language as tl

from tilewright.hw import env

__all__ = ["dot", "two_sums"]

_INTERPRETED = tl.constexpr(env.interpreting())


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, accumulated in acc's dtype; float32 operands are multiplied as float32, not tf32."""
    # Triton's interpreter multiplies the bit patterns of bf16 operands; a float32 holds them exactly.
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def two_sums(a, b):
    """Row sums of two tiles, [BLOCK_T, 1] each, with the barriers of one sum: most of a row's latency is barriers."""
    sums = tl.split(tl.sum(tl.join(a, b), axis=1))
    return sums[0][:, None], sums[1][:, None]
