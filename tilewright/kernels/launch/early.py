"""Whether a launch for one row starts while the launch before it still runs (`op.early_launches`; pdl.py).

In a decoding step of one sequence all launches are short, and starting them takes a large part of the step. Its norms,
rotations and products start early. The first thing that they do is `gdc_wait`; products fetch weights before it, and so only
those of parameters start early: another weight may be the result of the launch before. The launches before them, which are
norms, products and attention, say `release` when they start. Other launches of norms and attention say nothing.
"""

from torch import Tensor

from tilewright.hw.device import CARD_OF_ARCH, device_of
from tilewright.kernels.launch.pdl import overlaps
from tilewright.op import scope

__all__ = ["early"]


def early(x: Tensor, rows: int) -> bool:
    """Whether a launch for so many rows of x starts early."""
    now = scope()
    if not now.early or rows != 1:
        return False
    return overlaps(now.card or CARD_OF_ARCH[90] if x.is_meta else device_of(x.get_device()))
