"""Resizing against torch's own, values and gradients, up and down; and what it refuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops


def randn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


IMAGE, SIGNAL, VOLUME = randn(2, 3, 5, 6), randn(2, 3, 7), randn(1, 3, 3, 4, 2)
CASES: tuple[tuple[Tensor, dict[str, Any]], ...] = (
    (IMAGE, {"scale_factor": 2}),
    (IMAGE, {"scale_factor": (3.0, 1.5)}),
    (IMAGE, {"size": (5, 6)}),
    (IMAGE, {"size": (9, 4)}),
    (IMAGE.contiguous(memory_format=torch.channels_last), {"size": 3}),
    (SIGNAL, {"scale_factor": 4}),
    (VOLUME, {"scale_factor": 2}),
    (VOLUME, {"size": (5, 2, 7)}),
    *(
        (x, {**options, "mode": mode, "align_corners": corners})
        for corners in (False, True)
        for x, mode, options in (
            (IMAGE, "bilinear", {"scale_factor": 2}),
            (IMAGE, "bilinear", {"scale_factor": (0.5, 2.5)}),
            (IMAGE, "bilinear", {"size": (1, 13)}),
            (IMAGE[..., :1], "bilinear", {"size": (11, 4)}),
            (IMAGE.contiguous(memory_format=torch.channels_last), "bilinear", {"size": (3, 4)}),
            (SIGNAL, "linear", {"scale_factor": 8}),
            (IMAGE, "bicubic", {"scale_factor": 2}),
            (IMAGE, "bicubic", {"size": (3, 14)}),
            (IMAGE[..., :1], "bicubic", {"size": (11, 4)}),
            (VOLUME, "trilinear", {"scale_factor": 2}),
            (VOLUME, "trilinear", {"size": (5, 2, 7)}),
        )
    ),
)


@pytest.mark.parametrize(("x", "options"), CASES, ids=lambda v: str(v) if isinstance(v, dict) else str(list(v.shape)))
def test_equals_torch(x: Tensor, options: dict[str, Any]) -> None:
    results = []
    for function in (ops.upsample, F.interpolate):
        leaf = x.detach().requires_grad_()
        y = function(leaf, **options)
        results.append((y.detach(), torch.autograd.grad(y, leaf, randn(*y.shape, seed=5))[0]))
        assert torch.equal(function(x, **options), y)
    for got, want in zip(*results, strict=True):
        # torch takes steps in the input's dtype, but a factor's reciprocal is what it is.
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_places_are_exact() -> None:
    """In float32 49 * (1 / 49) is below 1, and torch takes the place before."""
    x = torch.arange(3.0).view(1, 1, 3)
    assert ops.upsample(x, scale_factor=49).flatten().tolist() == [float(o // 49) for o in range(147)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.upsample(x, 3, mode="trilinear"), "mode is 'trilinear' and x is [1, 2, 3, 4]"),
        (lambda x: ops.upsample(x, 3, mode="area"), "mode is 'area' and x is [1, 2, 3, 4]"),
        (lambda x: ops.upsample(x, 3, mode="linear"), "mode is 'linear' and x is [1, 2, 3, 4]"),
        (lambda x: ops.upsample(x, 3, align_corners=True), "align_corners is only for the linear modes"),
        (lambda x: ops.upsample(x), "exactly one of size and scale_factor must be given; got None and None"),
        (lambda x: ops.upsample(x, (1, 2, 3)), "size must be one number or 2 numbers, got (1, 2, 3)"),
        (lambda x: ops.upsample(x, 0), "got an input of 3 and an output of 0"),
        (lambda x: ops.upsample(x, scale_factor=0.2), "got an input of 3 and an output of 0.2 times that"),
        (lambda x: ops.upsample(x[..., :1].expand(1, 2, 3, 90000), (3, 89999)), "products of more than 31 bits"),
    ],
)
def test_refused(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(torch.zeros(1, 2, 3, 4))
