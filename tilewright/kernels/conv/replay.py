"""A convolution that was called before: the way from torch's tensors straight to its launch.

What a layer does a thousand times, with tensors of the same shapes and other memory, is checked, viewed, summarised, chosen for
and laid out once: the host takes longer for that than a card for a convolution of one image. `again` gives what is left over,
the plan of the implementation that was chosen.

Not for int8, gradients, convolutions whose operands are copied first, implementations without a plan.
"""

from typing import Any

from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.cudnn import cudnn_choosing, takes_padding
from tilewright.kernels.conv.plan import FORMATS, Plan
from tilewright.op import Choice

__all__ = ["FORMATS", "Plan", "again", "cudnn_choosing", "takes_padding"]


def again(*args: Any) -> Plan | None:
    """What makes a call of `conv_op` again that was made with these arguments, on tensors that differ in their memory alone."""
    x, weight, _, residual, *_, x_scales, _, _ = args
    if x_scales is not None or not x.is_cuda or x.dim() not in FORMATS or not x.numel():
        return None
    if not all(t is None or t.is_contiguous() for t in (x, weight, residual)):
        return None  # a depthwise weight, which some launchers copy
    choice: Choice = conv_op.chosen(*args)
    return None if choice.impl.plan is None else choice.impl.plan(choice.config, *args)
