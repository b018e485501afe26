"""Quantised weights: what they stand for, which product they take, how they move, split and differentiate."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright import formats, invariant, nn, ops
from tilewright.kernels.device.activations import ACTIVATION_FORMS
from tilewright.kernels.gemm.problem import ACTIVATIONS
from tilewright.ops import weights as weights_module
from tilewright.ops.linear import FEW_ROWS, QuantizedActivation
from tilewright.ops.weights import (
    WEIGHT_FORMATS,
    MixedWeight,
    QuantizedWeight,
    ScaledWeight,
    StaticWeight,
    quantize_weight,
    stack_rows,
)

N, K = 160, 256
ALL = list(WEIGHT_FORMATS)
MANY = FEW_ROWS + 4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(format: str, n: int = N, k: int = K) -> tuple[Tensor, QuantizedWeight]:
    weight = randn(n, k) * k**-0.5
    return weight, quantize_weight(weight, format)


def rounded(x: Tensor, format: str) -> Tensor:
    """What the product sees of the activation where there are many rows."""
    blocks = {"int8": ("int8", "row"), "fp8": ("fp8", "row"), "fp8-block": ("fp8", (1, 128)), "mxfp8": ("mxfp8", None)}
    if format not in blocks:
        return x
    return formats.dequantize(formats.quantize(x, *blocks[format]))


FINISH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "gelu": F.gelu,
    "silu_mul": lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
}


@pytest.mark.parametrize("rows", [1, FEW_ROWS, MANY])
@pytest.mark.parametrize("activation", FINISH)
@pytest.mark.parametrize("format", ALL)
def test_linear_is_the_product_with_what_the_codes_mean(format: str, activation: str, rows: int) -> None:
    _, weight = quantized(format)
    x, bias = randn(rows, K, seed=1), randn(N, seed=2)
    seen = x if rows <= FEW_ROWS else rounded(x, format)
    want = FINISH[activation](F.linear(seen.double(), weight.dequantize(torch.float64), bias.double()))
    residual = randn(*want.shape, seed=3)
    got = ops.linear(x, weight, bias, activation, residual)
    torch.testing.assert_close(got, (want + residual).float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [1, MANY])
@pytest.mark.parametrize("activation", FINISH)
@pytest.mark.parametrize(("format", "zero", "with_bias"), [("int8", None, True), ("fp8", None, False), ("int8", -37.0, True)])
def test_static_scales(format: str, zero: float | None, with_bias: bool, activation: str, rows: int) -> None:
    """In float64: (q - zero) * scale is the activation, saturated; the sum of a weight's codes makes up for the zero point."""
    _, dynamic = quantized(format)
    largest = formats.FORMATS[format].largest
    scale, point = torch.tensor(2.0 / largest), None if zero is None else torch.tensor(zero)
    weight = StaticWeight(dynamic.codes, dynamic.scales, block=dynamic.block, dtype=torch.float32, x_scale=scale, x_zero=point)
    assert weight.format == f"{format}-static"
    x, bias = randn(rows, K, seed=1), randn(N, seed=2) if with_bias else None
    seen = x.double()
    if rows > FEW_ROWS:
        low, high = (-largest, largest) if zero is None else (-128 - zero, 127 - zero)
        scaled = (x * (torch.ones(()) / scale)).clamp(low, high)
        seen = (scaled.round() if format == "int8" else scaled.to(torch.float8_e4m3fn)).double() * scale.double()
    want = F.linear(seen, weight.dequantize(torch.float64), None if bias is None else bias.double())
    got = ops.linear(x, weight, bias, activation)
    torch.testing.assert_close(got, FINISH[activation](want).float(), rtol=2e-5, atol=2e-5)
    parts = weight.split_rows([64, N - 64])
    assert torch.equal(torch.cat([ops.linear(x, part, None) for part in parts], 1), ops.linear(x, weight, None))
    assert torch.equal(ops.linear(x, stack_rows(parts), bias, activation), got)
    parts[1].x_scale = scale * 2
    if zero is None:
        return  # the larger scale is taken: test_static_weights_stack_under_one_scale_and_only_with_one_zero_point
    with pytest.raises(
        ValueError, match=r"stack_rows: .* share one activation, so their static scales and zero points must be equal"
    ):
        stack_rows(parts)


# Relative RMS that rounding to so many bits costs normal numbers, with some room.
ERRORS = {"int8": 0.011, "fp8": 0.028, "fp8-block": 0.028, "mxfp8": 0.032, "int4": 0.105, "int8-weight": 0.011}


@pytest.mark.parametrize("format", ALL)
def test_a_weight_says_what_it_stands_for(format: str) -> None:
    exact, weight = quantized(format)
    assert (weight.shape, weight.dim(), weight.dtype, weight.format) == (exact.shape, 2, torch.float32, format)
    assert weight.device == exact.device
    error = (weight.dequantize() - exact).norm() / exact.norm()
    assert 0.3 * ERRORS[format] < error < ERRORS[format]
    bits = 8 * weight.nbytes / exact.numel()
    assert bits < (4.4 if format == "int4" else 8.3)
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert format in repr(weight)


class Ops(TorchDispatchMode):
    """The names of tilewright's ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket)
        if name.startswith("tilewright."):
            self.names.append(name.removeprefix("tilewright."))
        return func(*args, **(kwargs or {}))


PRODUCT = {"int8": "scaled_linear", "fp8": "scaled_linear", "fp8-block": "block_scaled_linear", "mxfp8": "block_scaled_linear"}


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize(("rows", "alike"), [(1, False), (FEW_ROWS, False), (MANY, False), (1, True)])
def test_rows_decide_the_product_and_in_the_invariant_scope_nothing_does(format: str, rows: int, alike: bool) -> None:
    _, weight = quantized(format)
    with Ops() as seen, torch.no_grad():
        if alike:
            with invariant():
                ops.linear(randn(rows, K), weight)
        else:
            ops.linear(randn(rows, K), weight)
    few = rows <= FEW_ROWS and not alike
    assert seen.names[-1] == ("mixed_linear" if few else PRODUCT.get(format, "mixed_linear"))
    assert len(seen.names) == (1 if few or format not in PRODUCT else 2)


@pytest.mark.parametrize("format", [f for f in ALL if not WEIGHT_FORMATS[f].divides])
def test_any_k_and_rows_that_begin_at_multiples_of_16_bytes(format: str) -> None:
    exact, weight = quantized(format, 24, 100)
    assert weight.codes.shape == (24, 100)
    assert weight.codes.stride(0) == 112
    x = randn(MANY, 100, seed=1)
    want = F.linear(rounded(x, format), weight.dequantize())
    torch.testing.assert_close(ops.linear(x, weight), want, rtol=2e-5, atol=2e-5)
    assert (weight.dequantize() - exact).norm() < 0.04 * exact.norm()


def test_int4_takes_groups_of_64_where_128_do_not_divide() -> None:
    assert quantized("int4", 8, 256)[1].block == (1, 128)
    assert quantized("int4", 8, 192)[1].block == (1, 64)
    with pytest.raises(
        ValueError,
        match=r"int4 has groups of 128 or 64 inputs, so the number of inputs must be a multiple of that; got K = 100",
    ):
        quantized("int4", 8, 100)


@pytest.mark.parametrize("format", ALL)
def test_quantising_some_rows_at_a_time_changes_nothing(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = quantized(format, 300)
    monkeypatch.setattr(weights_module, "_CHUNK_ELEMENTS", 1)
    _, pieces = quantized(format, 300)
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), pieces.buffers(), strict=True))


def test_mxfp8_rows_far_below_their_neighbours_keep_scales_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = randn(300, K)
    assert quantize_weight(exact, "mxfp8").block == (128, 128)
    exact[290] *= 2.0**-12
    for chunk in (1 << 24, 1):
        monkeypatch.setattr(weights_module, "_CHUNK_ELEMENTS", chunk)
        weight = quantize_weight(exact, "mxfp8")
        assert weight.block == (1, 128)
        error = (weight.dequantize() - exact)[290].norm() / exact[290].norm()
        assert error < ERRORS["mxfp8"]


@pytest.mark.parametrize("parts", [(128, 32), (64, 64, 32), (160,)])
@pytest.mark.parametrize("format", ALL)
def test_rows_split_and_stack(format: str, parts: tuple[int, ...]) -> None:
    """Also where a block of 128 rows lies across two parts: the numbers stay."""
    _, weight = quantized(format)
    pieces = weight.split_rows(parts)
    assert [tuple(piece.shape) for piece in pieces] == [(rows, K) for rows in parts]
    again = stack_rows(pieces)
    assert type(again) is type(weight)
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert torch.equal(torch.cat([piece.dequantize() for piece in pieces]), weight.dequantize())


def test_weights_of_two_kinds_do_not_stack() -> None:
    with pytest.raises(ValueError, match="all weights must have the same type and block"):
        stack_rows([quantized("int8")[1], quantized("int8-weight")[1]])


def test_static_weights_stack_under_one_scale_and_only_with_one_zero_point() -> None:
    plain = quantized("int8")[1]
    assert isinstance(plain, ScaledWeight)

    def static(scale: float, zero: float | None = None) -> StaticWeight:
        x_zero = None if zero is None else torch.tensor(zero)
        scales = {"x_scale": torch.tensor(scale), "x_zero": x_zero}
        return StaticWeight(plain.codes, plain.scales, block=plain.block, dtype=plain.dtype, **scales)

    stacked = stack_rows([static(0.25), static(0.5), static(0.125)])
    assert isinstance(stacked, StaticWeight)
    assert stacked.input_qparams == (0.5, 0.0)
    assert torch.equal(stacked.codes, plain.codes.repeat(3, 1))
    alike = stack_rows([static(0.25, 3.0), static(0.25, 3.0)])
    assert isinstance(alike, StaticWeight)
    assert alike.input_qparams == (0.25, 3.0)
    for others in ([static(0.25, 3.0), static(0.5, 3.0)], [static(0.25), static(0.25, 3.0)]):
        with pytest.raises(ValueError, match="static scales and zero points must be equal; got"):
            stack_rows(others)


def layer(format: str, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(K, (96, 64), bias=True, dtype=dtype)
    made.bias = torch.nn.Parameter(randn(N, seed=2).to(dtype), requires_grad=False)
    made.replace_weight(quantize_weight((randn(N, K) * K**-0.5).to(dtype), format))
    return made


@pytest.mark.parametrize("format", ALL)
def test_a_layer_moves_casts_and_loads(format: str) -> None:
    made = layer(format)
    weight = made.weight
    assert isinstance(weight, QuantizedWeight)
    before = [buffer.clone() for buffer in weight.buffers()]
    made.to(torch.bfloat16)
    assert weight.dtype == torch.bfloat16
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, weight.buffers(), strict=True))
    assert made(randn(3, K).bfloat16()).dtype == torch.bfloat16
    other = copy.deepcopy(made).to_empty(device="cpu")
    other.load_state_dict(made.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.weight.buffers(), before, strict=True))
    assert copy.deepcopy(made).to("meta").weight.device.type == "meta"
    assert format in repr(made)


@pytest.mark.parametrize("format", ALL)
def test_the_activation_gets_the_gradient_of_the_dequantised_weight(format: str) -> None:
    _, weight = quantized(format)
    for rows, activation in ((3, "silu_mul"), (MANY, "gelu"), (MANY, "silu_mul")):
        x, bias = randn(rows, K, seed=1).requires_grad_(), randn(N, seed=2).requires_grad_()
        y = ops.linear(x, weight, bias, activation)
        grad = randn(*y.shape, seed=4)
        y.backward(grad)
        plain_x, plain_bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
        FINISH[activation](F.linear(plain_x, weight.dequantize(), plain_bias)).backward(grad)
        torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(bias.grad, plain_bias.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_through_every_activation_compile_whole(activation: str) -> None:
    torch._dynamo.reset()
    _, weight = quantized("int8")
    x, bias = randn(MANY, K, seed=1), randn(N, seed=2)
    residual = randn(MANY, N // 2 if ACTIVATIONS[activation][1] else N, seed=3)
    given = [tensor.requires_grad_() for tensor in (x, bias, residual)]
    grad = randn(*residual.shape, seed=4)
    compiled = torch.compile(ops.linear, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x, weight, bias, activation, residual), given, grad)
    plain = ACTIVATION_FORMS[activation](F.linear(x, weight.dequantize(), bias)) + residual
    for mine, theirs in zip(got, torch.autograd.grad(plain, given, grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("rows", [2, MANY])
def test_layers_compile_whole(format: str, rows: int) -> None:
    torch._dynamo.reset()
    made, x = layer(format), randn(rows, K, seed=1)
    with torch.no_grad():
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, "silu_mul"), made(x, "silu_mul"))


@pytest.mark.parametrize("format", ALL)
def test_layers_run_on_tensors_without_values(format: str) -> None:
    made = layer(format, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for rows in (2, MANY):
            y = made(torch.empty(rows, K, dtype=torch.bfloat16))
            assert (y.shape, y.dtype) == ((rows, N), torch.bfloat16)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("format", ALL)
def test_a_norm_writes_the_codes_that_its_reader_would_make(format: str, first: bool) -> None:
    """The norm's last bits may differ, so a code may be a neighbour: far less than rounding costs."""
    made, norm = layer(format), nn.RMSNorm(K).requires_grad_(False)
    norm.weight.copy_(randn(K, seed=5).abs() + 0.5)
    for rows, quantises in ((FEW_ROWS, False), (MANY, format in ("int8", "fp8"))):
        x, residual = randn(rows, K, seed=1), None if first else randn(rows, K, seed=2)
        normed, total = norm.add(x, residual)
        seen, again = norm.add_for(made, x, residual)
        assert isinstance(seen, QuantizedActivation) == quantises
        assert torch.equal(total, again)
        want = made(normed, "silu_mul")
        assert (made(seen, "silu_mul") - want).norm() < 2e-3 * want.norm()


def test_codes_are_for_weights_of_the_same_codes() -> None:
    codes, scales = ops.quantize_rows(randn(MANY, K), "int8")
    quantized_x = QuantizedActivation(codes, scales, torch.float32)
    for format, k in (("fp8", K), ("int8-weight", K), ("int8", K - 16)):
        with pytest.raises(
            ValueError, match=r"x is quantised to torch.int8 \[20, 256\], so the weight must be a `ScaledWeight`"
        ):
            ops.linear(quantized_x, quantized(format, N, k)[1])
    with pytest.raises(ValueError, match=r"got a weight of type Tensor"):
        ops.linear(quantized_x, randn(N, K))


def test_a_weight_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight must have the dtype and device of x, torch.bfloat16 on cpu"):
        ops.linear(randn(2, K).bfloat16(), quantized("int8")[1])


def test_formats_of_checkpoints_beyond_the_table() -> None:
    """A float8 weight whose activations stay, and float8 e5m2."""
    codes, scales, _ = formats.encode(randn(N, K), "fp8-e5m2", "row")
    for kind, name in ((MixedWeight, "fp8-e5m2-weight"), (ScaledWeight, "fp8-e5m2")):
        weight = kind(codes, scales[:, 0], block=(1, 0), dtype=torch.float32)
        assert weight.format == name
        x = randn(MANY, K, seed=1)
        error = (ops.linear(x, weight) - F.linear(x, weight.dequantize())).norm() / F.linear(x, weight.dequantize()).norm()
        assert error < (1e-5 if kind is MixedWeight else 0.07)
