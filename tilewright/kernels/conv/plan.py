"""Plans for repeated convolutions: `Impl.plan` of the implementations of `conv`.

A plan accepts tensors of torch's shapes. When it runs, the host only allocates the result, reads addresses and launches the
kernel, or makes one call of cuDNN. A plan keeps no tensor alive.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.conv.problem import empty_output
from tilewright.kernels.launch import plan as launch_plan
from tilewright.tune.space import Config

__all__ = ["FORMATS", "Plan", "launcher", "plan_of"]

Plan = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""(x [N, C, *S], weight [O, C / groups, *K], bias, residual [N, O, *P]) -> [N, O, *P], all with dense channels."""

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats by the number of dimensions."""


def plan_of(planned: Callable[..., launch_plan.Plan | None]) -> Callable[..., Plan | None]:
    """Make an `Impl.plan` from `planned`: (config, *args) -> the launch plan of such a call, or None.

    The operands of the launch plan are x, weight, y, bias, residual and scales.
    """

    def plan(config: Config, *args: Any) -> Plan | None:
        found = planned(config, *args)
        if found is None:
            return None
        x, weight, *_, size, _, _, dtype = args
        fill, shape = found.run, (x.shape[0], weight.shape[0], *size)
        options = {"dtype": dtype, "device": x.device, "memory_format": FORMATS[x.dim()]}

        def call(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
            y = torch.empty(shape, **options)
            fill(x, weight, y, bias, residual, None, None)
            return y

        return call

    return plan


def launcher(plans: launch_plan.Planned, *, dense_weight: bool = True) -> Callable[..., Tensor]:
    """Make an `Impl.launch` that uses these plans. dense_weight: a weight that is not contiguous is copied first."""

    def launch(
        config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
        stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int], x_scales: Tensor | None,
        w_scales: Tensor | None, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        y = empty_output(x, weight, size, dtype)
        if y.numel():
            weight = weight.contiguous() if dense_weight else weight
            args = (x, weight, bias, residual, activation, stride, padding, dilation, groups, size, x_scales, w_scales, dtype)
            plans.fill(config, y, args, (x, weight, y, bias, residual, x_scales, w_scales))
        return y

    return launch
