"""Code that the implementations of `grouped_linear` share: the problem, tiles in the order of experts, the epilogue.

Rows of x are sorted by expert. Only the device knows how many rows each expert has. So a launch has programs for the largest
possible number of tiles, `most_tiles`. Each program looks up its tile (`group_of`), and ends at once if there is none. So
nothing waits for the host, and a launch can be captured.
"""

# X experts, R rows, M rows of an expert in the masked layout, N rows of an expert's weight, K the shared dimension,
# F columns of the output

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.device.activations import ACTIVATION_FORMS, activate
from tilewright.kernels.gemm.problem import ACTIVATIONS, weight_rows
from tilewright.kernels.launch.shapes import next_pow2

__all__ = [
    "CLAMP",
    "GROUPED_ACTIVATIONS",
    "LARGEST_BUCKET",
    "GroupedProblem",
    "empty_grouped",
    "finish_rows",
    "group_of",
    "grouped_activated",
    "grouped_problem",
    "most_tiles",
]

CLAMP = tl.constexpr(7.0)
_LOWEST_UP = tl.constexpr(-7.0)
_SLOPE = tl.constexpr(1.702)

GROUPED_ACTIVATIONS = {
    name: ACTIVATIONS[name] for name in ("none", "relu", "gelu", "gelu_tanh", "silu", "silu_mul", "gelu_mul")
} | {"clamped_silu_mul": ("clamped_silu", True)}  # fmt: skip
"""The activations of `linear`, and that of gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), where the gate is clamped to at most
7, and up to -7 to 7."""


def grouped_activated(y: Tensor, activation: str) -> Tensor:
    """The activation of a tensor in torch. A gated activation halves the columns."""
    if activation != "clamped_silu_mul":
        return ACTIVATION_FORMS[activation](y)
    gate, up = y.chunk(2, -1)
    gate, up = gate.clamp(max=CLAMP.value), up.clamp(_LOWEST_UP.value, CLAMP.value)
    return gate * torch.sigmoid(_SLOPE.value * gate) * (up + 1)


class GroupedProblem(NamedTuple):
    """Everything that the choice of a kernel may depend on. `n` counts rows of an expert's weight."""

    dtype: torch.dtype
    rows: int
    """R, or X * M, rounded up to a power of two."""
    experts: int
    n: int
    k: int
    activation: str
    bias: bool
    masked: bool
    gathered: bool
    w_major: str
    aligned: bool
    """Whether all rows of x and of the experts' weights start at multiples of 16 bytes."""
    packed: bool
    """Whether the experts' weights follow each other in memory without gaps."""

    @property
    def gated(self) -> bool:
        """Whether the weight has a gate half and an up half."""
        return GROUPED_ACTIVATIONS[self.activation][1]

    @property
    def rows_each(self) -> int:
        """The rows per expert if they are distributed evenly."""
        return max(1, self.rows // self.experts)


LARGEST_BUCKET = 1 << 20


def grouped_problem(
    x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None, *_: Any
) -> GroupedProblem:
    """The problem of a call."""
    masked, size = x.dim() == 3, x.element_size()
    rows = x.shape[0] * x.shape[1] if masked else x.shape[0] if order is None else order.shape[0]
    w_dense = weight.stride(2) == 1 or weight.shape[2] == 1
    places = x.data_ptr() | weight.data_ptr() | x.stride(-2) * size | weight.stride(1 if w_dense else 2) * size
    return GroupedProblem(
        x.dtype,
        min(next_pow2(rows), LARGEST_BUCKET),
        weight.shape[0],
        weight.shape[1],
        weight.shape[2],
        activation,
        bias is not None,
        masked,
        order is not None,
        "k" if w_dense else "n",
        (places | weight.stride(0) * size) % 16 == 0,
        weight.stride(0) == weight.stride(1 if w_dense else 2) * weight.shape[1 if w_dense else 2],
    )


def empty_grouped(x: Tensor, weight: Tensor, activation: str, order: Tensor | None) -> Tensor:
    """Memory for the result."""
    n = weight.shape[1] // 2 if GROUPED_ACTIVATIONS[activation][1] else weight.shape[1]
    lead = x.shape[:-1] if order is None else order.shape
    return torch.empty((*lead, n), dtype=x.dtype, device=x.device)


def most_tiles(rows: int, experts: int, block_m: int) -> int:
    """The largest number of tile rows for sorted rows. Each expert, and the rows of no expert, may end inside a tile."""
    return rows // block_m + min(experts + 1, rows)


# ---- shared Triton code


@triton.jit
def group_of(bounds_ptr, tile, across, R, X, M, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr):
    """Look up a tile.

    Returns (expert, tile number within the expert, the expert's number of tile rows, its first row, the end of its rows, the
    end of the rows to write). Rows between the two ends are written as zeros. Expert X stands for the rows of no expert; a
    larger number means that there is no such tile. `across` is the number of tile columns. Bounds are clamped to [0, R].
    """
    if MASKED:
        high = tl.cdiv(M, BLOCK_M)
        expert = tile // (high * across)
        within = tile % (high * across)
        first = expert * M
        end = first + tl.minimum(tl.maximum(tl.load(bounds_ptr + expert), 0), M)
        limit = first + M
    else:
        g = tl.arange(0, BLOCK_X)
        starts = tl.load(bounds_ptr + g, mask=g <= X, other=R)
        starts = tl.minimum(tl.maximum(starts, 0), R)
        ends = tl.load(bounds_ptr + g + 1, mask=g < X, other=R)
        ends = tl.minimum(tl.maximum(ends, starts), R)
        heights = tl.cdiv(ends - starts, BLOCK_M)
        over = tl.cumsum(heights, 0) * across <= tile
        expert = tl.sum(over.to(tl.int32), 0)
        within = tile - across * tl.sum(tl.where(over, heights, 0), 0)
        own = g == expert
        high = tl.sum(tl.where(own, heights, 0), 0)
        first = tl.sum(tl.where(own, starts, 0), 0)
        limit = tl.sum(tl.where(own, ends, 0), 0)
        end = tl.where(expert < X, limit, first)
    return expert, within, high, first, end, limit


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_silu":
        # Not tl.minimum: a NaN stays a NaN.
        gate = tl.where(gate > CLAMP, CLAMP, gate)
        up = tl.where(up > CLAMP, CLAMP, tl.where(up < _LOWEST_UP, _LOWEST_UP, up))
        return gate / (1.0 + tl.exp(-(gate * _SLOPE))) * (up + 1.0)
    else:
        return activate(gate, ACTIVATION) * up


@triton.jit
def finish_rows(
    acc, y_ptr, bias_ptr, first_row, first_col, end, limit, N, ACTIVATION: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Apply bias and activation to a float32 tile, round it once, and store its rows before `end`, then zeros up to `limit`.

    y is contiguous. bias_ptr, of this expert, may be None. The tile's columns are the weight's rows, with the halves of a gated
    weight interleaved.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if bias_ptr is not None:
        cols = first_col + tl.arange(0, BLOCK_N)
        acc += tl.load(bias_ptr + weight_rows(cols, N, GATED), mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        y = _gated(gate, up, ACTIVATION)
        cols = first_col // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
        width = N // 2
    else:
        y = activate(acc, ACTIVATION)
        cols = first_col + tl.arange(0, BLOCK_N)[None, :]
        width = N
    rows = first_row + tl.arange(0, BLOCK_M)[:, None]
    y = tl.where(rows < end, y, 0.0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows.to(tl.int64) * width + cols, y, mask=(rows < limit) & (cols < width))
