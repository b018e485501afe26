"""Token embedding: a row of the table per token."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.nn.linear import empty_parameter

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """y[t] = weight[ids[t]], weight [vocab_size, features]. An id past the table: an error on the CPU, undefined on a GPU."""

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.weight = empty_parameter(vocab_size, features, device=device, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., features]."""
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        return "{} x {}".format(*self.weight.shape)
