"""Makes arguments for the quantisers from given dimensions: the `Op.make` of each op."""

import torch

from tilewright.kernels.elementwise.inputs import gated_arguments
from tilewright.kernels.norm.inputs import add_norm_arguments, norm_arguments
from tilewright.op import Args, Inputs

__all__ = [
    "add_norm_quantize_arguments",
    "gated_quantize_arguments",
    "layer_norm_quantize_arguments",
    "norm_quantize_arguments",
    "quantize_blocks_arguments",
    "quantize_both_ways_arguments",
    "quantize_mx_arguments",
    "quantize_rows_arguments",
    "quantize_static_arguments",
]

_BF16 = torch.bfloat16


def quantize_rows_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """x [M, N] and the format."""
    return inputs.randn(M, N, dtype=dtype), format


def quantize_blocks_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "fp8") -> Args:
    """x [M, N] and the format."""
    return inputs.randn(M, N, dtype=dtype), format


def quantize_both_ways_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "fp8", per: str = "row"
) -> Args:
    """x [M, N], `per`, and the format."""
    return inputs.randn(M, N, dtype=dtype), per, format


def quantize_mx_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "mxfp8") -> Args:
    """x [M, N] and the format."""
    return inputs.randn(M, N, dtype=dtype), format


def quantize_static_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """x [M, N], a scale that some numbers exceed, and the format."""
    return inputs.randn(M, N, dtype=dtype), inputs.tensor(0.02, torch.float32), format


def norm_quantize_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """x [M, N], weight [N], eps and the format."""
    return *norm_arguments(inputs, M=M, N=N, dtype=dtype), format


def add_norm_quantize_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """x and residual [M, N], weight [N], eps and the format."""
    return *add_norm_arguments(inputs, M=M, N=N, dtype=dtype), format


def gated_quantize_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """gate and up [M, N], the halves of one [M, 2 N], and the format."""
    return *gated_arguments(inputs, M=M, N=N, dtype=dtype), format


def layer_norm_quantize_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16, keep: bool = False
) -> Args:
    """x [M, N], weight and bias [N], eps, and whether the norm itself is returned."""
    return inputs.randn(M, N, dtype=dtype), inputs.randn(N, dtype=dtype), inputs.randn(N, dtype=dtype), 1e-5, keep
