"""Arguments of `add_layer_norm` from dimensions (inputs/common.py has those of the other norms)."""

from typing import Any

import torch

from tilewright.kernels.inputs.common import layer_norm_arguments
from tilewright.op import Inputs

__all__ = ["add_layer_norm_arguments"]


def add_layer_norm_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True, want_sum: bool = True
) -> tuple[Any, ...]:
    """x and residual [M, N], weight and bias [N]; whether the sum is wanted."""
    return inputs.randn(M, N, dtype=dtype), *layer_norm_arguments(inputs, M=M, N=N, dtype=dtype, bias=bias), want_sum
