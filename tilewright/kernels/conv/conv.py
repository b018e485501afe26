"""Convolution with a fused epilogue, channels-last, in one, two or three spatial dims.

    y[n, p, o] = activation(sum over taps k and channels c of x[n, p * stride - padding + k * dilation, c] * weight[o, k, c]
                            + bias[o] + residual[n, p, o])

    x [N, *S, C], weight [O, *K, C / groups], residual and y [N, *P, O]. All are contiguous, so channels are dense, as in
    torch's channels_last formats. bf16, fp16 or fp32; all tensors have the same dtype. Pixels outside of x are zero.
    int8: x and weight have float32 scales, one per image and one per output channel. The integer sum is multiplied by both
    before the bias is added. y is bf16 or fp16.

Sums are accumulated in float32 (int8: int32). The epilogue is float32, with one rounding at the end. The residual is added
before the activation, as in residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015). `padding` is
the padding of the low side; that of the high side follows from the size of the output. Limited by the tensor cores from about
64 channels on, otherwise memory-bound.

    linear       a 1 x 1 filter with stride 1 is a matrix product of the pixels: uses the implementations of `linear`
    vendor       cuDNN
    sm90         Hopper, in Gluon: the copy engine (TMA) loads boxes of pixels, shifted for each filter position
    narrow       Hopper: groups of up to 64 channels, or 64 channels without groups; the weights stay in shared memory
    depthwise    one input channel per group: multiply-adds without tensor cores
    few          few pixels, as in a single image: small tiles, split along K between programs
    triton       any shape, from sm_80 on

Not supported: gradients (ops.conv2d has them; they are separate ops), float64, one scale per channel of an int8 x.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.conv.cudnn import VENDOR
from tilewright.kernels.conv.depthwise import DEPTHWISE
from tilewright.kernels.conv.implicit_gemm import FEW, TRITON
from tilewright.kernels.conv.inputs import conv_arguments
from tilewright.kernels.conv.plan import Plan
from tilewright.kernels.conv.problem import Problem, problem_of, sizes_of
from tilewright.kernels.conv.reference import convolved, reference
from tilewright.kernels.conv.sm90 import SM90
from tilewright.kernels.conv.sm90_grouped import NARROW
from tilewright.kernels.gemm.linear import linear_op
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config

__all__ = ["conv_op", "convolved"]


def _cost(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, size: Sequence[int], x_scales: Tensor | None,
    w_scales: Tensor | None, dtype: torch.dtype,
) -> Cost:  # fmt: skip
    s = sizes_of(x, weight, stride, padding, dilation, groups, size)
    moved = x.nbytes + s.pixels * s.o * dtype.itemsize
    moved += sum(t.nbytes for t in (weight, bias, residual, x_scales, w_scales) if t is not None)
    return Cost(flops=2 * s.pixels * s.o * s.taps * (s.c // groups), bytes=moved)


# ---- examples


_example = Example.sized(conv_arguments)
EXAMPLES = (
    _example("3x3", 2, 64, 8, 64),
    _example("fused", 1, 32, 6, 40, bias=True, residual=True, activation="relu", dtype=torch.bfloat16),
    _example("stem", 1, 3, 11, 16, 7, S=2, P=3, bias=True),
    _example("strided ragged", 3, 20, 9, 24, S=2, dilation=2, P=1, activation="silu", bias=True),
    _example("1x1", 2, 16, 5, 24, 1, bias=True, activation="gelu", dtype=torch.bfloat16),
    _example("1x1 strided", 1, 40, 5, 8, 1, S=2, residual=True),
    _example("narrow groups", 1, 64, 6, 64, S=2, groups=16, residual=True, activation="relu", dtype=torch.bfloat16),
    _example("uneven groups", 1, 12, 4, 18, groups=3, bias=True, dtype=torch.float32),
    _example("depthwise", 2, 24, 7, 24, 5, groups=24, bias=True, residual=True),
    _example("depthwise twice", 1, 6, 5, 12, 3, S=2, groups=6, dtype=torch.float32),
    _example("line", 2, 24, 17, 8, 4, P=0, dims=1, dtype=torch.float32, activation="gelu_tanh"),
    _example("volume", 1, 8, 4, 12, 3, dims=3, bias=True),
    _example("int8", 2, 32, 5, 24, dtype=torch.int8, bias=True, activation="relu", residual=True),
    _example("no images", 0, 8, 4, 8),
)

# ---- linear


def _refuse_linear(device: Device, problem: Problem) -> str | None:
    if not problem.pointwise or problem.dtype == torch.int8:
        return "supports filters of one pixel only, with stride 1 and without padding or groups, and no int8"
    if problem.residual and problem.activation != "none":
        return "does not support a residual with an activation: linear adds the residual after the activation"
    return None


def _launch_linear(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, *_: Any
) -> Tensor:
    rows = None if residual is None else residual.flatten(0, -2)
    y = linear_op.run(x.flatten(0, -2), weight.flatten(1), bias, activation, rows)
    return y.view(*x.shape[:-1], weight.shape[0])


def _plan_linear(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, *_: Any
) -> Plan:  # fmt: skip
    """The plan of a 1 x 1 filter: the implementation that `linear` has chosen for the pixels [N S, C]."""
    pixels, (o, c), shape = x.numel() // x.shape[-1], (weight.shape[0], x.shape[-1]), (*x.shape[:-1], weight.shape[0])
    order = (0, x.dim() - 1, *range(1, x.dim() - 1))
    rows = None if residual is None else residual.view(pixels, o)
    impl, config = linear_op.chosen(x.view(pixels, c), weight.view(o, c), bias, activation, rows)[:2]

    def call(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        rows = None if residual is None else residual.as_strided((pixels, o), (o, 1))
        y = impl.launch(config, x.as_strided((pixels, c), (c, 1)), weight.as_strided((o, c), (c, 1)), bias, activation, rows)
        return y.view(shape).permute(order)

    return call


# ---- op


def _first(device: Device, problem: Problem) -> str | None:
    """The implementation that is preferred to cuDNN on Hopper, or None.

    H100, fp16: `sm90` is 1.05 to 1.7 times as fast as cuDNN with 3 x 3 filters, and 1.45 times with stems. It is not preferred
    where a strided filter leaves fewer tiles than there are SMs (0.8 times as fast), nor for 1 x 1 filters with stride 1, which
    are matrix products.
    """
    if not device.is_hopper or problem.dtype.itemsize != 2 or problem.empty:
        return None
    if problem.groups > 1:
        # ResNeXt-50 32x4d, 32 images. 128 channels of 56 x 56: 26.4 us, cuDNN 50.1; 1024 channels of 7 x 7: 9.7 us, cuDNN 10.6.
        return "narrow" if NARROW.refusal(device, problem) is None else None
    summed = problem.taps * problem.c
    small = problem.pixels * problem.o <= 64 * 64 * device.sms
    if small and summed >= 256:
        # One image of ResNet-50. 64 channels of 56 x 56: 4.1 us, cuDNN 5.5; 512 channels of 7 x 7: 7.4 us, cuDNN 12.3.
        return "few"
    if problem.pointwise and problem.residual:
        if problem.activation not in ("none", "relu"):
            return "sm90"
        # 32 images. 64 -> 256 channels of 56 x 56: 47.7 us, cuDNN 54.5; 256 -> 1024 channels of 14 x 14: 18.3 us, cuDNN 15.1.
        if small and summed >= 128:
            return "triton"  # 128 -> 512 of 28 x 28, one image: 3.3 us, cuDNN 4.6
        return "sm90" if problem.pixels * problem.o >= 10_000_000 and problem.c <= 128 else None
    if problem.pointwise:
        return None
    if max(problem.stride) > 1 and problem.kernel != (1, 1, 1) and problem.pixels * problem.o < 128 * 128 * device.sms:
        return None
    return "sm90" if problem.pixels * problem.o >= 100_000 else None  # one image of 14 x 14 x 256: 8.9 us, cuDNN 8.2


conv_op = Op(
    name="conv",
    reference=reference,
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    make=conv_arguments,
    first=_first,
    rows_in_problem=True,
    impls=(
        # `linear` may choose cuBLAS, which rounds the product before the epilogue of this package.
        Impl(name="linear", launch=_launch_linear, refuse=_refuse_linear, plan=_plan_linear, extra_roundings=1),
        DEPTHWISE,
        VENDOR,
        SM90,
        NARROW,
        FEW,
        TRITON,
    ),
)
