"""Shapes of dense decoders: their numbers of parameters, and the operations for training on one token.

The operations are those of the matrix products: every linear layer, the head, and attention (scores and weighted values).
Norms, activations and the softmax are left out; they are below 1 % for 64 or more hidden dims per head. A multiplication and
its addition count as two operations, and the backward pass as twice the forward pass.
"""

import math
from dataclasses import dataclass

__all__ = ["LARGEST_HIDDEN", "Shape", "nearest_shape", "shape_of"]

_ASPECT = 64
"""Hidden size / number of layers. In Llama's and Qwen's models of 0.1 to 10 billion parameters this ratio is 48 to 128."""
LARGEST_HIDDEN = 16384


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder with grouped-query attention and gated feed-forward layers, like Llama.

    tied: the embedding and the head share one matrix.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False

    @property
    def linear_params(self) -> int:
        """The number of weights in all linear layers except the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def params(self) -> int:
        """The number of all parameters: linear layers, embedding, head, and RMS norms (two per layer and one at the end)."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.linear_params + tables + self.hidden * (2 * self.layers + 1)

    def forward_flops(self, sequence: int, *, causal: bool = True) -> dict[str, float]:
        """Part -> operations of the forward pass per token, on average over sequences of `sequence` tokens.

        causal: True counts only the keys that a token sees, (sequence + 1) / 2 on average; False counts all keys, which some
        conventions do. "embedding" is 0, because it is a table lookup.
        """
        keys = (sequence + 1) / 2 if causal else sequence
        return {
            "linear": 2.0 * self.linear_params,
            "attention": 4.0 * self.layers * self.heads * self.head_dim * keys,
            "head": 2.0 * self.vocab * self.hidden,
            "embedding": 0.0,
        }

    def train_flops(self, sequence: int, *, causal: bool = True) -> float:
        """Operations for training on one token: forward and backward pass, without recomputation."""
        return 3 * sum(self.forward_flops(sequence, causal=causal).values())


def nearest_shape(
    params: float, vocab: int, *, tied: bool = False, head_dim: int = 64, layers: int | None = None
) -> Shape:  # fmt: skip
    """The shape whose number of parameters is closest to `params`, in a family with about 64 hidden dims per layer.

    A few depths around this proportion are tried; if `layers` is given, only that depth. Heads have `head_dim` dims, and all
    heads together are as wide as the model. The feed-forward layer is 8/3 as wide, rounded up to a multiple of 64.
    """
    options: list[Shape] = []
    for hidden in range(head_dim, LARGEST_HIDDEN + 1, head_dim):
        around = {max(1, math.floor(hidden / _ASPECT * x)) for x in (0.8, 0.9, 1.0, 1.1, 1.25)}
        depths = sorted(around) if layers is None else [layers]
        options += [shape_of(depth, hidden, vocab, tied, head_dim) for depth in depths]
        if options[-len(depths)].params > 4 * params:
            break
    return min(options, key=lambda shape: (abs(math.log(shape.params / params)), shape.layers))


def shape_of(layers: int, hidden: int, vocab: int, tied: bool, head_dim: int) -> Shape:
    """The shape of the family with this depth and hidden size; `hidden` is a multiple of `head_dim`."""
    heads, ffn = hidden // head_dim, -(-8 * hidden // 3 // 64) * 64
    return Shape(layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=head_dim, ffn=ffn, vocab=vocab, tied=tied)
