"""Repeats a convolution that was called before: goes from torch's tensors directly to the launch.

A layer calls the same convolution a thousand times, with tensors of the same shapes at other addresses. The checks, the views,
the choice of an implementation and the set-up of the launch are needed only once. On the host they take longer than a card
needs for the convolution of one image. `again` returns the part that is needed for every call: the plan of the implementation
that was chosen.

Not for int8, gradients, convolutions whose operands are copied first, and implementations without a plan.
"""

from typing import Any

from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.cudnn import cudnn_choosing, takes_padding
from tilewright.kernels.conv.plan import FORMATS, Plan
from tilewright.op import Choice

__all__ = ["FORMATS", "Plan", "again", "cudnn_choosing", "takes_padding"]


def again(*args: Any) -> Plan | None:
    """The plan that repeats the call of `conv_op` with these arguments on tensors at other addresses, or None."""
    x, weight, _, residual, *_, x_scales, _, _ = args
    if x_scales is not None or not x.is_cuda or x.dim() not in FORMATS or not x.numel():
        return None
    if not all(t is None or t.is_contiguous() for t in (x, weight, residual)):
        return None  # a depthwise weight, which some launchers copy
    choice: Choice = conv_op.chosen(*args)
    return None if choice.impl.plan is None else choice.impl.plan(choice.config, *args)
