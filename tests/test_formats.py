"""Formats against definitions written down independently: bit fields, tables of neighbours, loops over blocks."""

import ast
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewright
from tilewright import formats
from tilewright.formats import FORMATS, Quantized, dequantize, quantize

INF, NAN = math.inf, math.nan
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EVERY = [pytest.param(name, block, id=f"{name}-{block}") for name, form in FORMATS.items() for block in form.blocks]
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def meaning(byte: int, dtype: torch.dtype) -> float:
    """An fp8 code from its bit fields (OCP 8-bit floating point specification, 2023)."""
    mantissa_bits, bias = (3, 7) if dtype == E4M3 else (2, 15)
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    if dtype == E4M3 and byte & 0x7F == 0x7F:
        return NAN
    if dtype == E5M2 and exponent == 31:
        return sign * INF if mantissa == 0 else NAN
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def codes_of(dtype: torch.dtype) -> Tensor:
    """The finite values of a code's dtype that are not negative, ascending, float64."""
    if dtype == torch.int8:
        return torch.arange(128, dtype=torch.float64)
    return torch.tensor([v for v in (meaning(b, dtype) for b in range(128)) if math.isfinite(v)], dtype=torch.float64)


def one_block(format: str, values: Tensor, cols: int = 32) -> Tensor:
    """Values in rows, each of which begins with the format's largest number: in every format the scale is then 1."""
    per = cols - 1
    padded = torch.cat((values, values.new_zeros(-len(values) % per))).view(-1, per)
    return torch.cat((torch.full((len(padded), 1), FORMATS[format].largest), padded.float()), 1)


@pytest.mark.parametrize("format", ["fp8", "fp8-e5m2", "mxfp8", "mxfp8-e5m2"])
def test_all_256_codes(format: str) -> None:
    dtype = FORMATS[format].dtype
    want = torch.tensor([meaning(b, dtype) for b in range(256)], dtype=torch.float64)
    one = torch.tensor(127, dtype=torch.uint8).view(torch.float8_e8m0fnu) if "mx" in format else torch.tensor(1.0)
    q = Quantized(format=format, values=ALL_BYTES.view(dtype)[None], scales=one.expand(1, 8), block=(1, 32))
    for wide in (torch.float32, torch.float64):
        torch.testing.assert_close(dequantize(q, wide)[0].double(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8-e5m2"])
def test_all_256_scales_with_all_256_codes(format: str) -> None:
    dtype = FORMATS[format].dtype
    values = ALL_BYTES.view(dtype).expand(256, 256)
    scales = ALL_BYTES.view(torch.float8_e8m0fnu)[:, None].expand(256, 8)
    q = Quantized(format=format, values=values, scales=scales, block=(1, 32))
    factors = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [NAN], dtype=torch.float64)[:, None]
    want = torch.tensor([meaning(b, dtype) for b in range(256)], dtype=torch.float64) * factors
    torch.testing.assert_close(dequantize(q, torch.float64), want, rtol=0, atol=0, equal_nan=True)
    # float32: exact down to its smallest subnormal, infinite past its end.
    torch.testing.assert_close(dequantize(q), want.float(), rtol=0, atol=0, equal_nan=True)
    finite = want.isfinite() & (want.abs() < 2.0**128)
    assert torch.equal(want.float().double()[finite], want[finite])


@pytest.mark.parametrize("format", ["int8", "fp8", "fp8-e5m2", "mxfp8", "mxfp8-e5m2"])
def test_rounds_to_nearest_even(format: str) -> None:
    """Every code, every tie between two, and the float32 numbers next to each tie; both signs."""
    codes = codes_of(FORMATS[format].dtype)
    low, high = codes[:-1], codes[1:]
    ties = ((low + high) / 2).float()
    assert torch.equal(ties.double(), (low + high) / 2)
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    below, above = torch.nextafter(ties, torch.tensor(-INF)), torch.nextafter(ties, torch.tensor(INF))
    x = torch.cat((codes.float(), ties, below, above))
    want = torch.cat((codes, even, low, high))
    for sign in (1.0, -1.0):
        got = dequantize(quantize(one_block(format, sign * x), format))[:, 1:].flatten()[: len(x)]
        assert torch.equal(got.double(), sign * want)


@pytest.mark.parametrize(
    ("format", "amax", "byte"),
    [
        ("mxfp8", 1.0, 127 - 8),
        ("mxfp8", 1.99, 127 - 8),
        ("mxfp8", 2.0, 127 - 7),
        ("mxfp8", 448.0, 127),
        ("mxfp8", 511.99, 127),
        ("mxfp8", 512.0, 128),
        ("mxfp8", 0.75, 127 - 9),
        ("mxfp8", torch.finfo(torch.float32).max, 127 + 127 - 8),
        ("mxfp8", 2.0**-119, 0),
        ("mxfp8", 2.0**-118, 1),
        ("mxfp8", 2.0**-126, 0),
        ("mxfp8", 2.0**-149, 0),
        ("mxfp8", 0.0, 0),
        ("mxfp8-e5m2", 1.0, 127 - 15),
        ("mxfp8-e5m2", 57344.0, 127),
        ("mxfp8-e5m2", 65536.0, 128),
        ("mxfp8-e5m2", torch.finfo(torch.float32).max, 127 + 127 - 15),
        ("mxfp8-e5m2", 2.0**-112, 0),
        ("mxfp8", NAN, 255),
        ("mxfp8", INF, 255),
        ("mxfp8-e5m2", -INF, 255),
    ],
)
def test_shared_exponent(format: str, amax: float, byte: int) -> None:
    """floor(log2(amax)) less that of the element format, within E8M0."""
    x = torch.zeros(1, 32)
    x[0, 7] = amax
    q = quantize(x, format)
    assert q.scales.view(torch.uint8).tolist() == [[byte]]
    assert dequantize(q).isnan().all() == (byte == 255)
    if byte == 255:
        assert not q.values.view(torch.uint8).any()


@pytest.mark.parametrize(("format", "largest", "end"), [("mxfp8", 448.0, 512.0), ("mxfp8-e5m2", 57344.0, 65536.0)])
def test_mx_saturates(format: str, largest: float, end: float) -> None:
    """The floor of the exponent leaves the top of the last binade without a code: its numbers become the largest."""
    x = torch.linspace(largest, end * (1 - 2.0**-20), 31)
    x = torch.cat((x, -x, torch.tensor([largest, -largest])))
    for power in (-100, 0, 100):
        got = dequantize(quantize(x[None] * 2.0**power, format))
        assert torch.equal(got, x.sign()[None] * largest * 2.0**power)


def test_smallest_numbers() -> None:
    """At the smallest scale elements are subnormal, then zero."""
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([2.0**-136, 2.0**-137, 3 * 2.0**-137, -(2.0**-138), 2.0**-149])
    assert dequantize(quantize(x, "mxfp8"))[0, :5].tolist() == [2.0**-136, 0.0, 2.0**-135, 0.0, 0.0]


@pytest.mark.parametrize(("format", "block"), EVERY)
def test_one_scale_a_block(format: str, block: Any) -> None:
    """Scales and codes of each block are those of the block alone."""
    ragged = "mx" not in format and "int4" not in format
    shape = (2, 130, 300) if ragged else (2, 3, 256)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    q = quantize(x, format, block)
    whole, (r, c) = dequantize(q), q.block
    assert q.shape == x.shape
    assert q.scales.shape == (2, -(-shape[1] // r), -(-shape[2] // c))
    for i in range(0, shape[1], max(r, 64)):
        for j in range(0, shape[2], max(c, 99)):
            i0, j0 = i // r * r, j // c * c
            part = x[1, i0 : i0 + r, j0 : j0 + c]
            alone = quantize(part, format, "tensor" if ragged else (1, c))
            assert torch.equal(dequantize(alone), whole[1, i0 : i0 + r, j0 : j0 + c])


def bound(format: str, scale: Tensor, x: Tensor) -> Tensor:
    """The largest error that rounding alone explains."""
    if "int" in format:
        return scale * (1.0 if "zero" in format else 0.501)
    digits, smallest = (4, 2.0**-9) if FORMATS[format].dtype == E4M3 else (3, 2.0**-16)
    saturated = x.abs() / 8 * 1.01 if "mx" in format else 0 * x
    return torch.maximum(torch.maximum(x.abs() * 2.0**-digits, scale * smallest / 2) * 1.001, saturated)


@pytest.mark.parametrize(("format", "block"), EVERY)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_round_trip(format: str, block: Any, data: st.DataObject) -> None:
    """Errors stay within half a step, and what came out of a format goes back in unchanged."""
    rows, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**30)))
    power = data.draw(st.integers(-14, 8) if dtype == torch.float16 else st.integers(-90, 90))
    spread = data.draw(st.sampled_from([0.0, 1.0, 4.0]))
    x = torch.randn(rows, groups * 128, generator=generator)
    x = (x * 2.0**power * torch.exp(spread * torch.randn(x.shape, generator=generator)).clamp(1e-3, 30)).to(dtype).float()
    q = quantize(x.to(dtype), format, block)
    back = dequantize(q)
    r, c = q.block
    scales = q.scales.float().repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, : x.shape[1]]
    assert ((back - x).abs() <= bound(format, scales, x)).all()
    again = quantize(back, format, block)
    if "zero" not in format and format != "int4":
        assert torch.equal(again.values.view(torch.uint8), q.values.view(torch.uint8))
    known = torch.ones_like(back, dtype=torch.bool)
    if "zero" in format:
        # A rounded zero point may leave the lowest or the highest code unused: then `back` spans less, and so does its scale.
        span = back.view(rows, -1, c).amax(-1) - back.view(rows, -1, c).amin(-1)
        known = span.repeat_interleave(c, 1) > (2 ** int(format[3]) - 1.5) * scales
    torch.testing.assert_close(dequantize(again)[known], back[known], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("format", "block"), EVERY)
def test_zero_and_tiny_blocks(format: str, block: Any) -> None:
    for value in (0.0, -0.0, 2.0**-149):
        q = quantize(torch.full((128, 128), value), format, block)
        assert q.scales.float().isfinite().all()
        assert (q.scales.float() > 0).all()
        back = dequantize(q)
        assert (back.abs() <= 2.0**-126).all()
        assert value or not back.any()


@pytest.mark.parametrize(("format", "block"), EVERY)
def test_extremes_of_float32(format: str, block: Any) -> None:
    """The largest numbers of both signs neither overflow nor lose their sign."""
    x = torch.full((128, 128), torch.finfo(torch.float32).max)
    x[:, ::2] *= -1
    back = dequantize(quantize(x, format, block), torch.float64)
    assert ((back / x.double() - 1).abs() <= 0.125).all()


@pytest.mark.parametrize(("format", "block"), EVERY)
def test_empty(format: str, block: Any) -> None:
    for shape in ((0, 128), (128, 0), (3, 0, 128)):
        q = quantize(torch.zeros(shape), format, block)
        assert dequantize(q).shape == shape


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(("format", "block"), EVERY)
def test_what_is_not_finite(format: str, block: Any, bad: float) -> None:
    x = torch.ones(128, 256)
    x[5, 130] = bad
    if "mx" in format:
        q = quantize(x, format, block)
    else:
        with pytest.raises(ValueError, match=re.escape("1 of 32768 elements are not finite, the first at (5, 130)")):
            quantize(x, format, block)
        codes, scales, zeros = formats.encode(x, format, block)
        size = quantize(torch.ones_like(x), format, block).block
        q = Quantized(format=format, values=codes, scales=scales, zeros=zeros, block=size)
    r, c = q.block
    i, j = 5 // r * r, 130 // c * c
    back = dequantize(q)
    assert back[i : i + r, j : j + c].isnan().all()
    assert int(back.isnan().sum()) == min(r, 128) * min(c, 256)


def test_other_dtypes() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    q, wide = quantize(x, "int8"), quantize(x.double(), "int8")
    assert torch.equal(q.values, wide.values)
    assert torch.equal(q.scales, wide.scales)
    assert dequantize(q, torch.bfloat16).dtype == torch.bfloat16
    assert q.nbytes == 4 * 64 + 4 * 4
    assert torch.equal(dequantize(q, torch.float64), q.values.double() * q.scales.double())


def test_zero_points_use_all_codes() -> None:
    """0 to 15 without a zero point in the middle: int4 alone would lose half of its codes."""
    x = torch.arange(128).float()[None] % 16
    q = quantize(x, "int4-zero")
    assert torch.equal(dequantize(q), x)
    assert q.zeros is not None
    assert q.zeros.tolist() == [[0]]
    low = quantize(-x, "int4-zero")
    assert torch.equal(dequantize(low), -x)
    assert low.zeros is not None
    assert low.zeros.tolist() == [[15]]


def test_packing() -> None:
    codes = torch.randint(0, 16, (3, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    packed = formats.pack_int4(codes)
    assert packed[1, 2] == codes[1, 4] + 16 * codes[1, 5]
    assert torch.equal(formats.unpack_int4(packed), codes)


# ---- layouts of published checkpoints, packed here as their authors' code does it


def pack_columns(matrix: list[list[int]], order: tuple[int, ...], rows: bool) -> Tensor:
    """Eight numbers of a row (or of a column) in an int32, the order's first in the lowest bits."""
    if rows:
        return pack_columns([list(c) for c in zip(*matrix, strict=True)], order, False).t().contiguous()
    out = []
    for line in matrix:
        words = []
        for start in range(0, len(line), 8):
            word = sum(line[start + which] << 4 * i for i, which in enumerate(order))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        out.append(words)
    return torch.tensor(out, dtype=torch.int32)


def checkpoint(k: int, n: int, group: int) -> tuple[list[list[int]], list[list[int]], Tensor, Tensor]:
    """(codes [K, N], zeros [K / group, N], scales, the weight [N, K] that they mean)."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (k, n), generator=generator)
    zeros = torch.randint(1, 16, (k // group, n), generator=generator)
    scales = (torch.rand(k // group, n, generator=generator) + 0.1).half()
    weight = torch.zeros(n, k)
    for i in range(k):
        weight[:, i] = (codes[i] - zeros[i // group]).float() * scales[i // group].float()
    return codes.tolist(), zeros.tolist(), scales, weight


IN_ORDER, AWQ_ORDER = tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_reads_gptq(version: str) -> None:
    codes, zeros, scales, weight = checkpoint(128, 24, 64)
    less = int(version == "gptq")
    qweight = pack_columns(codes, IN_ORDER, rows=True)
    qzeros = pack_columns([[z - less for z in line] for line in zeros], IN_ORDER, rows=False)
    assert qweight.shape == (16, 24)
    g_idx = torch.arange(128, dtype=torch.int32) // 64
    q = formats.read_gptq(qweight, qzeros, scales, g_idx, stored_minus_one=bool(less))
    assert torch.equal(dequantize(q), weight)
    with pytest.raises(ValueError, match="desc_act"):
        formats.read_gptq(qweight, qzeros, scales, g_idx.flip(0))
    with pytest.raises(ValueError, match=re.escape("K = 128 inputs and N = 24 outputs")):
        formats.read_gptq(qweight, qzeros[:, :2], scales)
    with pytest.raises(ValueError, match=re.escape("qweight is torch.int64")):
        formats.read_gptq(qweight.long(), qzeros, scales)


def test_reads_awq() -> None:
    codes, zeros, scales, weight = checkpoint(128, 24, 32)
    qweight, qzeros = (pack_columns(m, AWQ_ORDER, rows=False) for m in (codes, zeros))
    assert qweight.shape == (128, 3)
    assert torch.equal(dequantize(formats.read_awq(qweight, qzeros, scales)), weight)
    with pytest.raises(ValueError, match=re.escape("got scales (3, 24)")):
        formats.read_awq(qweight, qzeros, scales[:3])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: quantize(x, "mxpf8"), ValueError, "no format 'mxpf8'; did you mean mxfp8"),
        (lambda x: quantize(x, "q"), ValueError, "There are int8, fp8"),
        (lambda x: quantize(x, "int8", (1, 128)), ValueError, "int8 has no blocks (1, 128); it has 'row', 'column', 'tensor'"),
        (lambda x: quantize(x, "mxfp8"), ValueError, "its 100 columns are no multiple of 32, the group of mxfp8"),
        (lambda x: quantize(x, "int4", (1, 64)), ValueError, "its 100 columns are no multiple of 64, the group of int4"),
        (lambda x: quantize(x[0], "int8"), ValueError, "x is (100,), wanted two dimensions"),
        (lambda x: quantize(quantize(x, "int8"), "fp8"), TypeError, "quantised already, as int8"),
        (lambda x: quantize(quantize(x, "fp8").values, "fp8"), TypeError, "are these codes of a quantised tensor?"),
        (lambda x: quantize(x.long(), "int8"), TypeError, "x is torch.int64, wanted bfloat16"),
        (lambda x: dequantize(x), TypeError, "wanted what quantize returns, got Tensor"),
        (lambda x: dequantize(quantize(x, "int8"), torch.int32), TypeError, "dtype is torch.int32"),
        (lambda x: formats.pack_int4(x), ValueError, "wanted uint8"),
        (lambda x: formats.pack_int4(x.byte()[:, :3]), ValueError, "with an even K"),
    ],
)
def test_refused(call: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(torch.ones(2, 100))


def test_public_and_plain() -> None:
    """`tilewright.formats` is reachable by the package, and needs torch alone."""
    assert tilewright.formats is formats
    tree = ast.parse(inspect.getsource(formats))
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert modules == {"collections.abc", "dataclasses", "difflib", "torch", "torch.nn.functional"}
