"""Whether a launch for one row starts while the launch before it still runs (`op.early_launches`; launch/pdl.py).

In a decoding step of one sequence all launches are short, and starting them takes a large part of the step. So the norms,
rotations and products of such a step start early. Their first action is `gdc_wait`, except that products load weights before
it. So a product starts early only if its weight is a parameter; another weight may be the result of the preceding launch. The
launches that precede early ones are norms, products and attention; they call `release` when they start. Other launches of norms
and attention do not call it. With several rows early launches gained nothing (docs/experiments/overlapping-launches.md).
"""

from torch import Tensor

from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.launch.pdl import overlaps
from tilewright.op import scope

__all__ = ["early"]


def early(x: Tensor, rows: int) -> bool:
    """Whether a launch for `rows` rows of x starts early."""
    return rows == 1 and scope().early and overlaps(card_of(x))
