"""Shared by the implementations of `attention_backward`: the problem by which they are chosen, memory for results,
arguments."""

# B sequences, T query rows of all sequences, S keys of all sequences, H query heads, G key/value heads, D head dim, V value
# head dim

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.kernels.attention.problem import addressable
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.op import Inputs

__all__ = ["Gradients", "Problem", "arguments_of", "empty_gradients", "gradient_of_sinks", "problem_of"]

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""The gradients of q, k, v and sinks, in their shapes and dtypes, contiguous; the last is float32 [0] if there are no sinks."""


class Problem(NamedTuple):
    """All properties that a choice may depend on. Counts of sequences and rows are rounded up to powers of two."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    max_q: int
    max_k: int
    causal: bool
    varlen: bool
    deterministic: bool
    """Whether the same call must give the same bits."""
    empty: bool
    """Whether there is no query or no key."""
    tma: bool
    """Whether TMA can address do, q, k and v as matrices: adjacent heads, starts at multiples of 16 bytes."""
    value_dim: int
    left: bool
    """Whether the number of keys that a query sees before its own key is bounded."""
    right: bool
    """Whether the number of keys that a query sees after its own key is bounded, without a causal mask."""
    prefix: bool
    softcap: bool
    sinks: bool
    alibi: bool
    alike: bool = False
    """Packed: whether queries and keys are the same tokens, so that one tensor has the lengths of both."""


def problem_of(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool, left: int | None = None,
    right: int | None = None, prefix: int = 0, prefixes: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> Problem:  # fmt: skip
    """The problem of a call of the op."""
    heads, dim = q.shape[-2:]
    return Problem(
        q.dtype,
        heads,
        k.shape[-2],
        dim,
        next_pow2(q.shape[0] if cu_q is None else cu_q.shape[0] - 1),
        next_pow2(max_q),
        next_pow2(max_k),
        causal,
        cu_q is not None,
        deterministic,
        not q.numel() or not k.numel(),
        all(addressable(t) for t in (do, q, k, v)),
        v.shape[-1],
        left is not None,
        right is not None and not causal,
        prefix > 0 or prefixes is not None,
        softcap is not None,
        sinks is not None,
        slopes is not None,
        cu_q is not None and cu_q is cu_k,
    )


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Gradients:
    """Memory for the gradients: the shapes and dtypes of q, k, v and sinks, contiguous."""
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    return dq, dk, dv, torch.empty(0, device=q.device) if sinks is None else torch.empty_like(sinks)


def gradient_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks [H], from lse and delta, float32 [H, T]: a sink's weight is exp(sink - lse); its value and dp are
    0."""
    return -((sinks.float()[:, None] - lse).exp() * delta).sum(1).to(sinks.dtype)


def arguments_of(
    inputs: Inputs, *, B: int, KV: int, Q: int | None = None, H: int = 32, G: int = 8, D: int = 128, V: int | None = None,
    causal: bool = False, packed: bool = False, deterministic: bool = False, window: int | None = None, prefix: int = 0,
    softcap: float = 0.0, sinks: bool = False, alibi: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:  # fmt: skip
    """B sequences of KV keys and Q queries (default: KV), one after the other; `packed`: with cumulative lengths.

    V: the head dim of values (default: D). window: a query sees its own key and the window - 1 keys before it; unless causal,
    also the window - 1 keys after it. prefix: the number of first keys that every query sees. softcap: 0 for none. out is
    random, and lse is what normally distributed scores have on average, log(keys seen) + 1/2, so no forward pass is needed.
    """
    queries = KV if Q is None else Q
    q = inputs.randn(B * queries, H, D, dtype=dtype)
    do, out = (inputs.randn(B * queries, H, V or D, dtype=dtype) for _ in range(2))
    k, v = (inputs.randn(B * KV, G, width, dtype=dtype) for width in (D, V or D))
    seen = torch.full((queries,), KV, device=q.device)
    if causal:
        seen = torch.arange(KV - queries + 1, KV + 1, device=q.device).clamp_min(0)
    if window is not None:
        seen = seen.clamp_max(window if causal else 2 * window - 1)
    lse = (seen.float().log() + 0.5).repeat(H, B)
    left = None if window is None else window - 1
    slopes = inputs.tensor([2.0 ** (-8.0 * (i + 1) / H) for i in range(H)], torch.float32) if alibi else None
    bends = (left, None if causal else left, prefix, None, softcap or None, inputs.randn(H) if sinks else None, slopes)
    options = (queries, KV, D**-0.5, causal, deterministic, *bends)
    if packed:
        cu_q = inputs.tensor([i * queries for i in range(B + 1)], torch.int32)
        cu_k = cu_q if queries == KV else inputs.tensor([i * KV for i in range(B + 1)], torch.int32)
        return do, q, k, v, out, lse, cu_q, cu_k, *options
    do, q, k, v, out = (t.unflatten(0, (B, -1)) for t in (do, q, k, v, out))
    return do, q, k, v, out, lse, None, None, *options
