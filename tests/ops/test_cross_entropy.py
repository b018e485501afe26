"""cross_entropy and linear_cross_entropy: losses and gradients against torch's own in float64, and what they refuse."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright import ops
from tilewright.hw import env

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kernels have no float64: there the same cases run in float32.
EXACT = torch.float32 if env.interpreting() or torch.cuda.is_available() else torch.float64
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5 if EXACT.itemsize == 4 else 1e-9}


def case(*shape: int, ignored: bool = True, dtype: torch.dtype = EXACT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(shape[-1], shape[:-1], generator=generator)
    if ignored:
        targets.view(-1)[::3] = -100
    return logits.to(dtype).to(DEVICE).requires_grad_(), targets.to(DEVICE)


def truth(logits: Tensor, targets: Tensor, reduction: str, smoothing: float, z_loss: float) -> Tensor:
    """The definition, in float64."""
    rows, ids = logits.double().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    losses = F.cross_entropy(rows, ids, reduction="none", label_smoothing=smoothing)
    losses = losses + torch.where(ids == -100, 0, z_loss * rows.logsumexp(1) ** 2)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / ((ids != -100).sum() if reduction == "mean" else 1)


def gradient(loss: Tensor, inputs: Any, later: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs, torch.as_tensor(later, dtype=loss.dtype, device=loss.device).expand(loss.shape))


@pytest.mark.parametrize("later", [1.0, -2.5])
@pytest.mark.parametrize("where", ["forward", "in place", "backward"])
@pytest.mark.parametrize(("reduction", "smoothing", "z_loss"), [("mean", 0.0, 0.0), ("sum", 0.1, 1e-2), ("none", 0.3, 1e-2)])
def test_equals_torch(reduction: str, smoothing: float, z_loss: float, where: str, later: float) -> None:
    if where == "in place" and reduction == "none":
        where = "forward"
    logits, targets = case(2, 5, 70)
    options: Any = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
    got = ops.cross_entropy(logits * 1, targets, **options, gradient=where)
    want = truth(logits, targets, reduction, smoothing, z_loss)
    torch.testing.assert_close(got, want.to(got.dtype), **CLOSE)
    torch.testing.assert_close(gradient(got, logits, later), gradient(want, logits, later), **CLOSE)
    with torch.no_grad():
        assert torch.equal(ops.cross_entropy(logits, targets, **options), got)


@pytest.mark.parametrize("where", ["forward", "in place", "backward", "linear"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights(reduction: str, where: str) -> None:
    logits, targets = case(11, 7)
    weights = torch.linspace(0.0, 2.0, 7, dtype=EXACT, device=DEVICE)
    options: Any = {"reduction": reduction, "class_weights": weights}
    if where == "linear":
        if reduction == "none":
            return
        got = ops.linear_cross_entropy(logits, torch.eye(7, dtype=EXACT, device=DEVICE), targets, chunk=4, **options)
    else:
        given = "backward" if reduction == "none" else where
        got = ops.cross_entropy(logits * 1, targets, **options, gradient=given)
    want = F.cross_entropy(logits.double(), targets, weights.double(), reduction=reduction)
    torch.testing.assert_close(got, want.to(got.dtype), **CLOSE)
    torch.testing.assert_close(gradient(got, logits, 1.5), gradient(want, logits, 1.5), **CLOSE)


@pytest.mark.skipif(EXACT.itemsize < 8, reason="gradcheck wants float64, which kernels do not have")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction: str) -> None:
    logits, targets = case(4, 6)
    options: Any = {"reduction": reduction, "label_smoothing": 0.2, "z_loss": 0.1, "gradient": "backward"}
    assert torch.autograd.gradcheck(lambda x: ops.cross_entropy(x, targets, **options), (logits,))


def test_edges_are_as_in_torch() -> None:
    logits, targets = case(3, 8)
    with torch.no_grad():
        nothing = torch.full_like(targets, -100)
        assert ops.cross_entropy(logits, nothing).isnan()
        assert ops.cross_entropy(logits, nothing, reduction="sum") == 0
        assert ops.cross_entropy(logits[:0], targets[:0], reduction="none").shape == (0,)
        logits[1, 2:] = -torch.inf
        targets = torch.tensor([0, 1, 2], device=DEVICE)
        torch.testing.assert_close(ops.cross_entropy(logits, targets), F.cross_entropy(logits, targets).to(EXACT))
        assert ops.cross_entropy(logits[1], targets[1]).shape == ()


def test_gradient_over_the_logits() -> None:
    logits, targets = case(6, 9)
    inner = logits * 1
    loss = ops.cross_entropy(inner, targets, gradient="in place")
    (want,) = gradient(truth(logits, targets, "mean", 0.0, 0.0), logits, 1.0)
    torch.testing.assert_close(inner.detach(), want, **CLOSE)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has used up the gradient"):
        loss.backward()
    # Whoever else needed the logits learns that they are gone.
    inner = logits * 1
    other = inner.exp().sum()
    squares = (inner**2).sum()
    ops.cross_entropy(inner, targets, gradient="in place")
    other.backward(retain_graph=True)  # exp keeps its result, not its input
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.parametrize("chunk", [None, 4, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_cross_entropy(bias: bool, chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(6)
    x, w, b = (torch.randn(n, generator=generator).to(EXACT).to(DEVICE).requires_grad_() for n in ((2, 7, 16), (33, 16), (33,)))
    targets = case(2, 7, 33)[1]
    inputs = (x, w, b) if bias else (x, w)
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3}
    got = ops.linear_cross_entropy(x, w, targets, b if bias else None, **options, chunk=chunk)
    logits = x.double() @ w.double().T + (b.double() if bias else 0)
    want = truth(logits, targets, "mean", 0.1, 1e-3)
    torch.testing.assert_close(got, want.to(got.dtype), **CLOSE)
    torch.testing.assert_close(gradient(got, inputs, 3.0), gradient(want, inputs, 3.0), **CLOSE)
    # Losses that are not reduced have a factor each, of either sign.
    rows = ops.linear_cross_entropy(x, w, targets, b if bias else None, **options, chunk=chunk, reduction="none")
    logits = x.double() @ w.double().T + (b.double() if bias else 0)
    want = truth(logits, targets, "none", 0.1, 1e-3)
    torch.testing.assert_close(rows, want.to(rows.dtype), **CLOSE)
    factors = torch.randn(2, 7, generator=generator).to(DEVICE)
    torch.testing.assert_close(gradient(rows, inputs, factors), gradient(want, inputs, factors), **CLOSE)


def test_linear_cross_entropy_makes_only_what_is_asked_for() -> None:
    x, w = torch.randn(4, 8, device=DEVICE, requires_grad=True), torch.randn(5, 8, device=DEVICE)
    ops.linear_cross_entropy(x, w, torch.arange(4, device=DEVICE)).backward()
    assert x.grad is not None
    assert w.grad is None


LOGITS, IDS = torch.zeros(4, 5), torch.tensor([0, 4, -100, 1])
LEAF = torch.zeros(4, 5, requires_grad=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.cross_entropy(LOGITS, torch.tensor([0, 5, -1, 7])), "the target of row 1 is 5, wanted a class 0 to 4"),
        (lambda: ops.cross_entropy(LOGITS, torch.tensor([0, 1, -1, 7])), "the target of row 2 is -1, wanted a class"),
        (lambda: ops.cross_entropy(LOGITS, IDS.int()), "must be [4] torch.int64"),
        (lambda: ops.cross_entropy(LOGITS, IDS[:3]), "got [3] torch.int64"),
        (lambda: ops.cross_entropy(LOGITS.int(), IDS), "logits must be floats"),
        (lambda: ops.cross_entropy(LOGITS[:, :0], IDS), "V at least 1"),
        (lambda: ops.cross_entropy(LOGITS, IDS, reduction="max"), "one of mean, sum, none; got 'max'"),
        (lambda: ops.cross_entropy(LOGITS, IDS, label_smoothing=1.5), "between 0 and 1, got 1.5"),
        (lambda: ops.cross_entropy(LOGITS, IDS, z_loss=-1.0), "0 or more, got -1.0"),
        (lambda: ops.cross_entropy(LOGITS, IDS, gradient="never"), "got 'never'"),
        (lambda: ops.cross_entropy(LEAF, IDS, gradient="in place"), "got a leaf"),
        (lambda: ops.cross_entropy(LOGITS, IDS, class_weights=torch.ones(4)), "class_weights must be floats [5]"),
        (
            lambda: ops.cross_entropy(LOGITS, IDS, class_weights=torch.ones(5), label_smoothing=0.1),
            "class_weights cannot be combined with label_smoothing; got label_smoothing 0.1",
        ),
        (lambda: ops.linear_cross_entropy(LOGITS, LOGITS.half(), IDS), "of the same dtype"),
        (lambda: ops.linear_cross_entropy(LOGITS, LOGITS, IDS, chunk=0), "at least 1 row"),
        (lambda: ops.linear_cross_entropy(LOGITS, LOGITS, IDS), "the target of row 1 is 4"),
    ],
)
def test_refused_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
