"""What the functions of `Impl.work` share, which tell the analytical model what a launch really does (`work.py` of a wing).

Each of those takes (device, config, *args) with the arguments of the op, which may be meta tensors; the entries of a config may
be NumPy arrays, and then so are the numbers of its `Work`, one entry a config. The lengths of attention are read from their
tensor, which waits for the device; on meta tensors the width of the block table stands for them.
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
    """a / b rounded up, of numbers or arrays."""
    return np.ceil(a / b)


def unit_of(dtype: torch.dtype) -> str:
    """The rate of `hw.device.Device` that a product of this dtype runs at."""
    return _UNITS.get(dtype, "fp32")


def row_work(device: Device, config: Config, x: Tensor, streams: int, shared: int, operations: int) -> Work:
    """`streams` arrays like x are read or written, `shared` vectors of a row's width are read by every block."""
    rows = max(rows_of(x)[0], 1)
    d, size = x.shape[-1], x.element_size()
    block_t, block_d, warps = config["BLOCK_T"], config["BLOCK_D"], config["num_warps"]
    wide = d > block_d
    blocks = cdiv(rows, block_t)
    parts = cdiv(d, block_d)
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
