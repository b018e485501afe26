"""The work of one launch of each norm: the functions `Impl.work` of the analytical model (launch/work.py). No kernels."""

from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.launch.work import row_work
from tilewright.tune.model import Work
from tilewright.tune.space import Config

__all__ = ["add_layer_norm_work", "add_norm_work", "layer_norm_work", "norm_work"]

_NORM_OPERATIONS = 5


def norm_work(device: Device, config: Config, x: Tensor, weight: Tensor, eps: float) -> Work:
    """rms_norm: reads one array and writes one."""
    return row_work(device, config, x, 2, 1, _NORM_OPERATIONS)


def add_norm_work(device: Device, config: Config, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Work:
    """add_rms_norm: reads two arrays and writes two."""
    return row_work(device, config, x, 4, 1, _NORM_OPERATIONS + 2)


def layer_norm_work(device: Device, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Work:
    """layer_norm: reads one array and writes one."""
    return row_work(device, config, x, 2, 1 + (bias is not None), _NORM_OPERATIONS + 3)


def add_layer_norm_work(
    device: Device, config: Config, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, want_sum: bool
) -> Work:
    """add_layer_norm. A row is one block."""
    block = {"BLOCK_D": 1 << (x.shape[-1] - 1).bit_length(), "HELD": 1}
    return row_work(device, {**config, **block}, x, 3 + want_sum, 1 + (bias is not None), _NORM_OPERATIONS + 5)
