"""group_norm, instance_norm and batch_norm with their gradients and running statistics: against torch's in float64."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import prune

from tilewright import nn, ops
from tilewright.hw import env
from tilewright.op import Inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kernels have no float64: there the same cases run in float32.
EXACT = torch.float32 if env.interpreting() or torch.cuda.is_available() else torch.float64
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5 if EXACT.itemsize == 4 else 1e-9}
Call = Callable[..., Tensor]

# name: (ours, torch's) of x, running_mean, running_var, weight, bias
CALLS: dict[str, tuple[Call, Call]] = {
    "group_norm": (lambda x, m, v, w, b: ops.group_norm(x, 2, w, b), lambda x, m, v, w, b: F.group_norm(x, 2, w, b)),
    "group_norm, one group": (lambda x, m, v, w, b: ops.group_norm(x, 1), lambda x, m, v, w, b: F.group_norm(x, 1)),
    "instance_norm": (lambda *a: ops.instance_norm(*a, momentum=0.3), lambda *a: F.instance_norm(*a, momentum=0.3)),
    "instance_norm, running": (
        lambda *a: ops.instance_norm(*a, use_input_stats=False), lambda *a: F.instance_norm(*a, use_input_stats=False),
    ),
    "batch_norm, training": (
        lambda *a: ops.batch_norm(*a, training=True, momentum=0.3), lambda *a: F.batch_norm(*a, training=True, momentum=0.3),
    ),
    "batch_norm, running": (lambda *a: ops.batch_norm(*a), lambda *a: F.batch_norm(*a)),
    "batch_norm, and what follows": (
        lambda x, *a: ops.batch_norm(x, *a, activation="silu", residual=2 * x),
        lambda x, *a: F.silu(F.batch_norm(x, *a) + 2 * x),
    ),
    "batch_norm, training, and what follows": (
        lambda x, m, v, w, b: ops.batch_norm(x, m, v, w, b, True, activation="silu", residual=x / 8),
        lambda x, m, v, w, b: F.silu(F.batch_norm(x, m, v, w, b, True) + x / 8),
    ),
    "batch_norm, training, and relu": (
        lambda x, m, v, w, b: ops.batch_norm(x, m, v, w, b, True, activation="relu", residual=x / 8),
        lambda x, m, v, w, b: F.relu(F.batch_norm(x, m, v, w, b, True) + x / 8),
    ),
    "batch_norm, no bias": (
        lambda x, m, v, w, b: ops.batch_norm(x, None, None, w, None, True),
        lambda x, m, v, w, b: F.batch_norm(x, None, None, w, None, True),
    ),
}  # fmt: skip
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels first": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "every other place": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


def operands(*shape: int, dtype: torch.dtype = EXACT) -> list[Tensor]:
    """x, running_mean, running_var, weight, bias. The mean is far from zero for the deviation of one channel."""
    generator = torch.Generator().manual_seed(4)
    x, *vectors = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape, *[shape[1:2]] * 4))
    x[:, 1] = x[:, 1] / 4 + 10
    vectors[1] = vectors[1].square() + 0.5
    return [t.to(dtype).to(DEVICE) for t in (x, *vectors)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_equals_torch(name: str, layout: str) -> None:
    ours, theirs = CALLS[name]
    x, *vectors = operands(3, 6, 5, 4)
    x = LAYOUTS[layout](x)
    mine, twin = ([t.to(d).clone() for t in (x, *vectors)] for d in (x.dtype, torch.float64))
    for tensors in (mine, twin):
        for at in (0, 3, 4):
            tensors[at].requires_grad_()
    got, want = ours(*mine), theirs(*twin)
    torch.testing.assert_close(got, want.to(got.dtype), **CLOSE)
    assert got.is_contiguous(memory_format=torch.channels_last if layout == "channels last" else torch.contiguous_format)
    for at in (1, 2):
        torch.testing.assert_close(mine[at], twin[at].to(EXACT), **CLOSE)
    dy = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got.backward(dy.to(got.dtype))
    want.backward(dy.double())
    for mine_, twin_ in zip(mine, twin, strict=True):
        assert (mine_.grad is None) == (twin_.grad is None)
        if mine_.grad is not None and twin_.grad is not None:
            torch.testing.assert_close(mine_.grad, twin_.grad.to(mine_.dtype), **CLOSE)


@pytest.mark.parametrize("shape", [(5, 6), (1, 6, 7), (2, 6, 1, 3, 2), (4, 6, 1)], ids=str)
def test_any_places(shape: tuple[int, ...]) -> None:
    x, m, v, w, b = operands(*shape)
    with torch.no_grad():
        torch.testing.assert_close(ops.group_norm(x, 3, w, b), F.group_norm(x, 3, w, b), **CLOSE)
        torch.testing.assert_close(ops.batch_norm(x, m, v, w, b), F.batch_norm(x, m, v, w, b), **CLOSE)
        torch.testing.assert_close(ops.batch_norm(x, None, None, w, b, True), F.batch_norm(x, None, None, w, b, True), **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_running_statistics_in_one_launch(layout: str) -> None:
    x, m, v, w, _ = operands(3, 6, 5, 4)
    residual = x.flip(0)
    x = LAYOUTS[layout](x)
    got = ops.batch_norm(x, m, v, w, None, eps=1e-3, activation="gelu", residual=residual)
    want = F.gelu(F.batch_norm(x, m, v, w, None, eps=1e-3) + residual)
    torch.testing.assert_close(got, want, **CLOSE)
    assert got.is_contiguous(memory_format=torch.channels_last if layout == "channels last" else torch.contiguous_format)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norm_with_what_stands_around_it(layout: str) -> None:
    x, _, _, w, b = operands(3, 6, 5, 4)
    added, x = x.mean((2, 3)).flip(0), LAYOUTS[layout](x)
    want = F.silu(F.group_norm(x + added[..., None, None], 2, w, b))
    with torch.no_grad():
        got = ops.group_norm(x, 2, w, b, added=added, activation="silu")
    torch.testing.assert_close(got, want, **CLOSE)
    assert got.is_contiguous(memory_format=torch.channels_last if layout == "channels last" else torch.contiguous_format)


def test_gradients_of_what_stands_around_group_norm() -> None:
    x, _, _, w, b = operands(2, 6, 5)
    mine = [t.clone().requires_grad_() for t in (x, w, b, x[..., 0])]
    twin = [t.clone().double().requires_grad_() for t in (x, w, b, x[..., 0])]
    got = ops.group_norm(mine[0], 3, mine[1], mine[2], added=mine[3], activation="gelu")
    want = F.gelu(F.group_norm(twin[0] + twin[3][..., None], 3, twin[1], twin[2]))
    torch.testing.assert_close(got, want.to(got.dtype), **CLOSE)
    for mine_, twin_ in zip(torch.autograd.grad(got.sum(), mine), torch.autograd.grad(want.sum(), twin), strict=True):
        torch.testing.assert_close(mine_, twin_.to(mine_.dtype), **CLOSE)


def test_weights_may_be_wider_than_images() -> None:
    x, m, v, w, b = operands(2, 4, 8)
    half = x.to(torch.bfloat16)
    got = ops.batch_norm(half, m, v, w, b, True)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.to(EXACT), F.batch_norm(half.to(EXACT), None, None, w, b, True), rtol=1e-2, atol=1e-2)


def test_no_images() -> None:
    x, m, v, w, b = operands(2, 4, 8)
    assert ops.group_norm(x[:0], 2, w, b).shape == (0, 4, 8)
    assert ops.batch_norm(x[:0], m, v, w, b).shape == (0, 4, 8)


X, V = torch.zeros(2, 6, 5), torch.zeros(6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.group_norm(X, 4), "the number of channels of x, 6, must be a multiple of num_groups, got 4"),
        (lambda: ops.group_norm(X, 0), "got 0"),
        (lambda: ops.group_norm(X, 2, V[:5]), "weight must be [6], one number per channel; got [5]"),
        (
            lambda: ops.group_norm(X, 2, added=X[..., 0].T),
            "added must be [2, 6], like the first two dimensions of x; got [6, 2]",
        ),
        (lambda: ops.group_norm(X, 2, activation="swish"), "activation is 'swish', wanted one of none, relu"),
        (lambda: ops.group_norm(X.int(), 2), "must be floating point [N, C, ...]"),
        (lambda: ops.instance_norm(X[..., 0]), "with at least one spatial dimension, got [2, 6]"),
        (lambda: ops.instance_norm(X[..., :1]), "more than one position"),
        (lambda: ops.instance_norm(X, use_input_stats=False), "running_mean and running_var are needed"),
        (lambda: ops.batch_norm(X, None, None), "running_mean and running_var are needed"),
        (lambda: ops.batch_norm(X[:1, :, :1], V, V, training=True), "more than one value per channel, got [1, 6, 1]"),
        (lambda: ops.batch_norm(X, V, V[:1]), "running_var must be [6]"),
        (
            lambda: ops.batch_norm(X, V, V, activation="mish"),
            "activation must be one of none, relu, gelu, gelu_tanh, silu; got",
        ),
        (lambda: ops.batch_norm(X, V, V, residual=X[1:]), "residual must be [2, 6, 5] torch.float32; got [1, 6, 5]"),
    ],
)
def test_refused_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_layer_whose_weight_is_pruned() -> None:
    """Then the weight is an attribute, made of a parameter of another name."""
    layer, twin = nn.BatchNorm2d(4).to(DEVICE), torch.nn.BatchNorm2d(4).to(DEVICE)
    x = Inputs(DEVICE).randn(2, 4, 3, 3)
    for norm in (layer, twin):
        prune.random_unstructured(norm, "weight", 2)
        norm.get_buffer("weight_mask").copy_(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    torch.testing.assert_close(layer(x), twin(x), **CLOSE)
