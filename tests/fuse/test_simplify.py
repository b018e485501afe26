"""What a traced graph says twice or computes for nothing: what goes, and what has to stay."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.fuse.trace import trace


class _Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (lambda x: x.exp() * x.exp(), 2),
        (lambda x: (x.exp() + 1.0) * (x.exp() + 1.0), 3),
        (lambda x: F.pad(x, (0, 0, 0, 0)).exp(), 1),
        (lambda x: x.roll((0, 0), (0, 1)).exp(), 1),
        (lambda x: F.pad(x, (0, 1)).exp(), 2),
        (lambda x: x.roll(1, 0) * x.roll(2, 0), 3),
        (lambda x: F.gelu(x) * F.gelu(x, approximate="tanh"), 3),
        (lambda x: (x * 0.0).atan2(x) * (x * -0.0).atan2(x), 5),
        (lambda x: x.sum(0, keepdim=True) * x.sum(1, keepdim=True), 3),
        (lambda x: torch.rand_like(x) - torch.rand_like(x), 3),
        (lambda x: (x.exp(), x.exp()), 2),
        (lambda x: F.pad(x, (0, 0)), 1),
    ],
)
def test_calls_that_stay(function: Callable[[Tensor], object], calls: int) -> None:
    traced = trace(_Calls(function), (torch.randn(3, 4),))
    kept = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert len(kept) == calls, traced.graph


def test_results_share_no_memory() -> None:
    x = torch.randn(3, 4)
    one, two, three = trace(_Calls(lambda x: (F.pad(x, (0, 0)), x.exp(), x.exp())), (x,)).module(x)
    assert len({t.data_ptr() for t in (x, one, two, three)}) == 4
