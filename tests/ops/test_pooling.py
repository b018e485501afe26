"""Pooling against torch's own on seeded random windows: values, places, gradients, shapes; and what it refuses."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops

SPATIAL = (1, 2, 3)


def randn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def image(rng: random.Random, spatial: int, spread: tuple[int, int]) -> Tensor:
    """A batch of a random size, channels-first or channels-last, or one image without a batch."""
    x = randn(2, 3, *(rng.randint(*spread) for _ in range(spatial)), seed=rng.randint(0, 99))
    if rng.random() < 0.5:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x if rng.random() < 0.8 else x[0]


def same_with_gradient(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor) -> None:
    results = []
    for function in (ours, theirs):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        results.append((y.detach(), torch.autograd.grad(y, leaf, randn(*y.shape, seed=5))[0]))
        assert torch.equal(function(x), y), "without a gradient it is the same"
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("spatial", SPATIAL)
def test_windows(spatial: int, seed: int) -> None:
    rng = random.Random(100 * spatial + seed)
    x = image(rng, spatial, (5, 9))
    kernel = [rng.randint(1, 4) for _ in range(spatial)]
    options: dict[str, Any] = {
        "stride": rng.choice([None, rng.randint(1, 4), [rng.randint(1, 3) for _ in range(spatial)]]),
        "padding": [rng.randint(0, k // 2) for k in kernel],
        "ceil_mode": rng.random() < 0.5,
    }
    average = {**options, "count_include_pad": rng.random() < 0.5}
    if spatial > 1 and rng.random() < 0.3:
        average["divisor_override"] = rng.randint(1, 7)
    same_with_gradient(
        lambda x: ops.avg_pool(x, kernel, spatial=spatial, **average),
        lambda x: getattr(F, f"avg_pool{spatial}d")(x, kernel, **average),
        x,
    )
    options["dilation"] = [1 if k == 4 else rng.randint(1, 2) for k in kernel]
    theirs = getattr(F, f"max_pool{spatial}d")
    same_with_gradient(
        lambda x: ops.max_pool(x, kernel, spatial=spatial, **options),  # pyright: ignore[reportArgumentType]
        lambda x: theirs(x, kernel, **options),
        x,
    )
    _, places = ops.max_pool(x, kernel, spatial=spatial, return_indices=True, **options)
    assert torch.equal(places, theirs(x, kernel, return_indices=True, **options)[1])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spatial", SPATIAL)
def test_adaptive(spatial: int, seed: int) -> None:
    rng = random.Random(100 * spatial + seed)
    x = image(rng, spatial, (2, 7))
    out = rng.choice([1, rng.randint(1, 9), [rng.randint(1, 9) for _ in range(spatial)], [None] * spatial])
    same_with_gradient(
        lambda x: ops.adaptive_avg_pool(x, out, spatial=spatial),
        lambda x: getattr(F, f"adaptive_avg_pool{spatial}d")(x, out[0] if spatial == 1 and isinstance(out, list) else out),
        x,
    ) if out != [None] or spatial > 1 else None
    if None in (out if isinstance(out, list) else []):
        assert torch.equal(ops.adaptive_max_pool(x, out, spatial=spatial), x)  # pyright: ignore[reportArgumentType]
        return
    theirs = getattr(F, f"adaptive_max_pool{spatial}d")
    same_with_gradient(
        lambda x: ops.adaptive_max_pool(x, out, spatial=spatial),  # pyright: ignore[reportArgumentType]
        lambda x: theirs(x, out),
        x,
    )
    _, places = ops.adaptive_max_pool(x, out, True, spatial=spatial)
    assert torch.equal(places, theirs(x, out, return_indices=True)[1])


def test_channels_last_stays_in_place() -> None:
    x = randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    for y in (ops.max_pool(x, 2), ops.avg_pool(x, 2), ops.adaptive_avg_pool(x, 3)):
        assert y.is_contiguous(memory_format=torch.channels_last)  # pyright: ignore[reportAttributeAccessIssue]


def test_not_a_number_and_infinity() -> None:
    x = torch.full((1, 1, 4), -torch.inf)
    y, places = ops.max_pool(x, 2, spatial=1, return_indices=True)
    assert y.tolist() == [[[-torch.inf, -torch.inf]]]
    assert places.tolist() == [[[0, 2]]]
    x[0, 0, 1] = torch.nan
    y, places = ops.max_pool(x, 2, spatial=1, return_indices=True)
    assert y.isnan().tolist() == [[[True, False]]]
    assert places.tolist() == [[[1, 2]]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.max_pool(x, 3, padding=2), "padding at most half of kernel_size; got 3, 3, 1 and 2"),
        (lambda x: ops.max_pool(x, 9), "a size of 6 is too small for a window of 9"),
        (lambda x: ops.max_pool(x, [2, 2, 2]), "kernel_size must be one number or 2 numbers, got [2, 2, 2]"),
        (lambda x: ops.max_pool(x, 2, spatial=1), "with 1 spatial dimensions (1, 2 or 3); got torch.float32 [2, 3, 6, 6]"),
        (lambda x: ops.max_pool(x.int(), 2), "wanted floating point"),
        (lambda x: ops.avg_pool(x, 2, divisor_override=0), "divisor_override is 0"),
        (lambda x: ops.adaptive_avg_pool(x, 0), "all sizes must be at least 1, got an input of [6, 6] and an output of [0, 0]"),
        (lambda x: ops.adaptive_max_pool(x, [1]), "output_size must be one number or 2 numbers, got [1]"),
    ],
)
def test_refused(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(torch.zeros(2, 3, 6, 6))
