"""`linear_straight_through`: the value is the quantised product's, the gradient the float product's."""

import pytest
import torch
from torch import Tensor

from tilewright import nn, ops
from tilewright.op import invariant
from tilewright.ops.weights import WEIGHT_FORMATS, quantize_weight

N, K = 48, 64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("activation", ["none", "silu_mul", "gelu"])
@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_values_are_of_the_quantised_weight_and_gradients_of_the_float_one(format: str, activation: str, rows: int) -> None:
    x, weight, bias = (t.requires_grad_() for t in (randn(rows, K, seed=1), randn(N, K, seed=2), randn(N, seed=3)))
    quantized = quantize_weight(weight.detach(), format)
    y = ops.linear_straight_through(x, weight, quantized, bias, activation)
    with torch.no_grad():
        served = ops.linear(x, quantized, bias, activation)
        assert torch.equal(ops.linear_straight_through(x, weight, quantized, bias, activation), served)
        assert not torch.equal(ops.linear(x, weight, bias, activation), served)
    assert torch.equal(y, served)
    dy = randn(*y.shape, seed=4)
    found = torch.autograd.grad(y, (x, weight, bias), dy)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    z = exact[0] @ exact[1].T + exact[2]
    if activation == "silu_mul":
        z = torch.nn.functional.silu(z[:, : N // 2]) * z[:, N // 2 :]
    elif activation == "gelu":
        z = torch.nn.functional.gelu(z)
    for ours, wanted in zip(found, torch.autograd.grad(z, exact, dy.double())):
        assert float((ours.double() - wanted).norm()) < 1e-6 * float(wanted.norm())


def test_the_invariant_scope_has_the_bits_of_the_quantised_product_too() -> None:
    x, weight = randn(5, K).bfloat16(), randn(N, K, seed=1).bfloat16().requires_grad_()
    quantized = quantize_weight(weight.detach(), "int8")
    with invariant():
        learnt = ops.linear_straight_through(x, weight, quantized)
        with torch.no_grad():
            assert torch.equal(learnt, ops.linear(x, quantized))
    assert learnt.requires_grad


def test_a_layer_with_a_quantised_weight_keeps_its_float_weight() -> None:
    layer = nn.Linear(K, N)
    layer.requires_grad_(True)
    assert isinstance(layer.weight, Tensor)
    with torch.no_grad():
        layer.quantized_weight = quantize_weight(layer.weight, "fp8")
        assert torch.equal(layer(randn(3, K)), ops.linear(randn(3, K), layer.quantized_weight, layer.bias))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    layer(randn(3, K)).sum().backward()
    assert layer.weight.grad is not None


def test_the_quantised_form_of_another_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[48, 64\] on cpu for a weight of \[47, 64\]"):
        ops.linear_straight_through(randn(2, K), randn(N - 1, K), quantize_weight(randn(N, K), "int8"))
