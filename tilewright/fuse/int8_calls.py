"""Further calls for graphs in int8: products of quantised values, operators that quantise their result, and conversions.

As in calls.py, the layout of each result is known: quantised values have the layout of the float tensor that they represent. A
tensor has one scale, which is determined on the example inputs. If a layer norm quantises it, it has one scale per row.
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
    "conv_int8_to_float", "conv_int8_to_float_operands", "conv_int8_to_int8", "conv_int8_to_int8_operands", "dequantise",
    "layer_norm_quantise", "linear_int8_to_float", "linear_int8_to_float_operands", "linear_int8_to_int8",
    "linear_int8_to_int8_operands", "quantise",
]  # fmt: skip

_WIDEST = 4096
"""The largest width of rows in which a tensor is quantised."""


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise a dense tensor, contiguous or channels-last. `scale` is one float32 number, [].

    The tensor is quantised in rows. If a row contains a number that is not finite, all its quantised values are 0. A row
    belongs to a single entry of the batch, so other entries are not affected.
    """
    flat = x if x.is_contiguous() else x.movedim(1, -1)
    width = math.gcd(math.prod(flat.shape[1:]), _WIDEST)
    if width < 16:  # quantised rows must start at multiples of 16 bytes
        codes = quantize_static_op(flat.reshape(flat.shape[0], -1), scale, "int8")[0].contiguous()
    else:
        codes = quantize_static_op(flat.reshape(-1, width), scale, "int8")[0]
    codes = codes.view(flat.shape)
    return codes if x.is_contiguous() else codes.movedim(-1, 1)


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes * scale, the tensor that the codes represent. `scale` is one float32 number, []; 16 bits may not represent it."""
    if torch.compiler.is_compiling():  # Dynamo does not accept a channels-last `out`; Inductor makes a single loop anyway
        return (codes * scale).to(dtype)
    return torch.mul(codes, scale, out=torch.empty_like(codes, dtype=dtype))


def linear_int8_to_float_operands(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool, shape: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `scaled_linear_op`."""
    return x, weight, x_scales.reshape(-1), w_scales, bias, activation, residual, dtype, chained


def linear_int8_to_float(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool, shape: Sequence[int], choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """A matrix product of quantised rows [R, K]. The result has dtype `dtype` and shape `shape`.

    chained: whether the preceding launch quantised the rows.
    """
    args = linear_int8_to_float_operands(
        x, weight, x_scales, w_scales, bias, activation, residual, dtype, chained, shape
    )  # fmt: skip
    return run(scaled_linear_op, args, choice).view(shape)


def linear_int8_to_int8_operands(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str, y_scale: Tensor,
    shape: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `cast_linear_op`."""
    return x, weight, x_scales.reshape(-1), w_scales, bias, activation, None, torch.int8, y_scale


def linear_int8_to_int8(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str, y_scale: Tensor,
    shape: Sequence[int], choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """As `linear_int8_to_float`, but with a quantised result. The width of its rows must be a multiple of 16."""
    args = linear_int8_to_int8_operands(x, weight, x_scales, w_scales, bias, activation, y_scale, shape)
    return run(cast_linear_op, args, choice).view(shape)


def _window(x: Tensor, weight: Tensor, stride: list[int], padding: Any, dilation: list[int]) -> tuple[Any, ...]:
    window = window_of("conv", x, weight, stride, padding, dilation)
    return window.stride, window.low, window.dilation, 1, window.size


def _last(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.movedim(1, -1)


def conv_int8_to_float_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], x_scales: Tensor, w_scales: Tensor, dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `conv_op`."""
    window = _window(x, weight, stride, padding, dilation)
    return _last(x), _last(weight), bias, _last(residual), activation, *window, x_scales, w_scales, dtype


def conv_int8_to_float(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], x_scales: Tensor, w_scales: Tensor, dtype: torch.dtype,
    choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """A convolution of quantised values. Residual and result have dtype `dtype`. All tensors are channels-last."""
    args = conv_int8_to_float_operands(
        x, weight, bias, residual, activation, stride, padding, dilation, x_scales, w_scales, dtype
    )  # fmt: skip
    return run(conv_op, args, choice).movedim(-1, 1)


def conv_int8_to_int8_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], w_scales: Tensor, factors: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `conv_codes_op`."""
    window = _window(x, weight, stride, padding, dilation)
    return _last(x), _last(weight), bias, _last(residual), activation, *window, w_scales, factors


def conv_int8_to_int8(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: list[int],
    padding: list[int] | str, dilation: list[int], w_scales: Tensor, factors: Tensor, choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """As `conv_int8_to_float`, but with quantised residual and result. The scales are folded (kernels/conv/int8.py)."""
    args = conv_int8_to_int8_operands(x, weight, bias, residual, activation, stride, padding, dilation, w_scales, factors)
    return run(conv_codes_op, args, choice).movedim(-1, 1)


def layer_norm_quantise(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shape: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer norm that quantises its result.

    Returns:
        (the quantised norm, of shape `shape`; the scales of its rows [R]; the norm in 16 bits, of shape `shape`). The last is
        empty unless `keep` is true.
    """
    codes, scales, y = layer_norm_quantize_op(x, weight, bias, eps, keep)
    return codes.reshape(shape), scales.reshape(-1), y.view(shape) if keep else y
