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

from tilewright.kernels.conv import implicit_gemm as conv_tile
from tilewright.kernels.conv import sm90 as conv_sm90_launch
from tilewright.kernels.conv import sm90_grouped as conv_sm90_narrow
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.cudnn import vendor_again
from tilewright.kernels.gemm.linear import linear_op
from tilewright.op import Choice

__all__ = ["FORMATS", "Again", "again"]

Again = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""(x [N, C, *S], weight [O, C / groups, *K], bias, residual [N, O, *P]) -> [N, O, *P], all with dense channels."""

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions."""


def again(*args: Any) -> Again | None:
    """What makes a call of `conv_op` again that was made with these arguments, on tensors that differ in their memory alone."""
    x, weight, _, residual, *_, size, x_scales, _, dtype = args
    if x_scales is not None or not x.is_cuda or x.dim() not in FORMATS or not x.numel():
        return None
    if not all(t is None or t.is_contiguous() for t in (x, weight, residual)):
        return None  # a depthwise weight, which some launchers copy
    choice: Choice = conv_op.chosen(*args)
    if choice.impl.name == "vendor":
        return vendor_again(*args)
    if choice.impl.name == "linear":
        return _product(*args)
    tile = conv_tile.launched
    held = {"sm90": conv_sm90_launch.launched, "narrow": conv_sm90_narrow.launched, "triton": tile, "few": tile}
    launched = held.get(choice.impl.name)
    found = None if launched is None else launched(choice.config, *args)
    if found is None:
        return None
    launch, shape = found.launch, (x.shape[0], weight.shape[0], *size)
    options = {"dtype": dtype, "device": x.device, "memory_format": FORMATS[x.dim()]}

    def call(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y = torch.empty(shape, **options)
        launch(x, weight, y, bias, residual, None, None)
        return y

    return call


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, *_: Any
) -> Again:  # fmt: skip
    """1 x 1: what `linear` has chosen for the pixels [N S, C]."""
    pixels, (o, c), shape = x.numel() // x.shape[-1], (weight.shape[0], x.shape[-1]), (*x.shape[:-1], weight.shape[0])
    order = (0, x.dim() - 1, *range(1, x.dim() - 1))
    rows = None if residual is None else residual.view(pixels, o)
    impl, config = linear_op.chosen(x.view(pixels, c), weight.view(o, c), bias, activation, rows)[:2]

    def call(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        rows = None if residual is None else residual.as_strided((pixels, o), (o, 1))
        y = impl.launch(config, x.as_strided((pixels, c), (c, 1)), weight.as_strided((o, c), (c, 1)), bias, activation, rows)
        return y.view(shape).permute(order)

    return call
