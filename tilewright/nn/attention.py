"""Causal grouped-query attention (Ainslie et al., "GQA", 2023): a projection, cache and attention, and a projection back.

An argument of `forward` determines where keys and values are stored (keys_values.py): in the pages of a cache for serving, or
only in the packed batch itself for training and scoring. Not here: attention to another sequence (multi_head.py).
"""

import math

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.batch import Batch, Packed
from tilewright.nn.filling import parameter
from tilewright.nn.keys_values import Heads, KeysValues
from tilewright.nn.linear import Linear
from tilewright.nn.rope import Rope
from tilewright.ops.linear import QuantizedActivation

__all__ = ["Attention"]

# T tokens, E model features, H query heads, G key/value heads, D head dim


class Attention(nn.Module):
    """Project to q, k and v; normalise q and k (optional) and rotate them; store k and v; attend; project back.

    Args:
        features: E.
        heads: H, a multiple of kv_heads.
        kv_heads: G.
        head_dim: D, independent of E / H.
        rope: the table of angles, shared by all layers.
        qkv_bias: whether q, k and v have biases.
        out_bias: whether the output projection has one.
        head_norm_eps: eps of RMS norms over each query head and each key head, before the rotation; None: no such norms.
        wide_norm_eps: eps of one RMS norm over all query heads together, and one over all key heads; None: no such norms.
        norm_dtype: dtype of the weights of these norms; None: the dtype of the other weights.
        early_rope: a rotation before these norms (HunYuan) instead of after them; `rope` is then a `NoRotation`.
        window: a token sees itself and the window - 1 tokens before it; None: itself and all tokens before it.
        sinks: whether each head has a further learned score in every softmax; the value that belongs to it is zero.
        scale: factor on q . k; None for 1 / sqrt(D).
        softcap: scores z become softcap * tanh(z / softcap); None: no cap.

    Raises:
        ValueError: heads is not a multiple of kv_heads, the window is below 1, the scale or the cap is not above 0, or both
            kinds of norms are given.
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
        wide_norm_eps: float | None = None,
        norm_dtype: torch.dtype | None = None,
        early_rope: Rope | None = None,
        window: int | None = None,
        sinks: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
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
        if softcap is not None and not 0.0 < softcap < math.inf:
            raise ValueError(f"Attention: softcap is {softcap}, wanted a finite number above 0, or None for no cap")
        if head_norm_eps is not None and wide_norm_eps is not None:
            raise ValueError("Attention: head_norm_eps and wide_norm_eps are both given, but at most one of them may be")
        self.head_dim, self.window, self.softcap = head_dim, window, softcap
        self.head_counts = (heads, kv_heads, kv_heads)
        self.qkv_shape = (-1, sum(self.head_counts), head_dim)
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        self.rope = rope
        self.early_rope = early_rope
        self.qkv = Linear(features, [n * head_dim for n in self.head_counts], bias=qkv_bias, device=device, dtype=dtype)
        self.out = Linear(heads * head_dim, features, bias=out_bias, device=device, dtype=dtype)
        self.q_norm = self.k_norm = None
        self.head_norm_eps, self.wide_norm_eps = head_norm_eps or 0.0, wide_norm_eps
        if head_norm_eps is not None or wide_norm_eps is not None:
            sizes = (head_dim, head_dim) if wide_norm_eps is None else (heads * head_dim, kv_heads * head_dim)
            norm = {"fill": nn.init.ones_, "device": device, "dtype": norm_dtype or dtype}
            self.q_norm, self.k_norm = (parameter(size, **norm) for size in sizes)
        self.sinks = parameter(heads, fill=nn.init.zeros_, device=device, dtype=dtype) if sinks else None

    @property
    def reader(self) -> Linear:
        """The only linear layer that reads the input. A norm before it may quantise its output for this layer."""
        return self.qkv

    def forward(self, x_TE: Tensor | QuantizedActivation, batch: Batch | Packed, keys_values: KeysValues) -> Tensor:
        """[T, E], or the same quantised -> [T, E]. keys_values: the object for this layer; if it is a cache, it is updated."""
        q, k, v = self.qkv(x_TE, adapters=batch.adapters).view(self.qkv_shape).split_with_sizes(self.head_counts, 1)
        norms = (self.q_norm, self.k_norm)
        if self.early_rope is not None:
            q, k = ops.rope(q, k, batch.positions, self.early_rope.cos_sin, self.early_rope.interleaved)
        if self.wide_norm_eps is not None and self.q_norm is not None and self.k_norm is not None:
            q, k = _normed(q, self.q_norm, self.wide_norm_eps), _normed(k, self.k_norm, self.wide_norm_eps)
            norms = (None, None)
        heads = Heads(self.rope, *norms, self.head_norm_eps, self.scale, self.window, self.sinks, self.softcap)
        return self.out(keys_values.attend(q, k, v, batch, heads).flatten(1), adapters=batch.adapters)

    def extra_repr(self) -> str:
        return f"{self.head_counts[0]} heads, {self.head_counts[1]} kv heads of {self.head_dim}, window={self.window}"


def _normed(x_THD: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An RMS norm over all heads of a token together."""
    return ops.rms_norm(x_THD.flatten(1), weight, eps).view(x_THD.shape)
