"""Numbers to codes of 8 bits: what the quantisers share with the kernels that quantise on their way.

The definition, bit by bit, is `tilewright.formats.encode`. `magnitude` finds the largest number, `scales_of` makes the scale of
it, `encode_tile` the codes.
"""

import triton
import triton.language as tl

__all__ = ["UNFUSED", "encode_tile", "magnitude", "padded_width", "scales_of"]

# Fusing a product into the addition that rounds it would skip a rounding that the definition has.
UNFUSED = {"enable_fp_fusion": False}


def padded_width(cols: int) -> int:
    """Bytes from a row of codes to the next."""
    return -(-cols // 16) * 16


@triton.jit
def magnitude(x):
    """The bits of |x| as float32: ordered like |x|, above all of them infinity, then NaN. A maximum loses no NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scales_of(bits, LARGEST: tl.constexpr):
    """(scale, inverse) of the largest magnitude's bits; for NaN and infinity (NaN, 0)."""
    finite = bits < 0x7F800000
    # 2^-100: formats.SMALLEST_AMAX
    amax = tl.where(finite, tl.maximum(bits, 0x0D800000), 0x3F800000).to(tl.float32, bitcast=True)
    scale = tl.where(finite, tl.div_rn(amax, LARGEST), float("nan"))
    return scale, tl.where(finite, tl.div_rn(tl.zeros_like(amax) + LARGEST, amax), 0.0)


@triton.jit
def encode_tile(x, inverse, dtype: tl.constexpr, zero=None):
    """The codes of x * inverse; zeros where inverse is 0, whatever x holds. Launch with `enable_fp_fusion=False`.

    zero: int8 only, what the code of 0 is, a whole float32.
    """
    y = tl.where(inverse > 0.0, x.to(tl.float32) * inverse, 0.0)
    if zero is not None:
        y = tl.minimum(tl.maximum(y, -128.0 - zero), 127.0 - zero)
        return ((y + 12582912.0).to(tl.int32, bitcast=True) + zero.to(tl.int32)).to(tl.int8)
    elif dtype == tl.int8:
        # Beyond the largest only where the scale was given. fp8 conversions saturate by themselves.
        y = tl.minimum(tl.maximum(y, -127.0), 127.0)
        # From 2^23 to 2^24 a float32 counts in ones: the addition rounds, ties to even, and leaves the integer in the low bits.
        return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return y.to(dtype)
