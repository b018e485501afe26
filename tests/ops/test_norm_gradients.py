"""Gradients of norms and softmax: against torch's in float64, for any layout of what comes back, and which are made at all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright import ops
from tilewright.hw import env
from tilewright.kernels.launch.shapes import heads_ready, rows_of_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kernels have no float64: there the same cases run in float32.
EXACT = torch.float32 if env.interpreting() or torch.cuda.is_available() else torch.float64
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5 if EXACT.itemsize == 4 else 1e-9}
Call = Callable[..., Any]


def _added(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return F.rms_norm(x + r, w.shape, w, 1e-3), x + r


def _summed(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return F.layer_norm(x + r, w.shape, w, b, 1e-3), x + r


# name: (ours, torch's, which of x, residual, weight and bias they take)
CALLS: dict[str, tuple[Call, Call, str]] = {
    "layer_norm": (ops.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), "xwb"),
    "layer_norm, no bias": (ops.layer_norm, lambda x, w: F.layer_norm(x, w.shape, w), "xw"),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, w.shape, w, 1e-3), "xw"),
    "add_rms_norm": (lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-3), _added, "xrw"),
    "add_rms_norm, the norm": (lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-3)[0], lambda *a: _added(*a)[0], "xrw"),
    "add_rms_norm, the sum": (lambda x, r: ops.add_rms_norm(x, r, torch.ones_like(x[0, 0]))[1], lambda x, r: x + r, "xr"),
    "add_layer_norm": (lambda x, r, w, b: ops.add_layer_norm(x, r, w, b, 1e-3), _summed, "xrwb"),
    "add_layer_norm, the norm": (lambda x, r, w, b: ops.add_layer_norm(x, r, w, b, 1e-3)[0], lambda *a: _summed(*a)[0], "xrwb"),
    "add_layer_norm, the sum": (lambda x, r: ops.add_layer_norm(x, r, torch.ones_like(x[0, 0]))[1], lambda x, r: x + r, "xr"),
    "softmax": (ops.softmax, lambda x: torch.softmax(x, -1), "x"),
    "softmax, first dimension": (lambda x: ops.softmax(x, 0), lambda x: torch.softmax(x, 0), "x"),
    "log_softmax": (ops.log_softmax, lambda x: torch.log_softmax(x, -1), "x"),
    "log_softmax, middle": (lambda x: ops.log_softmax(x, 1), lambda x: torch.log_softmax(x, 1), "x"),
}  # fmt: skip


def operands(which: str, *shape: int, dtype: torch.dtype = EXACT) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = {
        name: torch.randn(shape if name in "xr" else shape[-1:], generator=generator, dtype=torch.float64) for name in "xrwb"
    }
    return [made[name].to(dtype).to(DEVICE).requires_grad_() for name in which]


def flat(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


@pytest.mark.parametrize("name", CALLS)
def test_equals_torch(name: str) -> None:
    ours, theirs, which = CALLS[name]
    inputs = operands(which, 2, 3, 50)
    got, want = flat(ours(*inputs)), flat(theirs(*(t.double() for t in inputs)))
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w.to(g.dtype), **CLOSE)
    # What comes back may be an expanded number, a transposed view, or dense.
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda t: torch.full((), 0.7, dtype=t.dtype, device=t.device).expand(t.shape),
        lambda t: torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view(t.shape[::-1]).permute(2, 1, 0),
        lambda t: torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view(t.shape),
    ]
    for layout in layouts:
        found = torch.autograd.grad(got, inputs, [layout(t) for t in got], retain_graph=True)
        wanted = torch.autograd.grad(want, inputs, [layout(t) for t in want], retain_graph=True)
        for f, w in zip(found, wanted, strict=True):
            torch.testing.assert_close(f, w, **CLOSE)


@pytest.mark.skipif(EXACT.itemsize < 8, reason="gradcheck wants float64, which kernels do not have")
@pytest.mark.parametrize("name", CALLS)
def test_gradcheck(name: str) -> None:
    ours, _, which = CALLS[name]
    assert torch.autograd.gradcheck(ours, operands(which, 2, 2, 5))


def test_only_what_is_asked_for() -> None:
    x, w, b = operands("xwb", 3, 4, 8)
    y = ops.layer_norm(x.detach(), w, b.detach())
    assert y.requires_grad
    y.sum().backward()
    assert w.grad is not None
    assert x.grad is None
    assert b.grad is None
    with torch.no_grad():
        assert not ops.layer_norm(x, w, b).requires_grad
        assert not ops.softmax(x).requires_grad
    assert not ops.rms_norm(x.detach(), w.detach()).requires_grad


def test_rows_of_nothing() -> None:
    x, w = operands("xw", 0, 3, 8)
    ops.rms_norm(x, w).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()
    x = operands("x", 0, 3, 8)[0]
    ops.softmax(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_there_is_no_second_gradient() -> None:
    """Silence would be a wrong number."""
    x, w = operands("xw", 2, 2, 4)
    (first,) = torch.autograd.grad(ops.rms_norm(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_such_dimension() -> None:
    with pytest.raises(ValueError, match="dim must be -2 to 1"):
        ops.softmax(torch.zeros(2, 3), 2)
    with pytest.raises(ValueError, match="log_softmax: x must hold floats and have a last dimension"):
        ops.log_softmax(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("tokens", "heads", "others", "dim"),
    [(37, 4, 3, 128), (5, 2, 1, 64), (9, 3, 2, 100), (3, 2, 1, 36), (6, 1, 2, 16), (1, 4, 2, 64)],
)
@pytest.mark.parametrize("first", [True, False], ids=["first heads", "last heads"])
def test_heads_of_a_merged_projection_are_read_in_place(tokens: int, heads: int, others: int, dim: int, first: bool) -> None:
    """The bits of a dense copy, without the copy."""
    generator = torch.Generator().manual_seed(4)
    both = torch.randn(tokens, heads + others, dim, generator=generator).bfloat16().to(DEVICE)
    weight, dy = (torch.randn(size, generator=generator).bfloat16().to(DEVICE) for size in ((dim,), (tokens, heads, dim)))
    found = []
    for dense in (False, True):
        x = both[:, :heads] if first else both[:, others:]
        x, w = (x.clone() if dense else x).detach().requires_grad_(), weight.clone().requires_grad_()
        assert x.is_contiguous() == (dense or tokens == 1)
        y = ops.rms_norm(x, w, 1e-3)
        found.append([y.detach(), *torch.autograd.grad(y, (x, w), dy)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    rows, stride, together = rows_of_heads(heads_ready(both[:, :heads]))
    assert (rows, together) == (tokens * heads, heads if tokens > 1 and heads > 1 else 1)
    assert stride == (both.stride(0) if tokens > 1 else dim)


def test_heads_that_kernels_cannot_count_on_are_copied() -> None:
    wide = torch.zeros(4, 3 * 64 + 1)[:, : 3 * 64].view(4, 3, 64)  # tokens start anywhere
    apart = torch.zeros(4, 64, 3).mT  # numbers of a head are not beside each other
    gaps = torch.zeros(4, 7, 64)[:, ::3]  # heads are not
    assert all(heads_ready(x).is_contiguous() for x in (wide, apart, gaps))
