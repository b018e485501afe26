"""Grouped products of 8-bit matrices with a scale per row of both, for experts whose time is set by the tensor cores.

    y[r] = activation((x[r] @ weight[e]^T) * x_scales[r] * w_scales[e] + bias[e])        for the rows r of expert e

x [R, K], [T, K] with an order, or [X, M, K], and weight [X, N, K], int8, float8_e4m3fn or float8_e5m2, of the same dtype, dense
along K; x_scales in x's shape without K, w_scales [X, N], float32; bounds, order and `chosen` as in `grouped_linear`
-> y [R, N] or [X, M, N] of `dtype`, bf16 or fp16

Sums are those of `scaled_linear`: int8 is summed exactly, in int32, with K at most 131,072; float8 is added in float32 after at
most 128 products. The epilogue is float32, with one rounding at the end. Rows that belong to no expert are zeros.

    triton      from sm_80 on for int8, from sm_89 on for float8
    invariant   `triton` with one config for every number of rows

Nothing was measured yet. Not supported: gradients, zero points, scales along K (block_scaled.py has those).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.gemm.grouped.codes import (
    GroupedCodesProblem,
    check_codes,
    codes_cost,
    codes_problem,
    empty_rows,
    programs,
)
from tilewright.kernels.gemm.grouped.inputs import grouped_scaled_arguments
from tilewright.kernels.gemm.grouped.problem import GROUPED_ACTIVATIONS, finish_rows, group_of, grouped_activated
from tilewright.kernels.gemm.grouped.work import group_places
from tilewright.kernels.gemm.problem import weight_rows
from tilewright.kernels.gemm.quantized.row_scaled import LONGEST, scaled_linear_op
from tilewright.kernels.gemm.quantized_operands import FLOAT8, check_output, refuse_float8
from tilewright.kernels.gemm.tile import grouped
from tilewright.kernels.gemm.weight_only.problem import FORMATS
from tilewright.kernels.launch.shapes import check_tensor, next_pow2
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["grouped_scaled_linear", "grouped_scaled_linear_op"]


def _reference(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, dtype: torch.dtype, clear: bool = True,
) -> Tensor:  # fmt: skip
    wide = x_scales.dtype
    y = empty_rows(x, weight, activation, order, wide if wide == torch.float64 else dtype).zero_()
    if not y.numel():
        return y
    if order is not None:
        sources = (order.long() // chosen).clamp(0, x.shape[0] - 1)
        x, x_scales = x[sources], x_scales[sources]
    for e, at in group_places(x, bounds, weight.shape[0]):
        more = None if bias is None else bias[e].to(wide)
        z = scaled_linear_op.reference(x[at], weight[e], x_scales[at], w_scales[e], more, "none", None, wide)
        y[at] = grouped_activated(z, activation).to(y.dtype)
    return y


def _fake(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, dtype: torch.dtype, clear: bool = True,
) -> Tensor:  # fmt: skip
    return empty_rows(x, weight, activation, order, dtype)


# ---- problem, cost, examples


def _problem(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, dtype: torch.dtype, clear: bool = True,
) -> GroupedCodesProblem:  # fmt: skip
    return codes_problem(x, weight, bias, activation, order, FORMATS[weight.dtype])


def _cost(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, dtype: torch.dtype, clear: bool = True,
) -> Cost:  # fmt: skip
    cost = codes_cost(x, weight, (w_scales,), bounds, bias, activation, order, chosen, clear, dtype)
    return Cost(flops=cost.flops, bytes=cost.bytes + x_scales.nbytes)


def _example(label: str, experts: int, rows: int, n: int, k: int, dtype: torch.dtype = torch.int8, **more: object) -> Example:
    return Example(
        label, lambda inputs: grouped_scaled_arguments(inputs, X=experts, M=rows, N=n, K=k, dtype=dtype, **more)  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


EXAMPLES = (
    _example("rows", 3, 90, 72, 256, skew="random", bias=True),
    _example("decode", 4, 6, 64, 128, chosen=2, skew="random", activation="silu_mul"),
    _example("ragged", 3, 33, 75, 100, skew="random", activation="gelu"),
    _example("gated", 2, 70, 136, 64, activation="gelu_mul", out=torch.float16),
    _example("e4m3", 2, 60, 64, 300, torch.float8_e4m3fn, bias=True, skew="random"),
    _example("clamped", 3, 24, 32, 64, torch.float8_e4m3fn, chosen=2, bias=True, activation="clamped_silu_mul"),
    _example("e5m2", 2, 20, 48, 200, torch.float8_e5m2, activation="relu"),
    _example("masked", 3, 60, 40, 128, layout="masked", activation="silu"),
    _example("tail", 2, 40, 48, 64, skew="tail"),
    _example("no rows", 2, 0, 16, 32),
    _example("no k", 2, 3, 8, 0, bias=True),
)

# ---- triton

_BLOCK_K = 128
# The most rows per expert for which a tile is used, and the tile: BLOCK_M, BLOCK_N, num_warps, num_stages
_TILES = ((16, (16, 64, 4, 4)), (64, (64, 64, 4, 4)), (128, (64, 128, 4, 4)), (1 << 30, (128, 128, 8, 4)))
_LARGE = (128, 256, 8, 3)
"""int8, 128 experts of 1536 x 2048 with 2,048 rows each, H200: 913 T, compared with 727 for (128, 128, 8, 4)."""


def _smem_bytes(c: Config) -> int:
    return (c["BLOCK_M"] + c["BLOCK_N"]) * _BLOCK_K * c["num_stages"]


def _default(device: Device, problem: GroupedCodesProblem) -> Config:
    tile = next(tile for most, tile in _TILES if problem.rows_each <= most)
    if device.multiplies_by_warpgroup and problem.dtype == torch.int8 and problem.rows_each >= 256 and problem.n >= 512:
        tile = _LARGE
    config: Config = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), tile, strict=True))
    while _smem_bytes(config) > device.smem_bytes and config["num_stages"] > 2:
        config["num_stages"] -= 1
    return config


def _config_refusal(device: Device, problem: GroupedCodesProblem, c: Config) -> str | None:
    if _smem_bytes(c) > device.smem_bytes:
        return "more shared memory than the device has"
    # float8 needs the same number of registers again, for the partial sums that are added to the accumulators.
    most = 128 if device.multiplies_by_warpgroup and problem.dtype not in FLOAT8 else 64
    if not 8 <= c["BLOCK_M"] * c["BLOCK_N"] // (32 * c["num_warps"]) <= most:
        return "not a supported tile: too many accumulators per thread for the registers, or too few for its warps"
    if c["BLOCK_M"] > max(16, 2 * problem.rows_each):
        return "BLOCK_M is at least twice the number of rows per expert"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (16, 64, 128), "BLOCK_N": (64, 128, 256), "num_warps": (4, 8), "num_stages": (3, 4)},
    refusal=_config_refusal,
)


@triton.jit(do_not_specialize=["R", "M", "T", "chosen"])
def _grouped_scaled_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bounds_ptr, order_ptr, bias_ptr, y_ptr, R, M, T, X, N, K, chosen,
    x_stride, w_x_stride, w_n_stride,
    MASKED: tl.constexpr, CLEAR: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BLOCK_N)
    expert, tile, high, first, end, limit = group_of(bounds_ptr, tl.program_id(0), across, R, X, M, MASKED, BLOCK_M, BLOCK_X)
    if expert > X:
        return
    if not CLEAR:
        limit = end
    row, col = grouped(tile, high, across, GROUP_M)
    first_row, first_col = first + row * BLOCK_M, col * BLOCK_N
    if first_row >= limit:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    live = (rows < end)[:, None]
    if order_ptr is not None:
        source = tl.load(order_ptr + rows, mask=rows < end, other=0) // chosen
        rows = tl.minimum(tl.maximum(source, 0), T - 1)
    place = tl.minimum(expert, X - 1).to(tl.int64)
    cols = (first_col + tl.arange(0, BLOCK_N))[:, None]
    ks = tl.arange(0, BLOCK_K)[None, :]
    weights = weight_rows(cols, N, GATED)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + ks
    w_ptrs = w_ptr + place * w_x_stride + weights.to(tl.int64) * w_n_stride + ks
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32)
    for k in range(0, tl.where(first_row < end, K, 0), BLOCK_K):
        inside = ks < K - k
        x = tl.load(x_ptrs, mask=live & inside, other=0.0)
        w = tl.load(w_ptrs, mask=(cols < N) & inside, other=0.0)
        if x_ptr.dtype.element_ty.is_fp8():
            acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    x_scales = tl.load(x_scales_ptr + rows[:, None], mask=live, other=0.0)
    w_scales = tl.load(w_scales_ptr + place * N + weights, mask=cols < N, other=0.0)
    y = acc.to(tl.float32) * x_scales * tl.trans(w_scales)
    if bias_ptr is not None:
        bias_ptr += place * N
    finish_rows(y, y_ptr, bias_ptr, first_row, first_col, end, limit, N, ACTIVATION, GATED)


def _launch(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None,
    activation: str, order: Tensor | None, chosen: int, dtype: torch.dtype, clear: bool = True,
) -> Tensor:  # fmt: skip
    y = empty_rows(x, weight, activation, order, dtype)
    if not y.numel():
        return y
    function, gated = GROUPED_ACTIVATIONS[activation]
    (experts, n, k), masked = weight.shape, x.dim() == 3
    _grouped_scaled_kernel[(programs(y, experts, n, config),)](
        x, weight, x_scales, w_scales, bounds, order, bias, y, y.numel() // y.shape[-1], x.shape[1] if masked else 0,
        x.shape[0], experts, n, k, chosen, x.stride(-2), weight.stride(0), weight.stride(1), MASKED=masked, CLEAR=clear,
        ACTIVATION=function, GATED=gated, BLOCK_X=next_pow2(experts + 1), BLOCK_K=_BLOCK_K, GROUP_M=8, **config,
    )  # fmt: skip
    return y


# Fits every card from sm_80 on.
_ANY_ROWS: Config = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4}


grouped_scaled_linear_op = Op(
    name="grouped_scaled_linear",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=grouped_scaled_arguments,
    fake=_fake,
    rows_in_problem=True,
    impls=(
        Impl(name="triton", launch=_launch, space=SPACE, refuse=refuse_float8),
        Impl(
            name="invariant", launch=lambda config, *args: _launch(_ANY_ROWS, *args), refuse=refuse_float8, batch_invariant=True
        ),
    ),
)  # fmt: skip


def grouped_scaled_linear(
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    bounds: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    order: Tensor | None = None,
    chosen: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    clear: bool = True,
) -> Tensor:
    """activation((x @ weight[e]^T) * x_scales * w_scales[e] + bias[e]), each row by the weight of its expert e.

    Args:
        x: [R, K] sorted by expert, [T, K] with an order, or [X, M, K]; int8, float8_e4m3fn or float8_e5m2, as `quantize_rows`
            writes them.
        weight: [X, N, K] of the same dtype, dense along K.
        x_scales: [R], [T] or [X, M], float32, contiguous.
        w_scales: [X, N], float32, contiguous.
        bounds: int32; offsets [X + 1] of sorted rows, or counts [X].
        bias: [X, N] of `dtype`.
        activation: those of `grouped_linear`.
        order: [R] int32, row r is x[order[r] // chosen].
        chosen: the number of experts per token.
        dtype: of the output, bf16 or fp16; on a CPU also float32.
        clear: whether rows that belong to no expert are set to zero; otherwise their contents are undefined.

    Returns:
        [R, N] or [X, M, N] (half as wide with a gate).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the activation is unknown.
    """
    name = "grouped_scaled_linear"
    if x.dtype not in (torch.int8, *FLOAT8) or weight.dtype != x.dtype:
        raise ValueError(
            f"{name}: x and weight must be int8, float8_e4m3fn or float8_e5m2, both the same; got {x.dtype}, {weight.dtype}"
        )
    check_output(name, dtype, x)
    check_codes(name, x, weight, bounds, bias, activation, order, chosen, dtype)
    if x.dtype == torch.int8 and x.shape[-1] > LONGEST:
        raise ValueError(f"{name}: K must be at most {LONGEST}, or an int32 could overflow; got {x.shape[-1]}")
    for what, t, wanted in (("x_scales", x_scales, x.shape[:-1]), ("w_scales", w_scales, weight.shape[:2])):
        check_tensor(name, what, t, (wanted,), (torch.float32,), x, contiguous=True)
    bias = None if bias is None else bias.contiguous()
    return grouped_scaled_linear_op(x, weight, x_scales, w_scales, bounds, bias, activation, order, chosen, dtype, clear)
