"""Products of MX matrices (OCP Microscaling Formats v1.0): activation(x @ weight^T + bias) + residual, both mxfp8.

    x [M, K] and weight [N, K] float8_e4m3fn or float8_e5m2, of the same dtype; x_scales [M, K / 32] and w_scales [N, K / 32]
    float8_e8m0fnu, as `quantize_mx` and `formats.quantize` return them -> [M, N] of `dtype`, bf16 or fp16, on a CPU also fp32

    sm100   Blackwell: its tensor cores multiply elements and scales (tl.dot_scaled)
    fold    any card from sm_89 on: combines four scales into one (quantize/mx_to_block.py) and calls `block_scaled_linear`

quantize/mx_to_block.py states how much `fold` may add to the error. `fold` converts the weight at every call. A layer on such a
card therefore keeps its weight folded, and calls `quantize_fold` and `block_scaled_linear` itself. The epilogue is float32,
with one rounding at the end; activations are those of `linear`. A scale of NaN (0xFF) makes its 32 elements NaN. Limited by
the tensor cores.

Not supported: gradients, operands that are dense along M or N, K that 32 does not divide. `sm100` has been compiled, not run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.problem import ACTIVATIONS, finish, weight_rows
from tilewright.kernels.gemm.quantized.block_scaled import block_problem, block_scaled_linear_op
from tilewright.kernels.gemm.quantized.block_scaled_sm90 import BlockProblem
from tilewright.kernels.gemm.quantized.inputs import mx_linear_arguments
from tilewright.kernels.gemm.quantized_operands import (
    FLOAT8,
    check_product,
    dense_along_columns,
    empty_product,
    product_cost,
    refuse_float8,
)
from tilewright.kernels.gemm.tile import grouped
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.kernels.quantize.mx_to_block import fold_mx
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["mx_linear", "mx_linear_op"]

_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def _reference(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    # Tests pass float64 arguments to get an exact reference: products of elements and scales are exact in float64.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = (
        codes.to(wide) * scales.to(wide).repeat_interleave(32, 1) for codes, scales in ((x, x_scales), (weight, w_scales))
    )
    more = (None if t is None else t.to(wide) for t in (bias, residual))
    y = linear_op.reference(*values, next(more), activation, next(more))
    return y if wide == torch.float64 else y.to(dtype)


# ---- problem, cost, examples


_example = Example.sized(mx_linear_arguments)
EXAMPLES = (
    _example("rows", 70, 96, 256, bias=True, residual=True, activation="silu"),
    _example("ragged", 33, 75, 160, activation="gelu"),
    _example("gated", 20, 150, 96, activation="silu_mul", out=torch.float16),
    _example("e5m2", 5, 48, 128, dtype=torch.float8_e5m2),
    _example("no rows", 0, 16, 32),
    _example("no k", 3, 8, 0, bias=True),
)

# ---- sm100


def _default(device: Device, problem: BlockProblem) -> Config:
    few = problem.m_bucket <= 64 or -(-problem.m_bucket // 128) * -(-problem.n // 128) < device.sms
    return {"BLOCK_M": 128, "BLOCK_N": 64 if few else 128, "num_warps": 4, "num_stages": 4}


SPACE = Space(default=_default, axes={"BLOCK_M": (128,), "BLOCK_N": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)})


@triton.jit(do_not_specialize=["M"])
def _mx_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, x_stride, w_stride,
    xs_stride, ws_stride, residual_stride,
    ELEMENT: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    row, col = grouped(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    rows = (row * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = (col * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    ks = tl.arange(0, BLOCK_K)[None, :]
    groups = tl.arange(0, BLOCK_K // 32)[None, :]
    weights = weight_rows(cols, N, GATED)
    x_ptrs = x_ptr + rows.to(tl.int64) * x_stride + ks
    w_ptrs = w_ptr + weights.to(tl.int64) * w_stride + ks
    xs_ptrs = x_scales_ptr + rows.to(tl.int64) * xs_stride + groups
    ws_ptrs = w_scales_ptr + weights.to(tl.int64) * ws_stride + groups
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs, mask=(rows < M) & (ks < K - k), other=0.0)
        w = tl.load(w_ptrs, mask=(cols < N) & (ks < K - k), other=0.0)
        x_scales = tl.load(xs_ptrs, mask=(rows < M) & (groups * 32 < K - k), other=0)
        w_scales = tl.load(ws_ptrs, mask=(cols < N) & (groups * 32 < K - k), other=0)
        acc = tl.dot_scaled(x, x_scales, ELEMENT, tl.trans(w), w_scales, ELEMENT, acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
        xs_ptrs += BLOCK_K // 32
        ws_ptrs += BLOCK_K // 32
    finish(acc, y_ptr, bias_ptr, residual_ptr, row * BLOCK_M, col * BLOCK_N, M, N, residual_stride, ACTIVATION, GATED)


def _launch(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    (m, k), n = x.shape, weight.shape[0]
    function, gated = ACTIVATIONS[activation]
    y = empty_product(x, weight, activation, dtype)
    if y.numel():
        _mx_kernel[(ceil_div(m, config["BLOCK_M"]) * ceil_div(n, config["BLOCK_N"]),)](
            x, weight, x_scales.view(torch.uint8), w_scales.view(torch.uint8), bias, residual, y, m, n, k, x.stride(0),
            weight.stride(0), x_scales.stride(0), w_scales.stride(0), 0 if residual is None else residual.stride(0),
            ELEMENT=_ELEMENTS[x.dtype], ACTIVATION=function, GATED=gated, BLOCK_K=128, GROUP_M=8, **config,
        )  # fmt: skip
    return y


# ---- fold


def _launch_fold(config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, *args: Any) -> Tensor:
    (x, x_scales), (weight, w_scales) = fold_mx(x, x_scales), fold_mx(weight, w_scales)
    return block_scaled_linear_op.run(x, weight, x_scales, w_scales, *args)


mx_linear_op = Op(
    name="mx_linear",
    reference=_reference,
    problem=block_problem,
    cost=product_cost,
    examples=EXAMPLES,
    make=mx_linear_arguments,
    rows_in_problem=True,
    impls=(
        Impl(name="sm100", launch=_launch, space=SPACE, min_arch=100, interpretable=False),
        Impl(name="fold", launch=_launch_fold, refuse=refuse_float8),
    ),
)


def mx_linear(
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """activation(x @ weight^T + bias) + residual of mxfp8 operands.

    Args:
        x: [M, K], float8_e4m3fn or float8_e5m2, dense along K; 32 divides K.
        weight: [N, K] of the same dtype, dense along K.
        x_scales: [M, K / 32], float8_e8m0fnu, dense along K.
        w_scales: [N, K / 32], float8_e8m0fnu, dense along K.
        bias, activation, residual, dtype: as in `scaled_linear`; so are the result and the errors.
    """
    check_product("mx_linear", FLOAT8, x, weight, bias, activation, residual, dtype)
    (m, k), n = x.shape, weight.shape[0]
    if k % 32:
        raise ValueError(f"mx_linear: K is {k} in x {list(x.shape)}, wanted a multiple of 32; pad x and the weight with zeros")
    for name, t, wanted in (("x_scales", x_scales, (m, k // 32)), ("w_scales", w_scales, (n, k // 32))):
        dense = t.dim() == 2 and (t.shape[1] < 2 or t.stride(1) == 1)
        if t.shape != wanted or t.dtype != torch.float8_e8m0fnu or t.device != x.device or not dense:
            raise ValueError(
                f"mx_linear: {name} must be {list(wanted)}, float8_e8m0fnu, dense along K, on {x.device}; "
                f"got {list(t.shape)}, {t.dtype}, strides {t.stride()}, on {t.device}"
            )
    residual = dense_along_columns(residual)
    return mx_linear_op(x, weight, x_scales, w_scales, bias, activation, residual, dtype)
