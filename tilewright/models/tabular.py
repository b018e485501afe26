"""Models of table rows (Gorishniy et al., "Revisiting deep learning models for tabular data", 2021): MLP and FT-Transformer.

A row has numbers [B, N] and categories [B, K] int64; either may be missing. FT-Transformer turns each into a token: x_i w_i +
b_i for a number, a row of the feature's table plus b_i for a category; the output is read from one additional token. Its blocks
are pre-norm, without the first norm, with a ReGLU layer. Not supported: missing values, piecewise linear embeddings.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.activation import Dropout
from tilewright.nn.embedding import Embedding
from tilewright.nn.linear import Linear
from tilewright.nn.multi_head import SelfAttention
from tilewright.nn.norm import LayerNorm

__all__ = ["FTTransformer", "TabularMLP"]

# B rows, N numbers and K categories of each, E features of a token


class TabularMLP(nn.Module):
    """Blocks of linear, relu and dropout, and a linear head. Categories are embedded and join the numbers."""

    def __init__(
        self, numbers: int, categories: Sequence[int], outputs: int, *, widths: Sequence[int] = (256, 256),
        dropout: float = 0.1, embedding: int = 8, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.tables = nn.ModuleList(Embedding(size, embedding, **place) for size in categories)
        ends = [numbers + embedding * len(categories), *widths]
        self.layers = nn.ModuleList(Linear(a, b, bias=True, **place) for a, b in pairwise(ends))
        self.dropout = Dropout(dropout)
        self.head = Linear(ends[-1], outputs, bias=True, **place)

    def forward(self, numbers: Tensor | None, categories: Tensor | None = None) -> Tensor:
        """[B, N] and [B, K] int64 -> [B, outputs]."""
        parts = [] if numbers is None else [numbers]
        if categories is not None:
            parts += [table(categories[:, i]) for i, table in enumerate(self.tables)]
        x = torch.cat(parts, -1)
        for layer in self.layers:
            x = self.dropout(layer(x, "relu"))
        return self.head(x)


class _Block(nn.Module):
    """x + attention(norm(x)), then x + ReGLU layer(norm(x))."""

    def __init__(self, features: int, heads: int, inner: int, dropout: float, first: bool, place: dict):
        super().__init__()
        self.attention_norm = None if first else LayerNorm(features, **place)
        self.attention = SelfAttention(features, heads=heads, qkv_bias=True, out_bias=True, **place)
        self.norm = LayerNorm(features, **place)
        self.gate_up = Linear(features, (inner, inner), bias=True, **place)
        self.dropout = Dropout(dropout)
        self.down = Linear(inner, features, bias=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x if self.attention_norm is None else self.attention_norm(x))
        up, gate = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(self.dropout(ops.gated_mul(gate, up, "relu")))


class FTTransformer(nn.Module):
    """A transformer over the features of a row.

    Args:
        numbers: N.
        categories: the size of each of the K categories.
        outputs: of the head.
        features: E.
        layers: blocks.
        heads: a divisor of E.
        inner: width of the ReGLU layers; None for 4/3 E.
        dropout: in the ReGLU layers.
    """

    def __init__(
        self, numbers: int, categories: Sequence[int], outputs: int, *, features: int = 192, layers: int = 3, heads: int = 8,
        inner: int | None = None, dropout: float = 0.1, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        place = {"device": device, "dtype": dtype}
        tokens = numbers + len(categories)
        self.weight = nn.Parameter(torch.empty(numbers, features, **place))
        self.bias = nn.Parameter(torch.empty(tokens, features, **place))
        self.cls = nn.Parameter(torch.empty(features, **place))
        self.tables = nn.ModuleList(Embedding(size, features, **place) for size in categories)
        inner = features * 4 // 3 if inner is None else inner
        self.blocks = nn.ModuleList(_Block(features, heads, inner, dropout, i == 0, place) for i in range(layers))
        self.norm = LayerNorm(features, **place)
        self.head = Linear(features, outputs, bias=True, **place)
        for parameter in (self.weight, self.bias, self.cls):
            nn.init.uniform_(parameter, -1 / math.sqrt(features), 1 / math.sqrt(features))

    def forward(self, numbers: Tensor | None, categories: Tensor | None = None) -> Tensor:
        """[B, N] and [B, K] int64 -> [B, outputs]."""
        parts = [] if numbers is None else [numbers[..., None] * self.weight]
        if categories is not None:
            parts += [table(categories[:, i])[:, None] for i, table in enumerate(self.tables)]
        tokens = torch.cat(parts, 1) + self.bias
        x = torch.cat((self.cls.expand(tokens.shape[0], 1, -1), tokens), 1)
        for block in self.blocks:
            x = block(x)
        return self.head(ops.activation(self.norm(x[:, 0]), "relu"))
