"""Example arguments of the reductions from dimensions: the `Op.make` of each."""

import torch

from tilewright.op import Args, Inputs

__all__ = ["reduce_max_arguments", "reduce_sum_arguments"]

_BF16 = torch.bfloat16


def reduce_max_arguments(inputs: Inputs, *, M: int, N: int, B: int = 1, dtype: torch.dtype = _BF16, rows: bool = False) -> Args:
    """x [B, M, N] to be reduced over M; with `rows` the numbers that are reduced lie next to each other."""
    return (inputs.randn(B, N, M, dtype=dtype).mT if rows else inputs.randn(B, M, N, dtype=dtype),)


def reduce_sum_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 1, dtype: torch.dtype = _BF16, rows: bool = False, mean: bool = False
) -> Args:
    """The same, and whether the mean is wanted."""
    return *reduce_max_arguments(inputs, M=M, N=N, B=B, dtype=dtype, rows=rows), mean
