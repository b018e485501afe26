"""Gradients of `linear` with float weights, for every activation, against torch's in float64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.launch.replay import Held
from tilewright.ops import linear_gradient

ACTIVATIONS = {
    "none": lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
    "silu_mul": lambda y: F.silu(y[..., :3]) * y[..., 3:],
    "gelu_mul": lambda y: F.gelu(y[..., :3]) * y[..., 3:],
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_torch(activation: str, lead: tuple[int, ...]) -> None:
    width = 3 if activation.endswith("_mul") else 6
    tensors = (randn(*lead, 4, seed=1), randn(6, 4, seed=2), randn(6, seed=3), randn(*lead, width, seed=4))
    results = []
    for ours in (True, False):
        leaves = [t.clone().requires_grad_() for t in tensors]
        x, weight, bias, residual = leaves
        if ours:
            y = ops.linear(x, weight, bias, activation, residual)
        else:
            y = ACTIVATIONS[activation](F.linear(x, weight, bias)) + residual
        results.append((y.detach(), *torch.autograd.grad(y, leaves, randn(*y.shape, seed=5))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(ops.linear(tensors[0], *tensors[1:3], activation, tensors[3]), results[1][0])


def test_only_what_is_asked_for() -> None:
    x, weight = randn(5, 4, seed=1), randn(6, 4, seed=2).requires_grad_()
    (grad,) = torch.autograd.grad(ops.linear(x, weight).sum(), weight)
    torch.testing.assert_close(grad, x.sum(0).expand(6, 4))
    y = ops.linear(x[:, ::2].requires_grad_(), weight.detach()[:, ::2])
    assert y.requires_grad


def test_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that were made before: here on a CPU, where nothing is chosen, every second one goes the short way."""
    reference = SimpleNamespace(impl=SimpleNamespace(launch=lambda config, *args: linear_op.reference(*args)), config={})
    monkeypatch.setattr(linear_gradient, "call_key", lambda options, x, *rest: (options, x.shape))
    monkeypatch.setattr(linear_gradient, "_AGAIN", Held())
    monkeypatch.setattr(linear_op, "chosen", lambda *args: (reference.impl, reference.config), raising=False)
    monkeypatch.setattr(linear_gradient, "_launch", lambda known, args: (linear_op.reference(*args), known))
    for seed in range(3):
        results = []
        for ours in (True, False):
            x, weight, bias = (t.requires_grad_() for t in (randn(2, 3, 4, seed=seed), randn(6, 4, seed=8), randn(6, seed=9)))
            y = ops.linear(x, weight, bias, "gelu") if ours else F.gelu(F.linear(x, weight, bias))
            results.append((y.detach(), *torch.autograd.grad(y, (x, weight, bias), randn(*y.shape, seed=5))))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert len(linear_gradient._AGAIN._kept) == 1
