"""The configs that the schedules of `paged_attention` may choose from, and their defaults if nothing was measured."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.tune.space import Config, Space

__all__ = [
    "CODES",
    "FEW_QUERIES",
    "INVARIANT_SPACE",
    "STREAM_SPACE",
    "VARLEN_SPACE",
    "Problem",
    "codes_of",
    "misfit",
    "problem_of",
    "room_of",
    "stream_refusal",
    "value_shape",
]

CODES = (torch.int8, torch.float8_e4m3fn)
"""The dtypes of 8-bit caches."""
FEW_QUERIES = 16
"""The most queries per sequence that speculative and multi-token decoding use."""


class Problem(NamedTuple):
    """The properties that a schedule depends on. `batch` is rounded up to a power of two.

    cache: the dtype of the caches, either the queries' dtype or one of CODES.
    queries: the most queries of a sequence, as 1 (decode), FEW_QUERIES, or 0 for more.
    """

    dtype: torch.dtype
    cache: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    batch: int
    queries: int

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of one key of one head in the cache."""
        return self.cache.itemsize * self.head_dim


def problem_of(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, *rest: object,
) -> Problem:  # fmt: skip
    _, kv_heads, page_size, dim = k_cache.shape
    queries = 1 if max_q_len == 1 else FEW_QUERIES if max_q_len <= FEW_QUERIES else 0
    return Problem(q.dtype, k_cache.dtype, q.shape[1], kv_heads, dim, page_size, next_pow2(kv_lens.shape[0]), queries)


def value_shape(k_cache: Tensor) -> torch.Size:
    """The shape of the values for keys [P, G, S, D]: codes are stored by columns (tile_mainloop.py explains why)."""
    return k_cache.mT.shape if k_cache.dtype in CODES else k_cache.shape


def misfit(scale: Tensor, k_cache: Tensor, other: Tensor | None) -> str | None:
    """Why a scale does not fit a cache of codes [P, G, S, D] and the other scale, or None."""
    want, step = k_cache.shape[:3], scale.stride(1) if scale.dim() == 3 else 0
    strides = (want[1] * step, step, 1)
    if scale.shape != want or scale.dtype != torch.float32:
        return f"must be {tuple(want)} float32; got {tuple(scale.shape)} {scale.dtype}"
    if scale.stride() != strides or (other is not None and other.stride() != strides):
        got = scale.stride() if other is None else (scale.stride(), other.stride())
        return f"must have strides ({want[1]} n, n, 1), and both scales the same; got {got}"
    return None


def room_of(cache: Tensor, block_table: Tensor) -> int:
    """The tokens that a row of the block table has pages for: the kernels read no further, whatever the lengths are.

    `cache`: [P, G, S, D], or latents [P, S, any].
    """
    return block_table.shape[1] * cache.shape[-2] if cache.shape[0] else 0


def codes_of(cache: Tensor) -> Tensor:
    """A cache as kernels read it: float8 as bytes, which every GPU supports."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def _smem_refusal(device: Device, problem: Problem, config: Config) -> str | None:
    tile_bytes = config["BLOCK_N"] * next_pow2(problem.head_dim) * problem.cache.itemsize
    used = 2 * config["num_stages"] * tile_bytes
    return f"needs {used} bytes of shared memory, more than the device has" if used > device.smem_bytes else None


_MOST_ROWS = 128


def stream_refusal(device: Device, problem: Problem) -> str | None:
    """Refuses problems with too many queries or rows for one tile."""
    if not problem.queries:
        return f"supports at most {FEW_QUERIES} queries per sequence"
    rows = problem.queries * problem.group
    return f"supports at most {_MOST_ROWS} rows (queries x heads that share keys), not {rows}" if rows > _MOST_ROWS else None


def _stream_default(device: Device, problem: Problem) -> Config:
    tall = problem.queries * problem.group > 16  # needs 64 rows or more: the registers and shared memory of a warpgroup
    if tall:
        return {"PER_SM": 2, "BLOCK_N": 64 if problem.row_bytes <= 256 else 32, "num_warps": 4, "num_stages": 2, "maxnreg": 240}
    # H100, 32/8 heads of 128 (docs/log.md#paged-decode): without a limit ptxas uses 168 to 250 registers, and then one block
    # less fits on an SM. But more blocks per SM also mean more parts to combine. Codes need half as many bytes per key, so
    # their tiles are wider.
    block_n = 128 if problem.row_bytes <= 128 else 64 if problem.row_bytes <= 256 else 32
    # A single sequence is short more often than it is long: 1 x 8192 takes 21.5 us with one program per SM and 25.0 with two;
    # 1 x 131072 takes 202 and 196.
    per_sm = 1 if problem.batch == 1 else 2
    return {"PER_SM": per_sm, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 3, "maxnreg": 168}


STREAM_SPACE = Space(
    default=_stream_default,
    axes={
        "PER_SM": (1, 2, 4, 8),
        "BLOCK_N": (32, 64, 128),
        "num_warps": (4,),
        "num_stages": (2, 3),
        "maxnreg": (128, 168, 240),
    },
    refusal=_smem_refusal,
)


def _varlen_default(device: Device, problem: Problem) -> Config:
    small = problem.dtype.itemsize > 2 or problem.head_dim > 128
    if problem.queries == 1:
        return {"BLOCK_M": max(16, next_pow2(problem.group)), "BLOCK_N": 32 if small else 64, "num_warps": 4, "num_stages": 2}
    # The config of `invariant`. H100, mixtures of prefill, chunks and decoding: at most 15 % slower than the best of all
    # configs; with 128 rows and 8 warps up to 49 % (docs/regret.md). It spills if each warp has accumulators of its own, that
    # is, without warpgroup instructions.
    by_warpgroup = device.multiplies_by_warpgroup
    block_m = max(64 if small or by_warpgroup else 128, next_pow2(problem.group))
    warps = 8 if block_m > 64 and not small else 4
    return {"BLOCK_M": block_m, "BLOCK_N": 32 if small else 64, "num_warps": warps, "num_stages": 2}


VARLEN_SPACE = Space(
    default=_varlen_default,
    axes={"BLOCK_M": (16, 32, 64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3)},
    refusal=lambda device, problem, config: (
        "BLOCK_M is smaller than the number of query heads per key/value head"
        if config["BLOCK_M"] < problem.group
        else _smem_refusal(device, problem, config)
    ),
)


def _invariant_default(device: Device, problem: Problem) -> Config:
    # One tile for decode and prefill: with another number of rows the compiler may choose other tensor-core instructions, which
    # sum in another order. sm_90's warpgroup instructions need at least 64 rows.
    small = problem.dtype.itemsize > 2 or problem.head_dim > 128
    rows = max(64, next_pow2(problem.group))
    return {"BLOCK_M": rows, "BLOCK_N": 32 if small else 64, "num_warps": 4, "num_stages": 2}


INVARIANT_SPACE = Space(default=_invariant_default, axes={})
