"""What a launch of each tunable kernel really does: `Impl.work` for the analytical model. No kernels.

Each function takes (device, config, *args) with the arguments of the op, which may be meta tensors; the entries of a config may
be NumPy arrays, and then so are the numbers of its `Work`, one entry a config. The lengths of attention are read from their
tensor, which waits for the device; on meta tensors the width of the block table stands for them.
"""

# M rows of x, N rows of the weight, K shared, T rows, D columns or head dim, H query heads, G key/value heads, S page size

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.launch.shapes import next_pow2, rows_of
from tilewright.tune.model import Work
from tilewright.tune.space import Config

__all__ = [
    "add_layer_norm_work",
    "add_norm_work",
    "gemv_work",
    "layer_norm_work",
    "library_activates",
    "norm_work",
    "skinny_work",
    "sm90_work",
    "softmax_work",
    "stream_work",
    "tile_work",
    "tma_work",
    "varlen_work",
    "vendor_work",
]

_UNITS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Elementwise operations for each element, as the kernels' inner loops have them.
_SOFTMAX_OPERATIONS = 8
_NORM_OPERATIONS = 5
_ATTENTION_OPERATIONS = 10


def _cdiv(a: Any, b: Any) -> Any:
    return np.ceil(a / b)


def _unit(dtype: torch.dtype) -> str:
    return _UNITS.get(dtype, "fp32")


# ---- linear

# Arguments: x, weight, bias, activation, residual


def library_activates(dtype: torch.dtype, activation: str, bias: bool, batched: bool) -> bool:
    """Whether cuBLAS applies an activation itself: ReLU or the tanh form of GELU, behind a bias, to one product of 16 bits."""
    return activation in ("relu", "gelu_tanh") and bias and not batched and dtype.itemsize == 2


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int, int, int]:
    """(B, M, N, K, bytes of an element); where nothing is launched, as if there were one of what there is none."""
    m, k = x.shape[-2:]
    return (x.shape[0] if x.dim() == 3 else 1) or 1, m or 1, weight.shape[-2] or 1, k or 1, x.element_size()


def _compulsory(x: Tensor, weight: Tensor, activation: str, residual: Tensor | None) -> tuple[float, float]:
    """(bytes that come from memory, bytes that go there)."""
    batch, m, n, _, size = _sizes(x, weight)
    out = batch * m * (n // 2 if activation.endswith("_mul") else n) * size
    return batch * x.shape[-1] * (m + n) * size + (out if residual is not None else 0), out


def _vector(x: Tensor, weight: Tensor, multiple: int = 16) -> int:
    """Bytes of a load: Triton widens loads only along strides, and up to sizes, that it knows as multiples: by itself of 16."""
    size = x.element_size()
    for t in (x, weight):
        along, step = (t.shape[-1], t.stride(-2)) if t.stride(-1) == 1 else (t.shape[-2], t.stride(-1))
        if along % multiple or step % multiple:
            return size
    return 16


def gemv_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Work:
    """Each block reads all of x, from L1 most of the time: counted as instructions, not as bytes of L2."""
    _, m, n, k, _ = _sizes(x, weight)
    block_n, block_k, warps = config["BLOCK_N"], config["BLOCK_K"], config["num_warps"]
    read, written = _compulsory(x, weight, activation, residual)
    blocks, steps = _cdiv(n, block_n), _cdiv(k, block_k)
    elements = blocks * steps * block_n * block_k
    return Work(
        blocks=blocks,
        flops=0.0,
        unit="fp32",
        dram_bytes=read + written,
        l2_bytes=read + written,
        steps=steps,
        operations=elements * (1 + m) + elements // block_n * m,
        vector=_vector(x, weight),
        rounds=1 + np.log2(warps) / 2,
    )


def skinny_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Work:
    """The weight is the tall operand of the tensor core's product; each block reads all of x from L2."""
    _, m, n, k, size = _sizes(x, weight)
    block_n, step = config["BLOCK_N"], config["SLICES"] * config["BLOCK_K"]
    read, written = _compulsory(x, weight, activation, residual)
    blocks, steps = _cdiv(n, block_n), _cdiv(k, step)
    vector = _vector(x, weight, 8)
    return Work(
        blocks=blocks,
        flops=2.0 * blocks * steps * step * block_n * config["BLOCK_M"],
        unit=_unit(x.dtype),
        dram_bytes=read + written,
        l2_bytes=blocks * k * (block_n + m) * size + written,
        steps=steps,
        # Loads narrower than 4 bytes are not copied asynchronously: nothing is under way ahead.
        depth=config["num_stages"] - 1 if vector >= 4 else 1,
        vector=vector,
        rounds=1 + np.log2(config["SLICES"]) / 2,
        tile_m=block_n * config["SLICES"],
        tile_n=config["BLOCK_M"],
    )


def _tiles(
    config: Config, split: Any, x: Tensor, weight: Tensor, activation: str, residual: Tensor | None
) -> tuple[Any, Any, Any, Any, Any]:
    """(tiles, steps of a program, multiply-adds x 2, bytes from L2, bytes from memory) of a product by tiles."""
    batch, m, n, k, size = _sizes(x, weight)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    rows, cols = _cdiv(m, block_m), _cdiv(n, block_n)
    tiles, steps = batch * rows * cols, _cdiv(_cdiv(k, block_k), split)
    flops = 2.0 * tiles * split * steps * block_k * block_m * block_n
    read, written = _compulsory(x, weight, activation, residual)
    l2 = batch * k * size * (1.0 * m * cols + 1.0 * n * rows) + written
    return tiles, steps, flops, l2, read + written


def tile_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Work:
    """With SPLIT_K each program leaves its part, and the last one of a tile reads all."""
    split = config["SPLIT_K"]
    tiles, steps, flops, l2, dram = _tiles(config, split, x, weight, activation, residual)
    vector = _vector(x, weight)
    part = config["BLOCK_M"] * config["BLOCK_N"] * 4
    return Work(
        blocks=tiles * split,
        flops=flops,
        unit=_unit(x.dtype),
        dram_bytes=dram,
        l2_bytes=l2,
        steps=steps,
        depth=config["num_stages"] - 1 if vector >= 4 else 1,
        vector=vector,
        end_bytes=np.where(split > 1, part * (1 + split), 0),
        rounds=np.where(split > 1, 3, 1),
        tile_m=config["BLOCK_M"],
        tile_n=config["BLOCK_N"],
    )


def tma_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Work:
    """The copy engine loads whole boxes: no instructions to count, and none is narrow."""
    tiles, steps, flops, l2, dram = _tiles(config, 1, x, weight, activation, residual)
    return Work(
        blocks=tiles,
        flops=flops,
        unit=_unit(x.dtype),
        dram_bytes=dram,
        l2_bytes=l2,
        steps=steps,
        depth=config["num_stages"] - 1,
        vector=1024,
        rounds=1,
        tile_m=config["BLOCK_M"],
        tile_n=config["BLOCK_N"],
        persistent=True,
    )


def sm90_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Work:
    """As `tma_work`, with parts of shared tiles, and with copies of operands whose rows do not start at 16 bytes."""
    split, config = config["SPLIT_K"], {**config, "BLOCK_K": 64}
    tiles, whole, *_ = _tiles(config, 1, x, weight, activation, residual)
    waves, left = tiles // device.sms, tiles % device.sms
    # 0 shares the tiles that are left after the full waves: as if all tiles were so much shorter. Without a wave those are all.
    shared = np.where(split == 0, np.clip(device.sms // np.maximum(left, 1), 1, 4), split)
    _, steps, flops, l2, dram = _tiles(config, shared, x, weight, activation, residual)
    shorter = np.where(left > 0, (waves + 1 / shared) / (waves + 1), 1.0)
    copied = sum(2 * t.nbytes for t in (x, weight) if max(t.stride()[-2:]) * t.element_size() % 16)
    part = config["BLOCK_M"] * config["BLOCK_N"] * 4
    some = (split == 0) & (waves > 0)
    return Work(
        blocks=np.where(some, tiles, tiles * shared),
        flops=flops,
        unit=_unit(x.dtype),
        dram_bytes=dram + copied,
        l2_bytes=l2 + copied,
        steps=np.where(some, shorter * whole, steps),
        depth=4,
        vector=1024,
        end_bytes=np.where(shared > 1, part * shared, 0),
        rounds=np.where(shared > 1, 3, 1),
        tile_m=config["BLOCK_M"],
        tile_n=config["BLOCK_N"],
        persistent=True,
    )


def vendor_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Work:
    """The operands once, the product without padding: what a library gets of that is in the model's constants.

    cuBLAS minds rows of the result that do not start at 16 bytes as it minds those of the operands. An activation or a residual
    that it does not take (gemm/cublas.py) is a kernel of its own, which reads the product and writes the result.
    """
    batch, m, n, k, size = _sizes(x, weight)
    read, written = _compulsory(x, weight, activation, residual)
    whole = all(max(t.stride()[-2:]) * t.element_size() % 16 == 0 for t in (x, weight)) and n * x.element_size() % 16 == 0
    activates = activation != "none" and not library_activates(x.dtype, activation, bias is not None, x.dim() == 3)
    adds = residual is not None and (bias is not None or activation != "none")
    return Work(
        blocks=device.sms,
        flops=2.0 * batch * m * n * k,
        unit=_unit(x.dtype),
        dram_bytes=read + written,
        l2_bytes=read + written,
        rounds=activates + adds,
        end_bytes=activates * (batch * m * n * size + written) + adds * 3 * written,
        library=True,
        vector=16 if whole else x.element_size(),
    )


# ---- rows: norms and softmax


def _row_work(device: Device, config: Config, x: Tensor, streams: int, shared: int, operations: int) -> Work:
    """`streams` arrays like x are read or written, `shared` vectors of a row's width are read by every block."""
    rows = max(rows_of(x)[0], 1)
    d, size = x.shape[-1], x.element_size()
    block_t, block_d, warps = config["BLOCK_T"], config["BLOCK_D"], config["num_warps"]
    wide = d > block_d
    blocks = _cdiv(rows, block_t)
    parts = _cdiv(d, block_d)
    held = np.minimum(config["HELD"], parts - 1)
    again = np.where(wide, (parts - held) * block_d, 0) * rows * size
    moved = rows * d * size * streams + shared * d * size
    # A row waits in L2 for its second reading, beside those of the other blocks.
    waiting = device.sms * np.where(wide, (parts - held) * block_d, 0) * size * 2
    lost = np.clip(waiting / device.l2_bytes - 0.5, 0.0, 1.0) if device.l2_bytes else 0.0
    elements = blocks * block_t * np.where(wide, parts * block_d, block_d)
    # A row that does not start at 16 bytes is read element by element.
    vector = 16 if d * size % 16 == 0 else size
    return Work(
        blocks=blocks,
        flops=0.0,
        unit="fp32",
        dram_bytes=moved + again * lost,
        l2_bytes=moved + again + blocks * shared * d * size,
        steps=np.where(wide, 2 * (parts - held), 1),
        operations=1.0 * elements * operations,
        vector=vector,
        # Warps that share a row meet; rows of one warp do not.
        rounds=1 + np.maximum(np.log2(warps / np.minimum(block_t, warps)), 0) / 2,
    )


def norm_work(device: Device, config: Config, x: Tensor, weight: Tensor, eps: float) -> Work:
    """rms_norm."""
    return _row_work(device, config, x, 2, 1, _NORM_OPERATIONS)


def add_norm_work(device: Device, config: Config, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Work:
    """add_rms_norm: two arrays in, two out."""
    return _row_work(device, config, x, 4, 1, _NORM_OPERATIONS + 2)


def layer_norm_work(device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Work:
    """layer_norm."""
    return _row_work(device, config, x, 2, 1 + (bias is not None), _NORM_OPERATIONS + 3)


def add_layer_norm_work(
    device: Device, config: Config, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, want_sum: bool
) -> Work:
    """add_layer_norm, whose rows are one block each."""
    block = {"BLOCK_D": 1 << (x.shape[-1] - 1).bit_length(), "HELD": 1}
    return _row_work(device, {**config, **block}, x, 3 + want_sum, 1 + (bias is not None), _NORM_OPERATIONS + 5)


def softmax_work(device: Device, config: Config, x: Tensor) -> Work:
    """softmax."""
    return _row_work(device, config, x, 2, 0, _SOFTMAX_OPERATIONS)


# ---- paged_attention

# Arguments: q, k_cache, v_cache, block_table, kv_lens, cu_q, max_q_len, scale, window, k_scale, v_scale, sinks


def _lengths(q: Tensor, block_table: Tensor, page: int, kv_lens: Tensor, cu_q: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(keys, queries) of each sequence, each [B, 1]."""
    batch = kv_lens.shape[0]
    if kv_lens.is_meta:
        keys = np.full(batch, block_table.shape[1] * page)
        queries = np.full(batch, _cdiv(q.shape[0], max(batch, 1)))
    else:
        keys, queries = np.array(kv_lens.tolist()), np.array(cu_q.diff().tolist())
    return keys[:, None], queries[:, None]


def _attention_bytes(q: Tensor, k_cache: Tensor, keys: np.ndarray) -> float:
    return float(2 * q.numel() * q.element_size() + 2 * keys.sum() * k_cache.shape[1] * q.shape[2] * k_cache.element_size())


def stream_work(
    device: Device, config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor,
    cu_q: Tensor, max_q_len: int, scale: float, window: int | None, *codes: object,
) -> Work:  # fmt: skip
    """Equal shares of all tiles for a fixed number of programs; what is combined is read by one program of a sequence."""
    (_, heads, d), (_, kv_heads, page, _) = q.shape, k_cache.shape
    keys, queries = _lengths(q, block_table, page, kv_lens, cu_q)
    keys = keys if window is None else np.minimum(keys, window + queries - 1)
    block_d, block_n = max(16, next_pow2(d)), config["BLOCK_N"]
    rows = heads // kv_heads * (1 if max_q_len == 1 else 16)
    block_m = max(16, next_pow2(rows))
    steps = kv_heads * np.maximum(_cdiv(keys, block_n).sum(0), 1)
    share = _cdiv(steps, config["PER_SM"] * device.sms)
    blocks = _cdiv(steps, share)
    parts = _cdiv(steps, share * kv_heads * len(keys))
    return Work(
        blocks=blocks,
        flops=4.0 * steps * block_n * block_m * block_d,
        unit=_unit(q.dtype),
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
    """A tile of queries walks the keys up to its diagonal; the longest walk may outlast the rest of the grid."""
    (_, heads, d), (_, kv_heads, page, _) = q.shape, k_cache.shape
    keys, queries = _lengths(q, block_table, page, kv_lens, cu_q)
    group, block_d, size = heads // kv_heads, max(16, next_pow2(d)), q.element_size()
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    block_q = block_m // group
    tiles = _cdiv(queries, block_q)
    seen = np.minimum(keys, keys - queries / 2 + block_q / 2)
    if window is not None:
        seen = np.minimum(seen, window + block_q)
    steps = _cdiv(seen, block_n)
    blocks, all_steps = np.maximum(tiles.sum(0), 1), np.maximum((tiles * steps).sum(0), 1)
    walked = kv_heads * all_steps * block_n
    return Work(
        blocks=kv_heads * blocks,
        flops=4.0 * walked * block_m * block_d,
        unit=_unit(q.dtype),
        dram_bytes=_attention_bytes(q, k_cache, keys),
        l2_bytes=2.0 * kv_heads * (tiles * seen).sum(0) * d * size + 2 * q.numel() * size,
        steps=all_steps / blocks,
        longest=_cdiv(np.minimum(keys, window + block_q) if window is not None else keys, block_n).max(0),
        depth=config["num_stages"],
        operations=1.0 * kv_heads * all_steps * block_m * (block_n * _ATTENTION_OPERATIONS + block_d * 2),
        chain=4 + 3 * (config["num_warps"] * 16 > block_m),
        rounds=1,
        tile_m=block_m,
        tile_n=block_n,
    )
