"""Transposed convolution, channels-last, in one, two or three spatial dims; also the gradient of `conv` by its input.

    y[n, i, c] = activation(sum of x[n, p, o] * weight[o, k, c] over o and all taps k and pixels p with
                            p * stride - padding + k * dilation = i
                            + bias[c])

    x [N, *P, O], weight [O, *K, C / groups], y [N, *size, C], contiguous. bf16, fp16 or fp32, one dtype throughout.

Stride, padding and dilation are those of the convolution that it transposes, from y's pixels to x's: with x the gradient of
that one's output, y is the gradient of its input. `padding` is of the low side, the high side follows from `size`. Accumulated
in float32, one rounding at the end. Limited by the tensor cores; an output costs as many multiply-adds as taps meet it.

    depthwise    one channel each, stride 1: that of `conv`
    vendor       cuDNN
    sm90         Hopper: Gluon, boxes of pixels fetched by the copy engine, a phase at a time
    phases       Hopper: a stride of 2, all phases in one launch
    triton       any shape: outputs that share their taps are computed together

Not supported: gradients (ops.conv_transpose2d has them), residuals, float64, int8.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.conv.cudnn import cudnn_choosing
from tilewright.kernels.conv.depthwise import DEPTHWISE
from tilewright.kernels.conv.inputs import conv_transpose_arguments
from tilewright.kernels.conv.problem import Problem, problem_of, sizes_of
from tilewright.kernels.conv.reference import plain_padding
from tilewright.kernels.conv.transpose.implicit_gemm import TRITON, fold_of
from tilewright.kernels.conv.transpose.sm90 import TRANSPOSE_SM90
from tilewright.kernels.conv.transpose.sm90_subpixel import PHASES
from tilewright.kernels.device.activations import activated
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["conv_transpose_op"]

_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, size: Sequence[int],
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.shape[0]:
        return torch.empty((0, *size, weight.shape[-1] * groups), dtype=x.dtype, device=x.device)
    y = _whole(x.to(wide), weight.to(wide), stride, padding, dilation, groups, size)
    return activated(y if bias is None else y + bias, activation).to(x.dtype).contiguous()


def _whole(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    size: Sequence[int],
) -> Tensor:  # fmt: skip
    """torch's transposed convolution without padding, cut to `size`, [N, *size, C]."""
    transpose = _TRANSPOSED[x.dim() - 2]
    y = transpose(x.movedim(-1, 1), weight.movedim(-1, 1), None, tuple(stride), 0, 0, groups, tuple(dilation))
    sides = [(-low, n + low - full) for low, n, full in zip(padding, size, y.shape[2:], strict=True)]
    return F.pad(y, [side for pair in reversed(sides) for side in pair]).movedim(1, -1)


# ---- problem, cost, examples


def _problem(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, size: Sequence[int],
) -> Problem:  # fmt: skip
    """As of the convolution that it transposes: y's sizes are that one's x."""
    y = x.new_empty((x.shape[0], *size, weight.shape[-1] * groups), device="meta")
    found = problem_of(y, weight, bias, None, activation, stride, padding, dilation, groups, x.shape[1:-1], None, None, x.dtype)
    return found._replace(aligned=(x.data_ptr() | weight.data_ptr()) % 16 == 0)


def _cost(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, size: Sequence[int],
) -> Cost:  # fmt: skip
    y = x.new_empty((x.shape[0], *size, weight.shape[-1] * groups), device="meta")
    s = sizes_of(y, weight, stride, padding, dilation, groups, x.shape[1:-1])
    moved = x.nbytes + weight.nbytes + y.numel() * x.element_size() + (0 if bias is None else bias.nbytes)
    return Cost(flops=2 * s.pixels * s.o * s.taps * (s.c // groups), bytes=moved)


_example = Example.sized(conv_transpose_arguments)
EXAMPLES = (
    _example("double", 2, 32, 4, 24, 2, S=2, bias=True, activation="relu"),
    _example("phases", 1, 40, 3, 128, 3, S=2, P=1, dtype=torch.bfloat16),
    _example("gradient", 2, 24, 6, 20, 3, P=1),
    _example("dilated", 1, 16, 5, 8, 3, P=1, dilation=2, bias=True, dtype=torch.float32),
    _example("both", 1, 16, 4, 8, 3, S=2, dilation=3),
    _example("no taps", 1, 8, 3, 8, 1, S=3, bias=True),
    _example("groups", 1, 16, 4, 24, 4, S=2, P=1, groups=4),
    _example("depthwise", 1, 12, 4, 12, 3, S=2, P=1, groups=12, dtype=torch.float32),
    _example("depthwise 1", 1, 20, 5, 20, 3, P=1, dilation=2, groups=20, bias=True),
    _example("line", 2, 12, 7, 10, 5, S=3, dims=1, dtype=torch.float32),
    _example("volume", 1, 8, 3, 6, 2, S=2, dims=3),
    _example("no images", 0, 8, 4, 8, 2),
)

# ---- vendor


def _launch_vendor(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, size: list[int],
) -> Tensor:  # fmt: skip
    weight = weight.contiguous()
    with cudnn_choosing(deterministic=True):
        y = x.new_empty((x.shape[0], *size, weight.shape[-1] * groups))  # only its shape is looked at
        if plain_padding(y, weight, stride, padding, dilation, x.shape[1:-1]):
            dims = [0] * len(size)
            y = torch.ops.aten.convolution_backward(
                x.movedim(-1, 1), y.movedim(-1, 1), weight.movedim(-1, 1), None, stride, padding, dilation, False, dims, groups,
                [True, False, False],
            )[0].movedim(1, -1)  # fmt: skip
        else:
            y = _whole(x, weight, stride, padding, dilation, groups, size)
    return activated(y if bias is None else y.add_(bias), activation).contiguous()


def _refuse_vendor(device: Device, problem: Problem) -> str | None:
    return "cuDNN does not support empty tensors" if problem.empty or not problem.n_bucket else None


# ---- depthwise

# At a stride of 1 it is a convolution again, with the filter turned round.


def _as_forward(problem: Problem) -> Problem:
    return problem._replace(x=problem.y, y=problem.x)


def _refuse_depthwise(device: Device, problem: Problem) -> str | None:
    if problem.stride != (1, 1, 1) or problem.c != problem.o:
        return "supports a stride of 1 only, with as many channels of y as of x"
    return DEPTHWISE.refuse(device, _as_forward(problem))


DEPTHWISE_SPACE = Space(
    default=lambda device, problem: DEPTHWISE.space.default(device, _as_forward(problem)),
    axes=DEPTHWISE.space.axes,
    refusal=lambda device, problem, config: DEPTHWISE.space.refusal(device, _as_forward(problem), config),
)


def _launch_depthwise(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, size: list[int],
) -> Tensor:  # fmt: skip
    turned = weight.flip(tuple(range(1, weight.dim() - 1)))
    rest = [d * (k - 1) - low for d, k, low in zip(dilation, weight.shape[1:-1], padding, strict=True)]
    return DEPTHWISE.launch(
        config, x, turned, bias, None, activation, stride, rest, dilation, groups, size, None, None, x.dtype
    )  # fmt: skip


# ---- op


def _first(device: Device, problem: Problem) -> str | None:
    """Where ours go before cuDNN; H100, fp16: 2 x 2 with stride 2 and 256 channels 1.26, 3 x 3 with stride 1 1.25 times."""
    if not device.is_hopper or problem.dtype.itemsize != 2 or problem.groups > 1:
        return None
    if PHASES.refusal(device, problem) is None:
        # 8 images, 4 x 4, 128 -> 64 channels of 64 x 64: 19.9 us against cuDNN's 34.4; 2 x 2, 512 -> 256 of 16 x 16: 7.8, 13.0.
        return "phases"
    if fold_of(problem) > 1:
        return "triton" if problem.o >= 256 else None
    return "sm90" if problem.stride == (1, 1, 1) else None


conv_transpose_op = Op(
    name="conv_transpose",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=conv_transpose_arguments,
    first=_first,
    rows_in_problem=True,
    impls=(
        Impl(name="depthwise", launch=_launch_depthwise, space=DEPTHWISE_SPACE, refuse=_refuse_depthwise),
        Impl(name="vendor", library=True, launch=_launch_vendor, refuse=_refuse_vendor, extra_roundings=2),
        TRANSPOSE_SM90,
        PHASES,
        TRITON,
    ),
)
