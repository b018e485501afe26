"""What a launch of softmax really does: `Impl.work` for the analytical model, as launch/work.py says. No kernels."""

from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.launch.work import row_work
from tilewright.tune.model import Work
from tilewright.tune.space import Config

__all__ = ["softmax_work"]

# Elementwise operations for each element, as the kernels' inner loops have them.
_SOFTMAX_OPERATIONS = 8


def softmax_work(device: Device, config: Config, x: Tensor) -> Work:
    """softmax."""
    return row_work(device, config, x, 2, 0, _SOFTMAX_OPERATIONS)
