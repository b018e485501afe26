"""Activations, gates, dropout and rope through their public functions: values, strides and gradients against torch's own."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright import ops
from tilewright.kernels.elementwise.activation import KINDS
from tilewright.kernels.elementwise.rope import rope_table
from tilewright.ops.pointwise import gated_halves


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul_(2).to(dtype)


TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    **{kind: getattr(F, kind) for kind in KINDS if kind != "gelu_tanh"},
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "every other": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "expanded": lambda x: x[:1].expand(2, 3, 4, 5),
}


def same_with_gradients(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Tensor) -> None:
    """Values and the gradients of a random weighted sum, both in float64."""
    both = []
    for function in (ours, theirs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = function(*leaves)
        both.append((y.detach(), *torch.autograd.grad(y, leaves, randn(*y.shape, dtype=y.dtype, seed=5))))
    for ours_, theirs_ in zip(*both, strict=True):
        torch.testing.assert_close(ours_, theirs_)


@pytest.mark.parametrize("kind", KINDS)
def test_activation(kind: str) -> None:
    for layout in LAYOUTS.values():
        x = layout(randn(2, 3, 4, 5))
        assert ops.activation(x, kind, 0.3).stride() == TORCH[kind](x).stride() or x.stride(0) == 0
        same_with_gradients(lambda x: ops.activation(x, kind, 0.3), TORCH[kind], x)
    same_with_gradients(lambda x: ops.activation(x, kind, 0.3), TORCH[kind], torch.tensor([-3.0, -0.0, 0.0, 3.0, 40.0, -40.0]))
    assert ops.activation(torch.full((3,), torch.nan), kind).isnan().all()


GATES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (ops.silu_mul, F.silu),
    "gelu": (ops.gelu_mul, F.gelu),
    "gelu_tanh": (lambda gate, up: ops.gelu_mul(gate, up, True), TORCH["gelu_tanh"]),
    "sigmoid": (lambda gate, up: ops.gated_mul(gate, up, "sigmoid"), torch.sigmoid),
    "relu": (lambda gate, up: ops.gated_mul(gate, up, "relu"), F.relu),
}


@pytest.mark.parametrize("kind", GATES)
def test_gates(kind: str) -> None:
    ours, act = GATES[kind]
    same_with_gradients(ours, lambda gate, up: act(gate) * up, randn(2, 3, 6), randn(2, 3, 6, seed=4))
    same_with_gradients(lambda x: ours(*x.chunk(2, -1)), lambda x: act(x[..., :3]) * x[..., 3:], randn(4, 6))
    same_with_gradients(lambda x: ops.glu(x, 1, kind), lambda x: x[:, :3] * act(x[:, 3:]), randn(2, 6, 3))
    same_with_gradients(lambda x: ops.glu(x, kind=kind), lambda x: x[..., :3] * act(x[..., 3:]), randn(2, 6))


@pytest.mark.parametrize("kind", GATES)
def test_the_gradient_of_a_merged_projection_is_written_in_one_piece(kind: str) -> None:
    """The bits of two halves put together, without putting them together."""
    dy = randn(4, 3, seed=1)
    x, halves = (randn(4, 6).requires_grad_(True) for _ in range(2))
    with _Called() as called:
        (one,) = torch.autograd.grad(gated_halves(x, kind), x, dy)
    assert called.names
    assert not [name for name in called.names if "cat" in name or "slice_backward" in name or "copy" in name]
    (two,) = torch.autograd.grad(GATES[kind][0](*halves.chunk(2, -1)), halves, dy)
    assert torch.equal(one, two)


class _Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dropout() -> None:
    """The share is right, the rest is scaled, the same state repeats, and the gradient has the mask of its forward pass."""
    x, state = torch.rand(64, 1000) + 1, torch.tensor([3, 0])
    for p in (0.0, 0.1, 0.5, 0.9):
        y = ops.dropout(x, p, state)
        kept = y != 0
        assert abs(float(kept.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5 + 1e-9
        torch.testing.assert_close(y[kept], x[kept] / (1 - p))
        assert torch.equal(y, ops.dropout(x, p, state))
    assert not torch.equal(ops.dropout(x, 0.5, state), ops.dropout(x, 0.5, torch.tensor([3, 1])))
    assert not torch.equal(ops.dropout(x, 0.5, state), ops.dropout(x, 0.5, torch.tensor([4, 0])))
    torch.manual_seed(11)
    first = ops.dropout(x)
    assert not torch.equal(first, ops.dropout(x))
    torch.manual_seed(11)
    assert torch.equal(first, ops.dropout(x))
    for layout in LAYOUTS.values():
        leaf = layout(randn(2, 3, 4, 5) + 9).detach().requires_grad_()
        y = ops.dropout(leaf, 0.5, state)
        (grad,) = torch.autograd.grad(y, leaf, torch.ones(2, 3, 4, 5).double())
        assert torch.equal(grad, (y.detach() != 0) * 2.0)
    assert not ops.dropout(x, 1.0).any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool) -> None:
    """There and back again; and <R x, w> = <x, gradient>, as R is linear."""
    q, k, positions, table = randn(5, 3, 8), randn(5, 2, 8, seed=4), torch.tensor([0, 1, 7, 7, 30]), rope_table(6, 31, 100.0)
    turned = ops.rope(q, k, positions, table, interleaved)
    for back, start in zip(ops.rope(*turned, positions, table, interleaved, inverse=True), (q, k), strict=True):
        torch.testing.assert_close(back, start, atol=1e-6, rtol=0)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    weights = (randn(5, 3, 8, seed=6), randn(5, 2, 8, seed=7))
    grads = torch.autograd.grad(ops.rope(*leaves, positions, table, interleaved), leaves, weights)
    for x, y, weight, grad in zip((q, k), turned, weights, grads, strict=True):
        torch.testing.assert_close((y * weight).sum(), (x * grad).sum())  # a rotation is linear
        assert grad.shape == x.shape


def test_no_gradient_of_a_gradient() -> None:
    x = randn(5).requires_grad_()
    (grad,) = torch.autograd.grad(ops.activation(x, "tanh").sum(), x, create_graph=False)
    assert not grad.requires_grad
    with pytest.raises(RuntimeError, match="forward only"):
        torch.autograd.grad(ops.activation(x, "tanh").sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.activation(x, "selu"), "kind is 'selu', wanted one of elu, gelu"),
        (lambda x: ops.activation(x.int(), "relu"), "x is torch.int32, wanted bfloat16, float16 or float32"),
        (lambda x: ops.gated_mul(x, x, "mish"), "kind is 'mish', wanted one of relu, sigmoid, silu, gelu, gelu_tanh"),
        (lambda x: ops.gated_mul(x, x[:1], "relu"), "must have one shape and dtype"),
        (lambda x: ops.glu(x, 0), "an even size along dimension 0, got (3, 4)"),
        (lambda x: ops.glu(x, kind="mish"), "kind is 'mish', wanted one of relu, sigmoid"),
        (lambda x: ops.dropout(x, -0.1), "p is -0.1, wanted 0 <= p < 1"),
        (lambda x: ops.dropout(x, 0.5, torch.zeros(2)), "state must be int64 [2], (seed, offset), on cpu"),
    ],
)
def test_refused(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(torch.zeros(3, 4))
