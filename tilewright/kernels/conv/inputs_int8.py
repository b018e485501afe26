"""Arguments of the ops that write int8 codes on their way, from dimensions, as in `inputs/common.py`."""

import math
from typing import Any

import torch

from tilewright.kernels.conv.problem import output_size
from tilewright.op import Inputs

__all__ = ["conv_codes_arguments", "layer_norm_quantize_arguments"]


def conv_codes_arguments(
    inputs: Inputs, *, N: int, C: int, H: int, O: int, K: int = 3, S: int = 1, P: int | None = None, groups: int = 1,
    dims: int = 2, bias: bool = False, residual: bool = False, activation: str = "none", dtype: torch.dtype = torch.int8,
) -> tuple[Any, ...]:  # fmt: skip
    """x [N, H, H, C] and weight [O, K, K, C / groups] of codes, scaled such that the result is some 30 of 127 codes.

    Raises:
        ValueError: channels do not divide into groups, or there is no output.
    """
    if groups < 1 or C % groups or O % groups:
        raise ValueError(f"conv_codes: C={C} and O={O} must be multiples of groups={groups}")
    pad = K // 2 if P is None else P
    size = output_size(H, K, S, pad, pad, 1)
    if size < 1:
        raise ValueError(f"conv_codes: H={H} K={K} S={S} P={pad} leave no output")
    summed = C // groups * K**dims
    x = inputs.randint(-127, 128, N, *(H,) * dims, C, dtype=dtype)
    weight = inputs.randint(-127, 128, O, *(K,) * dims, C // groups, dtype=dtype)
    return (
        x, weight,
        inputs.randn(O) if bias else None,
        inputs.randint(-3, 4, N, *(size,) * dims, O, dtype=dtype) if residual else None,
        activation, [S] * dims, [pad] * dims, [1] * dims, groups, [size] * dims,
        inputs.randn(O).abs().add(0.5).div(5329.0 * math.sqrt(summed)), inputs.randn(N).abs().add(30.0),
    )  # fmt: skip


def layer_norm_quantize_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16, keep: bool = False
) -> tuple[Any, ...]:
    """x [M, N], weight and bias [N], eps, whether the norm itself is kept."""
    return inputs.randn(M, N, dtype=dtype), inputs.randn(N, dtype=dtype), inputs.randn(N, dtype=dtype), 1e-5, keep
