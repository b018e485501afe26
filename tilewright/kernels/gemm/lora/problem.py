"""What the two ops of an adapter share: the order of tokens by their adapters, checks, and what a config may depend on."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.launch.shapes import next_pow2

__all__ = ["CHUNK", "NOBODY", "Problem", "adapter_order", "check_order", "dot_width", "next_adapter", "some_order", "used"]

CHUNK = 512
"""Columns of x that one program adds up. Sums over chunks are added in their order: how many programs share the work does not
depend on how many rows there are, and neither does a row's result."""
NOBODY = tl.constexpr(2147483647)
"""Larger than every adapter's number."""


class Problem(NamedTuple):
    """All that a config may depend on: not the number of rows, nor that of adapters."""

    dtype: torch.dtype
    wide: int
    """K, or N."""
    rank: int
    parts: tuple[int, ...]


def adapter_order(ids: Tensor) -> Tensor:
    """[T], the adapter of each token, 0 for none -> [2, T] int32: the tokens in the order of their adapters, and the adapter of
    each in that order. On the tensor's device, without waiting for it."""
    order = ids.argsort(stable=True)
    return torch.stack([order, ids[order]]).to(torch.int32)


def check_order(op: str, adapters: Tensor, tokens: int) -> None:
    """Raise ValueError unless it may be what `adapter_order` gives for so many tokens."""
    if adapters.shape != (2, tokens) or adapters.dtype != torch.int32 or not adapters.is_contiguous():
        got = f"{list(adapters.shape)} {adapters.dtype}"
        raise ValueError(f"{op}: adapters must be contiguous [2, {tokens}] torch.int32, as adapter_order makes it; got {got}")


def used(adapters: Tensor) -> Sequence[tuple[int, Tensor]]:
    """(index into the stacks, its tokens) of each adapter that any token has; waits for the device."""
    tokens, ids = adapters.long().unbind()
    return [(number - 1, tokens[ids == number]) for number in ids.unique().tolist() if number > 0]


def some_order(tokens: int, held: int, one: bool = False) -> list[int]:
    """Adapters for tokens of an example: every kind of neighbour, and none; `one`: all have the last."""
    return [held if one else (7 * i * i + i // 3) % (held + 1) for i in range(tokens)]


def dot_width(rank: int) -> int:
    """Columns of a tile that holds a rank, or a part of it: the tensor cores want 16."""
    return max(16, min(64, next_pow2(rank)))


@triton.jit
def next_adapter(ids, after):
    """The smallest of a tile's adapters that is larger than `after`; NOBODY where there is none."""
    return tl.min(tl.where(ids > after, ids, NOBODY), axis=0)
