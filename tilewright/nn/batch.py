"""What a step's tokens are (`Batch`) and where their keys and values live (`KVCache`): plain values, passed to every layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Batch", "KVCache"]

# T tokens, B sequences, R rows to sample from, L layers, P pages, G key/value heads, S tokens a page, D head dim


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one step, sequence after sequence; every field is on the model's device but `max_q_len`.

    positions: [T] int64, each token's position in its sequence.
    slots: [T] int64, where its key and value go: page * S + offset; negative: nowhere (padding).
    block_table: [B, max_pages] int32, the pages of each sequence in order; entries past its length are not read.
    kv_lens: [B] int32, tokens in the cache once this step's are written; 0 marks a padding row.
    cu_q: [B + 1] int32, where each sequence's tokens start, and T.
    max_q_len: the most tokens any sequence has in this step; 1 says that each has exactly one.
    logits_rows: [R] int64, which of the T rows to project to logits.
    """

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    kv_lens: Tensor
    cu_q: Tensor
    max_q_len: int
    logits_rows: Tensor


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Paged keys and values: per layer one [P, G, S, D] tensor each."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    @classmethod
    def zeros(
        cls,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVCache":
        """An empty cache, one allocation. Zeroed: a kernel may read past a sequence's end, where a NaN would spread."""
        data = torch.zeros(2, layers, pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        return cls(k=data[0].unbind(), v=data[1].unbind())

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages, all layers. sources and targets: [N] int64; a page may be a source twice, a target once."""
        for cache in (*self.k, *self.v):
            cache.index_copy_(0, targets, cache.index_select(0, sources))
