"""Whether a launch for few rows starts while the launch before it still runs (`op.early_launches`; launch/pdl.py).

In a decoding step of few sequences all launches are short, and starting them takes a large part of the step. Its norms,
rotations and products start early. The first thing that they do is `gdc_wait`. Products of several rows ask for weights in L2
before that. Products of one row fetch weights, and so only those of parameters start early: another weight may be the result of
the launch before. The launches before them, which are norms, products and attention, say `release` when they start. Other
launches of norms and attention say nothing.
"""

from torch import Tensor

from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.launch.pdl import overlaps
from tilewright.op import scope

__all__ = ["early"]


def early(x: Tensor, rows: int) -> bool:
    """Whether a launch for so many rows of x starts early."""
    return 0 < rows <= scope().early and overlaps(card_of(x))
