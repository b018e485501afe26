"""Shared by the implementations of convolution: sizes, the problem on which their choice depends, the epilogue in Triton.

Tensors are channels-last and contiguous: x [N, *S, C], weight [O, *K, C / groups], y [N, *P, O] with one, two or three spatial
dims. Kernels always see three: missing dims are added in front, with size 1 (`Sizes`).
"""

# N images, C channels, O output channels; D, H, W spatial dims of x, P of y; K of the filter

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.device.activations import activate
from tilewright.kernels.launch.replay import Held
from tilewright.kernels.launch.shapes import next_pow2

__all__ = ["ACTIVATIONS", "Problem", "Sizes", "empty_output", "finish_pixels", "output_size", "problem_of", "sizes_of"]

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")

Three = tuple[int, int, int]


class Sizes(NamedTuple):
    """The sizes of a convolution, with three spatial dims: D, H, W."""

    n: int
    c: int
    """Channels of x."""
    o: int
    """Channels of y."""
    groups: int
    x: Three
    """Spatial size of x."""
    y: Three
    """Spatial size of y."""
    kernel: Three
    stride: Three
    padding: Three
    """Padding of the low side; that of the high side follows from the size of y. May be negative."""
    dilation: Three

    @property
    def pixels(self) -> int:
        """Rows of the matrix product: output pixels of all images."""
        return self.n * self.y[0] * self.y[1] * self.y[2]

    @property
    def taps(self) -> int:
        """Filter positions."""
        return self.kernel[0] * self.kernel[1] * self.kernel[2]

    @property
    def deep(self) -> bool:
        """Whether the first of the three spatial dims is more than a place-holder."""
        return (self.x[0], self.y[0], self.kernel[0], self.padding[0]) != (1, 1, 1, 0)


def _three(values: Sequence[int], fill: int) -> Three:
    a, b, c = (fill,) * (3 - len(values)) + tuple(values)
    return a, b, c


def sizes_of(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    size: Sequence[int],
) -> Sizes:  # fmt: skip
    """The sizes of a call of `conv`: x [N, *S, C], weight [O, *K, C / groups], y's spatial size."""
    return Sizes(
        x.shape[0], x.shape[-1], weight.shape[0], groups, _three(x.shape[1:-1], 1), _three(size, 1),
        _three(weight.shape[1:-1], 1), _three(stride, 1), _three(padding, 0), _three(dilation, 1),
    )  # fmt: skip


def output_size(size: int, kernel: int, stride: int, low: int, high: int, dilation: int) -> int:
    """Outputs along a dimension; 0 or less where the dilated filter is wider than the padded input."""
    return (size + low + high - dilation * (kernel - 1) - 1) // stride + 1


class Problem(NamedTuple):
    """Everything that a choice may depend on. The number of images is rounded up to a power of two."""

    dtype: torch.dtype
    out: torch.dtype
    n_bucket: int
    c: int
    o: int
    groups: int
    x: Three
    y: Three
    kernel: Three
    stride: Three
    padding: Three
    dilation: Three
    activation: str
    bias: bool
    residual: bool
    aligned: bool
    """Whether x, weight and residual start at multiples of 16 bytes."""

    @property
    def pixels(self) -> int:
        """Rows of the matrix product with n_bucket images."""
        return self.n_bucket * self.y[0] * self.y[1] * self.y[2]

    @property
    def taps(self) -> int:
        """Filter positions."""
        return self.kernel[0] * self.kernel[1] * self.kernel[2]

    @property
    def depthwise(self) -> bool:
        """Whether every output channel reads one channel of x."""
        return self.groups > 1 and self.groups == self.c

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute or nothing to sum."""
        return 0 in (self.c, self.o, *self.x, *self.y, *self.kernel)

    @property
    def pointwise(self) -> bool:
        """Whether the convolution is a matrix product of the pixels of x, without rearranging them."""
        return (
            self.groups == 1
            and self.x == self.y
            and self.kernel == (1, 1, 1)
            and self.stride == (1, 1, 1)
            and self.padding == (0, 0, 0)
        )


_PROBLEMS = Held()


def problem_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, size: Sequence[int], x_scales: Tensor | None,
    w_scales: Tensor | None, dtype: torch.dtype,
) -> Problem:  # fmt: skip
    """The problem of a call of `conv`."""
    starts = x.data_ptr() | weight.data_ptr() | (0 if residual is None else residual.data_ptr())
    key = (
        x.dtype, dtype, x.shape, weight.shape, *stride, *padding, *dilation, groups, *size, activation, bias is None,
        residual is None, starts % 16,
    )  # fmt: skip
    found = _PROBLEMS.get(key)
    if found is None:
        s = sizes_of(x, weight, stride, padding, dilation, groups, size)
        found = Problem(
            x.dtype, dtype, next_pow2(s.n), s.c, s.o, groups, s.x, s.y, s.kernel, s.stride, s.padding, s.dilation,
            activation, bias is not None, residual is not None, starts % 16 == 0,
        )  # fmt: skip
        _PROBLEMS.keep(key, found)
    return found


def empty_output(x: Tensor, weight: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for the result, [N, *size, O]."""
    return torch.empty((x.shape[0], *size, weight.shape[0]), dtype=dtype, device=x.device)


# ---- shared Triton code


@triton.jit
def finish_pixels(acc, y_ptr, bias_ptr, residual_ptr, pixels, channels, mask, O, ACTIVATION: tl.constexpr, factor=None):
    """Add bias and residual to a float32 tile, apply the activation, round once and store.

    pixels [BLOCK_M, 1] int64: the pixels of y and of the residual; channels [1, BLOCK_N]; O: elements per pixel. bias_ptr and
    residual_ptr may be None. factor: only for an int8 y. The activation is multiplied by it, rounded and saturated; NaN becomes
    0.
    """
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + channels, mask=channels < O, other=0.0).to(tl.float32)
    at = pixels * O + channels
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = activate(acc, ACTIVATION)
    if factor is None:
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        y *= factor
        held = tl.where(y == y, tl.minimum(tl.maximum(y, -127.0), 127.0), 0.0)
        # From 2^23 to 2^24, float32 numbers are integers. So the sum is rounded to nearest even, and its low bits are the
        # integer.
        tl.store(y_ptr + at, (held + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8), mask=mask)
