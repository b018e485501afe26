"""Converts quantised values of 8 and 4 bits to bf16 or fp16 in registers, exactly, in one to three instructions per value.

`cvt` converts one number at an eighth of the rate of other instructions, or goes through float32. Here the bits of a quantised
value (its code) become the low mantissa bits of a known number, and the known number is subtracted; two values at a time:

    int4    0x4300 | code is the bf16 128 + code; minus 128 + zero   (fp16: 0x6400 | code is 1024 + code);
            in the order of gemm/weight_only/int4_layout.py, where (word >> 4 i) & 0x000f000f is a pair
    int8    0x4300 | (code & 0x7f), minus 0x4300 | (code & 0x80)     (fp16: 0x6400 | (code ^ 0x80), minus 1152)
    e4m3    exponent and mantissa shifted next to the sign, times 2^120; subnormal codes are subnormal there    (fp16: 2^8)
    e5m2    the same, times 2^112                          (fp16 is e5m2 with a longer mantissa: a zero byte is appended)

The codes of infinity and NaN (0x7f in e4m3, 0x7c to 0x7f in e5m2) become 480, and 65,536 and more, with their sign. fp16
results keep the infinities and NaNs of e5m2. The quantisers of this package make no such codes.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

__all__ = ["minus", "pairs", "widen", "widen_pairs"]

# PTX instructions for an input word i. Each of d0, d1 (up to d3 for int4) is a pair of results. prmt with the selector 0x4140
# gives, from the lowest byte: byte 0 of the first operand, byte 0 of the second, byte 1 of the first, byte 0 of the second.
_PAIRS = "prmt.b32 {0}, {2}, k, 0x4140; prmt.b32 {1}, {2}, k, 0x4342; "
_UPPER = "prmt.b32 p, i, 0, 0x1404; prmt.b32 q, i, 0, 0x3424; "


def _float8(shift: int, mask: str, factor: str, kind: str) -> str:
    text = _UPPER
    for source, target in (("p", "d0"), ("q", "d1")):
        text += f"shr.u32 t, {source}, {shift}; and.b32 t, t, {mask}; and.b32 {source}, {source}, 0x80008000; "
        text += f"or.b32 t, t, {source}; mov.b32 k, {factor}; mov.b32 m, 0x80008000; fma.rn.{kind} {target}, t, k, m; "
    return text


def _int8_bf16() -> str:
    text = "mov.b32 k, 0x43434343; mov.b32 m, 0xBF80BF80; " + _PAIRS.format("p", "q", "i")
    for source, target in (("p", "d0"), ("q", "d1")):
        text += f"and.b32 t, {source}, 0xFF7FFF7F; and.b32 {source}, {source}, 0xFF80FF80; "
        text += f"fma.rn.bf16x2 {target}, {source}, m, t; "
    return text


def _int8_fp16() -> str:
    text = "mov.b32 k, 0x64646464; mov.b32 m, 0x64806480; xor.b32 t, i, 0x80808080; " + _PAIRS.format("p", "q", "t")
    return text + "sub.rn.f16x2 d0, p, m; sub.rn.f16x2 d1, q, m; "


def _int4(kind: str, known: str, one: str) -> str:
    # The second input is a pair of equal numbers to add: -(known number + zero point).
    text = f"mov.b32 k, {known}; mov.b32 m, $9; mov.b32 o, {one}; mov.b32 q, 0x000F000F; mov.b32 t, i; "
    for pair in range(4):
        text += f"lop3.b32 p, t, q, k, 0xEA; fma.rn.{kind} d{pair}, p, o, m; "
        text += "shr.u32 t, t, 4; " if pair < 3 else ""
    return text


def _program(body: str, registers: int, halves: bool = False) -> str:
    first = 2 * registers
    word = f"{{${first}, ${first + 1}}}" if halves else f"${first}"
    moves = "".join(f"mov.b32 {{${2 * n}, ${2 * n + 1}}}, d{n}; " for n in range(registers))
    names = ", ".join(f"d{n}" for n in range(registers))
    return "{ .reg .b32 i, k, m, o, p, q, t, " + names + f"; mov.b32 i, {word}; {body}{moves}" + "}"


_BODIES = {
    ("int8", "bf16"): _int8_bf16(),
    ("int8", "fp16"): _int8_fp16(),
    ("e4m3", "bf16"): _float8(4, "0x07F007F0", "0x7B807B80", "bf16x2"),
    ("e4m3", "fp16"): _float8(1, "0x3F803F80", "0x5C005C00", "f16x2"),
    ("e5m2", "bf16"): _float8(3, "0x0FE00FE0", "0x77807780", "bf16x2"),
    ("e5m2", "fp16"): _UPPER + "mov.b32 d0, p; mov.b32 d1, q; ",
    ("int4", "bf16"): _int4("bf16x2", "0x43004300", "0x3F803F80"),
    ("int4", "fp16"): _int4("f16x2", "0x64006400", "0x3C003C00"),
}


# The input is a 32-bit word (False) or two 16-bit halves (True).
_WIDEN = {(*key, False): _program(body, 4 if key[0] == "int4" else 2) for key, body in _BODIES.items()}
_WIDEN |= {(*key, True): _program(body, 2, True) for key, body in _BODIES.items() if key[0] != "int4"}


@constexpr_function
def _widening(format: str, dtype: str, halves: bool) -> str:
    return _WIDEN[format, dtype, halves]


@gluon.jit
def minus(zeros, x):
    """int4 zero points (integers up to 127) as `widen` needs them: -(128 + zero) in bf16 or -(1024 + zero) in fp16, twice."""
    if x.dtype == gl.bfloat16:
        return zeros.to(gl.int32) * 0x10001 - 0x3CFF3D00  # 0xC300C300
    else:
        return zeros.to(gl.int32) * 0x10001 - 0x1BFF1C00  # 0xE400E400


@gluon.jit
def widen(words, less, FORMAT: gl.constexpr, x):
    """Convert int32 words [..., W] of codes to x's dtype: [..., W, 4], or [..., W, 8] for int4.

    int4 codes are in the order of gemm/weight_only/int4_layout.py. less: for int4 the result of `minus`, with the rank of
    `words`; for other formats it is ignored.
    """
    PROGRAM: gl.constexpr = _widening(FORMAT, x.dtype.name, False)
    RANK: gl.constexpr = len(words.shape)
    if FORMAT == "int4":
        x0, x1, x2, x3, x4, x5, x6, x7 = gl.inline_asm_elementwise(
            PROGRAM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, less],
            dtype=(x.dtype, x.dtype, x.dtype, x.dtype, x.dtype, x.dtype, x.dtype, x.dtype), is_pure=True, pack=1,
        )  # fmt: skip
        low = gl.join(gl.join(x0, x1), gl.join(x2, x3))
        both = gl.join(low, gl.join(gl.join(x4, x5), gl.join(x6, x7)))  # [..., bit 0, bit 1, bit 2] of a code's position
        if RANK == 3:
            return both.permute([0, 1, 2, 5, 4, 3]).reshape([words.shape[0], words.shape[1], words.shape[2], 8])
        else:
            return both.permute([0, 1, 4, 3, 2]).reshape([words.shape[0], words.shape[1], 8])
    else:
        x0, x1, x2, x3 = gl.inline_asm_elementwise(
            PROGRAM, "=h,=h,=h,=h,r", [words], dtype=(x.dtype, x.dtype, x.dtype, x.dtype), is_pure=True, pack=1
        )
        both = gl.join(gl.join(x0, x1), gl.join(x2, x3))
        if RANK == 3:
            return both.permute([0, 1, 2, 4, 3]).reshape([words.shape[0], words.shape[1], words.shape[2], 4])
        else:
            return both.permute([0, 1, 3, 2]).reshape([words.shape[0], words.shape[1], 4])


@gluon.jit
def widen_pairs(low, high, FORMAT: gl.constexpr, x):
    """Convert two int16 tensors of one shape, with two 8-bit codes per element, to x's dtype: [..., tensor, code]."""
    PROGRAM: gl.constexpr = _widening(FORMAT, x.dtype.name, True)
    x0, x1, x2, x3 = gl.inline_asm_elementwise(
        PROGRAM, "=h,=h,=h,=h,h,h", [low, high], dtype=(x.dtype, x.dtype, x.dtype, x.dtype), is_pure=True, pack=1
    )
    both = gl.join(gl.join(x0, x1), gl.join(x2, x3))  # [..., code, which]
    return both.permute([0, 1, 2, 4, 3])


@gluon.jit
def pairs(words, x):
    """Split int32 words [S, R, W] into the two 16-bit floats of x's dtype that each contains: [S, R, 2 W].

    For operands that a loop loads in advance. If they were loaded as 16-bit numbers, they would be unpacked right after the
    load, and the loop would wait for them there.
    """
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(x.dtype, x.dtype), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([words.shape[0], words.shape[1], 2 * words.shape[2]])
