"""Embeddings and bags against torch's own, values and gradients, on ids that repeat; and what they refuse."""

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


TABLE = randn(11, 6)
IDS = torch.randint(0, 11, (40,), generator=torch.Generator().manual_seed(1))
OFFSETS = torch.tensor([0, 5, 5, 17, 39])
BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "weighted": {"mode": "sum", "per_sample_weights": randn(40)},
    "padding, sum": {"mode": "sum", "padding_idx": 3},
    "padding, mean": {"mode": "mean", "padding_idx": -8},
    "padding, max": {"mode": "max", "padding_idx": 3},
}


def same_with_gradient(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> None:
    results = []
    for function in (ours, theirs):
        table = TABLE.clone().requires_grad_()
        y = function(table)
        results.append((y.detach(), torch.autograd.grad(y, table, randn(*y.shape, seed=5))[0]))
        assert torch.equal(function(TABLE), y), "without a gradient it is the same"
    for got, want in zip(*results, strict=True):
        # Sizes and frequencies are counted in float32.
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", BAGS.values(), ids=BAGS.keys())
def test_bags(options: dict[str, Any]) -> None:
    same_with_gradient(
        lambda table: ops.embedding_bag(IDS, table, OFFSETS, **options),
        lambda table: F.embedding_bag(IDS, table, OFFSETS, **options),
    )


def test_forms_of_bags() -> None:
    same_with_gradient(
        lambda table: ops.embedding_bag(IDS.view(8, 5).int(), table), lambda table: F.embedding_bag(IDS.view(8, 5), table)
    )
    ends = torch.tensor([0, 7, 40])
    same_with_gradient(
        lambda table: ops.embedding_bag(IDS, table, ends, include_last_offset=True),
        lambda table: F.embedding_bag(IDS, table, ends, include_last_offset=True),
    )
    assert ops.embedding_bag(IDS[:0], TABLE, torch.zeros(2).long()).eq(0).all()


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}], ids=str)
def test_embedding(options: dict[str, Any]) -> None:
    ids = IDS.view(4, 2, 5)
    same_with_gradient(lambda table: ops.embedding(ids, table, **options), lambda table: F.embedding(ids, table, **options))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.embedding_bag(IDS, TABLE),
            "give either ids [T] with offsets, or ids [B, N] without; got [40] and no offsets",
        ),
        (lambda: ops.embedding_bag(IDS, TABLE, OFFSETS, "min"), "mode is 'min', wanted one of max, mean, sum"),
        (lambda: ops.embedding_bag(IDS, TABLE, OFFSETS, "mean", randn(40)), "scales go with mode 'sum'"),
        (
            lambda: ops.embedding_bag(IDS, TABLE, OFFSETS, "sum", randn(4)),
            "per_sample_weights must have the shape of ids, [40]; got [4]",
        ),
        (
            lambda: ops.embedding_bag(IDS, TABLE, OFFSETS, "sum", randn(40).requires_grad_()),
            "has no gradient; pass per_sample_weights.detach",
        ),
        (
            lambda: ops.embedding(IDS, TABLE, padding_idx=11),
            "padding_idx is 11, wanted the index of one of the table's 11 rows",
        ),
        (lambda: ops.embedding(IDS, TABLE[0]), "weight must be [V, D], got [6]"),
    ],
)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
