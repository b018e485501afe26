"""Example arguments of the products of quantised matrices for given dimensions: the `Op.make` of each."""

import torch
from torch import Tensor

from tilewright.kernels.gemm.inputs import linear_arguments
from tilewright.op import Args, Inputs

__all__ = ["block_scaled_linear_arguments", "cast_linear_arguments", "mx_linear_arguments", "scaled_linear_arguments"]

_BF16 = torch.bfloat16


def cast_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, out: torch.dtype = torch.int8,
    bias: bool = False, activation: str = "none", residual: bool = False,
) -> tuple[Tensor | str | torch.dtype | None, ...]:  # fmt: skip
    """Operands of `dtype` (bf16 or fp16 without scales, int8 or float8 with scales), for results of about 1 and dtype `out`.

    The y_scale of an 8-bit `out` is such that about 4 is the largest value.
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


def _epilogue(inputs: Inputs, M: int, N: int, bias: bool, activation: str, residual: bool, out: torch.dtype) -> Args:
    """(bias, activation, residual, dtype of the result)."""
    more = inputs.randn(N, dtype=out) if bias else None
    width = N // 2 if activation.endswith("_mul") else N
    return more, activation, inputs.randn(M, width, dtype=out) if residual else None, out


def scaled_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = torch.int8, bias: bool = False, activation: str = "none",
    residual: bool = False, out: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """x [M, K] and weight [N, K] of `dtype` with rows of a multiple of 16 bytes, and scales such that results are about 1."""

    def matrix(rows: int) -> Tensor:
        padded = -(-K // 16) * 16
        if dtype == torch.int8:
            return inputs.randint(-127, 128, rows, padded, dtype=dtype)[:, :K]
        return inputs.randn(rows, padded, scale=60.0).clamp(-448, 448).to(dtype)[:, :K]

    spread = 73.0 if dtype == torch.int8 else 60.0
    return (
        matrix(M),
        matrix(N),
        inputs.randn(M).abs().add(0.1).div(spread),
        inputs.randn(N).abs().add(0.1).div(spread * max(K, 1) ** 0.5),
        *_epilogue(inputs, M, N, bias, activation, residual, out),
    )


def block_scaled_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = torch.float8_e4m3fn, block_rows: int = 128,
    bias: bool = False, activation: str = "none", residual: bool = False, out: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """x [M, K] and weight [N, K] of a float8 `dtype`, and a scale per 128 columns of K such that results are about 1.

    `block_rows`: the number of weight rows that share a scale, 128 or 1.
    """
    padded, blocks = -(-K // 16) * 16, -(-K // 128)
    x, weight = (inputs.randn(rows, padded, scale=60.0).clamp(-448, 448).to(dtype)[:, :K] for rows in (M, N))
    return (
        x,
        weight,
        # Dense along M, as the quantisers write them.
        inputs.randn(blocks, M).abs().add(0.1).div(60.0).t(),
        inputs.randn(-(-N // block_rows), blocks).abs().add(0.1).div(60.0 * max(K, 1) ** 0.5),
        *_epilogue(inputs, M, N, bias, activation, residual, out),
    )


def mx_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = torch.float8_e4m3fn, bias: bool = False,
    activation: str = "none", residual: bool = False, out: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """x [M, K] and weight [N, K] of a float8 `dtype`, and an E8M0 scale per 32 columns of K such that results are about 1."""
    x, weight = (inputs.randn(rows, K, scale=60.0).clamp(-448, 448).to(dtype) for rows in (M, N))
    low = 121 - max(K, 1).bit_length() // 2

    def scales(rows: int, lowest: int) -> Tensor:
        return inputs.randint(lowest, lowest + 3, rows, K // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    return (
        x,
        weight,
        scales(M, 120),
        scales(N, low),
        *_epilogue(inputs, M, N, bias, activation, residual, out),
    )
