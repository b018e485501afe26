"""The work of a launch of paged attention: `Impl.work` for the analytical model (see launch/work.py). No kernels."""

# T rows, D head dim, H query heads, G key/value heads

import numpy as np
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.kernels.launch.work import cdiv, unit_of
from tilewright.tune.model import Work
from tilewright.tune.space import Config

__all__ = ["stream_work", "varlen_work"]

_ATTENTION_OPERATIONS = 10


def _lengths(q: Tensor, block_table: Tensor, page: int, kv_lens: Tensor, cu_q: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(keys, queries) of each sequence, each [B, 1]."""
    batch = kv_lens.shape[0]
    if kv_lens.is_meta:
        keys = np.full(batch, block_table.shape[1] * page)
        queries = np.full(batch, cdiv(q.shape[0], max(batch, 1)))
    else:
        keys, queries = np.array(kv_lens.tolist()), np.array(cu_q.diff().tolist())
    return keys[:, None], queries[:, None]


def _attention_bytes(q: Tensor, k_cache: Tensor, keys: np.ndarray) -> float:
    return float(2 * q.numel() * q.element_size() + 2 * keys.sum() * k_cache.shape[1] * q.shape[2] * k_cache.element_size())


def stream_work(
    device: Device, config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor,
    cu_q: Tensor, max_q_len: int, scale: float, window: int | None, *codes: object,
) -> Work:  # fmt: skip
    """A fixed number of programs with equal shares of all tiles; one program per sequence reads and combines the parts."""
    (_, heads, d), (_, kv_heads, page, _) = q.shape, k_cache.shape
    keys, queries = _lengths(q, block_table, page, kv_lens, cu_q)
    keys = keys if window is None else np.minimum(keys, window + queries - 1)
    block_d, block_n = max(16, next_pow2(d)), config["BLOCK_N"]
    rows = heads // kv_heads * (1 if max_q_len == 1 else 16)
    block_m = max(16, next_pow2(rows))
    steps = kv_heads * np.maximum(cdiv(keys, block_n).sum(0), 1)
    share = cdiv(steps, config["PER_SM"] * device.sms)
    blocks = cdiv(steps, share)
    parts = cdiv(steps, share * kv_heads * len(keys))
    return Work(
        blocks=blocks,
        flops=4.0 * steps * block_n * block_m * block_d,
        unit=unit_of(q.dtype),
        dram_bytes=_attention_bytes(q, k_cache, keys),
        l2_bytes=2.0 * kv_heads * keys.sum() * d * k_cache.element_size() + 2 * q.numel() * q.element_size(),
        steps=steps / blocks,
        longest=share,
        depth=config["num_stages"],
        operations=1.0 * steps * block_m * (block_n * _ATTENTION_OPERATIONS + block_d * 2),
        chain=4 + 3 * (config["num_warps"] * 16 > block_m),
        end_bytes=np.where(parts > 1, rows * (block_d + 2) * 8, 0),
        rounds=np.where(parts > 1, 3 + parts, 1),
        tile_m=block_m,
        tile_n=block_n,
    )


def varlen_work(
    device: Device, config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor,
    cu_q: Tensor, max_q_len: int, scale: float, window: int | None, *codes: object,
) -> Work:  # fmt: skip
    """A tile of queries goes through the keys up to its diagonal; the longest tile may outlast the rest of the grid."""
    (_, heads, d), (_, kv_heads, page, _) = q.shape, k_cache.shape
    keys, queries = _lengths(q, block_table, page, kv_lens, cu_q)
    group, block_d, size = heads // kv_heads, max(16, next_pow2(d)), q.element_size()
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    block_q = block_m // group
    tiles = cdiv(queries, block_q)
    seen = np.minimum(keys, keys - queries / 2 + block_q / 2)
    if window is not None:
        seen = np.minimum(seen, window + block_q)
    steps = cdiv(seen, block_n)
    blocks, all_steps = np.maximum(tiles.sum(0), 1), np.maximum((tiles * steps).sum(0), 1)
    walked = kv_heads * all_steps * block_n
    return Work(
        blocks=kv_heads * blocks,
        flops=4.0 * walked * block_m * block_d,
        unit=unit_of(q.dtype),
        dram_bytes=_attention_bytes(q, k_cache, keys),
        l2_bytes=2.0 * kv_heads * (tiles * seen).sum(0) * d * size + 2 * q.numel() * size,
        steps=all_steps / blocks,
        longest=cdiv(np.minimum(keys, window + block_q) if window is not None else keys, block_n).max(0),
        depth=config["num_stages"],
        operations=1.0 * kv_heads * all_steps * block_m * (block_n * _ATTENTION_OPERATIONS + block_d * 2),
        chain=4 + 3 * (config["num_warps"] * 16 > block_m),
        rounds=1,
        tile_m=block_m,
        tile_n=block_n,
    )
