"""Products of float8 matrices with scales along K: activation(sum of scaled blocks + bias) + residual.

    y[m, n] = activation(sum over blocks b of 128 columns: x_scales[m, b] * w_scales[n, b] * (x[m, b] . weight[n, b]) + bias[n])

    x [M, K] and weight [N, K] float8_e4m3fn or float8_e5m2, of the same dtype; x_scales [M, K / 128] float32; w_scales float32,
    one per block of 128 x 128 elements of the weight, [N / 128, K / 128], or one per 128 elements of each row, [N, K / 128];
    quotients are rounded up -> [M, N] of `dtype`, bf16 or fp16; on a CPU, where the reference runs, also float32

Blocks are added in float32. The tensor cores themselves add only within a block, of at most 128 products (on sm_90 with about
14 bits). So the error of a sum does not grow with K as it does in `scaled_linear`. The epilogue is float32, with one rounding
at the end; activations are those of `linear`. Rows start at multiples of 16 bytes; the quantisers lay them out this way. With
K = 0 the product is zero. A scale of NaN makes its elements NaN. mxfp8 also uses this product on cards without MX tensor cores:
`quantize/mx_to_block.py` combines its four scales per 128 columns into one. Limited by the tensor cores from some hundred rows
on, and by adding the blocks: one operation per 128 products.

    sm90             Hopper: Gluon, for one scale per 128 x 128 block of the weight
    triton           from sm_89 on
    sm90_invariant   `sm90` without split-K: with every tile shape, a row has the same bits
    invariant        `triton` with one config for every number of rows

Not supported: gradients, operands that are dense along M or N, other sizes of blocks.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.problem import ACTIVATIONS, LARGEST_BUCKET, finish, weight_rows
from tilewright.kernels.gemm.quantized.block_scaled_sm90 import SPACE as SM90_SPACE
from tilewright.kernels.gemm.quantized.block_scaled_sm90 import BlockProblem, best_config, launch_block_sm90
from tilewright.kernels.gemm.quantized.inputs import block_scaled_linear_arguments
from tilewright.kernels.gemm.quantized.row_scaled import fits, refuse_tile
from tilewright.kernels.gemm.quantized_operands import (
    FLOAT8,
    check_product,
    dense_along_columns,
    empty_product,
    product_cost,
    refuse_float8,
)
from tilewright.kernels.gemm.tile import grouped
from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.launch.pdl import waits
from tilewright.kernels.launch.shapes import ceil_div, check_tensor, next_pow2
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["block_problem", "block_scaled_linear", "block_scaled_linear_op"]


def _reference(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool = False,
) -> Tensor:  # fmt: skip
    wide, n = x_scales.dtype, weight.shape[0]
    if w_scales.shape[0] != n:
        w_scales = w_scales.repeat_interleave(128, 0)[:n]
    values = (
        codes.to(wide) * scales.repeat_interleave(128, 1)[:, : codes.shape[1]]
        for codes, scales in ((x, x_scales), (weight, w_scales))
    )
    more = (None if t is None else t.to(wide) for t in (bias, residual))
    y = linear_op.reference(*values, next(more), activation, next(more))
    return y if wide == torch.float64 else y.to(dtype)


# ---- problem, cost, examples


def block_problem(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool = False,
) -> BlockProblem:  # fmt: skip
    """The problem of a call. The weight has a scale for each of its rows, or for 128 rows together."""
    # This runs at every call, so it avoids keyword arguments and slices, which are slower.
    (m, k), n = x.shape, weight.shape[0]
    return BlockProblem(
        x.dtype,
        min(next_pow2(m), LARGEST_BUCKET),
        n,
        k,
        activation,
        bias is not None,
        residual is not None,
        1 if w_scales.shape[0] == n else 128,
        (x.data_ptr() | weight.data_ptr() | x.stride(0) | weight.stride(0)) % 16 == 0,
    )


_example = Example.sized(block_scaled_linear_arguments)
EXAMPLES = (
    _example("decode", 1, 256, 384),
    _example("batch 16", 16, 136, 208, activation="gelu_mul", bias=True),
    _example("rows", 70, 96, 256, activation="silu", bias=True, residual=True),
    _example("ragged", 33, 75, 300, activation="gelu"),
    _example("gated", 40, 512, 128, activation="silu_mul", residual=True, out=torch.float16),
    _example("gated ragged", 40, 300, 128, activation="silu_mul"),
    _example("by rows", 33, 72, 300, block_rows=1, bias=True),
    _example("by rows gated", 5, 80, 256, block_rows=1, activation="silu_mul"),
    _example("e5m2", 20, 48, 200, dtype=torch.float8_e5m2, activation="relu", residual=True),
    _example("no rows", 0, 16, 32),
    _example("no k", 3, 8, 0, bias=True),
)

# ---- sm90


def _refuse_sm90(device: Device, problem: BlockProblem) -> str | None:
    if problem.block_rows == 1:
        return "supports one scale per 128 rows of the weight only, not one per row"
    if not problem.aligned:
        return "needs rows of x and of the weight that start at multiples of 16 bytes"
    if not problem.k or not problem.n:
        return "N or K is 0: the copy engine (TMA) cannot load empty matrices"
    if problem.gated and problem.n % 256:
        return "with a gate, needs N to be a multiple of 256, so that both halves begin with a block of 128 rows"
    return None


def _launch_sm90(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool = False,
) -> Tensor:  # fmt: skip
    y, pdl = empty_product(x, weight, activation, dtype), waits(chained, *x.shape)
    return launch_block_sm90(config, y, x, weight, x_scales, w_scales, bias, activation, residual, pdl) if y.numel() else y


@lru_cache
def _unshared(device: Device, problem: BlockProblem) -> Config:
    return best_config(device, problem, (1,))


def _launch_sm90_invariant(config: Config, x: Tensor, *args: Any) -> Tensor:
    return _launch_sm90(_unshared(card_of(x), block_problem(x, *args)), x, *args)


# ---- triton

# BLOCK_M, BLOCK_N, num_warps, num_stages
_TILES = ((128, 128, 8, 4), (64, 128, 4, 4), (64, 64, 4, 4), (16, 64, 4, 4))
_BLOCK_K = 128


def _default_triton(device: Device, problem: BlockProblem) -> Config:
    """The tile with the least estimated time, counted in waves of tiles."""
    best, best_cycles = _TILES[-1], float("inf")
    for tile in _TILES:
        block_m, block_n, _, stages = tile
        if not fits(device, block_m, block_n, _BLOCK_K, stages):
            continue
        waves = -(-(-(-problem.m_bucket // block_m) * -(-problem.n // block_n)) // device.sms)
        # Cycles per index of K: for the products, or to load the operands from L2. Start and end of a block take about 1500.
        cycles = waves * (problem.k * max(block_m * block_n / 4096, (block_m + block_n) / 40) + 1500)
        if cycles < best_cycles:
            best, best_cycles = tile, cycles
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), best, strict=True))


TRITON_SPACE = Space(
    default=_default_triton,
    axes={"BLOCK_M": (16, 64, 128), "BLOCK_N": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)},
    refusal=lambda device, problem, config: refuse_tile(device, problem, {"BLOCK_K": _BLOCK_K, **config}),
)


@triton.jit(do_not_specialize=["M", "xs_m_stride", "xs_k_stride", "ws_n_stride", "ws_k_stride"])
def _block_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, x_stride, w_stride,
    xs_m_stride, xs_k_stride, ws_n_stride, ws_k_stride, residual_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    row, col = grouped(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    rows = (row * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = (col * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    ks = tl.arange(0, BLOCK_K)[None, :]
    weights = weight_rows(cols, N, GATED)
    x_ptrs = x_ptr + rows.to(tl.int64) * x_stride + ks
    w_ptrs = w_ptr + weights.to(tl.int64) * w_stride + ks
    xs_ptrs = x_scales_ptr + rows.to(tl.int64) * xs_m_stride
    ws_ptrs = w_scales_ptr + (weights // BLOCK_ROWS).to(tl.int64) * ws_n_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = ks < K - k
        x = tl.load(x_ptrs, mask=(rows < M) & inside, other=0.0)
        w = tl.load(w_ptrs, mask=(cols < N) & inside, other=0.0)
        x_scales = tl.load(xs_ptrs, mask=rows < M, other=0.0)
        w_scales = tl.load(ws_ptrs, mask=cols < N, other=0.0)
        acc += tl.dot(x, tl.trans(w)) * (x_scales * tl.trans(w_scales))
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
        xs_ptrs += xs_k_stride
        ws_ptrs += ws_k_stride
    finish(acc, y_ptr, bias_ptr, residual_ptr, row * BLOCK_M, col * BLOCK_N, M, N, residual_stride, ACTIVATION, GATED)


def _launch_triton(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool = False,
) -> Tensor:  # fmt: skip
    y = empty_product(x, weight, activation, dtype)
    if not y.numel():
        return y
    (m, k), n = x.shape, weight.shape[0]
    function, gated = ACTIVATIONS[activation]
    _block_kernel[(ceil_div(m, config["BLOCK_M"]) * ceil_div(n, config["BLOCK_N"]),)](
        x, weight, x_scales, w_scales, bias, residual, y, m, n, k, x.stride(0), weight.stride(0), *x_scales.stride(),
        *w_scales.stride(), 0 if residual is None else residual.stride(0), ACTIVATION=function, GATED=gated,
        BLOCK_ROWS=1 if w_scales.shape[0] == n else 128, BLOCK_K=_BLOCK_K, GROUP_M=8, **config,
    )  # fmt: skip
    return y


# Fits every card from sm_89 on.
_ANY_M = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4}


block_scaled_linear_op = Op(
    name="block_scaled_linear",
    reference=_reference,
    problem=block_problem,
    cost=product_cost,
    examples=EXAMPLES,
    make=block_scaled_linear_arguments,
    rows_in_problem=True,
    impls=(
        Impl(name="sm90", launch=_launch_sm90, space=SM90_SPACE, written_for=90, refuse=_refuse_sm90),
        Impl(name="triton", launch=_launch_triton, space=TRITON_SPACE, refuse=refuse_float8),
        Impl(name="sm90_invariant", launch=_launch_sm90_invariant, written_for=90, refuse=_refuse_sm90, batch_invariant=True),
        Impl(
            name="invariant", launch=lambda config, *args: _launch_triton(_ANY_M, *args), refuse=refuse_float8,
            batch_invariant=True,
        ),
    ),
)  # fmt: skip


def block_scaled_linear(
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    chained: bool = False,
) -> Tensor:
    """activation((x * x_scales) @ (weight * w_scales)^T + bias) + residual, with a scale per 128 columns.

    Args:
        x: [M, K], float8_e4m3fn or float8_e5m2, dense along K.
        weight: [N, K] of the same dtype, dense along K.
        x_scales: [M, K / 128 rounded up], float32, any strides; fastest with a stride of 1 from row to row.
        w_scales: [N / 128, K / 128] rounded up, or [N, K / 128], float32, any strides.
        bias, activation, residual, dtype, chained: as in `scaled_linear`; so are the result and the errors.
    """
    check_product("block_scaled_linear", FLOAT8, x, weight, bias, activation, residual, dtype)
    (m, k), n = x.shape, weight.shape[0]
    blocks = -(-k // 128)
    shapes = {"x_scales": (x_scales, ((m, blocks),)), "w_scales": (w_scales, ((-(-n // 128), blocks), (n, blocks)))}
    for name, (t, wanted) in shapes.items():
        why = f", a scale for each 128 of K = {k}"
        check_tensor("block_scaled_linear", name, t, wanted, (torch.float32,), x, why=why)
    residual = dense_along_columns(residual)
    return block_scaled_linear_op(x, weight, x_scales, w_scales, bias, activation, residual, dtype, chained)
