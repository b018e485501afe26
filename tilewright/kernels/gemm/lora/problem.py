"""Code that the two ops of an adapter share: the order of tokens by their adapters, argument checks, and the problem."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq

from tilewright.hw import env
from tilewright.kernels.launch.shapes import next_pow2

__all__ = [
    "CHUNK",
    "TILE",
    "Problem",
    "adapter_order",
    "along",
    "check_order",
    "dot_width",
    "fetch_ahead",
    "fetch_block",
    "fetch_rows",
    "forwards",
    "result",
    "some_order",
    "span_at",
    "spans_of",
    "tile_at",
    "tiles_of",
    "used",
    "wait",
]

TILE = 16
"""The most tokens of a tile, which are also the rows that tensor cores need."""
CHUNK = 512
"""The number of columns of x that one program sums. The sums of chunks are added in their order. So the number of programs that
share a sum does not depend on the number of rows, and neither does the result of a row."""


class Problem(NamedTuple):
    """Everything that a config may depend on. The numbers of rows and of adapters are not part of it."""

    dtype: torch.dtype
    wide: int
    """K, or N."""
    rank: int
    parts: tuple[int, ...]


def adapter_order(ids: Tensor) -> Tensor:
    """Sort the tokens by their adapters, and cut them into tiles, on the tensor's device, without waiting for it.

    A tile consists of at most 16 tokens with the same adapter. The tiles follow one another in the order of the tokens.

    ids [T]: the adapter of each token, 0 for none -> [4, T] int32: the tokens in the order of their adapters; the adapter of
    each in that order; where in that order each tile starts, T after the last tile; the adapter of each tile, 0 after the last
    tile.
    """
    count = ids.shape[0]
    if not count:
        return torch.zeros(4, 0, dtype=torch.int32, device=ids.device)
    order = ids.argsort(stable=True)
    ids, places = ids[order], torch.arange(count, device=ids.device)
    first = torch.cat([places[:1] == 0, ids[1:] != ids[:-1]])
    begins = (places - torch.where(first, places, 0).cummax(0).values) % TILE == 0
    starts = (~begins).to(torch.int32).argsort(stable=True)
    held = begins[starts]
    rows = [order, ids, torch.where(held, starts, count), torch.where(held, ids[starts], 0)]
    return torch.stack(rows).to(torch.int32)


def tiles_of(tokens: int, adapters: int) -> int:
    """The largest number of tiles that so many tokens with so many different adapters, or none, can have."""
    return min(tokens, tokens // TILE + adapters + 1)


def check_order(op: str, adapters: Tensor, tokens: int) -> None:
    """Raise ValueError unless `adapters` has the shape, dtype and layout of a result of `adapter_order` for `tokens` tokens."""
    if adapters.shape != (4, tokens) or adapters.dtype != torch.int32 or not adapters.is_contiguous():
        got = f"{list(adapters.shape)} {adapters.dtype}"
        raise ValueError(f"{op}: adapters must be contiguous [4, {tokens}] torch.int32, as adapter_order makes it; got {got}")


def result(x: Tensor, a: Tensor) -> Tensor:
    """An uninitialised result of `lora_shrink`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(-(-x.shape[1] // CHUNK), x.shape[0], a.shape[1], dtype=wide)


def used(adapters: Tensor) -> Sequence[tuple[int, Tensor]]:
    """(index in A and B, its tokens) of each adapter that any token has. Waits for the device. None on meta tensors."""
    if adapters.is_meta:
        return []
    tokens, ids = adapters[:2].long().unbind()
    return [(number - 1, tokens[ids == number]) for number in ids.unique().tolist() if number > 0]


def some_order(tokens: int, held: int, one: bool = False) -> list[int]:
    """Adapters for the tokens of an example, in a mixed order, some with none. `one`: all tokens have the last adapter."""
    return [held if one else (7 * i * i + i // 3) % (held + 1) for i in range(tokens)]


def dot_width(rank: int) -> int:
    """The width of a tile for a rank, or a part of it: at least the 16 columns that tensor cores need."""
    return max(16, min(64, next_pow2(rank)))


def spans_of(n: int, first: int, second: int) -> list[tuple[int, int]]:
    """(begin, end) of the rows of each part. Empty parts are left out."""
    return [(begin, end) for begin, end in ((0, first), (first, second), (second, n)) if end > begin]


_COMPILED = tl.constexpr(not env.interpreting())


@triton.jit
def wait():
    """Wait until the preceding launch has ended and its results are visible. Compiles to nothing for cards without PDL."""
    if _COMPILED:
        if cuda_capability_geq(9, 0):
            gdc_wait()


@triton.jit
def fetch_ahead(ptrs):
    """Prefetch the sectors of 32 bytes at these addresses into L2. Ordinary loads would occupy registers until used."""
    if _COMPILED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def fetch_block(ptr, BYTES: tl.constexpr):
    """Prefetch BYTES contiguous bytes into L2, by one instruction of one thread. BYTES and the address are multiples of 16.

    Compiles to nothing for cards before sm_90."""
    if _COMPILED:
        if cuda_capability_geq(9, 0):
            tl.inline_asm_elementwise(
                "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
                "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r", [ptr, tl.full([], BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def fetch_rows(ptrs, BYTES: tl.constexpr):
    """The same for the bytes at each of these addresses, one for each thread. Only the first half of each warp prefetches."""
    if _COMPILED:
        if cuda_capability_geq(9, 0):
            tl.inline_asm_elementwise(
                "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.lt.u32 p, t, 16; "
                "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r", [ptrs, tl.full(ptrs.shape, BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def span_at(pid, N: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, SPAN: tl.constexpr):
    """(part, first column, end of the part) of span `pid` of SPAN columns. No span contains columns of two parts."""
    BEFORE_1: tl.constexpr = (FIRST + SPAN - 1) // SPAN
    BEFORE_2: tl.constexpr = BEFORE_1 + (SECOND - FIRST + SPAN - 1) // SPAN
    part = (pid >= BEFORE_1).to(tl.int32) + (pid >= BEFORE_2).to(tl.int32)
    begin = tl.where(
        part == 0, pid * SPAN, tl.where(part == 1, FIRST + (pid - BEFORE_1) * SPAN, SECOND + (pid - BEFORE_2) * SPAN)
    )
    return part, begin, tl.where(part == 0, FIRST, tl.where(part == 1, SECOND, N))


_BACKWARDS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))


@triton.jit
def along(values, DIM: tl.constexpr, RANK: tl.constexpr):
    """`values` along dimension DIM of an index of RANK dimensions, whose threads and then warps lie along dimensions 0, 1, ...

    The last dimension is contiguous in memory. When it loads, Triton gives threads and warps to the other dimensions in their
    order, and since 3.7 in the opposite order. There `along` reverses them, and `forwards` restores the order of values."""
    at: tl.constexpr = RANK - 2 - DIM if _BACKWARDS and DIM < RANK - 1 else DIM
    for i in tl.static_range(RANK):
        if i != at:
            values = tl.expand_dims(values, i)
    return values


@triton.jit
def forwards(values):
    """Dimensions in the order of `along`, from the order in memory; and back."""
    if _BACKWARDS:
        if len(values.shape) == 6:
            return tl.permute(values, (4, 3, 2, 1, 0, 5))
        elif len(values.shape) == 5:
            return tl.permute(values, (3, 2, 1, 0, 4))
        else:
            return tl.permute(values, (1, 0, 2))
    else:
        return values


@triton.jit
def tile_at(adapters_ptr, tile, n_tokens):
    """(first place in the order, end, adapter) of a tile. It is empty, and has adapter 0, after the last tile."""
    starts_ptr = adapters_ptr + 2 * n_tokens + tile
    begin = tl.load(starts_ptr)
    end = tl.load(starts_ptr + 1, mask=tile + 1 < n_tokens, other=0)
    return begin, tl.where(tile + 1 < n_tokens, end, n_tokens), tl.load(starts_ptr + n_tokens)
