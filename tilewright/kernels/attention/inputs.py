"""Example arguments of `attention` and `biased_attention`, made from dimensions: the `Op.make` of each."""

import math

import torch

from tilewright.op import Args, Inputs

__all__ = ["biased_attention_arguments", "dense_attention_arguments"]

_BF16 = torch.bfloat16


def biased_attention_arguments(
    inputs: Inputs, *, B: int, KV: int, Q: int | None = None, H: int = 12, G: int | None = None, D: int = 64,
    V: int | None = None, bias: str = "keys", mask: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> Args:  # fmt: skip
    """B sequences of KV keys and Q queries (default: KV), with H query heads and G key/value heads (default: H).

    bias: "keys" of each sequence for all of its queries (padding), "heads" for all sequences (relative positions), or "each"
    for every score. mask: a bool bias instead of numbers in `dtype`. V: the head dim of values (default: D).

    Raises:
        ValueError: another `bias`.
    """
    queries = KV if Q is None else Q
    shapes = {"keys": (B, 1, 1, KV), "heads": (1, H, queries, KV), "each": (B, H, queries, KV)}
    if bias not in shapes:
        raise ValueError(f"bias is {bias!r}, wanted one of {', '.join(shapes)}")
    q = inputs.randn(B, queries, H, D, dtype=dtype)
    k, v = (inputs.randn(B, KV, G or H, width, dtype=dtype) for width in (D, V or D))
    given = inputs.randn(*shapes[bias], dtype=dtype)
    return q, k, v, given > -0.5 if mask else given, D**-0.5, -math.inf, False


def dense_attention_arguments(
    inputs: Inputs, *, B: int, KV: int, Q: int | None = None, H: int = 32, G: int = 8, D: int = 128, V: int | None = None,
    causal: bool = False, packed: bool = False, lse: bool = False, window: int | None = None, prefix: int = 0,
    sinks: bool = False, alibi: bool = False, dtype: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """B sequences of KV keys and Q queries (default: KV), one after the other; `packed`: with cumulative lengths.

    V: the head dim of values (default: D). window: a query sees its own key and the window - 1 keys before it; unless causal,
    also the window - 1 keys after it. prefix: the number of first keys that every query sees.
    """
    queries = KV if Q is None else Q
    q = inputs.randn(B, queries, H, D, dtype=dtype)
    k, v = (inputs.randn(B, KV, G, width, dtype=dtype) for width in (D, V or D))
    cu_q = cu_k = None
    if packed:
        cu_q, cu_k = (inputs.tensor([i * rows for i in range(B + 1)], torch.int32) for rows in (queries, KV))
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    left = None if window is None else window - 1
    sink = inputs.randn(H, dtype=dtype) if sinks else None
    slopes = inputs.tensor([2.0 ** (-8.0 * (i + 1) / H) for i in range(H)], torch.float32) if alibi else None
    right = None if causal else left
    return q, k, v, cu_q, cu_k, queries, KV, D**-0.5, causal, lse, left, right, prefix, None, None, sink, slopes
