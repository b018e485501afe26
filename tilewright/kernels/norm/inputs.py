"""Example arguments of the norms and their gradients, made from dimensions: the `Op.make` of each op."""

import torch
from torch import Tensor

from tilewright.op import Args, Inputs

__all__ = [
    "add_layer_norm_arguments",
    "add_norm_arguments",
    "layer_norm_arguments",
    "layer_norm_backward_arguments",
    "norm_arguments",
    "rms_norm_backward_arguments",
    "row_statistics",
]

_BF16 = torch.bfloat16


def add_layer_norm_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True, want_sum: bool = True
) -> Args:
    """x and residual [M, N], weight and bias [N]. `want_sum`: whether the op also returns x + residual."""
    return inputs.randn(M, N, dtype=dtype), *layer_norm_arguments(inputs, M=M, N=N, dtype=dtype, bias=bias), want_sum


def norm_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """x [M, N], weight [N]."""
    return inputs.randn(M, N, dtype=dtype), inputs.randn(N, dtype=dtype), 1e-6


def add_norm_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """x and residual [M, N], weight [N]."""
    return inputs.randn(M, N, dtype=dtype), *norm_arguments(inputs, M=M, N=N, dtype=dtype)


def layer_norm_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, bias: bool = True) -> Args:
    """x [M, N], weight and bias [N]."""
    x, weight, _ = norm_arguments(inputs, M=M, N=N, dtype=dtype)
    return x, weight, inputs.randn(N, dtype=dtype) if bias else None, 1e-5


def row_statistics(x: Tensor, eps: float) -> Tensor:
    """Mean and 1 / sqrt(variance + eps) of each row of x [..., D]: float32 [2, rows]."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    return torch.stack((mean.flatten(), torch.rsqrt((wide - mean).square().mean(-1) + eps).flatten()))


def layer_norm_backward_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, stats: bool = False
) -> Args:  # fmt: skip
    """dy and x [M, N], weight [N]; with `stats` also the saved statistics of x's rows."""
    dy, x, weight = inputs.randn(M, N, dtype=dtype), inputs.randn(M, N, dtype=dtype), inputs.randn(N, dtype=dtype)
    return dy, x, weight, 1e-5, row_statistics(x, 1e-5) if stats else None


def rms_norm_backward_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, more: bool = False
) -> Args:  # fmt: skip
    """dy and x [M, N], weight [N]; with `more` also the other gradient that reaches x, [M, N]."""
    dy, x, weight, *_ = layer_norm_backward_arguments(inputs, M=M, N=N, dtype=dtype)
    return dy, x, weight, inputs.randn(M, N, dtype=dtype) if more else None, 1e-6
