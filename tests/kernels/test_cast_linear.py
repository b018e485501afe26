"""What conformance cannot say of products with another output: saturation, what is not finite, two layers, bad input."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tilewright import ops
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.gemm.quantized.requantized import cast_linear_op
from tilewright.op import Inputs
from tilewright.ops.weights import StaticWeight, quantize_weight

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"
DEVICE = device_of(0 if GPU else -1)
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, E4M3: 448.0}


@pytest.mark.parametrize("out", [INT8, E4M3], ids=str)
def test_codes_saturate_round_to_even_and_say_what_is_not_finite(out: torch.dtype) -> None:
    values = torch.tensor([0.0, 0.5, 1.5, 2.5, -0.5, -2.5, 3.0, 1e4, -1e4, torch.inf, -torch.inf, torch.nan], device=WHERE)
    x = torch.zeros(12, 16, dtype=torch.bfloat16, device=WHERE)
    x[:, 0] = values
    weight = torch.eye(16, dtype=torch.bfloat16, device=WHERE)[:3]
    scale = torch.tensor(1.0, device=WHERE)
    # 0 * inf is NaN: rows that are not finite are looked at in column 0 alone.
    got = ops.cast_linear(x, weight, out, scale)
    want = values.clamp(-LARGEST[out], LARGEST[out])
    want = want.nan_to_num(0.0).round() if out == INT8 else want
    torch.testing.assert_close(got[:, 0].float(), want.to(out).float(), rtol=0, atol=0, equal_nan=True)
    assert not got[:9, 1:].float().any()
    assert got.stride() == (16, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, INT8], ids=str)
def test_float32_is_not_rounded_to_16_bits(dtype: torch.dtype) -> None:
    make: Any = cast_linear_op.make
    x, weight, x_scales, w_scales, *_ = make(Inputs(WHERE), M=20, N=24, K=256, dtype=dtype, out=torch.float32)
    got = ops.cast_linear(x, weight, torch.float32, x_scales=x_scales, w_scales=w_scales)
    want = F.linear(x.double(), weight.double())
    want = want if x_scales is None else want * x_scales[:, None] * w_scales
    assert got.dtype == torch.float32
    assert ((got - want).abs().max() / want.square().mean().sqrt()).item() < 2e-5


@pytest.mark.parametrize("format", [None, "int8", "fp8", "static"])
@pytest.mark.parametrize("reader", ["int8", "fp8"])
def test_a_layer_writes_the_codes_that_a_static_reader_takes(reader: str, format: str | None) -> None:
    inputs = Inputs(WHERE)
    dtype = torch.bfloat16 if GPU else torch.float32
    x, hidden = inputs.randn(40, 64, dtype=dtype), inputs.randn(48, 64, dtype=dtype, scale=0.2)
    bias = inputs.randn(48, dtype=dtype)
    codes = quantize_weight(inputs.randn(32, 48, dtype=dtype, scale=0.1), reader)
    step = inputs.tensor(6.0 / LARGEST[codes.operand.dtype], torch.float32)
    then = StaticWeight(codes.codes, codes.scales, block=codes.block, dtype=dtype, x_scale=step)
    weight: Any = hidden
    if format is not None:
        weight = quantize_weight(hidden, "int8" if format == "static" else format)
    if format == "static":
        given = {"x_scale": inputs.tensor(4.0 / 127, torch.float32), "x_zero": inputs.tensor(3.0, torch.float32)}
        weight = StaticWeight(weight.codes, weight.scales, block=weight.block, dtype=dtype, **given)
    if not GPU and format is None:
        x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    between = ops.linear_quantize(x, weight, then, bias, "gelu")
    want = ops.linear(ops.linear(x, weight, bias, "gelu").to(dtype), then)
    got = ops.linear(between, then)
    assert between.codes.dtype == then.operand.dtype
    assert ((got - want).norm() / want.norm()).item() < 0.02


def test_small_products_take_low_tiles_and_large_ones_the_largest() -> None:
    card = device_named("h100")
    space = next(impl.space for impl in cast_linear_op.impls if impl.name == "sm90")
    make: Any = cast_linear_op.make
    for m, activation, tile in ((4096, "none", (128, 256)), (64, "none", (64, 128)), (64, "silu_mul", (64, 256))):
        problem = cast_linear_op.problem(*make(Inputs("meta"), M=m, N=4096, K=4096, activation=activation))
        config = space.default(card, problem)
        assert (config["BLOCK_M"], config["BLOCK_N"]) == tile
        assert config in list(space.configs(card, problem))


X, W, ONE = torch.ones(2, 16).bfloat16(), torch.ones(4, 16).bfloat16(), torch.tensor(1.0)
BAD = (
    (lambda: ops.cast_linear(X, W[:, :8], INT8, ONE), r"with one K; got x \[2, 16\] and weight \[4, 8\]"),
    (lambda: ops.cast_linear(X, W, torch.bfloat16), "dtype must be float32, int8 or a float8; got torch.bfloat16"),
    (lambda: ops.cast_linear(X, W, INT8), "x torch.bfloat16 and dtype torch.int8, y_scale must be given"),
    (lambda: ops.cast_linear(X, W, torch.float32, ONE), "dtype torch.float32, y_scale must not be given"),
    (lambda: ops.cast_linear(X, W, INT8, torch.ones(2)), r"y_scale must be \[\], float32 on cpu; got \[2\]"),
    (lambda: ops.cast_linear(X, W, INT8, ONE, x_scales=torch.ones(2)), "dtype torch.int8, x_scales must not be given"),
    (lambda: ops.cast_linear(X.char(), W.char(), INT8, ONE), "x torch.int8 and dtype torch.int8, x_scales must be given"),
    (lambda: ops.cast_linear(X, W, INT8, ONE, bias=torch.ones(4)), r"bias must be \[4\], bfloat16 "),
    (lambda: ops.cast_linear(X.float(), W.float(), INT8, ONE), "x and weight must be bfloat16, float16, int8"),
    (
        lambda: ops.cast_linear(X.char()[:, :1].expand(2, 131073), W.char()[:, :1].expand(4, 131073), INT8, ONE),
        "K must be at most 131072",
    ),
)


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
