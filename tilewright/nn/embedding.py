"""Embeddings with torch.nn's names and arguments: a row of the table for each id, or the sum, mean or maximum of a bag of rows.

Sparse gradients raise an error, and so does `max_norm`, which would write to the table in a forward pass.
"""

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.filling import begins_empty, empty_parameter

__all__ = ["Embedding", "EmbeddingBag"]


def _refuse(name: str, **given: object) -> None:
    for argument, value in given.items():
        if value:
            raise ValueError(f"{name}: {argument}={value!r} is not supported; leave it out")


class _Table(nn.Module):
    """A weight [num_embeddings, embedding_dim]; one of its rows may be the padding row."""

    weight: nn.Parameter

    def __init__(self, padding_idx: int | None, rows: int):
        super().__init__()
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise ValueError(f"{type(self).__name__}: padding_idx is {padding_idx}, wanted the index of one of the {rows} rows")
        self.padding_idx = None if padding_idx is None else padding_idx % rows

    def reset_parameters(self) -> None:
        """Normal random numbers, and zeros in the padding row."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def extra_repr(self) -> str:
        return "{} x {}".format(*self.weight.shape) + (
            f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        )


class Embedding(_Table):
    """y[t] = weight[ids[t]]. An id outside of the table raises an error on a CPU; on a GPU the result is undefined."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(padding_idx, num_embeddings)
        _refuse("Embedding", max_norm=max_norm, sparse=sparse, norm_type=norm_type != 2.0 and norm_type)
        self.scale_grad_by_freq = scale_grad_by_freq
        self.weight = empty_parameter(num_embeddings, embedding_dim, device=device, dtype=dtype)
        if not begins_empty():
            self.requires_grad_().reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., embedding_dim]."""
        return ops.embedding(ids, self.weight, self.padding_idx, self.scale_grad_by_freq)


class EmbeddingBag(_Table):
    """The sum, mean or maximum of the rows of each bag of ids."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, include_last_offset: bool = False,
        padding_idx: int | None = None, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(padding_idx, num_embeddings)
        refused = {"max_norm": max_norm, "sparse": sparse, "scale_grad_by_freq": scale_grad_by_freq}
        _refuse("EmbeddingBag", **refused, norm_type=norm_type != 2.0 and norm_type)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"EmbeddingBag: mode is {mode!r}, wanted 'sum', 'mean' or 'max'")
        self.mode, self.include_last_offset = mode, include_last_offset
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Ids [T] with offsets [B], or ids [B, N] -> [B, embedding_dim].

        per_sample_weights: in the shape of ids; only with mode "sum".
        """
        return ops.embedding_bag(
            ids, self.weight, offsets, self.mode, per_sample_weights, self.include_last_offset, self.padding_idx
        )
