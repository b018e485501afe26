"""Example arguments of the convolutions, made from dimensions: the `Op.make` of each op."""

# N images, C channels, O output channels, H = height and width (depth, length) of x, K of the filter, S stride, P padding

import math

import torch
from torch import Tensor

from tilewright.kernels.conv.problem import output_size
from tilewright.op import Args, Inputs

__all__ = ["conv_arguments", "conv_codes_arguments", "conv_transpose_arguments", "conv_weight_gradient_arguments"]


def _scales(inputs: Inputs, n: int, spread: float) -> Tensor:
    return inputs.randn(n).abs().add(0.1).div(spread)


def conv_arguments(
    inputs: Inputs, *, N: int, C: int, H: int, O: int, K: int = 3, S: int = 1, P: int | None = None, dilation: int = 1,
    groups: int = 1, dims: int = 2, bias: bool = False, residual: bool = False, activation: str = "none",
    dtype: torch.dtype = torch.float16,
) -> Args:  # fmt: skip
    """x [N, H, H, C] and weight [O, K, K, C / groups]; with `dims` 1 or 3, as many H and K. P: K // 2 unless given.

    The operands are scaled so that the result is about 1. int8 operands have scales, and the result is bf16.

    Raises:
        ValueError: channels do not divide into groups, dims is not 1, 2 or 3, or there is no output.
    """
    if groups < 1 or C % groups or O % groups:
        raise ValueError(f"conv: C={C} and O={O} must be multiples of groups={groups}")
    if dims not in (1, 2, 3):
        raise ValueError(f"conv: dims is {dims}, wanted 1, 2 or 3")
    pad = K // 2 if P is None else P
    size = output_size(H, K, S, pad, pad, dilation)
    if size < 1:
        raise ValueError(f"conv: H={H} K={K} S={S} P={pad} dilation={dilation} leave no output")
    summed = C // groups * K**dims
    x_shape, w_shape = (N, *(H,) * dims, C), (O, *(K,) * dims, C // groups)
    out = torch.bfloat16 if dtype == torch.int8 else dtype
    x_scales = w_scales = None
    if dtype == torch.int8:
        x, weight = (inputs.randint(-127, 128, *shape, dtype=dtype) for shape in (x_shape, w_shape))
        x_scales, w_scales = _scales(inputs, N, 73.0), _scales(inputs, O, 73.0 * math.sqrt(summed))
    else:
        x, weight = inputs.randn(*x_shape, dtype=dtype), inputs.randn(*w_shape, dtype=dtype, scale=summed**-0.5)
        if groups == C > 1:  # as nn.Conv2d keeps a depthwise weight: channels dense
            weight = weight.movedim(0, -2).contiguous().movedim(-2, 0)
    return (
        x, weight,
        inputs.randn(O, dtype=out) if bias else None,
        inputs.randn(N, *(size,) * dims, O, dtype=out) if residual else None,
        activation, [S] * dims, [pad] * dims, [dilation] * dims, groups, [size] * dims, x_scales, w_scales, out,
    )  # fmt: skip


def conv_transpose_arguments(
    inputs: Inputs, *, N: int, C: int, H: int, O: int, K: int = 2, S: int = 1, P: int = 0, dilation: int = 1, groups: int = 1,
    dims: int = 2, bias: bool = False, activation: str = "none", dtype: torch.dtype = torch.float16,
) -> Args:  # fmt: skip
    """x [N, H, H, C] and weight [C, K, K, O / groups]; with `dims` 1 or 3, as many H and K.

    P: padding of the convolution that is transposed.

    Raises:
        ValueError: channels do not divide into groups, dims is not 1, 2 or 3, or there is no output.
    """
    if groups < 1 or C % groups or O % groups:
        raise ValueError(f"conv_transpose: C={C} and O={O} must be multiples of groups={groups}")
    if dims not in (1, 2, 3):
        raise ValueError(f"conv_transpose: dims is {dims}, wanted 1, 2 or 3")
    size = (H - 1) * S + dilation * (K - 1) + 1 - 2 * P
    if size < 1:
        raise ValueError(f"conv_transpose: H={H} K={K} S={S} P={P} dilation={dilation} leave no output")
    summed = max(1.0, C // groups * (K / S) ** dims)
    x = inputs.randn(N, *(H,) * dims, C, dtype=dtype)
    weight = inputs.randn(C, *(K,) * dims, O // groups, dtype=dtype, scale=summed**-0.5)
    if groups == C == O > 1:
        weight = weight.movedim(0, -2).contiguous().movedim(-2, 0)
    return (
        x, weight, inputs.randn(O, dtype=dtype) if bias else None, activation,
        [S] * dims, [P] * dims, [dilation] * dims, groups, [size] * dims,
    )  # fmt: skip


def conv_weight_gradient_arguments(
    inputs: Inputs, *, N: int, C: int, H: int, O: int, K: int = 3, S: int = 1, P: int | None = None, dilation: int = 1,
    groups: int = 1, dims: int = 2, dtype: torch.dtype = torch.float16,
) -> Args:  # fmt: skip
    """dy and x of the `conv` of these dimensions, scaled so that the result is about 1. Raises ValueError like `conv`."""
    meta = conv_arguments(
        Inputs("meta"), N=N, C=C, H=H, O=O, K=K, S=S, P=P, dilation=dilation, groups=groups, dims=dims, dtype=dtype
    )  # fmt: skip
    stride, padding, spread, groups, size = meta[5:10]
    dy = inputs.randn(N, *size, O, dtype=dtype, scale=max(1, N * math.prod(size)) ** -0.5)
    return dy, inputs.randn(N, *(H,) * dims, C, dtype=dtype), stride, padding, spread, groups, [K] * dims


def conv_codes_arguments(
    inputs: Inputs, *, N: int, C: int, H: int, O: int, K: int = 3, S: int = 1, P: int | None = None, groups: int = 1,
    dims: int = 2, bias: bool = False, residual: bool = False, activation: str = "none", dtype: torch.dtype = torch.int8,
) -> Args:  # fmt: skip
    """int8 x [N, H, H, C] and weight [O, K, K, C / groups], scaled so that the results are about 30, where 127 is the maximum.

    Raises:
        ValueError: channels do not divide into groups, or there is no output.
    """
    if groups < 1 or C % groups or O % groups:
        raise ValueError(f"conv_codes: C={C} and O={O} must be multiples of groups={groups}")
    pad = K // 2 if P is None else P
    size = output_size(H, K, S, pad, pad, 1)
    if size < 1:
        raise ValueError(f"conv_codes: H={H} K={K} S={S} P={pad} leave no output")
    summed = C // groups * K**dims
    x = inputs.randint(-127, 128, N, *(H,) * dims, C, dtype=dtype)
    weight = inputs.randint(-127, 128, O, *(K,) * dims, C // groups, dtype=dtype)
    return (
        x, weight,
        inputs.randn(O) if bias else None,
        inputs.randint(-3, 4, N, *(size,) * dims, O, dtype=dtype) if residual else None,
        activation, [S] * dims, [pad] * dims, [1] * dims, groups, [size] * dims,
        inputs.randn(O).abs().add(0.5).div(5329.0 * math.sqrt(summed)), inputs.randn(N).abs().add(30.0),
    )  # fmt: skip
