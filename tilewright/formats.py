"""Number formats of 8 and 4 bits in plain torch: how floats are quantised to stored codes, and what a code means.

    q = quantize(x, "mxfp8")        codes and scales of a float tensor [..., R, C]
    dequantize(q)                   code * scale, float32

| format       | code                         | blocks (the first is the default)              | scale                     |
|--------------|------------------------------|------------------------------------------------|---------------------------|
| `int8`       | -127 to 127                  | row, column, tensor                            | amax / 127, float32       |
| `fp8`        | float8 e4m3fn, up to 448     | row, column, tensor, (1, 128), (128, 128)      | amax / 448, float32       |
| `fp8-e5m2`   | float8 e5m2, up to 57344     | the same                                       | amax / 57344, float32     |
| `mxfp8`      | float8 e4m3fn                | (1, 32)                                        | E8M0, a power of two      |
| `mxfp8-e5m2` | float8 e5m2                  | (1, 32)                                        | E8M0                      |
| `int4`       | 0 to 15, meaning code - 8    | (1, 128), (1, 64)                              | amax / 7, float32         |
| `int4-zero`  | 0 to 15, meaning code - zero | (1, 128), (1, 64)                              | (max - min) / 15, float32 |

A block (r, c) is r rows and c columns that share one scale. "row" is (1, C): a token of activations, or an output channel of a
weight [N, K]; "column" is (R, 1), "tensor" is (R, C). Each matrix of leading dimensions has its own scales. The last `fp8`
block of a row or column may be shorter; `mxfp8` and `int4` refuse a C that is not a multiple of their group.

The arithmetic is float32, rounded once per operation (float64 is rounded to float32 first), so that kernels get the same bits:

    scale = max(amax, 2^-100) / largest        inverse = largest / max(amax, 2^-100)        code = round(x * inverse)

rounded to nearest, ties to even. The lower bound 2^-100 makes the scale of a zero block positive and its codes zero. `quantize`
refuses blocks that hold a NaN or an infinity, except for `mxfp8`. `encode` gives such a block the scale NaN and zero codes, so
that all its values are NaN.

mxfp8 follows the OCP Microscaling Formats (MX) specification v1.0: the scale is 2^(floor(log2(amax)) - emax), emax 8 for
e4m3 and 15 for e5m2, within 2^-127 to 2^127; elements are rounded to nearest even and saturate at the largest normal number. A
zero block has the smallest scale. Where the specification leaves a choice, a NaN or infinity makes its block NaN (E8M0 0xFF).

int4 codes are packed two per byte along a row, the even column in the low half. `read_gptq` and `read_awq` convert published
checkpoints to this form. Not here: kernels, scales from calibration, activation order of GPTQ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "FORMATS",
    "SMALLEST_AMAX",
    "Format",
    "Quantized",
    "dequantize",
    "encode",
    "pack_int4",
    "quantize",
    "read_awq",
    "read_gptq",
    "unpack_int4",
]

Block = str | tuple[int, int]

SMALLEST_AMAX = 2.0**-100
"""Lower bound for a block's largest magnitude: it keeps scale and inverse normal float32 numbers in every format."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A way to store numbers."""

    dtype: torch.dtype
    """Dtype of the codes; uint8 holds two int4 codes."""
    largest: float
    """The magnitude that a block's largest element is mapped to; with zero points, the largest code."""
    blocks: tuple[Block, ...]
    """The blocks that the format may have; the first is the default."""
    exponent: int | None = None
    """MX formats: the exponent of the element format's largest power of two; the scale is then E8M0. None: other formats."""
    has_zeros: bool = False


_FP8_BLOCKS: tuple[Block, ...] = ("row", "column", "tensor", (1, 128), (128, 128))
_INT4_BLOCKS: tuple[Block, ...] = ((1, 128), (1, 64))
FORMATS: Mapping[str, Format] = {
    "int8": Format(dtype=torch.int8, largest=127.0, blocks=("row", "column", "tensor")),
    "fp8": Format(dtype=torch.float8_e4m3fn, largest=448.0, blocks=_FP8_BLOCKS),
    "fp8-e5m2": Format(dtype=torch.float8_e5m2, largest=57344.0, blocks=_FP8_BLOCKS),
    "mxfp8": Format(dtype=torch.float8_e4m3fn, largest=448.0, blocks=((1, 32),), exponent=8),
    "mxfp8-e5m2": Format(dtype=torch.float8_e5m2, largest=57344.0, blocks=((1, 32),), exponent=15),
    "int4": Format(dtype=torch.uint8, largest=7.0, blocks=_INT4_BLOCKS),
    "int4-zero": Format(dtype=torch.uint8, largest=15.0, blocks=_INT4_BLOCKS, has_zeros=True),
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """A tensor [..., R, C] in a format of the table."""

    format: str
    values: Tensor
    """Codes [..., R, C]; int4 codes are packed two per byte, [..., R, C / 2]."""
    scales: Tensor
    """[..., R / r, C / c] rounded up, float32 or float8_e8m0fnu; from a checkpoint also float16 or bfloat16."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    zeros: Tensor | None = None
    """The code that means zero, uint8, in the shape of scales. None: 8 for int4, 0 for the other formats."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor before it was quantised."""
        packed = FORMATS[self.format].dtype == torch.uint8
        return torch.Size((*self.values.shape[:-1], self.values.shape[-1] * (2 if packed else 1)))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


def quantize(x: Tensor, format: str, block: Block | None = None) -> Quantized:
    """Quantise x.

    Args:
        x: [..., R, C], bf16, fp16, fp32, or fp64, which is rounded to fp32.
        format: a name of `FORMATS`.
        block: which elements share a scale: "row", "column", "tensor" or (rows, columns); None is the format's default.

    Raises:
        TypeError: x is quantised already, or does not hold floats.
        ValueError: unknown format or block, fewer than two dimensions, C is not a multiple of the group, or x is not finite
            (mxfp8 accepts such an x: the block becomes NaN).
    """
    if isinstance(x, Quantized):
        raise TypeError(f"quantize: x is quantised already, as {x.format}; dequantize it first to store it in another format")
    form = _format(format)
    if x.dtype not in _FLOATS:
        hint = ": are these codes of a quantised tensor?" if x.dtype in {f.dtype for f in FORMATS.values()} else ""
        raise TypeError(f"quantize: x is {x.dtype}, wanted bfloat16, float16, float32 or float64{hint}")
    if form.exponent is None and not bool((finite := x.to(torch.float32).isfinite()).all()):
        where = (~finite).nonzero()
        raise ValueError(
            f"quantize: {len(where)} of {x.numel()} elements are not finite, the first at {tuple(where[0].tolist())}; "
            f"{format} cannot hold them. Find where they come from, or take mxfp8, where their block reads NaN"
        )
    values, scales, zeros = encode(x, format, block)
    return Quantized(format=format, values=values, scales=scales, zeros=zeros, block=_size(x, format, block))


def encode(x: Tensor, format: str, block: Block | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scales, zeros) as in `Quantized`, without reading values: also for meta tensors and tracing.

    A block with a NaN or an infinity has the scale NaN and the codes of zero.

    Raises:
        ValueError: as in `quantize`, except for numbers that are not finite.
    """
    form, (r, c) = _format(format), _size(x, format, block)
    rows, cols = x.shape[-2:]
    # The last block of a row or column is filled up with zeros, which do not change its maximum.
    padded = F.pad(x.to(torch.float32), (0, -cols % c, 0, -rows % r)) if cols % c or rows % r else x.to(torch.float32)
    tiles = padded.unflatten(-2, (-1, r)).unflatten(-1, (-1, c)) if x.numel() else padded.new_zeros(_tiles(x, r, c))
    finite = tiles.isfinite().all(-1, keepdim=True).all(-3, keepdim=True)
    tiles = torch.where(finite, tiles, 0.0)
    scale, inverse, zero = _scales(tiles, form)
    scaled = tiles * inverse
    if form.dtype.is_floating_point:
        codes = scaled.clamp(-form.largest, form.largest).to(form.dtype)
    elif form.dtype == torch.int8:
        codes = scaled.round().to(torch.int8)
    else:
        codes = (scaled.round() + (8.0 if zero is None else zero)).clamp(0, 15).to(torch.uint8)
    codes = codes.flatten(-4, -3).flatten(-2, -1)[..., :rows, :cols].contiguous()
    if scale.dtype == torch.uint8:
        scale = torch.where(finite, scale, 255).view(torch.float8_e8m0fnu)
    else:
        scale = torch.where(finite, scale, torch.nan)
    zeros = None if zero is None else zero.to(torch.uint8)[..., 0, :, 0]
    return (pack_int4(codes) if form.dtype == torch.uint8 else codes), scale[..., 0, :, 0].contiguous(), zeros


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """code * scale, [..., R, C].

    The product is computed in float32 (in float64 for that dtype) and rounded to `dtype`. It is exact in float64. For mxfp8 it
    is exact in float32 too, except that values beyond its range (scales over 2^119 for e4m3) become infinite; the
    specification leaves that open.

    Raises:
        TypeError: q is not a `Quantized`, or `dtype` is not a floating-point type.
    """
    if not isinstance(q, Quantized):
        raise TypeError(f"dequantize: wanted what quantize returns, got {type(q).__name__}")
    if dtype not in _FLOATS:
        raise TypeError(f"dequantize: dtype is {dtype}, wanted bfloat16, float16, float32 or float64")
    wide = torch.promote_types(dtype, torch.float32)
    codes = q.values
    if FORMATS[q.format].dtype == torch.uint8:
        zeros = 8 if q.zeros is None else _spread(q.zeros, q).to(torch.int16)
        codes = unpack_int4(codes).to(torch.int16) - zeros
    return (codes.to(wide) * _spread(q.scales.to(torch.float32), q).to(wide)).to(dtype)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack uint8 codes 0 to 15, [..., K] with an even K, two per byte: [..., K / 2], the even column in the low half.

    Raises:
        ValueError: K is odd, or the codes are not uint8.
    """
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] % 2:
        raise ValueError(f"pack_int4: wanted uint8 [..., K] with an even K, got {codes.dtype} {tuple(codes.shape)}")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`: uint8 [..., K / 2] to [..., K]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


# ---- checkpoints of other projects


def read_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, stored_minus_one: bool = True
) -> Quantized:
    """The weight [N, K] of a linear layer from the tensors of a 4-bit GPTQ checkpoint.

    Args:
        qweight: int32 [K / 8, N]; each number holds eight codes of one column, the first in the lowest bits.
        qzeros: int32 [K / group, N / 8]; each number holds the zero points of eight neighbouring outputs.
        scales: [K / group, N].
        g_idx: [K], the group of each column; None: groups are consecutive.
        stored_minus_one: zero points are stored minus one, as in `checkpoint_format: gptq`; not so in `gptq_v2`.

    Raises:
        ValueError: shapes or dtypes do not fit, or the columns are in activation order (`desc_act`).
    """
    _check_int32("read_gptq", qweight=qweight, qzeros=qzeros)
    k, n = 8 * qweight.shape[0], qweight.shape[1]
    group = _group("read_gptq", k, n, qzeros, scales)
    if g_idx is not None and not torch.equal(g_idx.cpu().long(), torch.arange(k) // group):
        raise ValueError(
            f"read_gptq: g_idx is not column // {group}: the checkpoint was made in activation order (desc_act), which is not "
            "supported; quantise the model again with desc_act=False"
        )
    codes = _nibbles(qweight, range(8)).movedim(-1, 1).reshape(k, n)
    zeros = _nibbles(qzeros, range(8)).flatten(-2) + int(stored_minus_one)
    return _from_columns(codes, scales, zeros, group)


def read_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Quantized:
    """The weight [N, K] of a linear layer from the tensors of a 4-bit AWQ checkpoint (`version: gemm`).

    Args:
        qweight: int32 [K, N / 8]; of eight neighbouring outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.
        qzeros: int32 [K / group, N / 8], packed in the same order.
        scales: [K / group, N].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_int32("read_awq", qweight=qweight, qzeros=qzeros)
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    group = _group("read_awq", k, n, qzeros, scales)
    # Output i of each eight is in this place.
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    return _from_columns(_nibbles(qweight, places).flatten(-2), scales, _nibbles(qzeros, places).flatten(-2), group)


def _nibbles(packed: Tensor, places: range | tuple[int, ...]) -> Tensor:
    """[..., 8] uint8: the four bits at each place."""
    return torch.stack([packed >> 4 * place & 15 for place in places], -1).to(torch.uint8)


def _from_columns(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Quantized:
    """From codes [K, N], scales and zeros [K / group, N]."""
    return Quantized(
        format="int4-zero",
        values=pack_int4(codes.t().contiguous()),
        scales=scales.t().contiguous(),
        zeros=zeros.t().contiguous(),
        block=(1, group),
    )


def _check_int32(reader: str, **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.dtype != torch.int32 or t.dim() != 2:
            raise ValueError(f"{reader}: {name} is {t.dtype} {tuple(t.shape)}, wanted int32 with two dimensions")


def _group(reader: str, k: int, n: int, qzeros: Tensor, scales: Tensor) -> int:
    groups = scales.shape[0] if scales.dim() == 2 else 0
    if not groups or k % groups or tuple(scales.shape) != (groups, n) or tuple(qzeros.shape) != (groups, n // 8) or n % 8:
        raise ValueError(
            f"{reader}: a weight of K = {k} inputs and N = {n} outputs has scales [K / group, {n}] and qzeros "
            f"[K / group, {n} / 8]; got scales {tuple(scales.shape)} and qzeros {tuple(qzeros.shape)}"
        )
    return k // groups


# ---- internal


def _format(name: str) -> Format:
    if name in FORMATS:
        return FORMATS[name]
    near = get_close_matches(str(name), FORMATS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"quantize: no format {name!r}; {hint}There are {', '.join(FORMATS)}")


def _size(x: Tensor, format: str, block: Block | None) -> tuple[int, int]:
    """Rows and columns of a block of x, at least 1."""
    form = _format(format)
    block = form.blocks[0] if block is None else block
    if block not in form.blocks:
        raise ValueError(f"quantize: {format} has no blocks {block!r}; it has {', '.join(map(repr, form.blocks))}")
    if x.dim() < 2:
        raise ValueError(f"quantize: x is {tuple(x.shape)}, wanted two dimensions or more")
    rows, cols = x.shape[-2:]
    if isinstance(block, str):
        r, c = {"row": (1, cols), "column": (rows, 1), "tensor": (rows, cols)}[block]
        return max(r, 1), max(c, 1)
    if cols % block[1] and (form.exponent is not None or form.dtype == torch.uint8):
        raise ValueError(
            f"quantize: x is {tuple(x.shape)}, and its {cols} columns are no multiple of {block[1]}, the group of {format}; "
            "pad x, or take int8 or fp8"
        )
    return block


def _tiles(x: Tensor, r: int, c: int) -> tuple[int, ...]:
    """The shape of an empty x in blocks; a row without columns has a scale, too."""
    rows, cols = x.shape[-2:]
    return (*x.shape[:-2], -(-rows // r), r, max(-(-cols // c), int(c == 1)), c)


def _scales(tiles: Tensor, form: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """(scale, inverse, zero) of tiles [..., R / r, r, C / c, c], with the block's dimensions kept as 1."""
    if form.has_zeros:
        low, high = (extreme.clamp(**bound) for extreme, bound in ((tiles.amin((-3, -1), True), {"max": 0.0}),
                                                                   (tiles.amax((-3, -1), True), {"min": 0.0})))  # fmt: skip
        # Divide before subtracting: the difference between the extremes of float32 is not a float32.
        largest = torch.full_like(high, form.largest)
        scale = (high / largest - low / largest).clamp_min(SMALLEST_AMAX)
        inverse = 1.0 / scale
        return scale, inverse, (-low * inverse).round()
    amax = tiles.abs().amax((-3, -1), True)
    if form.exponent is None:
        # With a Python number torch multiplies by a reciprocal instead of dividing, on CUDA or where the number comes first.
        amax, largest = amax.clamp_min(SMALLEST_AMAX), torch.full_like(amax, form.largest)
        return amax / largest, largest / amax, None
    # floor(log2) is the exponent's bits, with float32's bias of 127, which E8M0 has too. A subnormal number has exponent bits 0
    # and a smaller logarithm, but it gets the smallest scale, 0, all the same.
    biased = ((amax.view(torch.int32) >> 23) - form.exponent).clamp_min(0)
    return biased.to(torch.uint8), ((254 - biased) << 23).view(torch.float32), None


def _spread(scales: Tensor, q: Quantized) -> Tensor:
    """Repeat a value for each block into a value for each element."""
    rows, cols = q.shape[-2:]
    by_row = scales.repeat_interleave(q.block[0], -2)[..., :rows, :]
    return by_row.repeat_interleave(q.block[1], -1)[..., :cols]
