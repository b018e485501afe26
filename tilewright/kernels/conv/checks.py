"""Checks of the arguments of the public convolutions, before an op is called: sizes, padding, dtypes, devices, scales."""

# d spatial dims, N images, C channels of x, O of y

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.kernels.conv.problem import ACTIVATIONS, output_size

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "PADDING_MODES",
    "Int",
    "Padding",
    "Window",
    "check_operands",
    "check_scales",
    "transposed_window",
    "window_of",
]

Int = int | Sequence[int]
"""One number for all spatial dims, or one for each."""
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]
"""The same, or (low, high) for each, or "same" or "valid"."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""float64 only on a CPU, where the reference runs."""
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class Window(NamedTuple):
    """Stride, padding (low and high sides), dilation and output size. Each has one number per spatial dim."""

    stride: list[int]
    low: list[int]
    high: list[int]
    dilation: list[int]
    size: list[int]
    """Spatial size of the result."""


def _each(op: str, name: str, value: Int, dims: int, least: int) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    if len(values) != dims or any(not isinstance(v, int) or v < least for v in values):
        raise ValueError(f"{op}: {name} must be one number or {dims}, each at least {least}; got {value!r}")
    return values


def _sides(op: str, padding: Padding, kernel: Sequence[int], stride: list[int], dilation: list[int]) -> list[tuple[int, int]]:
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"{op}: padding must be numbers, 'same' or 'valid'; got {padding!r}")
        if padding == "valid":
            return [(0, 0)] * len(kernel)
        if any(s != 1 for s in stride):
            raise ValueError(f"{op}: padding='same' needs a stride of 1; got {stride}")
        whole = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(n // 2, n - n // 2) for n in whole]
    if not isinstance(padding, int) and padding and all(isinstance(p, tuple) for p in padding):
        pairs = [_each(op, "padding", p, 2, 0) for p in padding]  # pyright: ignore[reportArgumentType]
        if len(pairs) != len(kernel):
            raise ValueError(f"{op}: padding must have {len(kernel)} pairs (low, high); got {padding!r}")
        return [(low, high) for low, high in pairs]
    return [(p, p) for p in _each(op, "padding", padding, len(kernel), 0)]  # pyright: ignore[reportArgumentType]


def check_operands(
    op: str,
    dims: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    activation: str,
    *,
    transposed: bool = False,
) -> None:
    """Raise ValueError unless x [N, C, *S] and weight [O, C / groups, *K] (transposed: [C, O / groups, *K]) fit each other."""
    spatial = ", ".join("DHW"[3 - dims :])
    if x.dim() != dims + 2 or weight.dim() != dims + 2:
        raise ValueError(
            f"{op}: x must be [N, C, {spatial}] and weight have as many dims; got {list(x.shape)} and {list(weight.shape)}"
        )
    allowed = (*DTYPES[:3], torch.int8) if op.startswith("conv") and not transposed else DTYPES[:3]
    if x.dtype not in allowed and not (x.dtype == torch.float64 and not x.is_cuda):
        raise ValueError(f"{op}: dtype must be one of {', '.join(map(str, allowed))}; got {x.dtype}")
    if groups < 1 or x.shape[1] % groups or weight.shape[0] % groups:
        raise ValueError(
            f"{op}: groups must divide the channels of x and the weight's first dim; got groups={groups}, "
            f"{x.shape[1]} and {weight.shape[0]}"
        )
    wanted = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1] != wanted or not x.shape[1] or not weight.shape[0] or not weight.shape[1]:
        raise ValueError(
            f"{op}: x has {x.shape[1]} channels, and a weight {list(weight.shape)} with groups={groups} needs {wanted}, "
            "at least 1; each dim of channels must be at least 1"
        )
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"{op}: bias must be [{outputs}]; got {list(bias.shape)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device, {x.device}; got {other.device}")
    if weight.dtype != x.dtype:
        raise ValueError(f"{op}: weight must have x's dtype, {x.dtype}; got {weight.dtype}")
    if bias is not None and x.dtype != torch.int8 and bias.dtype != x.dtype:
        raise ValueError(f"{op}: bias must have x's dtype, {x.dtype}; got {bias.dtype}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")


def check_scales(
    op: str, x: Tensor, weight: Tensor, x_scales: Tensor | None, w_scales: Tensor | None, dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype of the result. Raises ValueError unless int8 operands have both scales, and all others have none."""
    if x.dtype != torch.int8:
        if x_scales is not None or w_scales is not None:
            raise ValueError(f"{op}: scales are for int8 operands only; x is {x.dtype}")
        if dtype not in (None, x.dtype):
            raise ValueError(f"{op}: the result has x's dtype, {x.dtype}; got dtype={dtype}")
        return x.dtype
    if x_scales is None or w_scales is None:
        raise ValueError(f"{op}: int8 operands need x_scales (one number, or one for each image) and w_scales [O]")
    for name, t, wanted in (("x_scales", x_scales, x.shape[0]), ("w_scales", w_scales, weight.shape[0])):
        single = name == "x_scales" and t.numel() == 1
        if t.dtype != torch.float32 or t.device != x.device or (t.shape != (wanted,) and not single):
            raise ValueError(
                f"{op}: {name} must be [{wanted}] float32 on {x.device}; got {list(t.shape)} {t.dtype} on {t.device}"
            )
    found = torch.bfloat16 if dtype is None else dtype
    if found not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: dtype of an int8 convolution's result must be bfloat16 or float16; got {found}")
    return found


def window_of(op: str, x: Tensor, weight: Tensor, stride: Int, padding: Padding, dilation: Int) -> Window:
    """The window of a convolution of x [N, C, *S]. Raises ValueError: bad numbers, or no output."""
    dims = x.dim() - 2
    strides, dilations = _each(op, "stride", stride, dims, 1), _each(op, "dilation", dilation, dims, 1)
    kernel = weight.shape[2:]
    if 0 in kernel:
        raise ValueError(f"{op}: the filter must have a size of at least 1; got {list(kernel)}")
    sides = _sides(op, padding, kernel, strides, dilations)
    low, high = [a for a, _ in sides], [b for _, b in sides]
    each = zip(x.shape[2:], kernel, strides, low, high, dilations, strict=True)
    size = [output_size(*numbers) for numbers in each]
    if min(size) < 1:
        raise ValueError(
            f"{op}: no output: x has {list(x.shape[2:])} pixels, which with padding {sides} are fewer than the filter "
            f"{list(kernel)} with dilation {dilations} covers"
        )
    return Window(strides, low, high, dilations, size)


def transposed_window(
    op: str, x: Tensor, weight: Tensor, stride: Int, padding: Int, output_padding: Int, dilation: Int
) -> Window:
    """The window of a transposed convolution of x [N, C, *P]. Raises ValueError: bad numbers, or no output."""
    dims = x.dim() - 2
    strides, dilations = _each(op, "stride", stride, dims, 1), _each(op, "dilation", dilation, dims, 1)
    low, extra = _each(op, "padding", padding, dims, 0), _each(op, "output_padding", output_padding, dims, 0)
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise ValueError(f"{op}: output_padding must be less than stride or dilation; got {extra}, {strides} and {dilations}")
    kernel = weight.shape[2:]
    each = zip(x.shape[2:], kernel, strides, low, extra, dilations, strict=True)
    size = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + e for n, k, s, p, e, d in each]
    if min(size) < 1 or 0 in kernel or 0 in x.shape[2:]:
        raise ValueError(f"{op}: no output: x {list(x.shape[2:])}, filter {list(kernel)} and padding {low} leave {size} pixels")
    return Window(strides, low, low, dilations, size)
