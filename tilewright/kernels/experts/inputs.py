"""Example arguments of routing, sorting and moving rows from dimensions: the `Op.make` of each."""

# T tokens, X experts, `chosen` of them by each token, N columns

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
    """Logits [T, X]; with sigmoids also a bias."""
    bias = None if softmax else inputs.randn(X, scale=0.1)
    return inputs.randn(T, X), bias, chosen, softmax, groups, chosen_groups, normalise, scale


def sort_arguments(inputs: Inputs, *, T: int, X: int = 128, chosen: int = 8, skew: str = "random") -> Args:
    """Experts [T, chosen]: drawn at "random", or all of them "one".

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
    """x [T, N], where each of T * chosen rows comes from, and the factor of each row."""
    weights = inputs.randn(T, chosen) if weighted else None
    return inputs.randn(T, N, dtype=dtype), _order(inputs, T * chosen), chosen, weights


def combine_arguments(
    inputs: Inputs, *, T: int, N: int, chosen: int = 8, dtype: torch.dtype = torch.bfloat16, weighted: bool = True
) -> Args:
    """Rows [T * chosen, N], the row of each of a token's experts, their weights."""
    places = _order(inputs, T * chosen).unflatten(0, (T, chosen))
    return inputs.randn(T * chosen, N, dtype=dtype), places, inputs.randn(T, chosen) if weighted else None
