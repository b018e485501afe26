"""Causal grouped-query attention (Ainslie et al., "GQA", 2023): two matmuls, and between them what stores and attends.

Where keys and values live is a value that the layer is handed (keys_values.py): pages of a cache in serving, the packed batch
itself in training and scoring. Not here: attention over another sequence (multi_head.py), soft caps.
"""

import math

import torch
from torch import Tensor, nn

from tilewright.nn.batch import Batch, Packed
from tilewright.nn.filling import parameter
from tilewright.nn.keys_values import Heads, KeysValues
from tilewright.nn.linear import Linear
from tilewright.nn.rope import Rope
from tilewright.ops.linear import Codes

__all__ = ["Attention"]

# T tokens, E model features, H query heads, G key/value heads, D head dim


class Attention(nn.Module):
    """Project to q, k, v; norm (optional) and rotate q and k; store k and v; attend; project back.

    Args:
        features: E.
        heads: H, a multiple of kv_heads.
        kv_heads: G.
        head_dim: D, independent of E / H.
        rope: the angles, shared by all layers.
        qkv_bias: whether q, k and v have biases.
        out_bias: whether the output projection has one.
        head_norm_eps: RMS norms over each query and key head before the rotation, with this eps; None for none.
        window: a token sees itself and the window - 1 before it; None for all.
        sinks: whether each head has a learned score that joins its softmax, with the value zero.
        scale: factor on q . k; None for 1 / sqrt(D).

    Raises:
        ValueError: heads are no multiple of kv_heads, a window sees nothing, or the scale is not above 0.
    """

    def __init__(
        self,
        features: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm_eps: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"Attention: heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if window is not None and window < 1:
            raise ValueError(f"Attention: window is {window}, wanted at least 1, or None for all tokens")
        if scale is not None and not 0.0 < scale < math.inf:
            raise ValueError(f"Attention: scale is {scale}, wanted a finite number above 0, or None for 1 / sqrt(head_dim)")
        self.head_dim, self.window = head_dim, window
        self.head_counts = (heads, kv_heads, kv_heads)
        self.qkv_shape = (-1, sum(self.head_counts), head_dim)
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        self.rope = rope
        self.qkv = Linear(features, [n * head_dim for n in self.head_counts], bias=qkv_bias, device=device, dtype=dtype)
        self.out = Linear(heads * head_dim, features, bias=out_bias, device=device, dtype=dtype)
        self.q_norm = self.k_norm = None
        self.head_norm_eps = 0.0 if head_norm_eps is None else head_norm_eps
        if head_norm_eps is not None:
            self.q_norm = parameter(head_dim, fill=nn.init.ones_, device=device, dtype=dtype)
            self.k_norm = parameter(head_dim, fill=nn.init.ones_, device=device, dtype=dtype)
        self.sinks = parameter(heads, fill=nn.init.zeros_, device=device, dtype=dtype) if sinks else None

    @property
    def reader(self) -> Linear:
        """The one layer that reads the input."""
        return self.qkv

    def forward(self, x_TE: Tensor | Codes, batch: Batch | Packed, keys_values: KeysValues) -> Tensor:
        """[T, E], or its codes -> [T, E]. `keys_values` is this layer's; a cache is written."""
        q, k, v = self.qkv(x_TE, adapters=batch.adapters).view(self.qkv_shape).split_with_sizes(self.head_counts, 1)
        heads = Heads(self.rope, self.q_norm, self.k_norm, self.head_norm_eps, self.scale, self.window, self.sinks)
        return self.out(keys_values.attend(q, k, v, batch, heads).flatten(1), adapters=batch.adapters)

    def extra_repr(self) -> str:
        return f"{self.head_counts[0]} heads, {self.head_counts[1]} kv heads of {self.head_dim}, window={self.window}"
