"""Makes arguments for routing, sorting and moving rows from given dimensions: the `Op.make` of each op."""

# T tokens, X experts, `chosen` experts per token, N columns

import torch
from torch import Tensor

from tilewright.op import Args, Inputs

__all__ = ["combine_arguments", "permute_arguments", "route_arguments", "sort_arguments"]


def route_arguments(
    inputs: Inputs,
    *,
    T: int,
    X: int = 128,
    chosen: int = 8,
    softmax: bool = True,
    groups: int = 1,
    chosen_groups: int = 1,
    normalise: bool = False,
    scale: float = 1.0,
) -> Args:
    """Logits [T, X], and a bias [X] if scores are sigmoids."""
    bias = None if softmax else inputs.randn(X, scale=0.1)
    return inputs.randn(T, X), bias, chosen, softmax, groups, chosen_groups, normalise, scale


def sort_arguments(inputs: Inputs, *, T: int, X: int = 128, chosen: int = 8, skew: str = "random") -> Args:
    """Experts [T, chosen]: with skew "random" drawn at random, with "one" all the same.

    Raises:
        ValueError: an unknown skew.
    """
    if skew not in ("random", "one"):
        raise ValueError(f"sort_by_expert: skew is {skew!r}, wanted random or one")
    return inputs.randint(X // 2 if skew == "one" else 0, X // 2 + 1 if skew == "one" else X, T, chosen, dtype=torch.int32), X


def _order(inputs: Inputs, rows: int) -> Tensor:
    return inputs.permutation(rows).to(torch.int32)


def permute_arguments(
    inputs: Inputs, *, T: int, N: int, chosen: int = 8, dtype: torch.dtype = torch.bfloat16, weighted: bool = False
) -> Args:
    """x [T, N], an order for T * chosen rows, `chosen`, and weights or None."""
    weights = inputs.randn(T, chosen) if weighted else None
    return inputs.randn(T, N, dtype=dtype), _order(inputs, T * chosen), chosen, weights


def combine_arguments(
    inputs: Inputs, *, T: int, N: int, chosen: int = 8, dtype: torch.dtype = torch.bfloat16, weighted: bool = True
) -> Args:
    """Rows [T * chosen, N], the row of each token's experts [T, chosen], and their weights or None."""
    places = _order(inputs, T * chosen).unflatten(0, (T, chosen))
    return inputs.randn(T * chosen, N, dtype=dtype), places, inputs.randn(T, chosen) if weighted else None
