"""Code that the grouped products of quantised weights share: the problem, memory for the result, cost, argument checks."""

# X experts, R rows, M rows of an expert in the masked layout, N rows of an expert's weight, K the shared dimension

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.gemm.grouped.linear import check_order, check_shapes
from tilewright.kernels.gemm.grouped.problem import GROUPED_ACTIVATIONS, LARGEST_BUCKET, most_tiles
from tilewright.kernels.gemm.grouped.work import group_sizes
from tilewright.kernels.gemm.weight_only.int4_layout import CHUNK
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.tune.space import Config

__all__ = ["GroupedCodesProblem", "check_codes", "codes_cost", "codes_problem", "empty_rows", "programs"]


class GroupedCodesProblem(NamedTuple):
    """Everything that the choice of a kernel may depend on. `n` counts rows of an expert's weight."""

    dtype: torch.dtype
    """The dtype of x."""
    rows: int
    """R, or X * M, rounded up to a power of two."""
    experts: int
    n: int
    k: int
    activation: str
    bias: bool
    masked: bool
    gathered: bool
    format: str
    """The format of the weight's codes: int8, int4, e4m3 or e5m2."""
    block_rows: int = 1
    block_cols: int = 0
    """Columns of the weight that share a scale; 0: all."""
    zeros: bool = False

    @property
    def gated(self) -> bool:
        """Whether the weight has a gate half and an up half."""
        return GROUPED_ACTIVATIONS[self.activation][1]

    @property
    def rows_each(self) -> int:
        """The rows per expert if they are distributed evenly."""
        return max(1, self.rows // self.experts)


def _rows(x: Tensor, order: Tensor | None) -> int:
    return x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0] if order is None else order.shape[0]


def codes_problem(
    x: Tensor, codes: Tensor, bias: Tensor | None, activation: str, order: Tensor | None, format: str, block_rows: int = 1,
    block_cols: int = 0, zeros: bool = False,
) -> GroupedCodesProblem:  # fmt: skip
    """The problem of a call."""
    rows = min(next_pow2(_rows(x, order)), LARGEST_BUCKET)
    return GroupedCodesProblem(
        x.dtype, rows, codes.shape[0], codes.shape[1], x.shape[-1], activation, bias is not None, x.dim() == 3,
        order is not None, format, block_rows, block_cols, zeros,
    )  # fmt: skip


def empty_rows(x: Tensor, codes: Tensor, activation: str, order: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Memory for the result."""
    n = codes.shape[1] // 2 if GROUPED_ACTIVATIONS[activation][1] else codes.shape[1]
    return torch.empty((*(x.shape[:-1] if order is None else order.shape), n), dtype=dtype, device=x.device)


def programs(y: Tensor, experts: int, n: int, config: Config) -> int:
    """The number of programs of a launch that fills y: the largest possible number of tiles."""
    block_m = config["BLOCK_M"]
    high = experts * ceil_div(y.shape[1], block_m) if y.dim() == 3 else most_tiles(y.shape[0], experts, block_m)
    return high * ceil_div(n, config["BLOCK_N"])


def codes_cost(
    x: Tensor, codes: Tensor, more: tuple[Tensor | None, ...], bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, clear: bool, dtype: torch.dtype,
) -> Cost:  # fmt: skip
    """Reads codes, scales and zero points (`more`) of experts with rows once each, and the rows once; writes the result."""
    experts, n, k = codes.shape[0], codes.shape[1], x.shape[-1]
    sizes = group_sizes(x, bounds, experts, order)
    rows, active = sum(sizes), sum(size > 0 for size in sizes)
    written = (_rows(x, order) if clear else rows) * (n // 2 if GROUPED_ACTIVATIONS[activation][1] else n)
    read = min(rows // max(chosen, 1) if order is not None else rows, x.numel() // max(k, 1)) * k
    each = sum(t.nbytes for t in (codes, bias, *more) if t is not None) // experts
    moved = read * x.element_size() + active * each + written * dtype.itemsize + bounds.nbytes
    return Cost(flops=2 * rows * n * k, bytes=moved)


def check_codes(
    op: str, x: Tensor, codes: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None, chosen: int,
    dtype: torch.dtype, *, packed: bool = False,
) -> None:  # fmt: skip
    """Raise ValueError if the arguments that these products have in common do not fit together. packed: codes are int4."""
    shape = codes.shape
    if packed and x.dim() and shape[-1] == ceil_div(x.shape[-1], CHUNK) * CHUNK // 2:
        shape = torch.Size((*shape[:-1], x.shape[-1]))
    check_shapes(op, x, shape, bounds, bias, activation)
    check_order(op, x, order, chosen)
    if bias is not None and bias.dtype != dtype:
        raise ValueError(f"{op}: bias must be of the output's dtype, {dtype}; got {bias.dtype}")
    if codes.device != x.device:
        raise ValueError(f"{op}: codes must be on the device of x, {x.device}; got {codes.device}")
    for name, t in (("x", x), ("codes", codes)):
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"{op}: {name} must be dense along K; got strides {t.stride()}")
