"""A small causal transformer with a choice of residual connections, which differ in where the norms are.

    none        x + f(x)
    pre         x + f(norm(x))                   Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020
    post        norm(x + f(x))                   Vaswani et al., "Attention Is All You Need", 2017
    peri        x + norm(f(norm(x)))             Kim et al., "Peri-LN", 2025
    deepnorm    norm(alpha x + f(x))             Wang et al., "DeepNet", 2022: alpha = (2 L)^(1/4), weights of v, of the
                                                 output projection and of the feed-forward layer times (8 L)^(-1/4)

f is attention or a feed-forward layer with ReLU. Matrices have Xavier initialisation: normal with variance 2 / (in + out).
Embeddings have variance 1. With `pre` and `peri`, there is one more norm before the output layer.

    B sequences, S tokens per sequence, E features, V tokens in the vocabulary, L layers
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from tilewright.nn import Embedding, Linear, RMSNorm, SelfAttention

__all__ = ["SCHEMES", "Block", "FeedForward", "Scheme", "Transformer"]


class FeedForward(nn.Module):
    """y = down(relu(up(x))). The hidden layer is four times as wide as x."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.up = Linear(features, 4 * features, bias=False)
        self.down = Linear(4 * features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        return self.down(self.up(x, "relu"))


class Plain(nn.Module):
    """x + f(x)."""

    def __init__(self, f: nn.Module, features: int, layers: int) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        return x + self.f(x)


class Pre(nn.Module):
    """x + f(norm(x))."""

    def __init__(self, f: nn.Module, features: int, layers: int) -> None:
        super().__init__()
        self.norm, self.f = RMSNorm(features, eps=1e-6), f

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        return x + self.f(self.norm(x))


class Post(nn.Module):
    """norm(x + f(x))."""

    def __init__(self, f: nn.Module, features: int, layers: int) -> None:
        super().__init__()
        self.norm, self.f = RMSNorm(features, eps=1e-6), f

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        return self.norm(x + self.f(x))


class Peri(nn.Module):
    """x + norm(f(norm(x)))."""

    def __init__(self, f: nn.Module, features: int, layers: int) -> None:
        super().__init__()
        self.before, self.f, self.behind = RMSNorm(features, eps=1e-6), f, RMSNorm(features, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        return x + self.behind(self.f(self.before(x)))


class Deep(nn.Module):
    """norm(alpha x + f(x)), with smaller initial weights of f."""

    def __init__(self, f: nn.Module, features: int, layers: int) -> None:
        super().__init__()
        self.norm, self.f = RMSNorm(features, eps=1e-6), f
        self.alpha = (2 * layers) ** 0.25
        smaller = (8 * layers) ** -0.25
        for linear in (m for m in f.modules() if isinstance(m, Linear)):
            rows = _weight(linear)
            # In a merged projection, only the rows of the values are scaled. They come last.
            (rows[-linear.parts[-1] :] if len(linear.parts) > 1 else rows).mul_(smaller)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        return self.norm(self.alpha * x + self.f(x))


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A kind of residual connection, and whether the residual stream needs a norm at its end."""

    connect: Callable[[nn.Module, int, int], nn.Module]
    """(f, features, layers) -> a module [B, S, E] -> [B, S, E]."""
    final_norm: bool


SCHEMES: Mapping[str, Scheme] = {
    "pre": Scheme(connect=Pre, final_norm=True),
    "post": Scheme(connect=Post, final_norm=False),
    "peri": Scheme(connect=Peri, final_norm=True),
    "deepnorm": Scheme(connect=Deep, final_norm=False),
    "none": Scheme(connect=Plain, final_norm=False),
}


class Block(nn.Module):
    """Attention, then a feed-forward layer, each with a residual connection as in the scheme."""

    def __init__(self, scheme: Scheme, features: int, heads: int, layers: int) -> None:
        super().__init__()
        attention, feed_forward = SelfAttention(features, heads=heads, causal=True), FeedForward(features)
        for linear in (m for f in (attention, feed_forward) for m in f.modules() if isinstance(m, Linear)):
            _xavier(linear)
        self.attention = scheme.connect(attention, features, layers)
        self.feed_forward = scheme.connect(feed_forward, features, layers)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        return self.feed_forward(self.attention(x))


def _weight(linear: Linear) -> Tensor:
    """The weight of a layer, for changes without gradients."""
    assert isinstance(linear.weight, Tensor), "a new layer is not quantised"
    return linear.weight.data


def _xavier(linear: Linear) -> None:
    """Initialise each projection of a merged layer as if it were a separate layer."""
    for part in _weight(linear).split(linear.parts):
        nn.init.normal_(part, std=math.sqrt(2 / (part.shape[0] + part.shape[1])))


class Transformer(nn.Module):
    """Embedding with positions, blocks, a norm if the scheme needs one, and an output layer."""

    def __init__(self, scheme: Scheme, *, layers: int, features: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embed, self.positions = Embedding(vocabulary, features), Embedding(length, features)
        for embedding in (self.embed, self.positions):
            nn.init.normal_(embedding.weight, std=math.sqrt(0.5))
        self.blocks = nn.ModuleList(Block(scheme, features, heads, layers) for _ in range(layers))
        self.norm = RMSNorm(features, eps=1e-6) if scheme.final_norm else nn.Identity()
        self.head = Linear(features, vocabulary, bias=False)
        nn.init.normal_(_weight(self.head), std=features**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 -> logits [B, S, V]."""
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
