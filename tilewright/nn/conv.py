"""Convolutions with torch.nn's names, arguments and initialisation; trainable, channels-last.

Weights have torch's shapes and names, so state dicts of torch.nn can be loaded. In memory, the channels of a weight are dense,
because the kernels need this. A channels_last input is read without a copy. `forward` also accepts an activation and a
residual, which run in the same launch (transposed convolutions: only an activation).
Not supported: lazy classes, complex or float64 weights on a GPU, padding modes of transposed convolutions (torch has none
either).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.ops.conv import PADDING_MODES, Int

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


def _each(name: str, value: Int, dims: int) -> tuple[int, ...]:
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) != dims:
        raise ValueError(f"{name} must be one number or {dims}; got {value!r}")
    return values


class _ConvNd(nn.Module):
    """Base of all six classes: arguments, memory layout of the weight, initialisation."""

    dims: int

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Int, stride: Int, padding: str | Int, dilation: Int,
        groups: int, bias: bool, padding_mode: str, transposed: bool, device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):  # fmt: skip
        super().__init__()
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{type(self).__name__}: groups={groups} must divide in_channels={in_channels} and out_channels={out_channels}"
            )
        if padding_mode not in PADDING_MODES:
            raise ValueError(
                f"{type(self).__name__}: padding_mode must be one of {', '.join(PADDING_MODES)}; got {padding_mode!r}"
            )
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise ValueError(f"{type(self).__name__}: padding must be numbers, 'same' or 'valid'; got {padding!r}")
        self.in_channels, self.out_channels, self.groups, self.padding_mode = in_channels, out_channels, groups, padding_mode
        self.kernel_size = _each("kernel_size", kernel_size, self.dims)
        self.stride = _each("stride", stride, self.dims)
        if padding == "same" and any(step != 1 for step in self.stride):
            raise ValueError(f"{type(self).__name__}: padding='same' needs a stride of 1; got {list(self.stride)}")
        self.padding = padding if isinstance(padding, str) else _each("padding", padding, self.dims)
        self.dilation = _each("dilation", dilation, self.dims)
        first, second = (in_channels, out_channels) if transposed else (out_channels, in_channels)
        shape = (first, *self.kernel_size, second // groups)
        if second == groups > 1:  # depthwise: the first dimension is dense in memory
            memory = torch.empty((*shape[1:], first), device=device, dtype=dtype).movedim(-1, 0)
        else:
            memory = torch.empty(shape, device=device, dtype=dtype)
        self.weight = nn.Parameter(memory.movedim(-1, 1))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in torch.nn: uniform, with a bound of 1 / sqrt(number of inputs of an output)."""
        bound = 1 / math.sqrt(max(1, self.weight.shape[1] * math.prod(self.kernel_size)))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        """The arguments, as torch.nn shows them."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}, "
            f"padding_mode={self.padding_mode}"
        )


class _Forward(_ConvNd):
    """A convolution; `call` is the function for its number of dimensions."""

    call: Callable[..., Tensor]

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Int, stride: Int = 1, padding: str | Int = 0, dilation: Int = 1,
        groups: int = 1, bias: bool = True, padding_mode: str = "zeros", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, False, device, dtype
        )  # fmt: skip

    def forward(self, x: Tensor, activation: str = "none", residual: Tensor | None = None) -> Tensor:
        """activation(conv(x) + bias + residual): [N, in_channels, *S] -> [N, out_channels, *P], or both without N."""
        return type(self).call(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups,
            padding_mode=self.padding_mode, activation=activation, residual=residual,
        )  # fmt: skip


class Conv1d(_Forward):
    """torch.nn.Conv1d: x [N, C, L]."""

    dims = 1
    call = staticmethod(ops.conv1d)


class Conv2d(_Forward):
    """torch.nn.Conv2d: x [N, C, H, W]."""

    dims = 2
    call = staticmethod(ops.conv2d)


class Conv3d(_Forward):
    """torch.nn.Conv3d: x [N, C, D, H, W]."""

    dims = 3
    call = staticmethod(ops.conv3d)


class _Transposed(_ConvNd):
    """A transposed convolution; `call` is the function for its number of dimensions."""

    call: Callable[..., Tensor]

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Int, stride: Int = 1, padding: Int = 0, output_padding: Int = 0,
        groups: int = 1, bias: bool = True, dilation: Int = 1, padding_mode: str = "zeros",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        if padding_mode != "zeros":
            raise ValueError(f"{type(self).__name__}: padding_mode must be zeros; got {padding_mode!r}")
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, True, device, dtype
        )  # fmt: skip
        self.output_padding = _each("output_padding", output_padding, self.dims)

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None, activation: str = "none") -> Tensor:
        """activation(transposed conv(x) + bias): [N, in_channels, *P] -> [N, out_channels, *S], or both without N.

        output_size: S; `output_padding` is chosen so that the output has this size. Raises ValueError if that is impossible.
        """
        extra = self.output_padding if output_size is None else self._extra(x, tuple(output_size)[-self.dims :])
        return type(self).call(
            x, self.weight, self.bias, self.stride, self.padding, extra, self.groups, self.dilation, activation=activation
        )  # fmt: skip

    def _extra(self, x: Tensor, size: tuple[int, ...]) -> tuple[int, ...]:
        sides: Any = self.padding
        each = zip(x.shape[-self.dims :], self.kernel_size, self.stride, sides, self.dilation, strict=True)
        least = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in each]
        extra = tuple(a - b for a, b in zip(size, least, strict=False))
        if len(size) != self.dims or any(not 0 <= e < s for e, s in zip(extra, self.stride, strict=True)):
            most = [n + s - 1 for n, s in zip(least, self.stride, strict=True)]
            raise ValueError(f"{type(self).__name__}: output_size must be between {least} and {most}; got {list(size)}")
        return extra


class ConvTranspose1d(_Transposed):
    """torch.nn.ConvTranspose1d: x [N, C, L]."""

    dims = 1
    call = staticmethod(ops.conv_transpose1d)


class ConvTranspose2d(_Transposed):
    """torch.nn.ConvTranspose2d: x [N, C, H, W]."""

    dims = 2
    call = staticmethod(ops.conv_transpose2d)


class ConvTranspose3d(_Transposed):
    """torch.nn.ConvTranspose3d: x [N, C, D, H, W]."""

    dims = 3
    call = staticmethod(ops.conv_transpose3d)
