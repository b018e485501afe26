"""What a step's tokens are (`Batch`) and where their keys and values live: plain values, passed to every layer.

`KVCache` holds the keys and values of heads, `LatentCache` rows of which those of all heads are made.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops.paged import CODES

__all__ = ["Batch", "KVCache", "LatentCache"]

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
    """Paged keys and values: per layer one [P, G, S, D] tensor each.

    A cache of codes (int8 or float8) has a scale for each token and head, [P, G, S], and values by columns, [P, G, D, S].
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    k_scale: tuple[Tensor, ...] = ()
    v_scale: tuple[Tensor, ...] = ()

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
        if dtype not in CODES:
            return cls(k=data[0].unbind(), v=data[1].unbind())
        by_columns = data[1].view(layers, pages, kv_heads, head_dim, page_size)
        # Side by side, because they are read together: with small pages a scale's 64 bytes would be a read of their own.
        k_scale, v_scale = torch.zeros(layers, pages, kv_heads, 2, page_size, device=device).unbind(3)
        return cls(k=data[0].unbind(), v=by_columns.unbind(), k_scale=k_scale.unbind(), v_scale=v_scale.unbind())

    @property
    def layers(self) -> Iterator[tuple[Tensor, ...]]:
        """What each layer is called with."""
        tensors = (self.k, self.v, self.k_scale, self.v_scale) if self.k_scale else (self.k, self.v)
        return zip(*tensors, strict=True)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages, all layers. sources and targets: [N] int64; a page may be a source twice, a target once."""
        for cache in (*self.k, *self.v, *self.k_scale, *self.v_scale):
            # A CPU indexes no float8.
            held = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            held.index_copy_(0, targets, held.index_select(0, sources))


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """Paged rows that stand for a token's keys and values of all heads (`nn.MLA`): per layer one [P, S, W] tensor."""

    rows: tuple[Tensor, ...]

    @classmethod
    def zeros(
        cls, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> "LatentCache":
        """An empty cache, one allocation. Zeroed: a kernel may read past a sequence's end, where a NaN would spread."""
        return cls(rows=torch.zeros(layers, pages, page_size, width, dtype=dtype, device=device).unbind())

    @property
    def layers(self) -> Iterator[tuple[Tensor, ...]]:
        """What each layer is called with."""
        return ((rows,) for rows in self.rows)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages, all layers. sources and targets: [N] int64; a page may be a source twice, a target once."""
        for cache in self.rows:
            cache.index_copy_(0, targets, cache.index_select(0, sources))
