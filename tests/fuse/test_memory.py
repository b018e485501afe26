"""What a graph must keep of a call's memory, and outputs that are rounding alone; random programs found each case."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from tilewright.fuse.check import TOLERANCES, Check, above_noise
from tilewright.fuse.differences import compare_outputs


class Rolled(nn.Module):
    """`roll` of a channels-last image is contiguous. Fake tensors have it channels-last, and `flatten` could not be a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 0).flatten(0, 1) * 2


class Written(nn.Module):
    """Dropout in evaluation is its input, which is written to behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        same = self.drop(x.view(x.shape[0], -1))
        F.leaky_relu(x.movedim(3, 1), 0.2, inplace=True)
        return same


@pytest.mark.parametrize("make", [Rolled, Written])
def test_memory_is_what_a_call_makes_it(make: Callable[[], nn.Module]) -> None:
    model, x = make().eval(), torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    x = x if make is Rolled else x.contiguous()
    fast = tilewright.optimize(model, x.clone(), "fp32", compiled=False, report=False)
    torch.testing.assert_close(fast(x.clone()), model(x.clone()))


class Nothing(nn.Module):
    """Its output is the rounding error of equal numbers' mean, where it is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x - x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y) - y


def test_an_output_that_is_rounding_alone_is_nobodys_fault() -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        model, x = Nothing().eval(), torch.randn(2, 5, 8)
        fast = tilewright.optimize(model, x, "fp32", compiled=False, report=False)
        assert fast(x).abs().max() < 1e-6


def test_only_as_much_as_rounding_moves_is_excused() -> None:
    want, moved = torch.tensor([1e-9, -1e-9]), torch.tensor([2e-9, -2e-9])
    for got, excused in ((2.5e-9, True), (9e-9, False)):
        check = Check("fp32", TOLERANCES["fp32"], compare_outputs(want, torch.tensor([got, -got])))
        assert check.failed
        assert bool(above_noise(check, want, lambda: moved).failed) != excused
    wrong = Check("fp32", TOLERANCES["fp32"], compare_outputs(torch.ones(2), torch.full((2,), 1.01)))
    assert above_noise(wrong, torch.ones(2), lambda: torch.ones(2) * (1 + 2**-23)).failed, "a sound output's error stays one"
