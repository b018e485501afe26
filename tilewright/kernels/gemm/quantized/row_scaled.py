"""Products of 8-bit matrices: y = activation((x @ weight^T) * x_scales * w_scales + bias) + residual.

    x [M, K] and weight [N, K] int8, float8_e4m3fn or float8_e5m2, of the same dtype; x_scales [M], w_scales [N] float32, one
    for each row of x (a token) and each row of the weight (an output channel) -> [M, N] of `dtype`, bf16 or fp16

int8 is summed exactly, in int32. K is at most 131,072, so that the sum cannot overflow. For float8, the tensor cores sum at
most 256 products (`sm90`; up to 384 in the last span) or 128 (`triton`); these partial sums are added in float32. The reason is
that on sm_90 tensor cores keep about 14 bits of a sum. So float8 products are as exact as float32 sums, except for an error
whose largest value, among millions of sums, was 0.005 of the RMS. The epilogue is float32, with one rounding at the end;
activations are those of `linear`. Rows start at multiples of 16 bytes; the quantisers lay them out this way. With K = 0 the
product is zero. Limited by memory bandwidth up to some hundred rows, then by the tensor cores: twice the rate of 16-bit
products, with half of the bytes.

    sm90       Hopper: the Gluon kernel of `linear` with other operand types
    triton     from sm_80 on for int8, from sm_89 on for float8
    vendor     cuBLAS through torch._int_mm and torch._scaled_mm; the epilogue is composed of torch operations
    invariant  `triton` with one config for every number of rows: the bits of a row do not depend on its batch

Not supported: gradients, operands that are dense along M or N, zero points, scales along K.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.device.activations import activated
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, finish, problem_of, weight_rows
from tilewright.kernels.gemm.quantized.inputs import scaled_linear_arguments
from tilewright.kernels.gemm.quantized_operands import (
    FLOAT8,
    check_product,
    dense_along_columns,
    empty_product,
    product_cost,
    refuse_float8,
)
from tilewright.kernels.gemm.sm90 import launch_sm90
from tilewright.kernels.gemm.sm90_configs import SPACE as SM90_SPACE
from tilewright.kernels.gemm.tile import best_tile, grouped
from tilewright.kernels.launch.pdl import waits
from tilewright.kernels.launch.shapes import ceil_div, check_tensor
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = [
    "LONGEST", "finished", "fits", "halved", "launch_scaled", "refuse_sm90", "refuse_tile", "scaled_kernel", "scaled_linear",
    "scaled_linear_op",
]  # fmt: skip

LONGEST = 131072


def _reference(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool = False,
) -> Tensor:  # fmt: skip
    wide = x_scales.dtype
    y = (x.to(wide) @ weight.to(wide).mT) * x_scales[:, None] * w_scales
    return finished(y, bias, activation, residual).to(wide if wide == torch.float64 else dtype)


def finished(y: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    """The epilogue of a product in plain torch."""
    if bias is not None:
        y = y + bias
    y = activated(y, activation)
    return y if residual is None else y + residual


# ---- problem, cost, examples


_example = Example.sized(scaled_linear_arguments)
EXAMPLES = (
    _example("decode", 1, 64, 256),
    _example("batch 16", 16, 72, 208, activation="gelu_mul", bias=True),
    _example("rows", 70, 96, 128, activation="silu", bias=True, residual=True),
    _example("ragged", 33, 75, 100, activation="gelu"),
    _example("gated", 40, 150, 64, activation="silu_mul", residual=True, out=torch.float16),
    _example("e4m3", 70, 96, 128, torch.float8_e4m3fn, bias=True),
    _example("e5m2", 20, 48, 200, torch.float8_e5m2, activation="relu", residual=True),
    _example("long sums", 20, 40, 1040, torch.float8_e4m3fn, bias=True),
    _example("no rows", 0, 16, 32),
    _example("no k", 3, 8, 0, bias=True),
)

# ---- sm90


def refuse_sm90(device: Device, problem: Problem) -> str | None:
    """Why the Hopper kernel refuses a product whose operands it reads in place, without a copy; None if it accepts it."""
    if not problem.aligned:
        return "needs rows of x and of the weight that start at multiples of 16 bytes"
    if not problem.k or not problem.n:
        return "N or K is 0: the copy engine (TMA) cannot load empty matrices"
    if problem.x_major != "k" or problem.w_major != "k":
        return "needs x and the weight contiguous along K"
    return None


def halved(problem: Problem) -> Problem:
    """The 16-bit problem that takes the same time. It has half of K, because an 8-bit instruction covers twice as much of K."""
    return problem._replace(k=-(-problem.k // 2))


SM90_8BIT_SPACE = Space(
    default=lambda device, problem: SM90_SPACE.default(device, halved(problem)),
    axes={**SM90_SPACE.axes, "BLOCK_N": (32, 64, 96, 128, 192, 256), "UNALIGNED": ("copy",)},
    refusal=lambda device, problem, config: SM90_SPACE.refusal(device, halved(problem), config),
)


def _launch_sm90(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool = False,
) -> Tensor:  # fmt: skip
    y, pdl = empty_product(x, weight, activation, dtype), waits(chained, *x.shape)
    return launch_sm90(config, y, x, weight, bias, activation, residual, x_scales, w_scales, pdl) if y.numel() else y


# ---- triton

# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages
_TILES = (
    (128, 256, 128, 8, 3),
    (128, 128, 128, 8, 4),
    (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 4),
    (16, 64, 128, 4, 4),
)


def _default_triton(device: Device, problem: Problem) -> Config:
    most = _most_accumulators(device, problem)
    fitting = (t for t in _TILES if fits(device, t[0], t[1], t[2], t[4]) and t[0] <= max(64, problem.m_bucket))
    tiles = tuple(t for t in fitting if t[0] * t[1] <= 32 * t[3] * most)
    block_m, block_n, block_k, warps, stages = best_tile(tiles, (1,), device.sms, halved(problem))[:5]
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}


def _most_accumulators(device: Device, problem: Any) -> int:
    """The most accumulators per thread. float8 needs the same number again for the partial sums that are added to them."""
    return 128 if device.multiplies_by_warpgroup and problem.dtype not in FLOAT8 else 64


def fits(device: Device, block_m: int, block_n: int, block_k: int, stages: int) -> bool:
    """Whether the pipeline stages of a tile with 8-bit operands fit into shared memory."""
    return (block_m + block_n) * block_k * stages <= device.smem_bytes


def refuse_tile(device: Device, problem: Any, c: Config) -> str | None:
    """Why a tile is too large or too small for a product of 8-bit operands, or None. `problem` has a dtype and an m_bucket."""
    if not fits(device, c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"], c["num_stages"]):
        return "more shared memory than the device has"
    accumulators = c["BLOCK_M"] * c["BLOCK_N"] // (32 * c["num_warps"])
    if not 8 <= accumulators <= _most_accumulators(device, problem):
        return "not a supported tile: too many accumulators per thread for the registers, or too few for its warps"
    if c["BLOCK_M"] > max(64, problem.m_bucket):
        return "BLOCK_M is larger than the number of rows of x"
    return None


TRITON_SPACE = Space(
    default=_default_triton,
    axes={
        "BLOCK_M": (16, 64, 128),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (128,),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    },
    refusal=refuse_tile,
)


@triton.jit(do_not_specialize=["M"])
def scaled_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, x_stride, w_stride, residual_stride,
    y_scale_ptr, y_stride, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """The product. It also accepts 16-bit operands without scales. With y_scale the result is quantised (requantized.py)."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    row, col = grouped(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    rows = (row * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = (col * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    ks = tl.arange(0, BLOCK_K)[None, :]
    weights = weight_rows(cols, N, GATED)
    x_ptrs = x_ptr + rows.to(tl.int64) * x_stride + ks
    w_ptrs = w_ptr + weights.to(tl.int64) * w_stride + ks
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = ks < K - k
        x = tl.load(x_ptrs, mask=(rows < M) & inside, other=0.0)
        w = tl.load(w_ptrs, mask=(cols < N) & inside, other=0.0)
        if x_ptr.dtype.element_ty.primitive_bitwidth == 16:
            acc = dot(x, tl.trans(w), acc)
        elif x_ptr.dtype.element_ty.is_fp8():
            acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    y = acc.to(tl.float32)
    if x_scales_ptr is not None:
        x_scales = tl.load(x_scales_ptr + rows, mask=rows < M, other=0.0)
        w_scales = tl.load(w_scales_ptr + weights, mask=cols < N, other=0.0)
        y = y * x_scales * tl.trans(w_scales)
    finish(
        y, y_ptr, bias_ptr, residual_ptr, row * BLOCK_M, col * BLOCK_N, M, N, residual_stride, ACTIVATION, GATED,
        y_scale_ptr, y_stride,
    )  # fmt: skip


def _launch_triton(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool = False,
) -> Tensor:  # fmt: skip
    y = empty_product(x, weight, activation, dtype)
    return launch_scaled(config, y, x, weight, x_scales, w_scales, bias, activation, residual)


def launch_scaled(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, x_scales: Tensor | None, w_scales: Tensor | None,
    bias: Tensor | None, activation: str, residual: Tensor | None, y_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fill y and return it. With a y_scale, y is quantised."""
    if not y.numel():
        return y
    (m, k), n = x.shape, weight.shape[0]
    function, gated = ACTIVATIONS[activation]
    scaled_kernel[(ceil_div(m, config["BLOCK_M"]) * ceil_div(n, config["BLOCK_N"]),)](
        x, weight, x_scales, w_scales, bias, residual, y, m, n, k, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0), y_scale, y.stride(0),
        ACTIVATION=function, GATED=gated, GROUP_M=8, **config,
    )  # fmt: skip
    return y


_ONE_CONFIG: Config = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
"""The config of `invariant` for any number of rows. It fits into the shared memory of every card from sm_80 on."""


# ---- vendor


def _refuse_vendor(device: Device, problem: Problem) -> str | None:
    if problem.dtype == torch.float8_e5m2:
        return "torch does not multiply two float8_e5m2 matrices"
    if reason := refuse_float8(device, problem):
        return reason
    if not problem.aligned or problem.k % 16 or problem.n % 16 or not problem.k or not problem.n:
        return "needs K and N that are multiples of 16"
    if problem.dtype == torch.int8 and problem.m_bucket <= 32:
        return "torch._int_mm needs more than 16 rows"
    return None


def _launch_vendor(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, chained: bool = False,
) -> Tensor:  # fmt: skip
    if not x.shape[0]:
        return empty_product(x, weight, activation, dtype)
    if x.dtype == torch.int8:
        y = torch._int_mm(x, weight.mT) * x_scales[:, None] * w_scales  # pyright: ignore[reportPrivateImportUsage]
    else:
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        y = multiply(x, weight.mT, x_scales[:, None], w_scales[None], out_dtype=torch.bfloat16).float()
    return finished(y, bias, activation, residual).to(dtype)


scaled_linear_op = Op(
    name="scaled_linear",
    reference=_reference,
    problem=lambda x, weight, x_scales, w_scales, bias, act, residual, *_: problem_of(x, weight, bias, act, residual),
    cost=product_cost,
    examples=EXAMPLES,
    make=scaled_linear_arguments,
    rows_in_problem=True,
    impls=(
        Impl(name="sm90", launch=_launch_sm90, space=SM90_8BIT_SPACE, written_for=90, refuse=refuse_sm90),
        Impl(name="triton", launch=_launch_triton, space=TRITON_SPACE, refuse=refuse_float8),
        Impl(name="vendor", library=True, launch=_launch_vendor, refuse=_refuse_vendor, extra_roundings=1),
        Impl(
            name="invariant", launch=lambda config, *args: _launch_triton(_ONE_CONFIG, *args), refuse=refuse_float8,
            batch_invariant=True,
        ),
    ),
)  # fmt: skip


def scaled_linear(
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
    """activation((x @ weight^T) * x_scales * w_scales + bias) + residual.

    Args:
        x: [M, K], int8, float8_e4m3fn or float8_e5m2, dense along K.
        weight: [N, K] of the same dtype, dense along K.
        x_scales: [M], float32.
        w_scales: [N], float32.
        bias: [N] of `dtype` or float32.
        activation: none, relu, gelu, gelu_tanh, silu; or silu_mul, gelu_mul, where the weight is [2F, K], gate half first.
        residual: the shape of the output, of `dtype`; added last.
        dtype: of the output, bf16 or fp16; on a CPU, where the reference runs, also fp32.
        chained: a hint that the preceding launch is the quantiser that wrote x. It does not change the result.

    Returns:
        [M, N] ([M, F] with silu_mul and gelu_mul), contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the activation is unknown.
    """
    if x.dtype == torch.int8 and x.dim() == 2 and x.shape[1] > LONGEST:
        raise ValueError(f"scaled_linear: K must be at most {LONGEST}, or an int32 could overflow; got {x.shape[1]}")
    check_product("scaled_linear", (torch.int8, *FLOAT8), x, weight, bias, activation, residual, dtype)
    for name, t, rows in (("x_scales", x_scales, x.shape[0]), ("w_scales", w_scales, weight.shape[0])):
        check_tensor("scaled_linear", name, t, ((rows,),), (torch.float32,), x, contiguous=True)
    residual = dense_along_columns(residual)
    return scaled_linear_op(x, weight, x_scales, w_scales, bias, activation, residual, dtype, chained)
