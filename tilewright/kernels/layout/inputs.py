"""Example arguments of `permute`, made from dimensions: its `Op.make`."""

import torch

from tilewright.op import Args, Inputs

__all__ = ["permute_arguments"]

_BF16 = torch.bfloat16


def permute_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 0, dtype: torch.dtype = _BF16, int8: bool = False, rows: bool = False
) -> Args:  # fmt: skip
    """x [M, N], or a batch of B such matrices, to be transposed. `int8` overrides dtype.

    rows: x is [M, N, 128] instead, and its rows of 128 elements stay whole.
    """
    dtype = torch.int8 if int8 else dtype
    shape = (*((B,) if B else ()), M, N, *((128,) if rows else ()))
    lead = len(shape) - (3 if rows else 2)
    dims = [*range(lead), lead + 1, lead, *range(lead + 2, len(shape))]
    x = inputs.randn(*shape, dtype=torch.float32 if not dtype.is_floating_point else dtype, scale=1.0)
    return x.mul(100).to(dtype) if not dtype.is_floating_point else x, dims
