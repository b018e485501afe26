"""Quantisation to 8 bits: functions for the quantisers and for kernels that quantise as a part of their work.

`tilewright.formats.encode` defines the results bit by bit. `magnitude` serves to find the largest absolute value, `scales_of`
computes the scale from it, and `encode_tile` computes the quantised values (codes).
"""

import triton
import triton.language as tl

__all__ = ["UNFUSED", "encode_tile", "magnitude", "padded_width", "scales_of"]

# If a product were fused with the addition that rounds it, a rounding that is part of the definition would be skipped.
UNFUSED = {"enable_fp_fusion": False}


def padded_width(cols: int) -> int:
    """Bytes from one row of codes to the next."""
    return -(-cols // 16) * 16


@triton.jit
def magnitude(x):
    """The bits of |x| as float32, as an int32. They are ordered like |x|; infinity and then NaN are largest, so a maximum keeps
    NaNs."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scales_of(bits, LARGEST: tl.constexpr):
    """(scale, inverse) from the bits of the largest magnitude; (NaN, 0) for NaN and infinity."""
    finite = bits < 0x7F800000
    # 2^-100: formats.SMALLEST_AMAX
    amax = tl.where(finite, tl.maximum(bits, 0x0D800000), 0x3F800000).to(tl.float32, bitcast=True)
    scale = tl.where(finite, tl.div_rn(amax, LARGEST), float("nan"))
    return scale, tl.where(finite, tl.div_rn(tl.zeros_like(amax) + LARGEST, amax), 0.0)


@triton.jit
def encode_tile(x, inverse, dtype: tl.constexpr, zero=None):
    """The codes of x * inverse. Where inverse is 0 they are zeros, whatever x is. Launch with `enable_fp_fusion=False`.

    zero: the zero point (the code of 0), an integer as float32; int8 only.
    """
    y = tl.where(inverse > 0.0, x.to(tl.float32) * inverse, 0.0)
    if zero is not None:
        y = tl.minimum(tl.maximum(y, -128.0 - zero), 127.0 - zero)
        return ((y + 12582912.0).to(tl.int32, bitcast=True) + zero.to(tl.int32)).to(tl.int8)
    elif dtype == tl.int8:
        # y exceeds the range only if the scale was given by the caller. fp8 conversions saturate by themselves.
        y = tl.minimum(tl.maximum(y, -127.0), 127.0)
        # From 2^23 to 2^24 float32 numbers are spaced 1 apart. So the addition rounds to an integer (ties to even) and leaves
        # this integer in the low bits.
        return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return y.to(dtype)
