"""The calls of a graph that runs in int8: products of codes, what writes codes on its way, and the two conversions.

As in calls.py each says in its result where elements lie: codes lie as the tensor that they stand for. A tensor's codes have
one scale, found on the example inputs, or where a layer norm writes them one a row.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.fuse.calls import Choice, run
from tilewright.kernels.conv.checks import window_of
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.int8 import conv_codes_op
from tilewright.kernels.gemm.quantized.requantized import cast_linear_op
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear_op
from tilewright.kernels.quantize.layer_norm_fused import layer_norm_quantize_op
from tilewright.kernels.quantize.per_tensor import quantize_static_op

__all__ = [
    "conv_from_codes", "conv_from_codes_operands", "conv_to_codes", "conv_to_codes_operands", "dequantise", "layer_norm_codes",
    "linear_from_codes", "linear_from_codes_operands", "linear_to_codes", "linear_to_codes_operands", "quantise",
]  # fmt: skip

_WIDEST = 4096
"""Columns of the rows in which a tensor is quantised, at most."""


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """The codes of a dense tensor, contiguous or with channels last; scale: one float32, [].

    A row with a number that is not finite has codes of 0: rows are of one entry of the batch, so the others keep theirs.
    """
    flat = x if x.is_contiguous() else x.movedim(1, -1)
    width = math.gcd(math.prod(flat.shape[1:]), _WIDEST)
    if width < 16:  # rows of codes start at multiples of 16 bytes
        codes = quantize_static_op(flat.reshape(flat.shape[0], -1), scale, "int8")[0].contiguous()
    else:
        codes = quantize_static_op(flat.reshape(-1, width), scale, "int8")[0]
    codes = codes.view(flat.shape)
    return codes if x.is_contiguous() else codes.movedim(-1, 1)


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes * scale, one float32, []: the tensor that they stand for. A step may be too small a number for 16 bits."""
    if torch.compiler.is_compiling():  # Dynamo takes no `out` with channels last; Inductor makes one loop of this anyway
        return (codes * scale).to(dtype)
    return torch.mul(codes, scale, out=torch.empty_like(codes, dtype=dtype))


def linear_from_codes_operands(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool, shape: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    """What `scaled_linear_op` is called with."""
    return x, weight, x_scales.reshape(-1), w_scales, bias, activation, residual, dtype, chained


def linear_from_codes(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool, shape: Sequence[int], choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """A product of codes [R, K], the result in `dtype` with dims `shape`. chained: the launch before wrote the codes."""
    args = linear_from_codes_operands(
        x, weight, x_scales, w_scales, bias, activation, residual, dtype, chained, shape
    )  # fmt: skip
    return run(scaled_linear_op, args, choice).view(shape)


def linear_to_codes_operands(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str, y_scale: Tensor,
    shape: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    """What `cast_linear_op` is called with."""
    return x, weight, x_scales.reshape(-1), w_scales, bias, activation, None, torch.int8, y_scale


def linear_to_codes(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str, y_scale: Tensor,
    shape: Sequence[int], choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """The same with a result of codes, in rows of a multiple of 16."""
    args = linear_to_codes_operands(x, weight, x_scales, w_scales, bias, activation, y_scale, shape)
    return run(cast_linear_op, args, choice).view(shape)


def _window(x: Tensor, weight: Tensor, stride: list[int], padding: Any, dilation: list[int]) -> tuple[Any, ...]:
    window = window_of("conv", x, weight, stride, padding, dilation)
    return window.stride, window.low, window.dilation, 1, window.size


def _last(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.movedim(1, -1)


def conv_from_codes_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], x_scales: Tensor, w_scales: Tensor, dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """What `conv_op` is called with."""
    window = _window(x, weight, stride, padding, dilation)
    return _last(x), _last(weight), bias, _last(residual), activation, *window, x_scales, w_scales, dtype


def conv_from_codes(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], x_scales: Tensor, w_scales: Tensor, dtype: torch.dtype,
    choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """A convolution of codes, the residual and the result in `dtype`, all with channels last."""
    args = conv_from_codes_operands(
        x, weight, bias, residual, activation, stride, padding, dilation, x_scales, w_scales, dtype
    )  # fmt: skip
    return run(conv_op, args, choice).movedim(-1, 1)


def conv_to_codes_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], w_scales: Tensor, factors: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """What `conv_codes_op` is called with."""
    window = _window(x, weight, stride, padding, dilation)
    return _last(x), _last(weight), bias, _last(residual), activation, *window, w_scales, factors


def conv_to_codes(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], w_scales: Tensor, factors: Tensor, choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """The same with a residual and a result of codes; scales are folded (kernels/conv/int8.py)."""
    args = conv_to_codes_operands(x, weight, bias, residual, activation, stride, padding, dilation, w_scales, factors)
    return run(conv_codes_op, args, choice).movedim(-1, 1)


def layer_norm_codes(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shape: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(codes with dims `shape`, scales of rows [R], the norm itself with dims `shape`, of no rows without `keep`)."""
    codes, scales, y = layer_norm_quantize_op(x, weight, bias, eps, keep)
    return codes.reshape(shape), scales.reshape(-1), y.view(shape) if keep else y
