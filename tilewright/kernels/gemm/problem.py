"""What the implementations of `linear` share: the problem they choose by, and the epilogue in Triton.

    y = activation(x @ weight^T + bias) + residual

With a gate (`silu_mul`, `gelu_mul`) the weight is [2F, K], gate half first, and y = act(gate) * up is [..., F]. Every kernel
here walks the weight's rows interleaved (gate 0, up 0, gate 1, up 1, ...), so that the two numbers which meet in the epilogue
stand in one tile, in one thread. BLOCK_N, N and `n` always count rows of the weight; the output is half as wide then.
"""

# M rows of x, N rows of the weight, K shared, B matrices of a batch, F columns of a gated output

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
    """All that a choice may depend on. `n` counts rows of the weight; majors name the dimension that is dense in memory."""

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
    """Whether x and the weight start, and step from row to row, at multiples of 16 bytes."""
    w_aligned: bool
    """Whether the weight does."""

    @property
    def gated(self) -> bool:
        """Whether the weight's halves meet in the epilogue."""
        return ACTIVATIONS[self.activation][1]


def buckets(max_m: int) -> tuple[int, ...]:
    """Every `m_bucket` that row counts of 1 to `max_m` fall into: powers of two, up to the one that holds all larger ones."""
    return tuple(1 << i for i in range(min(next_pow2(max_m), LARGEST_BUCKET).bit_length()))


def problem_of(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Problem:
    """The problem of a call; its m_bucket is the next power of two above the number of rows."""
    # Runs at every call: no keywords, no slices.
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
    """Memory for the result: x's leading dims and dtype, as wide as the weight is tall, or half of that."""
    n = weight.shape[-2]
    return torch.empty((*x.shape[:-1], n // 2 if gated else n), dtype=x.dtype, device=x.device)


# ---- shared Triton code


@triton.jit
def weight_rows(cols, N, GATED: tl.constexpr):
    """The weight's rows behind the columns of a tile: as they are, or the two halves interleaved."""
    if GATED:
        return (cols % 2) * (N // 2) + cols // 2
    else:
        return cols


@triton.jit
def _codes_of(y, inverse, dtype: tl.constexpr):
    """Codes of 8 bits of y * inverse, to nearest even, saturated. A NaN's int8 is 0."""
    MOST: tl.constexpr = 127.0 if dtype == tl.int8 else 57344.0 if dtype == tl.float8e5 else 448.0  # pyright: ignore[reportAssignmentType]
    y *= inverse
    held = tl.minimum(tl.maximum(y, -MOST), MOST)
    if dtype == tl.int8:
        # From 2^23 to 2^24 a float32 counts in ones: the sum is rounded to even, its low bits are the integer.
        return (tl.where(y == y, held, 0.0) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return tl.where(y == y, held, y).to(dtype)


@triton.jit
def finish(
    acc, y_ptr, bias_ptr, residual_ptr, first_row, first_col, M, N, residual_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, y_scale_ptr=None, y_stride=None,
    COL_STEP: tl.constexpr = 1,
):  # fmt: skip
    """Bias, activation, residual and the one rounding of a float32 tile [rows of x, weight rows]; then its store.

    y is contiguous unless a stride is given, the tile's columns are COL_STEP apart. With y_scale_ptr y is codes of 8 bits.
    bias_ptr and residual_ptr may be None.
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
