"""The work of `linear`'s kernels as the analytical model counts it: `Impl.work` (launch/work.py). Contains no kernels."""

# M rows of x, N rows of the weight, K the shared dimension. Arguments: x, weight, bias, activation, residual

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.launch.work import cdiv, unit_of
from tilewright.tune.model import Work
from tilewright.tune.space import Config

__all__ = ["gemv_work", "library_activates", "skinny_work", "sm90_work", "tile_work", "tma_work", "vendor_work"]


def library_activates(dtype: torch.dtype, activation: str, bias: bool, batched: bool) -> bool:
    """Whether cuBLAS itself applies the activation: ReLU or tanh-GELU after a bias, in a 16-bit product without a batch."""
    return activation in ("relu", "gelu_tanh") and bias and not batched and dtype.itemsize == 2


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int, int, int]:
    """(B, M, N, K, bytes per element). Sizes of 0, for which nothing is launched, are counted as 1."""
    m, k = x.shape[-2:]
    return (x.shape[0] if x.dim() == 3 else 1) or 1, m or 1, weight.shape[-2] or 1, k or 1, x.element_size()


def _compulsory(x: Tensor, weight: Tensor, activation: str, residual: Tensor | None) -> tuple[float, float]:
    """(bytes read from memory, bytes written to memory)."""
    batch, m, n, _, size = _sizes(x, weight)
    out = batch * m * (n // 2 if activation.endswith("_mul") else n) * size
    return batch * x.shape[-1] * (m + n) * size + (out if residual is not None else 0), out


def _vector(x: Tensor, weight: Tensor, multiple: int = 16) -> int:
    """Bytes per load. Triton vectorises loads only if it knows that sizes and strides are multiples of `multiple`.

    By itself Triton recognises multiples of 16.
    """
    size = x.element_size()
    for t in (x, weight):
        along, step = (t.shape[-1], t.stride(-2)) if t.stride(-1) == 1 else (t.shape[-2], t.stride(-1))
        if along % multiple or step % multiple:
            return size
    return 16


def gemv_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Work:
    """Each block reads all of x, mostly from L1. These reads are counted as instructions, not as L2 bytes."""
    _, m, n, k, _ = _sizes(x, weight)
    block_n, block_k, warps = config["BLOCK_N"], config["BLOCK_K"], config["num_warps"]
    read, written = _compulsory(x, weight, activation, residual)
    blocks, steps = cdiv(n, block_n), cdiv(k, block_k)
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
    """The weight is the tall operand of the tensor cores; each block reads all of x from L2."""
    _, m, n, k, size = _sizes(x, weight)
    block_n, step = config["BLOCK_N"], config["SLICES"] * config["BLOCK_K"]
    read, written = _compulsory(x, weight, activation, residual)
    blocks, steps = cdiv(n, block_n), cdiv(k, step)
    vector = _vector(x, weight, 8)
    return Work(
        blocks=blocks,
        flops=2.0 * blocks * steps * step * block_n * config["BLOCK_M"],
        unit=unit_of(x.dtype),
        dram_bytes=read + written,
        l2_bytes=blocks * k * (block_n + m) * size + written,
        steps=steps,
        # Loads narrower than 4 bytes cannot be asynchronous copies, so nothing is loaded ahead.
        depth=config["num_stages"] - 1 if vector >= 4 else 1,
        vector=vector,
        rounds=1 + np.log2(config["SLICES"]) / 2,
        tile_m=block_n * config["SLICES"],
        tile_n=config["BLOCK_M"],
    )


def _tiles(
    config: Config, split: Any, x: Tensor, weight: Tensor, activation: str, residual: Tensor | None
) -> tuple[Any, Any, Any, Any, Any]:
    """(tiles, steps per program, flops, L2 bytes, memory bytes) of a tiled product. A multiply-add counts as two flops."""
    batch, m, n, k, size = _sizes(x, weight)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    rows, cols = cdiv(m, block_m), cdiv(n, block_n)
    tiles, steps = batch * rows * cols, cdiv(cdiv(k, block_k), split)
    flops = 2.0 * tiles * split * steps * block_k * block_m * block_n
    read, written = _compulsory(x, weight, activation, residual)
    l2 = batch * k * size * (1.0 * m * cols + 1.0 * n * rows) + written
    return tiles, steps, flops, l2, read + written


def tile_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Work:
    """With SPLIT_K each program writes its part, and the last program of a tile reads all parts."""
    split = config["SPLIT_K"]
    tiles, steps, flops, l2, dram = _tiles(config, split, x, weight, activation, residual)
    vector = _vector(x, weight)
    part = config["BLOCK_M"] * config["BLOCK_N"] * 4
    return Work(
        blocks=tiles * split,
        flops=flops,
        unit=unit_of(x.dtype),
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


def tma_work(device: Device, config: Config, *args: Any) -> Work:
    """As `tile_work`. The copy engine loads whole boxes, so there are no load instructions to count and no narrow loads."""
    work = tile_work(device, {**config, "SPLIT_K": 1}, *args)
    return work._replace(depth=config["num_stages"] - 1, vector=1024, persistent=True)


def sm90_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Work:
    """As `tma_work`, plus the partial sums of shared tiles, and copies of operands whose rows are not 16-byte aligned."""
    split, config = config["SPLIT_K"], {**config, "BLOCK_K": 64}
    tiles, whole, *_ = _tiles(config, 1, x, weight, activation, residual)
    waves, left = tiles // device.sms, tiles % device.sms
    # SPLIT_K 0 shares only the tiles left after the full waves (all tiles if there is no full wave). It is modelled as if all
    # tiles were shorter by the same factor.
    shared = np.where(split == 0, np.clip(device.sms // np.maximum(left, 1), 1, 4), split)
    _, steps, flops, l2, dram = _tiles(config, shared, x, weight, activation, residual)
    shorter = np.where(left > 0, (waves + 1 / shared) / (waves + 1), 1.0)
    copied = sum(2 * t.nbytes for t in (x, weight) if max(t.stride()[-2:]) * t.element_size() % 16)
    part = config["BLOCK_M"] * config["BLOCK_N"] * 4
    some = (split == 0) & (waves > 0)
    return Work(
        blocks=np.where(some, tiles, tiles * shared),
        flops=flops,
        unit=unit_of(x.dtype),
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
    """Each operand is read once, and the product has no padding. The model's constants contain the efficiency of a library.

    cuBLAS is slower if rows of the operands, or of the result, do not start at multiples of 16 bytes. An activation or residual
    that cuBLAS cannot apply itself (gemm/cublas.py) is a separate kernel, which reads the product and writes the result.
    """
    batch, m, n, k, size = _sizes(x, weight)
    read, written = _compulsory(x, weight, activation, residual)
    whole = all(max(t.stride()[-2:]) * t.element_size() % 16 == 0 for t in (x, weight)) and n * x.element_size() % 16 == 0
    activates = activation != "none" and not library_activates(x.dtype, activation, bias is not None, x.dim() == 3)
    adds = residual is not None and (bias is not None or activation != "none")
    return Work(
        blocks=device.sms,
        flops=2.0 * batch * m * n * k,
        unit=unit_of(x.dtype),
        dram_bytes=read + written,
        l2_bytes=read + written,
        rounds=activates + adds,
        end_bytes=activates * (batch * m * n * size + written) + adds * 3 * written,
        library=True,
        vector=16 if whole else x.element_size(),
    )
