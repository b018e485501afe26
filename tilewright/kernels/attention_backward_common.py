"""What the implementations of `attention_backward` share: the problem they choose by, memory for results, arguments."""

# B sequences, T query rows of all, S keys of all, H query heads, G key/value heads, D head dim

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.kernels.attention_common import addressable
from tilewright.kernels.shapes import next_pow2
from tilewright.op import Inputs

__all__ = ["Gradients", "Problem", "arguments_of", "empty_gradients", "inverted", "problem_of"]

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v, in their shapes and dtype, contiguous."""


class Problem(NamedTuple):
    """All that a choice may depend on. Counts of sequences and rows are rounded up to powers of two."""

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
    """Whether do, q, k and v are matrices that the copy engine can address: heads beside each other, starts at 16 bytes."""


def problem_of(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool,
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
    )


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Memory for the gradients: as q, k and v are, but contiguous."""
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    return dq, dk, dv


def arguments_of(
    inputs: Inputs, *, B: int, KV: int, Q: int | None = None, H: int = 32, G: int = 8, D: int = 128, causal: bool = False,
    packed: bool = False, deterministic: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:  # fmt: skip
    """B sequences of KV keys and Q queries (KV of them unless given), in a row; `packed`: with cumulative lengths.

    out is random, and lse what normal scores have on average, log(keys seen) + 1/2: no forward pass is run for them.
    """
    queries = KV if Q is None else Q
    do, q, out = (inputs.randn(B * queries, H, D, dtype=dtype) for _ in range(3))
    k, v = (inputs.randn(B * KV, G, D, dtype=dtype) for _ in range(2))
    seen = torch.full((queries,), KV, device=q.device)
    if causal:
        seen = torch.arange(KV - queries + 1, KV + 1, device=q.device).clamp_min(0)
    lse = (seen.float().log() + 0.5).repeat(H, B)
    options = (queries, KV, D**-0.5, causal, deterministic)
    if packed:
        cu_q, cu_k = (inputs.tensor([i * rows for i in range(B + 1)], torch.int32) for rows in (queries, KV))
        return do, q, k, v, out, lse, cu_q, cu_k, *options
    do, q, k, v, out = (t.unflatten(0, (B, -1)) for t in (do, q, k, v, out))
    return do, q, k, v, out, lse, None, None, *options


def inverted(lse: Tensor) -> Tensor:
    """lse with +inf where it is -inf, so that exp(score - lse) is 0 in a row that sees no key."""
    return lse.masked_fill(lse == -math.inf, math.inf)
