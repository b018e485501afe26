"""sum, mean, max and argmax against torch's: any dimensions, layouts, ties, NaN, nothing; their gradients and refusals."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright import ops
from tilewright.hw import env

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = torch.float32 if env.interpreting() or torch.cuda.is_available() else torch.float64
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("seed", range(12))
def test_equals_torch(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((1, 2, 3, 9)) for _ in range(rng.randint(1, 3))]
    # Few different values: ties.
    x = torch.randint(-3, 4, sizes, generator=torch.Generator().manual_seed(seed)).float()
    x = x.transpose(0, -1) if rng.random() < 0.3 else x
    x = x.to(DEVICE)
    dims, keep = rng.sample(range(x.dim()), rng.randint(1, x.dim())), rng.random() < 0.5
    one = rng.choice(dims) - (x.dim() if rng.random() < 0.5 else 0)
    torch.testing.assert_close(ops.sum(x, dims, keep), x.sum(dims, keep))
    torch.testing.assert_close(ops.mean(x, dims, keep), x.mean(dims, keep))
    torch.testing.assert_close(ops.sum(x), x.sum())
    values, places = ops.max(x, one, keep)
    want = x.cpu().max(one, keep)  # on a GPU torch names any of the equals
    assert torch.equal(values.cpu(), want.values)
    assert torch.equal(places.cpu(), want.indices)
    assert torch.equal(ops.argmax(x, one, keep).cpu(), x.cpu().argmax(one, keep))
    assert ops.argmax(x).item() == x.cpu().argmax().item()


@pytest.mark.parametrize(
    "column",
    [[1, NAN, INF, NAN], [-INF, -INF], [NAN], [-0.0, 0.0], [1.0, 3.0, 3.0, 2.0], [INF, INF, NAN], [-INF, -1e30]],
    ids=str,
)
def test_special_values(column: list[float]) -> None:
    for x in (torch.tensor(column)[:, None].expand(-1, 3).contiguous(), torch.tensor([column, column])):
        dim = 0 if x.shape[1] == 3 and x.shape[0] == len(column) else 1
        values, places = ops.max(x.to(DEVICE), dim)
        want = x.max(dim)
        torch.testing.assert_close(values.cpu(), want.values, equal_nan=True)
        assert torch.equal(places.cpu(), want.indices)
        torch.testing.assert_close(ops.sum(x.to(DEVICE), dim).cpu(), x.sum(dim), equal_nan=True)


def test_nothing_is_as_in_torch() -> None:
    x = torch.zeros(2, 0, 3, device=DEVICE)
    assert torch.equal(ops.sum(x, 1), x.sum(1))
    assert ops.mean(x, 1).isnan().all()
    assert ops.sum(x, 2).shape == (2, 0)
    assert ops.max(x, 2)[1].shape == (2, 0)
    assert ops.mean(x, (0, 2), keepdim=True).shape == (1, 0, 1)
    for call in (lambda: ops.max(x, 1), lambda: ops.argmax(x), lambda: ops.argmax(x, -2)):
        with pytest.raises(IndexError, match="an empty set of values has no largest value"):
            call()
    scalar = torch.tensor(2.5, device=DEVICE)
    assert ops.sum(scalar) == ops.mean(scalar) == 2.5
    assert ops.argmax(scalar) == 0


def test_16_bits_are_accumulated_in_32() -> None:
    x = torch.full((1024, 2), 0.01, dtype=torch.bfloat16, device=DEVICE)
    torch.testing.assert_close(ops.sum(x, 0), x.float().sum(0).bfloat16())
    torch.testing.assert_close(ops.mean(x, 0), x.float().mean(0).bfloat16())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: ops.sum(x, (0, 2)) ** 2, lambda x: x.sum((0, 2)) ** 2),
        (lambda x: ops.mean(x, 1, True) ** 2, lambda x: x.mean(1, True) ** 2),
        (lambda x: ops.mean(x) ** 2, lambda x: x.mean() ** 2),
        (lambda x: ops.max(x, -1)[0] ** 2, lambda x: x.max(-1)[0] ** 2),
        (lambda x: ops.max(x, 0, True)[0] ** 2, lambda x: x.max(0, True)[0] ** 2),
    ],
)
def test_gradients(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(EXACT).to(DEVICE)
    x.requires_grad_()
    (got,), (want,) = (torch.autograd.grad(f(x).sum(), x) for f in (ours, theirs))
    torch.testing.assert_close(got, want)
    if EXACT.itemsize == 8:
        assert torch.autograd.gradcheck(ours, (x,))
        assert torch.autograd.gradgradcheck(ours, (x,))


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.sum(X, 2), "sum: dim must be -2 to 1 for x [2, 3], got 2"),
        (lambda: ops.mean(X, (0, -2)), "names a dimension twice"),
        (lambda: ops.max(X.int(), 0), "max: x must be floating point"),
        (lambda: ops.max(torch.tensor(1.0), 0), "dim must be"),
        (lambda: ops.argmax(X, 5), "argmax: dim must be"),
    ],
)
def test_refused_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
