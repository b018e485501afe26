"""Attention without a cache: within a sequence (for encoders and training), and from one sequence to another.

Weights are laid out as in `nn.Attention`: projections of the same input are merged into one matmul. Sequences are [B, S, E] of
equal length, or packed, [T, E], with cumulative lengths. Not here: dropout, masks as tensors, caches (see `nn.Attention`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.filling import parameter
from tilewright.nn.linear import Linear
from tilewright.nn.rope import Rope

__all__ = ["CrossAttention", "Lengths", "SelfAttention"]

# B sequences, S tokens per sequence, T tokens in all, E model features, H query heads, G key/value heads, D head dim,
# V value head dim


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Where packed sequences begin and end."""

    cu: Tensor
    """int32 [B + 1]: sequence b is rows cu[b] to cu[b + 1] (exclusive)."""
    longest: int


def _attended(
    q: Tensor, k: Tensor, v: Tensor, of_q: Lengths | None, of_k: Lengths | None, options: Mapping[str, Any]
) -> Tensor:  # fmt: skip
    """`ops.attention`, with the heads concatenated: [..., H V]."""
    if (of_q is None) != (of_k is None) or (of_q is None) != (q.dim() == 4):
        raise ValueError(
            "attention layer: packed sequences [T, E] need lengths, and sequences [B, S, E] must come without them; got "
            f"queries {list(q.shape[:-2])} {'without' if of_q is None else 'with'} lengths, and keys {list(k.shape[:-2])} "
            f"{'without' if of_k is None else 'with'} lengths"
        )
    lengths = {}
    if of_q is not None and of_k is not None:
        lengths = {"cu_q": of_q.cu, "max_q": of_q.longest, "cu_k": of_k.cu, "max_k": of_k.longest}
    out = ops.attention(q, k, v, **lengths, **options)
    assert isinstance(out, Tensor), "without return_lse there is one result"
    return out.flatten(-2)


class SelfAttention(nn.Module):
    """Project to q, k and v; rotate q and k (optional); every token attends to its own sequence; project back.

    Args:
        features: E.
        heads: H, a multiple of kv_heads.
        kv_heads: G; None for H.
        head_dim: D; None for E / H.
        value_dim: V; None for D.
        causal: a token sees only itself and the tokens before it.
        window: a number, (left, right), or None for no window, as in `ops.attention`.
        softcap: as in `ops.attention`.
        scale: factor on q . k, above 0; None for 1 / sqrt(D).
        sinks: whether each head has a further learned score in every softmax; the value that belongs to it is zero.
        alibi_slopes: H numbers, one per head; None: no ALiBi.
        rope: the table of angles; None: no rotation.
        qkv_bias: whether q, k and v have biases.
        out_bias: whether the output projection has one.

    Raises:
        ValueError: heads is not a multiple of kv_heads; head_dim is None and features is not a multiple of heads; alibi_slopes
            is not one number per head; or the window is below 1.
    """

    def __init__(
        self,
        features: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: bool = False,
        alibi_slopes: Tensor | None = None,
        rope: Rope | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kv_heads, head_dim = _checked(features, heads, kv_heads, head_dim)
        if isinstance(window, int) and window < 1:
            raise ValueError(f"SelfAttention: window is {window}, wanted at least 1, (left, right), or None for all tokens")
        if alibi_slopes is not None and alibi_slopes.shape != (heads,):
            raise ValueError(
                f"SelfAttention: alibi_slopes must have shape [{heads}], one slope per head; got {list(alibi_slopes.shape)}"
            )
        self.heads = (heads, kv_heads, kv_heads)
        self.widths = (head_dim, head_dim, value_dim or head_dim)
        self.rope = rope
        self.options = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
        parts = [n * width for n, width in zip(self.heads, self.widths, strict=True)]
        self.qkv = Linear(features, parts, bias=qkv_bias, device=device, dtype=dtype)
        self.out = Linear(heads * self.widths[2], features, bias=out_bias, device=device, dtype=dtype)
        self.sinks = parameter(heads, fill=nn.init.zeros_, device=device, dtype=dtype) if sinks else None
        self.alibi_slopes: Tensor | None
        slopes = None if alibi_slopes is None else alibi_slopes.to(device=device, dtype=torch.float32)
        self.register_buffer("alibi_slopes", slopes, persistent=False)

    def forward(
        self, x: Tensor, lengths: Lengths | None = None, positions: Tensor | None = None, prefix: int | Tensor | None = None
    ) -> Tensor:
        """[B, S, E] -> [B, S, E]; or packed, [T, E] with `lengths` -> [T, E].

        Args:
            x: the tokens.
            lengths: where packed sequences begin and end.
            positions: int64, the position of every token, for the rotation. None: 0, 1, 2, ... in each sequence; packed
                sequences with a rotation need positions.
            prefix: only with causal: the number of keys at the start of a sequence that all its tokens see.

        Raises:
            ValueError: lengths do not fit x, or a packed x needs positions for the rotation.
        """
        q, k, v = (
            part.unflatten(-1, (n, -1)) for part, n in zip(self.qkv(x).split(self.qkv.parts, -1), self.heads, strict=True)
        )
        if self.rope is not None:
            q, k = self._rotated(q, k, positions, self.rope)
        bent = {"prefix": prefix, "sinks": self.sinks, "alibi_slopes": self.alibi_slopes, **self.options}
        return self.out(_attended(q, k, v, lengths, lengths, bent))

    def _rotated(self, q: Tensor, k: Tensor, positions: Tensor | None, rope: Rope) -> tuple[Tensor, Tensor]:
        if positions is None:
            if q.dim() == 3:
                raise ValueError("SelfAttention: the rotary embedding of packed tokens needs positions, int64 [T]")
            positions = torch.arange(q.shape[1], device=q.device).expand(q.shape[:2])
        shapes = q.shape, k.shape
        turned = ops.rope(q.flatten(0, -3), k.flatten(0, -3), positions.reshape(-1), rope.cos_sin, rope.interleaved)
        return turned[0].view(shapes[0]), turned[1].view(shapes[1])

    def extra_repr(self) -> str:
        return f"{self.heads[0]} heads, {self.heads[1]} kv heads of {self.widths[0]}, {self.options}"


class CrossAttention(nn.Module):
    """Project x to q, and another sequence (the memory) to k and v; every token of x attends to the memory; project back.

    Args:
        features: E.
        heads: H, a multiple of kv_heads.
        memory_features: M, the features of the memory's tokens; None for E.
        kv_heads: G; None for H.
        head_dim: D; None for E / H.
        bias: whether the projections to q, k and v have biases.
        out_bias: whether the output projection has one.

    Raises:
        ValueError: heads is not a multiple of kv_heads; or head_dim is None and features is not a multiple of heads.
    """

    def __init__(
        self,
        features: int,
        *,
        heads: int,
        memory_features: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kv_heads, head_dim = _checked(features, heads, kv_heads, head_dim)
        self.heads = (heads, kv_heads)
        self.head_dim = head_dim
        self.q = Linear(features, heads * head_dim, bias=bias, device=device, dtype=dtype)
        of_memory = features if memory_features is None else memory_features
        self.kv = Linear(of_memory, [kv_heads * head_dim] * 2, bias=bias, device=device, dtype=dtype)
        self.out = Linear(heads * head_dim, features, bias=out_bias, device=device, dtype=dtype)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [..., G, D] of a memory [..., M]. They do not depend on x, so a decoder can reuse them in every step."""
        k, v = self.kv(memory).unflatten(-1, (2, self.heads[1], self.head_dim)).unbind(-3)
        return k, v

    def forward(
        self, x: Tensor, kv: tuple[Tensor, Tensor], lengths: Lengths | None = None, memory_lengths: Lengths | None = None
    ) -> Tensor:
        """x [B, S, E] and kv (`keys_and_values` of a memory [B, SM, M]) -> [B, S, E]; or both packed, with lengths.

        Raises:
            ValueError: lengths do not fit x and kv.
        """
        q = self.q(x).unflatten(-1, (self.heads[0], self.head_dim))
        return self.out(_attended(q, *kv, lengths, memory_lengths, {}))

    def extra_repr(self) -> str:
        return f"{self.heads[0]} heads, {self.heads[1]} kv heads of {self.head_dim}"


def _checked(features: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """(kv_heads, head_dim) with the defaults filled in."""
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"attention layer: heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    if head_dim is None and features % heads:
        raise ValueError(f"attention layer: features ({features}) is not a multiple of heads ({heads}); pass head_dim")
    return kv_heads, features // heads if head_dim is None else head_dim
