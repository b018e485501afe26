"""The work of a launch of softmax: `Impl.work` for the analytical model (see launch/work.py). No kernels."""

from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.launch.work import row_work
from tilewright.tune.model import Work
from tilewright.tune.space import Config

__all__ = ["softmax_work"]

# Elementwise operations per element in the kernels' inner loops.
_SOFTMAX_OPERATIONS = 8


def softmax_work(device: Device, config: Config, x: Tensor) -> Work:
    """The work of a softmax launch."""
    return row_work(device, config, x, 2, 0, _SOFTMAX_OPERATIONS)
