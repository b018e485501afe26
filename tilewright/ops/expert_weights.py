"""Experts whose weights have 8 or 4 bits: the type of the weight decides which grouped product runs, as in linear.py.

If experts have at most `FEW_ROWS` rows each on average, an 8-bit weight is multiplied by 16-bit activations, because most of
the time is then spent on reading the weight. With more rows the activation is quantised as well, once for each token, before
rows are gathered. In the invariant scope the activation is always quantised, so that the result does not depend on the number
of rows.

Not here: gradients (ops/experts.py computes them with the dequantised weights), and static activation scales (scales are
computed in every call).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.kernels.experts.permute import permute_tokens_op
from tilewright.kernels.gemm.grouped.block_scaled import grouped_block_scaled_linear_op
from tilewright.kernels.gemm.grouped.row_scaled import grouped_scaled_linear_op
from tilewright.kernels.gemm.grouped.weight_only import grouped_mixed_linear_op
from tilewright.kernels.quantize.mx_to_block import quantize_fold_op
from tilewright.kernels.quantize.per_block import quantize_blocks_op
from tilewright.kernels.quantize.per_row import quantize_rows_op
from tilewright.ops.linear import few_rows
from tilewright.ops.weights import BlockScaledWeight, MixedWeight, MXWeight, QuantizedWeight, ScaledWeight

__all__ = ["GROUPED_OPS", "ExpertWeights", "grouped_codes"]


class ExpertWeights(NamedTuple):
    """The quantised weights of all experts, stacked along their rows."""

    weight: QuantizedWeight
    """[X N, K]."""
    experts: int

    @property
    def shape(self) -> torch.Size:
        """[X, N, K]."""
        rows, cols = self.weight.shape
        return torch.Size((self.experts, rows // self.experts, cols))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[X, N, K]."""
        return self.weight.dequantize(dtype).unflatten(0, (self.experts, -1))

    def by_expert(self, t: Tensor) -> Tensor:
        """Quantised values, scales or zero points of the weight, with a first dimension of experts."""
        return t.unflatten(0, (self.experts, -1))


class _Rows(NamedTuple):
    """The arguments of a grouped product other than x and the weight."""

    bounds: Tensor
    bias: Tensor | None
    activation: str
    order: Tensor | None
    chosen: int
    clear: bool

    def each(self, x: Tensor, experts: int) -> int:
        """The average number of rows of an expert, rounded up."""
        rows = x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0] if self.order is None else self.order.shape[0]
        return -(-rows // experts)


def _mixed(x: Tensor, weight: ExpertWeights, rows: _Rows) -> Tensor:
    codes = weight.weight
    zeros = None if codes.zeros is None else weight.by_expert(codes.zeros)
    few_rows(x, 1)  # raises a ValueError for float32 on a GPU
    return grouped_mixed_linear_op(
        x, weight.by_expert(codes.operand), weight.by_expert(codes.scales), zeros, *rows[:5], *codes.block, rows.clear
    )


def _scaled(x: Tensor, weight: ExpertWeights, rows: _Rows) -> Tensor:
    codes = weight.weight
    assert isinstance(codes, ScaledWeight)
    if few_rows(x, rows.each(x, weight.experts)):
        return _mixed(x, weight, rows)
    values, scales = quantize_rows_op(x.flatten(0, -2), codes.value_format)
    values, scales = (t.unflatten(0, x.shape[:-1]) for t in (values, scales))
    operands = values, weight.by_expert(codes.operand), scales, weight.by_expert(codes.scales)
    return grouped_scaled_linear_op(*operands, *rows[:5], x.dtype, rows.clear)


def _block_scaled(x: Tensor, weight: ExpertWeights, rows: _Rows) -> Tensor:
    codes = weight.weight
    if codes.block != (128, 128) or few_rows(x, rows.each(x, weight.experts)):
        return _mixed(x, weight, rows)  # scales of single rows, as where an expert begins within a 128 x 128 block
    if rows.order is not None:
        x = permute_tokens_op(x.contiguous(), rows.order, rows.chosen, None)
    flat = x.flatten(0, -2)
    mx = isinstance(codes, MXWeight)
    values, scales = quantize_fold_op(flat, "mxfp8") if mx else quantize_blocks_op(flat, "fp8")
    values, scales = (t.unflatten(0, x.shape[:-1]) for t in (values, scales))
    operands = values, weight.by_expert(codes.operand), scales, weight.by_expert(codes.scales)
    return grouped_block_scaled_linear_op(*operands, *rows[:3], x.dtype, rows.clear)


GroupedOp = Callable[[Tensor, ExpertWeights, _Rows], Tensor]

GROUPED_OPS: dict[type[QuantizedWeight], GroupedOp] = {
    ScaledWeight: _scaled,
    BlockScaledWeight: _block_scaled,
    MixedWeight: _mixed,
}
"""Weight type -> the function that multiplies by it. A subclass that is not listed uses that of its nearest base class."""


def grouped_codes(
    x: Tensor, weight: ExpertWeights, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None, chosen: int,
    clear: bool = True,
) -> Tensor:  # fmt: skip
    """`grouped_linear_op` with a quantised weight. The arguments must fit together, and x must be dense along K.

    Raises:
        TypeError: there is no grouped product for a weight of this type.
        ValueError: x is float32 on a GPU.
    """
    kind: Any = next((base for base in type(weight.weight).__mro__ if base in GROUPED_OPS), None)
    if kind is None:
        known = ", ".join(t.__name__ for t in GROUPED_OPS)
        raise TypeError(
            f"grouped_linear: weights of experts of type {type(weight.weight).__name__} are not supported; supported "
            f"are {known}"
        )
    return GROUPED_OPS[kind](x, weight, _Rows(bounds, bias, activation, order, chosen, clear))
