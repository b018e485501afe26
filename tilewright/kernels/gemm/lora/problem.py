"""Code that the two ops of an adapter share: the order of tokens by their adapters, argument checks, and the problem."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.launch.shapes import next_pow2

__all__ = ["CHUNK", "NOBODY", "Problem", "adapter_order", "check_order", "dot_width", "next_adapter", "some_order", "used"]

CHUNK = 512
"""The number of columns of x that one program sums. The sums of chunks are added in their order. So the number of programs that
share a sum does not depend on the number of rows, and neither does the result of a row."""
NOBODY = tl.constexpr(2147483647)
"""Larger than every adapter's number."""


class Problem(NamedTuple):
    """Everything that a config may depend on. The numbers of rows and of adapters are not part of it."""

    dtype: torch.dtype
    wide: int
    """K, or N."""
    rank: int
    parts: tuple[int, ...]


def adapter_order(ids: Tensor) -> Tensor:
    """Sort the tokens by their adapters, on the tensor's device, without waiting for it.

    ids [T]: the adapter of each token, 0 for none -> [2, T] int32: the tokens in the order of their adapters, and the adapter
    of each in that order.
    """
    order = ids.argsort(stable=True)
    return torch.stack([order, ids[order]]).to(torch.int32)


def check_order(op: str, adapters: Tensor, tokens: int) -> None:
    """Raise ValueError unless `adapters` has the shape, dtype and layout of a result of `adapter_order` for `tokens` tokens."""
    if adapters.shape != (2, tokens) or adapters.dtype != torch.int32 or not adapters.is_contiguous():
        got = f"{list(adapters.shape)} {adapters.dtype}"
        raise ValueError(f"{op}: adapters must be contiguous [2, {tokens}] torch.int32, as adapter_order makes it; got {got}")


def used(adapters: Tensor) -> Sequence[tuple[int, Tensor]]:
    """(index in A and B, its tokens) of each adapter that any token has. Waits for the device."""
    tokens, ids = adapters.long().unbind()
    return [(number - 1, tokens[ids == number]) for number in ids.unique().tolist() if number > 0]


def some_order(tokens: int, held: int, one: bool = False) -> list[int]:
    """Adapters for the tokens of an example, in a mixed order, some with none. `one`: all tokens have the last adapter."""
    return [held if one else (7 * i * i + i // 3) % (held + 1) for i in range(tokens)]


def dot_width(rank: int) -> int:
    """The width of a tile for a rank, or a part of it: at least the 16 columns that tensor cores need."""
    return max(16, min(64, next_pow2(rank)))


@triton.jit
def next_adapter(ids, after):
    """The smallest adapter number in a tile that is larger than `after`; NOBODY if there is none."""
    return tl.min(tl.where(ids > after, ids, NOBODY), axis=0)
