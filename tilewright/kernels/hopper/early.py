"""Whether a launch for one row starts while the launch before it still runs (`op.early_launches`; launch/pdl.py).

In a decoding step of one sequence all launches are short, and starting them takes a large part of the step. Its norms,
rotations and products start early. The first thing that they do is `gdc_wait`; products fetch weights before it, and so only
those of parameters start early: another weight may be the result of the launch before. The launches before them, which are
norms, products and attention, say `release` when they start. Other launches of norms and attention say nothing.
"""

from torch import Tensor

from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.launch.pdl import overlaps
from tilewright.op import scope

__all__ = ["early"]


def early(x: Tensor, rows: int) -> bool:
    """Whether a launch for so many rows of x starts early."""
    return scope().early and rows == 1 and overlaps(card_of(x))
