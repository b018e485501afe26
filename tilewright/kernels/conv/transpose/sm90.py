"""The host side of `conv_transpose` on Hopper, by the kernel of `conv` (conv/sm90_kernel.py): exports the Impl `sm90`.

With a stride of S the outputs that meet the same positions of the filter lie S apart: a phase, S x S of them. Output S * i + a
meets position r where a + padding - r * dilation is S times a whole number, the distance from i to the pixel of x: every so
manyeth position, farther back each time. So a phase is a convolution of stride 1 with some of the filter, a negative dilation
and negative padding, written to every S-th pixel of y: views all of them, nothing is copied, no zeros are multiplied. The
weight is read as it stands, dense along the columns of the product; tensor cores take that of 16 bits.

A filter as wide as its stride, without padding there, fills pixels of y that lie side by side: they are one pixel of more
channels, KW * C, and only rows have phases.

Refuses: groups, other dtypes than fp16 and bf16, three spatial dims, channels that are no multiple of 16 bytes, filters
narrower than their stride (some outputs would be the bias alone).
"""

from itertools import product
from math import gcd
from typing import Any

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.conv.problem import Problem, sizes_of
from tilewright.kernels.conv.sm90_im2col import AXES, Launch, Shape, best_tile, launch_boxes, refuse_boxes, tile_refusal
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import pointer_kind
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["TRANSPOSE_SM90", "taps_of"]

_LARGEST_STRIDE = 4


def _refuse(device: Device, problem: Problem) -> str | None:
    if (reason := refuse_boxes(device, problem)) is not None:
        return reason
    if not problem.aligned or problem.o % 8 or problem.c % 8:
        return "needs tensors that start at multiples of 16 bytes, and channels that fill a multiple of 16 bytes"
    if max(problem.stride) > _LARGEST_STRIDE:
        return f"supports strides up to {_LARGEST_STRIDE} only"
    for d in (1, 2):
        way = problem.kernel[d], problem.stride[d], problem.padding[d], problem.dilation[d]
        if any(taps_of(a, *way) is None for a in range(min(problem.stride[d], problem.x[d]))):
            return "does not support outputs to which no position of the filter contributes"
    return None


def taps_of(a: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int, int, int] | None:
    """Along a dimension, for outputs stride * i + a: (first position, positions between, pixel of x at i = 0, step there).

    None where no position meets them. Source: the definition of a transposed convolution, solved for the pixel.
    """
    step = stride // gcd(stride, dilation)
    for first in range(min(step, kernel)):
        if (a + padding - first * dilation) % stride == 0:
            return first, step, (a + padding - first * dilation) // stride, -(step * dilation // stride)
    return None


def _fills(kernel: int, stride: int, padding: int, dilation: int, size: int) -> bool:
    """Whether along a dimension every pixel of x fills `stride` outputs of its own, of `size` in all."""
    return kernel == stride and padding == 0 and dilation == 1 and size % stride == 0


def _shape(problem: Problem) -> Shape:
    (_, h, w), (_, sh, sw), (_, kh, kw) = problem.x, problem.stride, problem.kernel
    columns = problem.c
    if _fills(kw, sw, problem.padding[2], problem.dilation[2], w):
        w, columns, kw, sw = w // sw, columns * kw, 1, 1
    # Of the phase with the most positions. Where phases have equally many they are taken as convolutions of stride 1 are.
    kernel, stride = (-(-kh // sh), -(-kw // sw)), 1 if kh % sh == 0 else sh
    dilation, slow = (-problem.dilation[1], -problem.dilation[2]), problem.activation not in ("none", "relu")
    return Shape(
        problem.n_bucket, -(-h // sh), -(-w // sw), columns, kernel, (stride, 1), dilation, problem.o, problem.dtype.itemsize,
        False, slow,
    )  # fmt: skip


SPACE = Space(
    default=lambda device, problem: best_tile(device, _shape(problem)),
    axes=AXES,
    refusal=lambda device, problem, config: tile_refusal(device, _shape(problem), config),
)


def _key(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, size: list[int],
) -> tuple[Any, ...]:  # fmt: skip
    return (
        x.get_device(), x.dtype, x.shape, weight.shape, pointer_kind(bias), activation, *stride, *padding, *dilation, *size,
        *config.values(),
    )  # fmt: skip


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    y = torch.empty((x.shape[0], *rest[-1], weight.shape[-1]), dtype=x.dtype, device=x.device)
    if y.numel():
        _PLANS.fill(config, y, (x, weight, bias, *rest), (x, weight, y, bias, None, None, None))
    return y


def _first_launch(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: list[int],
    padding: list[int], dilation: list[int], groups: int, size: list[int],
) -> Plan:  # fmt: skip
    """Fill y, by a launch a phase."""
    s = sizes_of(y, weight, stride, padding, dilation, groups, x.shape[1:-1])
    (_, kh, kw), (_, sh, sw), (_, h, w), c = s.kernel, s.stride, s.x, s.c
    pad_w, dilation_w = s.padding[2], s.dilation[2]
    if _fills(kw, sw, pad_w, dilation_w, w):
        w, c, kw, sw = w // sw, c * kw, 1, 1
    pixels, filters, plane = x.view(s.n, *s.y[1:], s.o), weight.view(s.o, kh, kw, c), y.view(s.n, h, w, c)
    made: list[Plan] = []
    for a, b in product(range(min(sh, h)), range(min(sw, w))):
        down = taps_of(a, kh, sh, s.padding[1], s.dilation[1])
        right = taps_of(b, kw, sw, pad_w, dilation_w)
        assert down, "refused otherwise"
        assert right, "refused otherwise"
        part = filters[:, down[0] :: down[1], right[0] :: right[1]]
        work = Launch(
            pixels, part, plane[:, a::sh, b::sw], (1, 1), (-down[2], -right[2]), (down[3], right[3]), activation, bias,
            w_major="n",
        )  # fmt: skip
        made.append(launch_boxes(config, work, (x, weight, y)))
    return Plan.joined(made)


_PLANS = Planned(_key, _first_launch)

TRANSPOSE_SM90 = Impl(name="sm90", launch=_launch, plan=_PLANS.plan, space=SPACE, written_for=90, refuse=_refuse)
