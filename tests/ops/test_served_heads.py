"""Heads as a server makes them: their numbers, their gradients, and where paged attention is the loop over packed rows."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright import ops
from tilewright.hw.device import CARD_OF_ARCH
from tilewright.op import invariant
from tilewright.ops import served_heads as module
from tilewright.ops.pointwise import rope_table
from tilewright.ops.served_heads import paged_is_packed, served_heads

TOKENS, HEADS, KV_HEADS, DIM = 7, 4, 2, 16
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 0, 5])


def leaves(normed: bool) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, HEADS, DIM), (TOKENS, KV_HEADS, DIM), *[(DIM,)] * (2 * normed)]
    return [torch.randn(shape, generator=drawn).requires_grad_() for shape in shapes]


def gradients(made: tuple[Tensor, Tensor], of: list[Tensor]) -> tuple[Tensor, ...]:
    drawn = torch.Generator().manual_seed(1)
    return torch.autograd.grad(made, of, [torch.randn(x.shape, generator=drawn) for x in made])


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(("rotated", "interleaved"), [(16, False), (8, False), (16, True)])
def test_numbers_and_gradients_are_those_of_norm_and_rope(normed: bool, rotated: int, interleaved: bool) -> None:
    table, (q, k, *norms) = rope_table(rotated, 8, 100.0), leaves(normed)
    q_norm, k_norm = norms or (None, None)
    rows = torch.arange(TOKENS)
    found = served_heads(q, k, torch.zeros_like(k), POSITIONS, rows, table, q_norm, k_norm, 1e-6, interleaved)
    ours = gradients(found, [q, k, *norms])
    a, b = [ops.rms_norm(x, w, 1e-6) for x, w in zip((q, k), norms)] if normed else (q, k)
    wanted = ops.rope(a, b, POSITIONS, table, interleaved)
    for x, y in zip((*found, *ours), (*wanted, *gradients(wanted, [q, k, *norms]))):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """(sm_N) -> that card is the one of the operands."""
    yield lambda arch: monkeypatch.setattr(module, "device_of", lambda index: CARD_OF_ARCH[arch])
    module._one_loop.cache_clear()


@pytest.mark.parametrize(
    ("arch", "dim", "dtype", "page_size", "same"),
    [
        (90, 128, torch.bfloat16, 16, True), (90, 64, torch.float16, 64, True), (90, 96, torch.bfloat16, 16, False),
        (90, 128, torch.float32, 16, False), (90, 128, torch.bfloat16, 8, False), (80, 128, torch.bfloat16, 16, False),
        (100, 128, torch.bfloat16, 16, False),
    ],
)  # fmt: skip
def test_only_two_kernels_share_a_loop(card: Any, arch: int, dim: int, dtype: torch.dtype, page_size: int, same: bool) -> None:
    card(arch)
    module._one_loop.cache_clear()
    q = torch.empty(3, 4, dim, dtype=dtype)
    for window, sinks in ((None, None), (40, None), (None, torch.zeros(4))):
        with invariant():
            assert paged_is_packed(q, 2, page_size, window, sinks) is same
        assert not paged_is_packed(q, 2, page_size, window, sinks), "nothing is promised outside of the scope"
