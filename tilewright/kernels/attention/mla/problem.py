"""Shared by the implementations of `mla_attention`: the problem by which they are chosen, its cost, and example arguments.

# T tokens of B sequences, H query heads, R rank of the latent, E rotated dims beside it, P pages, S tokens per page
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.op import Inputs

__all__ = ["FEW_QUERIES", "Problem", "cost", "mla_attention_arguments", "problem_of"]

FEW_QUERIES = 16
"""The most queries per sequence that speculative and multi-token decoding use."""


class Problem(NamedTuple):
    """The properties that a schedule depends on. `batch` is rounded up to a power of two.

    queries: the most queries of a sequence, as 1 (decode), FEW_QUERIES, or 0 for more.
    keys: the most keys of a sequence: the room in its row of the block table, rounded up to a power of two.
    """

    dtype: torch.dtype
    heads: int
    rank: int
    rotated: int
    page_size: int
    batch: int
    queries: int
    keys: int


def problem_of(
    q: Tensor, cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor, max_q_len: int, rank: int, scale: float
) -> Problem:
    """The problem of a call of the op."""
    queries = 1 if max_q_len == 1 else FEW_QUERIES if max_q_len <= FEW_QUERIES else 0
    page, keys = cache.shape[1], next_pow2(block_table.shape[1] * cache.shape[1])
    return Problem(q.dtype, q.shape[1], rank, q.shape[2] - rank, page, next_pow2(kv_lens.shape[0]), queries, keys)


def cost(
    q: Tensor, cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor, max_q_len: int, rank: int, scale: float
) -> Cost:
    """Waits for the device, because the cost depends on the lengths."""
    tokens, heads, width = q.shape
    keys = pairs = 0
    for length, queries in zip(kv_lens.tolist(), cu_q.diff().tolist(), strict=True):
        keys += length
        pairs += sum(max(length - i, 0) for i in range(queries))
    moved = q.nbytes + tokens * heads * rank * q.element_size() + keys * width * cache.element_size()
    return Cost(flops=2 * pairs * heads * (width + rank), bytes=moved)


def mla_attention_arguments(
    inputs: Inputs,
    *,
    B: int,
    KV: int,
    Q: int = 1,
    H: int = 128,
    R: int = 512,
    E: int = 64,
    S: int = 64,
    ragged: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:
    """B sequences of KV tokens in scattered pages; the last Q tokens of each are the queries (1: decode).

    ragged: lengths from KV / 200 to KV in equal steps.

    Raises:
        ValueError: more queries than tokens.
    """
    if not 1 <= Q <= KV:
        raise ValueError(f"mla_attention: Q is {Q} and KV {KV}, wanted 1 <= Q <= KV: queries are the last tokens of a sequence")
    least = max(Q, KV // 200) if ragged else KV
    lengths = [least + (KV - least) * i // max(B - 1, 1) for i in range(B)] if ragged else [KV] * B
    per = -(-KV // S)
    table = inputs.permutation(B * per).to(torch.int32).view(B, per)
    q = inputs.randn(B * Q, H, R + E, dtype=dtype)
    cache = inputs.randn(B * per, S, R + E, dtype=dtype)
    cu_q = inputs.tensor([i * Q for i in range(B + 1)], torch.int32)
    return q, cache, table, inputs.tensor(lengths, torch.int32), cu_q, Q, R, (R // 4 + E) ** -0.5
