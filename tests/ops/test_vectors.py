"""Weights, biases and running statistics with gaps between their numbers: every second one, or one many times."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright import ops
from tilewright.op import Inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Call = Callable[..., Any]

# name: (ours, torch's) of images [2, 4, 3, 3] or rows, and vectors of 4
CALLS: dict[str, tuple[Call, Call]] = {
    "layer_norm": (ops.layer_norm, lambda x, w, b: F.layer_norm(x, (4,), w, b)),
    "rms_norm": (lambda x, w, b: ops.rms_norm(x, w), lambda x, w, b: F.rms_norm(x, (4,), w, 1e-6)),
    "add_rms_norm": (lambda x, w, b: ops.add_rms_norm(x, x, w)[0], lambda x, w, b: F.rms_norm(x + x, (4,), w, 1e-6)),
    "add_layer_norm": (lambda x, w, b: ops.add_layer_norm(x, x, w, b)[0], lambda x, w, b: F.layer_norm(x + x, (4,), w, b)),
    "linear": (lambda x, w, b: ops.linear(x, x[:4, :4].detach(), b), lambda x, w, b: F.linear(x, x[:4, :4].detach(), b)),
    "matmul": (lambda x, w, b: ops.matmul(x.detach(), x[:4, :4].detach(), b.detach()), lambda x, w, b: x @ x[:4, :4] + b),
    "batch_norm, training": (
        lambda x, w, b: ops.batch_norm(x, None, None, w, b, True), lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    ),
    "batch_norm": (
        lambda x, w, b: ops.batch_norm(x, b.detach(), w.detach(), w, b),
        lambda x, w, b: F.batch_norm(x, b.detach(), w.detach(), w, b),
    ),
    "rms_norm_quantize": (
        lambda x, w, b: ops.rms_norm_quantize(x.detach(), w.detach())[1],
        lambda x, w, b: ops.rms_norm_quantize(x.detach(), w.detach().clone(memory_format=torch.contiguous_format))[1],
    ),
    "layer_norm_quantize": (
        lambda x, w, b: ops.layer_norm_quantize(x.detach(), w.detach(), b.detach())[1],
        lambda x, w, b: F.layer_norm(x, (4,), w, b).detach().abs().amax(1) / 127,
    ),
    "group_norm": (lambda x, w, b: ops.group_norm(x, 2, w, b), lambda x, w, b: F.group_norm(x, 2, w, b)),
    "conv2d": (
        lambda x, w, b: ops.conv2d(x, x[:, :, :1, :1].repeat(2, 1, 1, 1), b),
        lambda x, w, b: F.conv2d(x, x[:, :, :1, :1].repeat(2, 1, 1, 1), b),
    ),
    "conv_transpose2d": (
        lambda x, w, b: ops.conv_transpose2d(x, x[:, :, :1, :1].repeat(2, 1, 1, 1), b),
        lambda x, w, b: F.conv_transpose2d(x, x[:, :, :1, :1].repeat(2, 1, 1, 1), b),
    ),
}  # fmt: skip


def gaps(name: str, seed: int) -> Tensor:
    whole = Inputs(DEVICE, seed).randn(8).square() + 0.5
    return whole[::2] if name == "every second" else whole[:1].expand(4)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("which", ["every second", "one"])
@pytest.mark.parametrize("name", CALLS)
def test_equals_torch(name: str, which: str, trains: bool) -> None:
    results = []
    for call in CALLS[name]:
        shape = (2, 4, 3, 3) if "batch" in name or "group" in name or "conv" in name else (6, 4)
        x, w, b = Inputs(DEVICE).randn(*shape), gaps(which, 1), gaps(which, 2)
        leaves = [t.requires_grad_(trains and name != "matmul") for t in (x, w, b)]
        y = call(*leaves)
        made = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True) if y.requires_grad else ()
        results.append((y.detach(), *(g for g in made if g is not None)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_running_statistics() -> None:
    kept = []
    for norm in (ops.batch_norm, F.batch_norm):
        both = torch.ones(2, 8, device=DEVICE)
        for seed in range(2):
            norm(Inputs(DEVICE, seed).randn(2, 4, 3, 3), both[0, ::2], both[1, 1::2], None, None, True)
        kept.append(both)
    torch.testing.assert_close(*kept)
