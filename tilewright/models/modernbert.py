"""ModernBERT (Warner et al., "Smarter, Better, Faster, Longer", 2024) with the names of transformers' `ModernBertModel`.

    x = norm of word embeddings; each block: x += attention(norm x), x += down(gelu(a) * b) with (a, b) from one projection of
    norm x; then a last norm. The first block's attention reads x itself. Most blocks attend within a window on both sides.

Sequences are packed, [T] with `Lengths` and positions. Not supported: dropout.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.embedding import Embedding
from tilewright.nn.linear import Linear
from tilewright.nn.multi_head import Lengths
from tilewright.nn.norm import LayerNorm
from tilewright.nn.rope import Rope

__all__ = ["ModernBert"]

# T tokens, E features, H heads


class _Block(nn.Module):
    def __init__(
        self, features: int, heads: int, inner: int, *, reach: int | None, rope: Rope, first: bool, biases: tuple[bool, bool],
        activation: str, norm: dict, place: dict,
    ):  # fmt: skip
        super().__init__()
        self.heads, self.reach, self.rope, self.activation = heads, reach, rope, activation
        of_attention, of_mlp = biases
        self.attn_norm = nn.Identity() if first else LayerNorm(features, **norm, **place)
        self.attn = nn.ModuleDict(
            {
                "Wqkv": Linear(features, (features,) * 3, bias=of_attention, **place),
                "Wo": Linear(features, features, bias=of_attention, **place),
            }
        )
        self.mlp_norm = LayerNorm(features, **norm, **place)
        self.mlp = nn.ModuleDict(
            {
                "Wi": Linear(features, (inner, inner), bias=of_mlp, **place),
                "Wo": Linear(inner, features, bias=of_mlp, **place),
            }
        )

    def forward(self, x: Tensor, lengths: Lengths, positions: Tensor) -> Tensor:
        q, k, v = self.attn["Wqkv"](self.attn_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = ops.rope(q, k, positions, self.rope.cos_sin)
        window = None if self.reach is None else (self.reach, self.reach)
        attended = ops.attention(
            q, k, v, window=window, cu_q=lengths.cu, cu_k=lengths.cu, max_q=lengths.longest, max_k=lengths.longest
        )  # fmt: skip
        assert isinstance(attended, Tensor), "without return_lse there is one result"
        x = x + self.attn["Wo"](attended.flatten(1))
        return x + self.mlp["Wo"](self.mlp["Wi"](self.mlp_norm(x), self.activation))


class ModernBert(nn.Module):
    """ids -> the last norm's output.

    Args:
        vocab_size: rows of the word table.
        features: E.
        heads: H, a divisor of E.
        inner: width of the feed-forward layers.
        positions: the longest sequence.
        reaches: of each block, how far it sees to both sides; None: all.
        thetas: bases of the wavelengths, of blocks that see all and of others.
        eps: of the norms.
        norm_bias: whether they have biases.
        attention_bias: whether projections of the attention have biases.
        mlp_bias: whether the feed-forward layers have.
        activation: of the gated layer, as `ops.linear` calls it.
    """

    def __init__(
        self, vocab_size: int, features: int, heads: int, inner: int, positions: int, *, reaches: Sequence[int | None],
        thetas: tuple[float, float] = (160_000.0, 10_000.0), eps: float = 1e-5, norm_bias: bool = False,
        attention_bias: bool = False, mlp_bias: bool = False, activation: str = "gelu_mul",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        place, norm = {"device": device, "dtype": dtype}, {"eps": eps, "bias": norm_bias}
        ropes = [Rope(features // heads, max_positions=positions, base=theta, device=device) for theta in thetas]
        self.embeddings = nn.ModuleDict(
            {"tok_embeddings": Embedding(vocab_size, features, **place), "norm": LayerNorm(features, **norm, **place)}
        )
        self.layers = nn.ModuleList(
            _Block(
                features, heads, inner, reach=reach, rope=ropes[0 if reach is None else 1], first=i == 0,
                biases=(attention_bias, mlp_bias), activation=activation, norm=norm, place=place,
            )
            for i, reach in enumerate(reaches)
        )  # fmt: skip
        self.final_norm = LayerNorm(features, **norm, **place)

    def forward(self, ids: Tensor, lengths: Lengths, positions: Tensor) -> Tensor:
        """[T] -> [T, E]."""
        x = self.embeddings["norm"](self.embeddings["tok_embeddings"](ids))
        for block in self.layers:
            x = block(x, lengths, positions)
        return self.final_norm(x)
