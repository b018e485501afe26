"""The host side of `conv` on Hopper: exports the Impl `sm90`.

Refuses: groups, float32, three spatial dims, strides other than 1, 2 and 4 (unless a filter is as wide as its stride), output
channels that are no multiple of 16 bytes. One spatial dim is treated as two with a single row.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.conv.plan import launcher, plan_of
from tilewright.kernels.conv.problem import Problem, sizes_of
from tilewright.kernels.conv.sm90_im2col import (
    AXES,
    Launch,
    Shape,
    best_tile,
    launch_boxes,
    phases_of,
    refuse_boxes,
    tile_refusal,
)
from tilewright.kernels.conv.sm90_space_to_depth import fold_of, folded
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import pointer_kind
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["SM90", "planned"]


def _refuse(device: Device, problem: Problem) -> str | None:
    if (reason := refuse_boxes(device, problem, (torch.float16, torch.bfloat16, torch.int8))) is not None:
        return reason
    if not problem.aligned or problem.o * problem.out.itemsize % 16:
        return "needs tensors that start at multiples of 16 bytes, and output channels that fill a multiple of 16 bytes"
    if problem.kernel[2] > 1 and problem.dilation[2] > 1 and problem.c * problem.dtype.itemsize % 16:
        return "with a dilation along the width, needs channels that fill a multiple of 16 bytes"
    fold = fold_of(problem, problem.dtype)
    if any(stride not in (1, 2, 4) for stride in fold.stride):
        return "supports strides of 1, 2 and 4 only"
    if len(phases_of(fold.kernel, fold.stride, fold.padding, fold.dilation)) > 4:
        return "needs a stride that splits the pixels read by the filter into at most four phases"
    if fold.way != "windows" and (problem.x[1] < fold.stride[0] or problem.x[2] < fold.stride[1]):
        return "needs an x that is at least as large as the stride"
    return None


def _shape(problem: Problem) -> Shape:
    fold = fold_of(problem, problem.dtype)
    slow = problem.activation not in ("none", "relu")
    return Shape(
        problem.n_bucket, *problem.y[1:], problem.o, fold.kernel, fold.stride, fold.dilation, fold.c, problem.dtype.itemsize,
        problem.residual, slow,
    )  # fmt: skip


SPACE = Space(
    default=lambda device, problem: best_tile(device, _shape(problem)),
    axes=AXES,
    refusal=lambda device, problem, config: tile_refusal(device, _shape(problem), config),
)


def _key(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int], x_scales: Tensor | None,
    w_scales: Tensor | None, dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    return (
        x.get_device(), x.dtype, dtype, x.shape, weight.shape, *size, *stride, *padding, *dilation, activation,
        residual is None, pointer_kind(bias), pointer_kind(x_scales), pointer_kind(w_scales), *config.values(),
    )  # fmt: skip


def _first_launch(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int], x_scales: Tensor | None,
    w_scales: Tensor | None, dtype: torch.dtype,
) -> Plan:  # fmt: skip
    """Fill y. If operands are copied to windows (sm90_space_to_depth.py), the plan makes these copies first."""
    s = sizes_of(x, weight, stride, padding, dilation, groups, size)
    fold, plane = fold_of(s, x.dtype), (s.n, *s.y[1:], s.o)
    view = folded(fold, x, weight, s)
    rest = None if residual is None else residual.view(plane)
    work = Launch(
        view.x, view.weight, y.view(plane), fold.stride, fold.padding, fold.dilation, activation, bias, rest, x_scales,
        w_scales,
    )  # fmt: skip
    plan = launch_boxes(config, work)
    return plan.behind(lambda x, weight, *rest: (*folded(fold, x, weight, s), *rest)) if fold.way == "windows" else plan


_PLANS = Planned(_key, _first_launch)
_launch = launcher(_PLANS, dense_weight=False)


def planned(config: Config, *args: Any) -> Plan | None:
    """The plan of a call of `SM90`. None if there is none, or if it copies operands first: it then reads their strides."""
    plan = _PLANS.plan(config, *args)
    return None if plan is None or plan.copies else plan


SM90 = Impl(name="sm90", launch=_launch, space=SPACE, plan=plan_of(planned), written_for=90, refuse=_refuse)
