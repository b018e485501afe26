"""Example arguments of the grouped products from dimensions: the `Op.make` of each."""

# X experts, M rows of all experts, N rows of an expert's weight, K shared

from typing import Any

import torch
from torch import Tensor

from tilewright.op import Inputs

__all__ = ["SKEWS", "grouped_arguments", "grouped_gradient_arguments", "row_offsets"]

Args = tuple[Any, ...]

SKEWS = ("even", "random", "one", "tail")
"""How rows are dealt out: as evenly as may be, at random, all to one expert, or half of them to nobody."""


def row_offsets(inputs: Inputs, rows: int, experts: int, skew: str) -> Tensor:
    """Offsets [X + 1], int32, of so many rows.

    Raises:
        ValueError: an unknown skew.
    """
    if skew not in SKEWS:
        raise ValueError(f"grouped product: skew is {skew!r}, wanted {', '.join(SKEWS)}")
    if inputs.device.type == "meta":
        return inputs.randint(0, 1, experts + 1, dtype=torch.int32)
    if skew == "random":
        sizes = torch.bincount(inputs.randint(0, experts, rows), minlength=experts)
        return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)
    if skew == "one":
        return inputs.tensor([0] * (experts // 2 + 1) + [rows] * (experts - experts // 2), torch.int32)
    used = rows // 2 if skew == "tail" else rows
    return inputs.tensor([used * e // experts for e in range(experts + 1)], torch.int32)


def grouped_arguments(
    inputs: Inputs,
    *,
    X: int,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = torch.bfloat16,
    skew: str = "even",
    layout: str = "sorted",
    chosen: int = 0,
    w_major: str = "k",
    bias: bool = False,
    activation: str = "none",
) -> Args:
    """x [M, K] sorted by expert, weight [X, N, K]; with layout "masked" x [X, M / X, K], half of whose rows count.

    chosen: of how many experts each token is a row; then x is [M / chosen, K], gathered by an order. w_major: "k" or "n", along
    which the weight is dense.

    Raises:
        ValueError: an unknown layout or skew.
    """
    if layout not in ("sorted", "masked"):
        raise ValueError(f"grouped_linear: layout is {layout!r}, wanted sorted or masked")
    weight = (
        inputs.randn(X, K, N, dtype=dtype, scale=max(K, 1) ** -0.5).mT
        if w_major == "n"
        else inputs.randn(X, N, K, dtype=dtype, scale=max(K, 1) ** -0.5)
    )
    more = inputs.randn(X, N, dtype=dtype) if bias else None
    if layout == "masked":
        each = M // X
        counts = inputs.randint(each // 2, each + 1, X, dtype=torch.int32)
        return inputs.randn(X, each, K, dtype=dtype), weight, counts, more, activation, None, 1
    offsets = row_offsets(inputs, M, X, skew)
    if not chosen:
        return inputs.randn(M, K, dtype=dtype), weight, offsets, more, activation, None, 1
    order = inputs.permutation(M).to(torch.int32)
    return inputs.randn(M // chosen, K, dtype=dtype), weight, offsets, more, activation, order, chosen


def grouped_gradient_arguments(
    inputs: Inputs, *, X: int, M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, skew: str = "even"
) -> Args:
    """dy [M, N] and x [M, K], sorted by expert."""
    return inputs.randn(M, N, dtype=dtype), inputs.randn(M, K, dtype=dtype), row_offsets(inputs, M, X, skew)
