"""A convolution that was called before: the way from torch's tensors straight to its launch.

What a layer does a thousand times, with tensors of the same shapes and other memory, is checked, viewed, summarised, chosen for
and laid out once: the host takes longer for that than a card for a convolution of one image. `again` gives what is left over:
memory for the result, addresses, the launch; or the call of cuDNN.

Not for int8, gradients, convolutions whose operands are copied first, other implementations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels import conv_sm90_launch, conv_tile
from tilewright.kernels.conv import conv_op
from tilewright.kernels.conv_vendor import vendor_again
from tilewright.op import Choice

__all__ = ["Again", "again"]

Again = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""(x [N, C, *S], weight [O, C / groups, *K], bias, residual [N, O, *P]) -> [N, O, *P], all with dense channels."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def again(*args: Any) -> Again | None:
    """What makes a call of `conv_op` again that was made with these arguments, on tensors that differ in their memory alone."""
    x, weight, _, residual, *_, size, x_scales, _, dtype = args
    if x_scales is not None or not x.is_cuda or x.dim() not in _FORMATS or not x.numel():
        return None
    if not all(t is None or t.is_contiguous() for t in (x, weight, residual)):
        return None  # a depthwise weight, which some launchers copy
    choice: Choice = conv_op.chosen(*args)
    if choice.impl.name == "vendor":
        return vendor_again(*args)
    tile = conv_tile.launched
    launched = {"sm90": conv_sm90_launch.launched, "triton": tile, "few": tile}.get(choice.impl.name)
    found = None if launched is None else launched(choice.config, *args)
    if found is None:
        return None
    launch, shape = found.launch, (x.shape[0], weight.shape[0], *size)
    options = {"dtype": dtype, "device": x.device, "memory_format": _FORMATS[x.dim()]}

    def call(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y = torch.empty(shape, **options)
        launch(x, weight, y, bias, residual, None, None)
        return y

    return call
