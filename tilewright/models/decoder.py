"""A decoder-only transformer composed of given parts: the builder chooses attention, feed-forward layer and norms.

The residual stream is passed along with the activations, and h + residual is computed inside the next norm: one pass over
memory instead of two. The last sum is computed by the final norm.

    T tokens, E hidden, R rows, V vocabulary
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.config import ModelConfig
from tilewright.nn import (
    MLA,
    MLP,
    Attention,
    Batch,
    ClampedMoE,
    Embedding,
    GatedMLP,
    KVCache,
    LatentCache,
    LayerNorm,
    Linear,
    MoE,
    Packed,
    PackedKeysValues,
    RMSNorm,
)

__all__ = ["Block", "Decoder", "FeedForward", "Norm"]

Norm = RMSNorm | LayerNorm
FeedForward = GatedMLP | MLP | MoE | ClampedMoE


class Block(nn.Module):
    """Norm, attention, norm, feed-forward."""

    def __init__(self, *, attn_norm: Norm, attn: Attention | MLA, ffn_norm: Norm, ffn: FeedForward):
        super().__init__()
        self.attn_norm = attn_norm
        self.attn = attn
        self.ffn_norm = ffn_norm
        self.ffn = ffn

    def forward(self, h: Tensor, residual: Tensor | None, batch: Batch | Packed, cache: Any) -> tuple[Tensor, Tensor]:
        """(h [T, E], residual [T, E] or None before the first block) -> (h, residual); the stream is their sum.

        cache: this layer's, in the form that its attention needs.
        """
        normed, residual = self.attn_norm.add_for(self.attn.reader, h, residual, batch.adapters)
        h = self.after_attn(self.attn(normed, batch, cache))
        reader = self.ffn.reader
        if reader is None:
            normed, residual = self.ffn_norm.add(h, residual)
        else:
            normed, residual = self.ffn_norm.add_for(reader, h, residual, batch.adapters)
        return self.after_ffn(self.ffn(normed, batch.adapters)), residual

    def after_attn(self, h: Tensor) -> Tensor:
        """Applied to the attention's output before it is added to the stream; here the identity. A family may add a norm."""
        return h

    def after_ffn(self, h: Tensor) -> Tensor:
        """The same for the feed-forward layer's output."""
        return h

    def norm_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """(norm, the one linear layer that reads its output), for norms with a single reader."""
        pairs = [(self.attn_norm, self.attn.reader), (self.ffn_norm, self.ffn.reader)]
        return [(norm, reader) for norm, reader in pairs if reader is not None]


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head. `head` may share the embedding's parameter."""

    def __init__(self, config: ModelConfig, *, embed: Embedding, blocks: Iterable[nn.Module], norm: Norm, head: Linear):
        super().__init__()
        self.config = config
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head

    def empty_cache(
        self, pages: int, page_size: int, dtype: torch.dtype | None = None, *, window_pages: int = 0
    ) -> KVCache | LatentCache:
        """A cache for this model on its device, of the embedding's dtype, or quantised to int8 or float8_e4m3fn.

        window_pages: number of pages for layers with a window; 0: all layers use the same pages.
        """
        config, weight = self.config, self.embed.weight
        sizes = {"layers": config.num_hidden_layers, "pages": pages, "page_size": page_size}
        place = {"dtype": dtype or weight.dtype, "device": weight.device}
        if config.latent is not None:
            return LatentCache.zeros(width=config.latent.cached, **sizes, **place)
        heads = {"kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
        if not window_pages:
            return KVCache.zeros(**heads, **sizes, **place)
        windowed = [window is not None for window in config.windows]
        kinds = ((len(windowed) - sum(windowed), pages), (sum(windowed), window_pages))
        made = [KVCache.zeros(**heads, layers=layers, pages=count, page_size=page_size, **place) for layers, count in kinds]
        return KVCache.of_kinds(windowed, *made)

    def forward(self, token_ids: Tensor, batch: Batch | Packed, cache: KVCache | LatentCache | PackedKeysValues) -> Tensor:
        """token_ids [T] int64 -> hidden [T, E] after the final norm. A cache is written to.

        It waits for nothing, and allocations depend only on shapes, so it can be captured in a CUDA graph. With
        `PackedKeysValues` and a `Packed` batch it is differentiable.
        """
        h, residual = self.embed(token_ids), None
        for index, block in enumerate(self.blocks):
            h, residual = block(h, residual, batch, cache.layer(index))
        return self.norm.add(h, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of hidden [R, E] -> [R, V], in the model's dtype."""
        return self.head(hidden)
