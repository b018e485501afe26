"""A BERT encoder (Devlin et al., "BERT", 2019) with the names of transformers' `BertModel`, so that its state dicts load.

RoBERTa and XLM-RoBERTa use the same module; their positions begin after that of the padding token (`first_position`).

    x = layer norm of word + position + token type embeddings; each block: self-attention, then a gelu layer of 4 E, each with
    a residual and a layer norm after it. The pooler is tanh of a linear layer of the first token.

Sequences are [B, S] of one length, or packed, [T] with `Lengths` and positions: padding is not computed, so there is no mask.
Not supported: causal and cross attention, dropout, relative positions.
"""

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.embedding import Embedding
from tilewright.nn.linear import Linear
from tilewright.nn.multi_head import Lengths
from tilewright.nn.norm import LayerNorm

__all__ = ["Bert"]

# B sequences, S tokens of each, T of all, E features, H heads


class _Block(nn.Module):
    """Post-norm: norm(x + attention(x)), then norm(x + feed-forward(x))."""

    def __init__(self, features: int, heads: int, inner: int, eps: float, activation: str, place: dict):
        super().__init__()
        self.heads = heads
        self.activation = activation

        def linear(width_in: int, width_out: int) -> Linear:
            return Linear(width_in, width_out, bias=True, **place)

        projections = nn.ModuleDict({name: linear(features, features) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict(
            {
                "self": projections,
                "output": nn.ModuleDict(
                    {"dense": linear(features, features), "LayerNorm": LayerNorm(features, eps=eps, **place)}
                ),
            }
        )
        self.intermediate = nn.ModuleDict({"dense": linear(features, inner)})
        self.output = nn.ModuleDict({"dense": linear(inner, features), "LayerNorm": LayerNorm(features, eps=eps, **place)})

    def forward(self, x: Tensor, lengths: Lengths | None) -> Tensor:
        of_self, after = self.attention["self"], self.attention["output"]
        q, k, v = (of_self[name](x).unflatten(-1, (self.heads, -1)) for name in ("query", "key", "value"))
        packed = {}
        if lengths is not None:
            packed = {"cu_q": lengths.cu, "cu_k": lengths.cu, "max_q": lengths.longest, "max_k": lengths.longest}
        attended = ops.attention(q, k, v, **packed)
        assert isinstance(attended, Tensor), "without return_lse there is one result"
        x = after["LayerNorm"](x + after["dense"](attended.flatten(-2)))
        inner = self.intermediate["dense"](x, self.activation)
        return self.output["LayerNorm"](x + self.output["dense"](inner))


class Bert(nn.Module):
    """ids -> the last block's output, and the pooler's.

    Args:
        vocab_size: rows of the word table.
        features: E.
        layers: blocks.
        heads: H, a divisor of E.
        inner: width of the feed-forward layers.
        positions: the longest sequence.
        token_types: rows of the token type table.
        eps: of the layer norms.
        activation: between the feed-forward layers, as `ops.linear` calls it.
        pooler: whether there is one.
        first_position: row of the position table that a sequence's first token has.
    """

    def __init__(
        self, vocab_size: int = 30522, features: int = 768, layers: int = 12, heads: int = 12, inner: int = 3072,
        positions: int = 512, token_types: int = 2, eps: float = 1e-12, *, activation: str = "gelu", pooler: bool = True,
        first_position: int = 0, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.first_position = first_position
        place = {"device": device, "dtype": dtype}
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": Embedding(vocab_size, features, **place),
                "position_embeddings": Embedding(positions, features, **place),
                "token_type_embeddings": Embedding(token_types, features, **place),
                "LayerNorm": LayerNorm(features, eps=eps, **place),
            }
        )
        blocks = [_Block(features, heads, inner, eps, activation, place) for _ in range(layers)]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(blocks)})
        self.pooler = nn.ModuleDict({"dense": Linear(features, features, bias=True, **place)}) if pooler else None

    def forward(
        self, ids: Tensor, lengths: Lengths | None = None, positions: Tensor | None = None, token_types: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[B, S] -> ([B, S, E], [B, E]); or packed, [T] with lengths and positions (from 0) -> ([T, E], [B, E]).

        Without a pooler its output is the first tokens'.

        Raises:
            ValueError: packed ids without lengths or positions, or the other way round.
        """
        if (ids.dim() == 1) != (lengths is not None) or (ids.dim() == 1) != (positions is not None):
            raise ValueError(
                "Bert: packed ids [T] need lengths and positions, and ids [B, S] must come without them; got ids of "
                f"shape {list(ids.shape)}"
            )
        if positions is None:
            positions = torch.arange(ids.shape[-1], device=ids.device)
        if token_types is None:
            token_types = torch.zeros_like(ids)
        tables = self.embeddings
        x = tables["word_embeddings"](ids) + tables["token_type_embeddings"](token_types)
        x = tables["LayerNorm"](x + tables["position_embeddings"](positions + self.first_position))
        for block in self.encoder["layer"]:  # pyright: ignore[reportGeneralTypeIssues]
            x = block(x, lengths)
        first = x[:, 0] if lengths is None else x[lengths.cu[:-1].long()]
        return x, first if self.pooler is None else ops.activation(self.pooler["dense"](first), "tanh")
