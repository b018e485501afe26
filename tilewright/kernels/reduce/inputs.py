"""Example arguments of the reductions, made from dimensions: the `Op.make` of each op."""

import torch

from tilewright.op import Args, Inputs

__all__ = ["reduce_max_arguments", "reduce_sum_arguments"]

_BF16 = torch.bfloat16


def reduce_max_arguments(inputs: Inputs, *, M: int, N: int, B: int = 1, dtype: torch.dtype = _BF16, rows: bool = False) -> Args:
    """x [B, M, N], to be reduced over M. With `rows`, the numbers of one reduction are neighbours in memory."""
    return (inputs.randn(B, N, M, dtype=dtype).mT if rows else inputs.randn(B, M, N, dtype=dtype),)


def reduce_sum_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 1, dtype: torch.dtype = _BF16, rows: bool = False, mean: bool = False
) -> Args:
    """x as in `reduce_max_arguments`, and `mean`: whether the op returns the mean instead of the sum."""
    return *reduce_max_arguments(inputs, M=M, N=N, B=B, dtype=dtype, rows=rows), mean
