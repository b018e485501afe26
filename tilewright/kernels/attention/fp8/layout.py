"""Shared by the quantiser, the definition and the implementations of `scaled_attention`: the memory layout of the codes."""

# B sequences, H query heads, G key/value heads, D head dim

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.kernels.attention.problem import addressable
from tilewright.kernels.launch.shapes import next_pow2

__all__ = ["KEYS", "SMALLEST", "Problem", "key_order", "padded_rows", "problem_of"]

SMALLEST = 2.0**-40  # lower bound of a block's largest magnitude: so the product of two scales is not a denormal number
KEYS = 128  # keys per scale


class Problem(NamedTuple):
    """All properties that a choice may depend on. Counts of sequences and rows are rounded up to powers of two."""

    codes: torch.dtype
    dtype: torch.dtype
    """The dtype of the queries and the result."""
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    queries: int
    keys: int
    causal: bool
    coded_values: bool
    """Whether the values are float8 codes, transposed; else numbers of the queries' dtype."""
    tma: bool
    """Whether TMA can address q as a matrix: adjacent heads, starts at multiples of 16 bytes."""


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor | None, keys: int, scale: float, causal: bool
) -> Problem:
    """The problem of a call of the op."""
    batch, queries, heads, dim = q.shape
    coded = v_scale is not None
    return Problem(
        k.dtype,
        q.dtype,
        heads,
        k.shape[1],
        dim,
        next_pow2(batch),
        next_pow2(queries),
        next_pow2(keys),
        causal,
        coded,
        addressable(q),
    )


def padded_rows(rows: int) -> int:
    """Rows of codes per head: whole tiles of 128."""
    return -(-rows // 128) * 128


def key_order(padded: int, device: torch.device) -> Tensor:
    """int64 [padded]: the key of each stored value. In this order Hopper's scores can be used directly as an 8-bit operand P.

    Of each 16 keys, thread t of four has the scores 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t; the operand needs four adjacent keys per
    thread.
    """
    of_16 = torch.arange(16, device=device).view(2, 4, 2).transpose(0, 1).flatten()
    return (torch.arange(0, padded, 16, device=device)[:, None] + of_16).flatten()
