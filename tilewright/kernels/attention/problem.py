"""Shared by the implementations of `attention`: the problem by which they are chosen, and the memory layout of operands."""

# B sequences, T query rows of all sequences, S keys of all sequences, H query heads, G key/value heads, D head dim, V value
# head dim

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.kernels.launch.shapes import next_pow2

__all__ = [
    "DTYPES",
    "LARGEST_HEAD_DIM",
    "LOG2_E",
    "Problem",
    "addressable",
    "empty_outputs",
    "lacks",
    "lengths_of",
    "packed",
    "pairs_seen",
    "problem_of",
    "side_by_side",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD_DIM = 256
LOG2_E = 1.4426950408889634


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
    lse: bool
    square: bool
    """Whether every sequence has as many queries as keys."""
    has_keys: bool
    tma: bool
    """Whether TMA can address q, k and v as matrices: adjacent heads, starts at multiples of 16 bytes."""
    value_dim: int
    left: bool
    """Whether the number of keys that a query sees before its own key is bounded."""
    right: bool
    """Whether the number of keys that a query sees after its own key is bounded, without a causal mask."""
    prefix: bool
    softcap: bool
    sinks: bool
    alibi: bool


def lacks(problem: Any, *, window: bool = False, sinks: bool = False) -> str | None:
    """Which options of a problem are missing in an implementation that supports only causal masks and unmodified scores, or
    None.

    problem: of `attention` or of `attention_backward`. window, sinks: whether the implementation supports these as well.
    """
    wanted = {
        "windows": not window and (problem.left or problem.right),
        "prefixes": problem.prefix,
        "soft caps": problem.softcap,
        "sinks": not sinks and problem.sinks,
        "ALiBi": problem.alibi,
    }
    missing = [name for name, needed in wanted.items() if needed]
    return f"does not support {', '.join(missing)}" if missing else None


def side_by_side(t: Tensor) -> bool:
    """Whether [T, H, D] or [B, S, H, D] is, in memory, one matrix whose rows contain the adjacent heads of a token."""
    strides = t.stride()
    if t.dim() == 4 and t.shape[0] > 1 and strides[0] != t.shape[1] * strides[1]:
        return False
    rows, heads, dense = strides[-3:]
    return dense == 1 and (t.shape[-2] == 1 or heads <= rows)


def addressable(t: Tensor) -> bool:
    """Whether TMA can address t as a matrix: adjacent heads, starts at multiples of 16 bytes."""
    rows, heads, _ = t.stride()[-3:]
    return (rows | heads) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 and side_by_side(t)


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, scale: float,
    causal: bool, want_lse: bool, left: int | None = None, right: int | None = None, prefix: int = 0,
    prefixes: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None, slopes: Tensor | None = None,
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
        want_lse,
        cu_q is None and max_q == max_k,
        max_k > 0,
        addressable(q) and addressable(k) and addressable(v),
        v.shape[-1],
        left is not None,
        right is not None and not causal,
        prefix > 0 or prefixes is not None,
        softcap is not None,
        sinks is not None,
        slopes is not None,
    )


def packed(t: Tensor) -> Tensor:
    """[B, S, H, D] as [B S, H, D] without a copy, which requires `side_by_side`; [T, H, D] unchanged."""
    if t.dim() == 3:
        return t
    # Not `flatten`: it may change the stride of a dimension of size 1, and TMA descriptors contain that stride.
    return t.as_strided((t.shape[0] * t.shape[1], *t.shape[2:]), t.stride()[1:])


def empty_outputs(q: Tensor, v: Tensor, want_lse: bool) -> tuple[Tensor, Tensor]:
    """Memory for the contiguous result [.., H, V], and for the log-sum-exp: float32 [H, T], or [0] if it is not requested."""
    rows = q.shape[:-2].numel()
    lse = torch.empty((q.shape[-2], rows) if want_lse else (0,), dtype=torch.float32, device=q.device)
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device), lse


def lengths_of(q: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int) -> list[tuple[int, int]]:
    """(queries, keys) of every sequence. Waits for the device; on meta tensors every sequence counts as long as the longest."""
    if cu_q is None or cu_k is None:
        return [(max_q, max_k)] * q.shape[0]
    if cu_q.is_meta:
        return [(max_q, max_k)] * (cu_q.shape[0] - 1)
    return list(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True))


def pairs_seen(queries: int, keys: int, left: int | None, right: int | None, prefix: int = 0) -> int:
    """The number of (query, key) pairs in which the query sees the key."""
    own = np.arange(keys - queries, keys, dtype=np.int64)
    end = np.full(queries, keys) if right is None else np.minimum(np.maximum(own + right + 1, prefix), keys)
    begin = 0 if left is None else np.maximum(own - left, 0)
    return int(np.maximum(end - begin, 0).sum())
