"""Helpers for the functions of `Impl.work`, which describe to the analytical model the work that a launch really does.

These functions are in the `work.py` of a kernel folder. Each accepts (device, config, *args) with the arguments of the op,
which may be meta tensors. The entries of a config may be NumPy arrays; then the numbers of the `Work` are arrays too, with one
entry per config. The sequence lengths of attention are read from their tensor, so the host waits for the device. For meta
tensors the width of the block table is used instead.
"""

# T rows, D columns

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.launch.shapes import rows_of
from tilewright.tune.model import Work
from tilewright.tune.space import Config

__all__ = ["cdiv", "row_work", "unit_of"]

_UNITS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def cdiv(a: Any, b: Any) -> Any:
    """a / b rounded up, for numbers or arrays."""
    return np.ceil(a / b)


def unit_of(dtype: torch.dtype) -> str:
    """The arithmetic unit (a key of `hw.ceilings.Ceilings.flops`) on which a product of this dtype runs."""
    return _UNITS.get(dtype, "fp32")


def row_work(device: Device, config: Config, x: Tensor, streams: int, shared: int, operations: int) -> Work:
    """Work of a kernel that reads or writes `streams` arrays like x. Each block also reads `shared` vectors of row width."""
    rows = max(rows_of(x)[0], 1)
    d, size = x.shape[-1], x.element_size()
    block_t, block_d, warps = config["BLOCK_T"], config["BLOCK_D"], config["num_warps"]
    wide = d > block_d
    blocks = cdiv(rows, block_t)
    parts = cdiv(d, block_d)
    held = np.minimum(config["HELD"], parts - 1)
    again = np.where(wide, (parts - held) * block_d, 0) * rows * size
    moved = rows * d * size * streams + shared * d * size
    # Until it is read again, a row stays in L2, together with the rows of the other blocks.
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
        # Warps that share a row synchronise; a row that one warp processes needs no synchronisation.
        rounds=1 + np.maximum(np.log2(warps / np.minimum(block_t, warps)), 0) / 2,
    )
