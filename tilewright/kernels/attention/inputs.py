"""Arguments of `biased_attention` from dimensions."""

import math
from typing import Any

import torch

from tilewright.op import Inputs

__all__ = ["biased_attention_arguments"]


def biased_attention_arguments(
    inputs: Inputs, *, B: int, KV: int, Q: int | None = None, H: int = 12, G: int | None = None, D: int = 64,
    V: int | None = None, bias: str = "keys", mask: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:  # fmt: skip
    """B sequences of KV keys and Q queries (KV of them unless given), H query heads on G key/value heads (H unless given).

    bias: "keys" of each sequence for all of its queries (padding), "heads" for all sequences (relative positions), or "each"
    for every score. mask: bool instead of numbers in `dtype`. V: of the values' heads, D unless given.

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
