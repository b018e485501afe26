"""Blocks of a row that is too wide for registers. No launchers.

The normalisations and softmax read such a row twice: for its statistics, and then to compute the result. Only the first read
should come from memory. On an H100 each of 132 SMs works on a row of its own, which has 256 KB for 131072 bf16 columns. So
between the two reads 34 MB must stay in L2, which has two halves of 25 MB. These steps brought RMS norm of 4096 such rows close
to the time of a device copy (710 us):

    two passes of plain loads                                                                           1091 us
    one program of 32 warps per SM, so that no second row needs space in the caches                     1011 us
    hints: keep data that is read again (`evict_last`), drop the rest (`evict_first`, stores with `.cs`) 891 us
    the last blocks stay in registers as they were loaded; the others are read again, last block first   795 us
    weights and the blocks kept in registers bypass L1 (`.cg`), which keeps the rest of the row          776 us

A thread loads 8 adjacent columns at a time. They are the second axis of a block, so a sum over that axis needs no shuffle.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tilewright.hw.device import Device
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.tune.space import Config, Space

__all__ = ["columns", "load_block", "narrow_rows", "rows_space", "store_block"]


def narrow_rows(cols: int) -> Config:
    """A config for rows that fit in one block: about 2048 elements per program, at most 32 per thread."""
    block_d = next_pow2(cols)
    warps = max(4, min(16, block_d // 512))
    return {"BLOCK_T": max(1, min(16, 2048 // block_d)), "BLOCK_D": block_d, "HELD": 1, "num_warps": warps}


def rows_space(default: Callable[[Device, Any], Config], most_a_thread: int = 512) -> Space:
    """A config space for rows of `problem.cols` columns.

    Rows wider than a block are processed one by one, and only for them can HELD (blocks kept in registers) be more than 1.
    """

    def refusal(device: Device, problem: Any, c: Config) -> str | None:
        cols, tile = problem.cols, c["BLOCK_T"] * c["BLOCK_D"]
        if tile > 16384:
            return "tile over 16384 elements"
        if c["BLOCK_D"] >= 2 * cols and c["BLOCK_D"] > 64:
            return "BLOCK_D wider than the row needs"
        if tile > most_a_thread * 32 * c["num_warps"]:
            return f"over {most_a_thread} elements per thread"
        if cols <= c["BLOCK_D"]:
            return "HELD must be 1 if one block holds the whole row" if c["HELD"] > 1 else None
        if c["BLOCK_T"] > 1:
            return "BLOCK_T must be 1 if a row is wider than a block"
        return "blocks must have at least 2048 columns if a row is wider than a block" if c["BLOCK_D"] < 2048 else None

    axes = {
        "BLOCK_T": (1, 2, 4, 8, 16),
        "BLOCK_D": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        "HELD": (1, 2, 3),
        "num_warps": (1, 2, 4, 8, 16, 32),
    }
    return Space(default=default, axes=axes, refusal=refusal)


@triton.jit
def columns(block, BLOCK_D: tl.constexpr):
    """The columns of a block of a row, [BLOCK_D // 8, 8]."""
    return block * BLOCK_D + tl.arange(0, BLOCK_D // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def load_block(
    row_ptr, block, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, USE: tl.constexpr, OTHER: tl.constexpr
):
    """Load a block of the row at row_ptr, in its own dtype. MASKED: columns beyond the row's end contain OTHER.

    USE selects the cache hints. This program will read the block "again", reads it now for the "last time", reads it only
    "once", or the block is "shared" with other programs. The last is for weights: they stay in L2, and L1 is left to the row.
    """
    cols = columns(block, BLOCK_D)
    EVICT: tl.constexpr = "evict_last" if USE == "again" else "evict_first" if USE == "last time" else ""
    CACHE: tl.constexpr = ".cg" if USE == "once" or USE == "shared" else ""
    if MASKED:
        return tl.load(row_ptr + cols, mask=cols < D, other=OTHER, cache_modifier=CACHE, eviction_policy=EVICT)
    else:
        return tl.load(row_ptr + cols, cache_modifier=CACHE, eviction_policy=EVICT)


@triton.jit
def store_block(
    row_ptr, block, values, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, AGAIN: tl.constexpr = False
):
    """Store a block. AGAIN: this program will read it."""
    cols = columns(block, BLOCK_D)
    EVICT: tl.constexpr = "evict_last" if AGAIN else ""
    CACHE: tl.constexpr = "" if AGAIN else ".cs"
    values = values.to(row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(row_ptr + cols, values, mask=cols < D, cache_modifier=CACHE, eviction_policy=EVICT)
    else:
        tl.store(row_ptr + cols, values, cache_modifier=CACHE, eviction_policy=EVICT)
