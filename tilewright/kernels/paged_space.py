"""What the schedules of `paged_attention` may choose from, and what they take when nothing was measured."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.shapes import next_pow2
from tilewright.tune.space import Config, Space

__all__ = ["INVARIANT_SPACE", "SPLIT_SPACE", "VARLEN_SPACE", "Problem", "problem_of"]


class Problem(NamedTuple):
    """What a schedule depends on. `batch` is rounded up to a power of two."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    batch: int
    decode: bool

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads


def problem_of(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None,
) -> Problem:  # fmt: skip
    _, kv_heads, page_size, dim = k_cache.shape
    return Problem(q.dtype, q.shape[1], kv_heads, dim, page_size, next_pow2(kv_lens.shape[0]), max_q_len == 1)


def _smem_refusal(device: Device, problem: Problem, config: Config) -> str | None:
    tile_bytes = config["BLOCK_N"] * next_pow2(problem.head_dim) * problem.dtype.itemsize
    used = 2 * config["num_stages"] * tile_bytes
    return f"needs {used} bytes of shared memory" if used > device.smem_bytes else None


def _split_default(device: Device, problem: Problem) -> Config:
    # Measured on an H100 (docs/log.md#paged-decode): one program a (sequence, head) once they fill the card about four
    # times; below, more than 16 ranges cost more in the combination than they bring.
    splits = next_pow2(4 * device.sms // (problem.batch * problem.kv_heads) + 1) // 2
    splits = max(1, min(16, splits))
    row_bytes = problem.dtype.itemsize * problem.head_dim
    # Tiles of 128 keys where one program walks them all, and where rows are short: 64 of 128 bytes are too little under way
    # (H100, 32 sequences of 500 to 4000 tokens, 16 heads of 64: 73 us, with 128 keys and 4 stages 66).
    wide = {"SPLITS": splits, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3 if splits == 1 else 4}
    if (row_bytes <= 128 or (splits == 1 and row_bytes <= 256)) and _smem_refusal(device, problem, wide) is None:
        return wide
    return {"SPLITS": splits, "BLOCK_N": 64 if row_bytes <= 256 else 32, "num_warps": 4, "num_stages": 2}


SPLIT_SPACE = Space(
    default=_split_default,
    axes={"SPLITS": (1, 2, 4, 8, 16, 32, 64), "BLOCK_N": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
    refusal=_smem_refusal,
)


def _varlen_default(device: Device, problem: Problem) -> Config:
    small = problem.dtype.itemsize > 2 or problem.head_dim > 128
    if problem.decode:
        return {"BLOCK_M": max(16, next_pow2(problem.group)), "BLOCK_N": 32 if small else 64, "num_warps": 4, "num_stages": 2}
    # The config of `invariant`. H100, mixtures of prefill, chunks and decoding: at most 15 % from the best of all, with 128
    # rows and 8 warps up to 49 % (docs/regret.md). Where the accumulators are a warp's own it spills.
    by_warpgroup = device.arch in (90, 100, 103)
    block_m = max(64 if small or by_warpgroup else 128, next_pow2(problem.group))
    warps = 8 if block_m > 64 and not small else 4
    return {"BLOCK_M": block_m, "BLOCK_N": 32 if small else 64, "num_warps": warps, "num_stages": 2}


VARLEN_SPACE = Space(
    default=_varlen_default,
    axes={"BLOCK_M": (16, 32, 64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3)},
    refusal=lambda device, problem, config: (
        "a tile holds less than one group of heads"
        if config["BLOCK_M"] < problem.group
        else _smem_refusal(device, problem, config)
    ),
)


def _invariant_default(device: Device, problem: Problem) -> Config:
    # One tile for decode and prefill: another number of rows may mean other tensor-core instructions, which add in another
    # order. 64 rows are the least that sm_90's warpgroup instructions take.
    small = problem.dtype.itemsize > 2 or problem.head_dim > 128
    rows = max(64, next_pow2(problem.group))
    return {"BLOCK_M": rows, "BLOCK_N": 32 if small else 64, "num_warps": 4, "num_stages": 2}


INVARIANT_SPACE = Space(default=_invariant_default, axes={})
