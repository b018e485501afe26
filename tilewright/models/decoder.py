"""A decoder-only transformer as a composition: which attention, feed-forward layer and norms, is the builder's choice.

The residual stream travels beside the activations, h + residual is formed inside the next norm: one pass over memory instead
of two. The last sum is formed by the final norm.

    T tokens, E hidden, R rows, V vocabulary
"""

from collections.abc import Iterable

from torch import Tensor, nn

from tilewright.models.config import ModelConfig
from tilewright.nn import Attention, Batch, Embedding, GatedMLP, KVCache, Linear, RMSNorm

__all__ = ["Block", "Decoder"]


class Block(nn.Module):
    """Norm, attention, norm, feed-forward."""

    def __init__(self, *, attn_norm: RMSNorm, attn: Attention, ffn_norm: RMSNorm, ffn: GatedMLP):
        super().__init__()
        self.attn_norm = attn_norm
        self.attn = attn
        self.ffn_norm = ffn_norm
        self.ffn = ffn

    def forward(
        self, h: Tensor, residual: Tensor | None, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(h [T, E], residual [T, E] or None before the first block) -> (h, residual); their sum is the stream."""
        normed, residual = self.attn_norm.add_for(self.attn.qkv, h, residual)
        h = self.attn(normed, batch, k_cache, v_cache)
        normed, residual = self.ffn_norm.add_for(self.ffn.gate_up, h, residual)
        return self.ffn(normed), residual

    def norm_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """(norm, the one linear layer that reads its output)."""
        return [(self.attn_norm, self.attn.qkv), (self.ffn_norm, self.ffn.gate_up)]


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head. `head` may share the embedding's parameter."""

    def __init__(self, config: ModelConfig, *, embed: Embedding, blocks: Iterable[Block], norm: RMSNorm, head: Linear):
        super().__init__()
        self.config = config
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head

    def forward(self, token_ids: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """token_ids [T] int64 -> hidden [T, E] after the final norm. Writes the tokens' keys and values to the cache.

        Waits for nothing and allocates only by shape: may be captured in a CUDA graph.
        """
        h, residual = self.embed(token_ids), None
        for block, k_cache, v_cache in zip(self.blocks, cache.k, cache.v, strict=True):
            h, residual = block(h, residual, batch, k_cache, v_cache)
        return self.norm.add(h, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of hidden [R, E] -> [R, V], in the model's dtype."""
        return self.head(hidden)
