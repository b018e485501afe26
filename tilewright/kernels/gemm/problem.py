"""Code that the implementations of `linear` share: the problem, on which the choice of a kernel depends, and the epilogue.

    y = activation(x @ weight^T + bias) + residual

With a gate (`silu_mul`, `gelu_mul`) the weight is [2F, K], gate half first, and y = act(gate) * up is [..., F]. Every kernel
here reads the weight's rows interleaved (gate 0, up 0, gate 1, up 1, ...). So the two elements that the epilogue multiplies are
in the same tile and the same thread. BLOCK_N, N and `n` always count weight rows; with a gate the output is half as wide.
"""

# M rows of x, N rows of the weight, K the shared dimension, B matrices of a batch, F columns of a gated output

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.device.activations import activate
from tilewright.kernels.launch.shapes import next_pow2

__all__ = ["ACTIVATIONS", "LARGEST_BUCKET", "Problem", "buckets", "empty_output", "finish", "problem_of", "weight_rows"]

# Name -> (the function, whether it multiplies the second half of the columns).
ACTIVATIONS = {
    "none": ("none", False),
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "silu": ("silu", False),
    "silu_mul": ("silu", True),
    "gelu_mul": ("gelu", True),
}

LARGEST_BUCKET = 16384


class Problem(NamedTuple):
    """Everything that the choice of a kernel may depend on.

    `n` counts rows of the weight. `x_major` and `w_major` name the dimension that is dense in memory.
    """

    dtype: torch.dtype
    m_bucket: int
    n: int
    k: int
    activation: str
    bias: bool
    residual: bool
    batched: bool
    x_major: str
    w_major: str
    aligned: bool
    """Whether all rows of x and of the weight start at multiples of 16 bytes."""
    w_aligned: bool
    """The same for the weight alone."""

    @property
    def gated(self) -> bool:
        """Whether the weight has a gate half and an up half."""
        return ACTIVATIONS[self.activation][1]


def buckets(max_m: int) -> tuple[int, ...]:
    """The `m_bucket` values of 1 to `max_m` rows: powers of two. Row counts above the largest bucket all fall into it."""
    return tuple(1 << i for i in range(min(next_pow2(max_m), LARGEST_BUCKET).bit_length()))


def problem_of(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Problem:
    """The problem of a call. Its m_bucket is the number of rows, rounded up to a power of two, at most LARGEST_BUCKET."""
    # This runs at every call, so it avoids keyword arguments and slices, which are slower.
    shape, x_strides, w_strides = x.shape, x.stride(), weight.stride()
    k = shape[-1]
    x_dense = k == 1 or x_strides[-1] == 1
    w_dense = k == 1 or w_strides[-1] == 1
    size = x.dtype.itemsize
    x_places = x.data_ptr() | x_strides[-2 if x_dense else -1] * size
    w_places = weight.data_ptr() | w_strides[-2 if w_dense else -1] * size
    return Problem(
        x.dtype,
        min(next_pow2(shape[-2]), LARGEST_BUCKET),
        weight.shape[-2],
        k,
        activation,
        bias is not None,
        residual is not None,
        len(shape) == 3,
        "k" if x_dense else "m",
        "k" if w_dense else "n",
        (x_places | w_places) % 16 == 0,
        w_places % 16 == 0,
    )


def empty_output(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """Memory for the result: x's leading dims and dtype, one column per weight row (half as many if gated)."""
    n = weight.shape[-2]
    return torch.empty((*x.shape[:-1], n // 2 if gated else n), dtype=x.dtype, device=x.device)


# ---- shared Triton code


@triton.jit
def weight_rows(cols, N, GATED: tl.constexpr):
    """The weight rows for the columns of a tile: the same indices, or with a gate the two halves interleaved."""
    if GATED:
        return (cols % 2) * (N // 2) + cols // 2
    else:
        return cols


@triton.jit
def _codes_of(y, inverse, dtype: tl.constexpr):
    """y * inverse as 8-bit values, rounded to nearest even and saturated. A NaN becomes 0 in int8."""
    MOST: tl.constexpr = 127.0 if dtype == tl.int8 else 57344.0 if dtype == tl.float8e5 else 448.0  # pyright: ignore[reportAssignmentType]
    y *= inverse
    held = tl.minimum(tl.maximum(y, -MOST), MOST)
    if dtype == tl.int8:
        # Between 2^23 and 2^24 the spacing of float32 values is 1. So the sum is rounded to an integer (to nearest even), and
        # the low bits of its mantissa are that integer.
        return (tl.where(y == y, held, 0.0) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return tl.where(y == y, held, y).to(dtype)


@triton.jit
def finish(
    acc, y_ptr, bias_ptr, residual_ptr, first_row, first_col, M, N, residual_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, y_scale_ptr=None, y_stride=None,
    COL_STEP: tl.constexpr = 1,
):  # fmt: skip
    """Apply bias, activation and residual to a float32 tile [rows of x, weight rows], round it once and store it.

    y is contiguous unless y_stride is given. The columns of the tile are COL_STEP apart in y. With y_scale_ptr, y is quantised
    to 8 bits. bias_ptr and residual_ptr may be None.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if bias_ptr is not None:
        cols = first_col + tl.arange(0, BLOCK_N) * COL_STEP
        bias = tl.load(bias_ptr + weight_rows(cols, N, GATED), mask=cols < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        y = activate(gate, ACTIVATION) * up
        cols = first_col // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
        width = N // 2
    else:
        y = activate(acc, ACTIVATION)
        cols = first_col + (tl.arange(0, BLOCK_N) * COL_STEP)[None, :]
        width = N
    rows = first_row + tl.arange(0, BLOCK_M)[:, None]
    mask = (rows < M) & (cols < width)
    rows = rows.to(tl.int64)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if y_scale_ptr is not None:
        codes = _codes_of(y, 1.0 / tl.load(y_scale_ptr), y_ptr.dtype.element_ty)
    else:
        codes = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows * (width if y_stride is None else y_stride) + cols, codes, mask=mask)
