"""Arguments of embedding_bag and of the gradient of an embedding, made from dimensions.

# M ids, N columns of the table, B bags, V rows of the table
"""

import torch

from tilewright.op import Args, Inputs

__all__ = ["embedding_backward_arguments", "embedding_bag_arguments"]

_BF16 = torch.bfloat16


def embedding_bag_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 0, V: int = 1024, dtype: torch.dtype = _BF16, mode: str = "sum"
) -> Args:
    """A table [V, N], ids [M], and the index of the first id of each bag. Bags have equal sizes, by default 8 ids."""
    bags = B or max(1, M // 8)
    offsets = inputs.tensor([M * b // bags for b in range(bags)], torch.int64)
    return inputs.randn(V, N, dtype=dtype), inputs.randint(0, V, M), offsets, None, mode, None


def embedding_backward_arguments(inputs: Inputs, *, M: int, N: int, V: int = 1024, dtype: torch.dtype = _BF16) -> Args:
    """The gradient [M, N] of the rows of M ids, and the ids."""
    return inputs.randn(M, N, dtype=dtype), inputs.randint(0, V, M), None, None, None, V, None
