"""Arguments of `cast_linear` from dimensions (inputs/common.py has those of the other products)."""

import torch
from torch import Tensor

from tilewright.kernels.inputs.common import linear_arguments, scaled_linear_arguments
from tilewright.op import Inputs

__all__ = ["cast_linear_arguments"]


def cast_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, out: torch.dtype = torch.int8,
    bias: bool = False, activation: str = "none", residual: bool = False,
) -> tuple[Tensor | str | torch.dtype | None, ...]:  # fmt: skip
    """Operands of `dtype`, bf16 or fp16 without scales, int8 or float8 with; the result, about 1, as `out`.

    Codes have a step such that about 4 is the largest.
    """
    if dtype.itemsize == 2:
        x, weight, given, _, more = linear_arguments(
            inputs, M=M, N=N, K=K, dtype=dtype, bias=bias, activation=activation, residual=residual
        )
        x_scales = w_scales = None
    else:
        x, weight, x_scales, w_scales, given, _, more, _ = scaled_linear_arguments(
            inputs, M=M, N=N, K=K, dtype=dtype, bias=bias, activation=activation, residual=residual
        )
    y_scale = None
    if out.itemsize == 1:
        y_scale = inputs.tensor(4.0 / (127.0 if out == torch.int8 else 448.0), torch.float32)
    return x, weight, x_scales, w_scales, given, activation, more, out, y_scale
