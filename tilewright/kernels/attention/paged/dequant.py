"""Convert codes of an 8-bit KV cache to the queries' dtype, in registers. Device functions, no launchers.

A cache of codes is int8, or the bytes of float8 e4m3fn as uint8, because sm_80 has no float8. No conversion instruction of the
hardware is as fast as a few logical instructions on two numbers at a time:

    int8    0x4300 | (code & 0x7f) minus 0x4300 | (code & 0x80)     bf16     (fp16: 0x6400 | (code ^ 0x80), minus 1152)
    e4m3    exponent and mantissa moved next to the sign            2^-120 of the number as bf16, 2^-8 as fp16

The factor of e4m3 is a power of two that is applied afterwards, in float32 (`unit`), so every step is exact. Subnormal codes
are subnormal in between, which tensor cores support. The two NaN codes (0x7f, 0xff) become 480; the quantisers here never write
them.
"""

import triton
import triton.language as tl

from tilewright.hw import env

__all__ = ["unit", "widen"]

_INTERPRETED = tl.constexpr(env.interpreting())

# Four codes in, two registers of two numbers out. prmt's selector 4140 pairs bytes 0 and 1, each with byte 0 of the other
# operand as the upper byte.
_INT8_BF16 = tl.constexpr(
    "{ .reg .b32 p, q, t, k, m; mov.b32 k, 0x43434343; mov.b32 m, 0xBF80BF80; "
    "prmt.b32 p, $2, k, 0x4140; prmt.b32 q, $2, k, 0x4342; "
    "and.b32 t, p, 0xFF7FFF7F; and.b32 p, p, 0xFF80FF80; fma.rn.bf16x2 $0, p, m, t; "
    "and.b32 t, q, 0xFF7FFF7F; and.b32 q, q, 0xFF80FF80; fma.rn.bf16x2 $1, q, m, t; }"
)
_INT8_FP16 = tl.constexpr(
    "{ .reg .b32 p, q, t, k, m; mov.b32 k, 0x64646464; mov.b32 m, 0x64806480; xor.b32 t, $2, 0x80808080; "
    "prmt.b32 p, t, k, 0x4140; prmt.b32 q, t, k, 0x4342; sub.rn.f16x2 $0, p, m; sub.rn.f16x2 $1, q, m; }"
)
_E4M3_BF16 = tl.constexpr(
    "{ .reg .b32 p, q, t; prmt.b32 p, $2, 0, 0x1404; prmt.b32 q, $2, 0, 0x3424; "
    "shr.u32 t, p, 4; and.b32 t, t, 0x07F007F0; and.b32 p, p, 0x80008000; or.b32 $0, t, p; "
    "shr.u32 t, q, 4; and.b32 t, t, 0x07F007F0; and.b32 q, q, 0x80008000; or.b32 $1, t, q; }"
)
_E4M3_FP16 = tl.constexpr(
    "{ .reg .b32 p, q, t; prmt.b32 p, $2, 0, 0x1404; prmt.b32 q, $2, 0, 0x3424; "
    "shr.u32 t, p, 1; and.b32 t, t, 0x3F803F80; and.b32 p, p, 0x80008000; or.b32 $0, t, p; "
    "shr.u32 t, q, 1; and.b32 t, t, 0x3F803F80; and.b32 q, q, 0x80008000; or.b32 $1, t, q; }"
)


@triton.constexpr_function
def unit(codes, dtype):
    """The factor, in float32, by which the numbers from `widen` must be multiplied."""
    if codes == tl.int8:
        return 1.0
    return 2.0**8 if dtype == tl.float16 else 2.0**120


@triton.jit
def widen(codes, like):
    """Codes in the dtype of `like` (bf16, fp16, fp32), up to the factor `unit`. Input that already has this dtype is
    unchanged."""
    if codes.dtype == like.dtype:
        return codes
    elif _INTERPRETED or like.dtype == tl.float32:
        if codes.dtype == tl.int8:
            return codes.to(tl.float32).to(like.dtype)
        elif like.dtype == tl.float16:
            half = codes.to(tl.uint16)
            return (((half & 0x80) << 8) | ((half & 0x7F) << 7)).to(tl.float16, bitcast=True)
        else:
            wide = codes.to(tl.uint32)
            return (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True).to(like.dtype)
    elif codes.dtype == tl.int8:
        PROGRAM: tl.constexpr = _INT8_BF16 if like.dtype == tl.bfloat16 else _INT8_FP16
        return tl.inline_asm_elementwise(PROGRAM, "=r,=r,r", [codes], dtype=like.dtype, is_pure=True, pack=4)
    else:
        PROGRAM: tl.constexpr = _E4M3_BF16 if like.dtype == tl.bfloat16 else _E4M3_FP16
        return tl.inline_asm_elementwise(PROGRAM, "=r,=r,r", [codes], dtype=like.dtype, is_pure=True, pack=4)
