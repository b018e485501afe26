"""Variants of blocks, embeddings and heads for some model families, which replace the plain ones of decoder.py.

| part              | difference                                                          | in                   |
|-------------------|---------------------------------------------------------------------|----------------------|
| `SandwichBlock`   | outputs of attention and feed-forward layer are normalised, too     | Gemma 2 and 3, GLM-4 |
| `PostNormBlock`   | only these outputs are normalised                                   | OLMo-2               |
| `ScaledBlock`     | these outputs have a factor                                         | Granite              |
| `ParallelBlock`   | attention and feed-forward layer read the same stream               | Cohere, GPT-NeoX     |
| `PositionedBlock` | a first block: adds learned positions to the embedding              | GPT-2, OPT           |
| `ScaledEmbedding` | the embedding has a factor                                          | Gemma, Granite       |
| `ScaledNorm`,     | the logits have a factor, applied to the output of the last norm    | Granite; Cohere      |
| `ScaledLayerNorm` |                                                                     |                      |
| `CappedHead`      | logits z become cap tanh(z / cap)                                   | Gemma 2              |
"""

from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.decoder import Block, FeedForward, Norm
from tilewright.nn import MLA, Attention, Batch, Embedding, LayerNorm, Linear, Packed, RMSNorm
from tilewright.ops.linear import QuantizedActivation

__all__ = [
    "CappedHead", "ParallelBlock", "PositionedBlock", "PostNormBlock", "SandwichBlock", "ScaledBlock", "ScaledEmbedding",
    "ScaledLayerNorm", "ScaledNorm",
]  # fmt: skip


class SandwichBlock(Block):
    """Norm, attention, norm; norm, feed-forward, norm."""

    def __init__(self, *, attn_post_norm: Norm, ffn_post_norm: Norm, **block: Any):
        super().__init__(**block)
        self.attn_post_norm = attn_post_norm
        self.ffn_post_norm = ffn_post_norm

    def after_attn(self, h: Tensor) -> Tensor:
        """The second norm."""
        return self.attn_post_norm(h)

    def after_ffn(self, h: Tensor) -> Tensor:
        """The fourth."""
        return self.ffn_post_norm(h)


class ScaledBlock(Block):
    """The outputs of attention and feed-forward layer are multiplied by `scale`."""

    def __init__(self, *, scale: float, **block: Any):
        super().__init__(**block)
        self.scale = scale

    def after_attn(self, h: Tensor) -> Tensor:
        """Multiply by the factor."""
        return h * self.scale

    def after_ffn(self, h: Tensor) -> Tensor:
        """Multiply by the factor."""
        return h * self.scale


class PostNormBlock(nn.Module):
    """Attention, norm; feed-forward, norm. Both layers read the residual stream without a norm."""

    def __init__(self, *, attn: Attention | MLA, attn_post_norm: Norm, ffn: FeedForward, ffn_post_norm: Norm):
        super().__init__()
        self.attn = attn
        self.attn_post_norm = attn_post_norm
        self.ffn = ffn
        self.ffn_post_norm = ffn_post_norm

    def forward(self, h: Tensor, residual: Tensor | None, batch: Batch | Packed, cache: Any) -> tuple[Tensor, Tensor]:
        """As `Block`."""
        stream = h if residual is None else h + residual
        stream = stream + self.attn_post_norm(self.attn(stream, batch, cache))
        return self.ffn_post_norm(self.ffn(stream, batch.adapters)), stream


class ParallelBlock(nn.Module):
    """Attention and feed-forward layer read the same stream, and the sum of their outputs is added to it.

    Both read one norm, or `ffn_norm` is that of the feed-forward layer (Wang and Komatsuzaki, "GPT-J", 2021; Black et al.,
    "GPT-NeoX-20B", 2022).
    """

    def __init__(self, *, attn_norm: Norm, attn: Attention, ffn: FeedForward, ffn_norm: Norm | None = None):
        super().__init__()
        self.attn_norm = attn_norm
        self.attn = attn
        self.ffn_norm = ffn_norm
        self.ffn = ffn

    def forward(self, h: Tensor, residual: Tensor | None, batch: Batch | Packed, cache: Any) -> tuple[Tensor, Tensor]:
        """As `Block`."""
        normed, stream = self.attn_norm.add(h, residual)
        other = normed if self.ffn_norm is None else self.ffn_norm.add(stream, None)[0]
        return self.attn(normed, batch, cache) + self.ffn(other, batch.adapters), stream


class PositionedBlock(Block):
    """A first block, which begins by adding a learned vector for each position to the embedding.

    offset: the row of the first position.
    """

    def __init__(self, *, positions: Embedding, offset: int = 0, **block: Any):
        super().__init__(**block)
        self.positions, self.offset = positions, offset

    def forward(self, h: Tensor, residual: Tensor | None, batch: Batch | Packed, cache: Any) -> tuple[Tensor, Tensor]:
        """As `Block`."""
        rows = batch.positions + self.offset if self.offset else batch.positions
        return super().forward(h + self.positions(rows), residual, batch, cache)


class ScaledEmbedding(Embedding):
    """Rows of the table, multiplied by `scale`."""

    def __init__(self, rows: int, features: int, *, scale: float, **place: Any):
        super().__init__(rows, features, **place)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., features]."""
        return super().forward(ids) * self.scale


class ScaledNorm(RMSNorm):
    """A norm whose output is multiplied by `scale`."""

    def __init__(self, features: int, *, scale: float, **options: Any):
        super().__init__(features, **options)
        self.scale = scale

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, scaled; the sum)."""
        normed, total = super().add(x, residual)
        return normed * self.scale, total


class ScaledLayerNorm(LayerNorm):
    """The same of a layer norm."""

    def __init__(self, features: int, *, scale: float, **options: Any):
        super().__init__(features, **options)
        self.scale = scale

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, scaled; the sum)."""
        normed, total = super().add(x, residual)
        return normed * self.scale, total


class CappedHead(Linear):
    """A head whose logits are limited to `cap` on both sides."""

    def __init__(self, features: int, rows: int, *, cap: float, **place: Any):
        super().__init__(features, rows, bias=False, **place)
        self.cap = cap

    def forward(self, x: Tensor | QuantizedActivation, activation: str = "none", adapters: Tensor | None = None) -> Tensor:
        """[..., features] -> [..., rows]."""
        return torch.tanh(super().forward(x, activation, adapters) / self.cap) * self.cap
