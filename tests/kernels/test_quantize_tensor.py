"""One scale for all rows, found or given: against `tilewright.formats`, edges, and what the public functions refuse."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import bits
from tilewright.formats import FORMATS, encode
from tilewright.kernels.quantize.per_tensor import quantize_static, quantize_tensor
from tilewright.op import prefer

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
ROW_FORMATS = ("int8", "fp8", "fp8-e5m2")
INF, NAN = float("inf"), float("nan")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(WHERE)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("shape", [(7, 96), (5,), (2, 3, 5000), (3, 20000), (0, 96), (3, 0), (2, 0, 16)], ids=str)
def test_one_scale_for_the_tensor(format: str, shape: tuple[int, ...]) -> None:
    x = randn(*shape, dtype=torch.bfloat16)
    codes, scales = quantize_tensor(x, format)
    assert (codes.shape, scales.shape) == (shape, shape[:-1])
    if x.numel():
        want, scale, _ = encode(x.cpu().reshape(-1, shape[-1]), format, "tensor")
        assert torch.equal(bits(codes).cpu().flatten(), bits(want).flatten())
        assert bool((scales.cpu() == scale[0, 0]).all())


@pytest.mark.parametrize("fill", [0.0, -0.0, 1e-38, 3e38, NAN, -INF], ids=["zero", "minus zero", "tiny", "huge", "nan", "inf"])
@pytest.mark.parametrize("format", ROW_FORMATS)
def test_tensors_of_extremes(format: str, fill: float) -> None:
    """All of a tensor is NaN if a number of it is not finite; a second call finds the counters as the first did."""
    x = torch.zeros(3, 40, device=WHERE)
    x[1, 7] = fill
    for _ in range(2):
        codes, scales = quantize_tensor(x, format)
        want, scale, _ = encode(x.cpu(), format, "tensor")
        assert torch.equal(bits(codes).cpu(), bits(want))
        torch.testing.assert_close(scales.cpu(), scale[0].expand(3), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [40, 20000])
def test_a_given_scale(format: str, dtype: torch.dtype, cols: int) -> None:
    """Nearest codes of x / scale, the largest beyond; rows that are not finite read NaN, and only they."""
    largest = FORMATS[format].largest
    scale = torch.tensor(0.0625, device=WHERE)
    x = randn(6, cols)
    x[1] *= 1000
    x[2, 3], x[3, 5], x[4] = NAN, INF, 0.0
    x[5, :6] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5], device=WHERE) * 0.0625
    x = x.to(dtype)
    codes, scales = quantize_static(x, scale, format)
    assert scales.isnan().tolist() == [False, False, True, True, False, False]
    assert not codes.float()[2:5].any()
    for row in (0, 1, 5):
        scaled = (x[row].double() / 0.0625).clamp(-largest, largest)
        want = scaled.float().to(FORMATS[format].dtype) if format != "int8" else scaled.round().to(torch.int8)
        assert torch.equal(codes[row].float(), want.float())
        assert float(scales[row]) == 0.0625
    with prefer("reference"):
        want_codes, want_scales = quantize_static(x.cpu(), scale.cpu(), format)
    assert torch.equal(bits(codes).cpu(), bits(want_codes))
    torch.testing.assert_close(scales.cpu(), want_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("zero", [-128, 0, 37, 127])
@pytest.mark.parametrize("cols", [40, 20000])
def test_a_given_zero_point(zero: int, dtype: torch.dtype, cols: int) -> None:
    """Ties go to the even number before the zero point is added; what is beyond the codes saturates; NaN rows read NaN."""
    x = (randn(4, cols) * 4).to(dtype)
    x[1, :6] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -126.5], device=WHERE) * 0.0625
    x[2, 3], x[3] = NAN, 0.0
    codes, scales = quantize_static(x, torch.tensor(0.0625, device=WHERE), "int8", torch.tensor(float(zero), device=WHERE))
    want = ((x.double() / 0.0625).nan_to_num().round() + zero).clamp(-128, 127)
    want[2] = zero
    assert torch.equal(codes.double(), want)
    assert scales.isnan().tolist() == [False, False, True, False]


ONE = torch.tensor(0.1, device=WHERE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize_tensor(x, "mxfp8"), "format is 'mxfp8', wanted int8 or fp8 or fp8-e5m2"),
        (lambda x: quantize_static(x, ONE, "int4"), "format is 'int4'"),
        (lambda x: quantize_static(x, ONE.double()), "scale must be one float32"),
        (lambda x: quantize_static(x, x[0]), "got (8,) torch.float32"),
        (lambda x: quantize_static(x.double(), ONE), "x must be bf16, fp16 or fp32"),
    ],
)
def test_refused_arguments(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(randn(2, 8))
