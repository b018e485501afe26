"""mxfp8 with one scale for 128 columns: what folding may cost, where it is exact, and the kernel's bits."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import bits
from tilewright.formats import dequantize, quantize
from tilewright.kernels.quantize.mx_to_block import fold_mx, fold_mx_weight, quantize_fold
from tilewright.kernels.quantize.per_block import quantize_mx

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("mxfp8", "mxfp8-e5m2")
# Of the largest magnitude of 128 columns: half a multiple of the smallest number, beside the least that a block's largest is.
BOUND = {"mxfp8": 2.0**-18, "mxfp8-e5m2": 2.0**-32}


def spread(rows: int, cols: int, binades: float, seed: int = 0) -> Tensor:
    """Normal numbers whose blocks of 32 differ by up to so many binades, float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(-binades * torch.rand(rows, cols // 32, generator=generator))
    return torch.randn(rows, cols, generator=generator) * scales.repeat_interleave(32, 1)


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """What folded codes mean, in float64."""
    (rows, cols), tall = codes.shape, scales.shape[0] != codes.shape[0]
    scales = scales.repeat_interleave(128, 0)[:rows] if tall else scales
    return codes.double() * scales.double().repeat_interleave(128, 1)[:, :cols]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("binades", [0.0, 6.0, 14.0, 60.0])
@pytest.mark.parametrize("cols", [256, 160])
def test_error_is_within_the_bound(format: str, binades: float, cols: int) -> None:
    q = quantize(spread(40, cols, binades), format)
    want = dequantize(q, torch.float64)
    codes, scales = fold_mx(q.values, q.scales)
    assert (codes.shape, scales.shape) == ((40, cols), (40, -(-cols // 128)))
    got = values(codes, scales)
    padded = torch.nn.functional.pad(want, (0, -cols % 128)).abs().unflatten(1, (-1, 128)).amax(-1)
    largest = padded.repeat_interleave(128, 1)[:, :cols]
    worst = float(((got - want).abs() / largest).max())
    assert worst <= BOUND[format]
    # The bound is no empty promise: far apart, errors come near it; side by side there are none.
    assert worst > BOUND[format] / 4 if binades == 60 and format == "mxfp8" else True
    assert worst == 0 if binades == 0 else True


def test_every_code_moves_down_as_it_should() -> None:
    """All finite codes beside a block whose scale is 0 to 30 binades larger: the nearest code, ties to even."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()]
    pad = torch.zeros(256 - len(codes), dtype=torch.uint8).view(torch.float8_e4m3fn)
    block = torch.cat((codes, pad)).view(8, 32)
    for down in range(31):
        x = torch.zeros(8, 128, dtype=torch.float8_e4m3fn)
        x[:, 32:64] = block
        scales = torch.tensor([[100 + down, 100, 100, 100]] * 8, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        got, folded = fold_mx(x, scales)
        assert bool((folded == 2.0 ** (100 + down - 127)).all())
        want = (block.double() * 2.0**-down).float().to(torch.float8_e4m3fn)
        assert torch.equal(got[:, 32:64].float(), want.float())


def test_extreme_scales() -> None:
    """2^-127 is a subnormal float32, 2^127 the largest scale; a NaN takes its 32 elements along and no others."""
    codes = torch.ones(3, 128).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0] * 4, [254] * 4, [255, 127, 127, 127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    folded, got = fold_mx(codes, scales)
    assert got[:, 0].double().tolist() == [2.0**-127, 2.0**127, 1.0]
    assert folded[2].float().isnan().tolist() == [True] * 32 + [False] * 96
    assert bool((folded[2, 32:].float() == 1).all())


def test_weights_get_square_blocks_where_that_is_as_good() -> None:
    q = quantize(spread(200, 384, 2.0), "mxfp8")
    codes, scales = fold_mx_weight(q.values, q.scales)
    assert scales.shape == (2, 3)
    want = dequantize(q, torch.float64)
    largest = want.abs().unflatten(1, (-1, 128)).amax(-1).repeat_interleave(128, 1)
    assert float(((values(codes, scales) - want).abs() / largest).max()) <= 2.0**-13
    far = spread(200, 384, 2.0)
    far[7, 128:256] *= 2.0**-9
    q = quantize(far, "mxfp8")
    codes, scales = fold_mx_weight(q.values, q.scales)
    assert scales.shape == (200, 3)
    far[7] = 0
    q = quantize(far, "mxfp8")
    assert fold_mx_weight(q.values, q.scales)[1].shape == (2, 3), "rows of zeros lie below everything, and lose nothing"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(6, 256), (2, 3, 160), (96,), (0, 64), (3, 0)], ids=str)
def test_one_launch_is_the_two_steps(format: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    if x.numel():
        x = spread(max(x[..., 0].numel(), 1), shape[-1], 20.0).view(shape)
        flat = x.view(-1)
        flat[3], flat[70], flat[40] = float("nan"), -0.0, float("inf")
    x = x.to(dtype).to(WHERE)
    codes, scales = quantize_fold(x, format)
    assert (codes.shape, scales.shape) == (shape, (*shape[:-1], -(-shape[-1] // 128)))
    if x.numel():
        q = quantize_mx(x, format)
        want = fold_mx(q[0].view(-1, shape[-1]), q[1].view(-1, shape[-1] // 32))
        assert torch.equal(bits(codes).flatten(), bits(want[0]).flatten())
        assert torch.equal(scales.reshape(-1), want[1].flatten())
        assert scales.dim() < 2 or scales.stride(-2) == 1


CODES, SCALES = torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 2).to(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fold_mx(CODES.float(), SCALES), "codes must be float8 [R, K], 32 dividing K; got (2, 64) torch.float32"),
        (lambda: fold_mx(CODES[:, :40], SCALES), "got (2, 40)"),
        (lambda: fold_mx(CODES, SCALES[:, :1]), "must be float8_e8m0fnu (2, 2); got (2, 1)"),
        (lambda: fold_mx(CODES, SCALES.float()), "got (2, 2) torch.float32"),
        (lambda: quantize_fold(torch.ones(2, 40)), "K is 40 in x (2, 40), wanted a multiple of 32"),
        (lambda: quantize_fold(torch.ones(2, 32), "fp8"), "format is 'fp8', wanted mxfp8 or mxfp8-e5m2"),
    ],
)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
