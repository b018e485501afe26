"""Grouped products of float8 matrices with scales along K: the experts of a mixture, quantised in blocks.

    y[r] = activation(the sum over blocks b of 128 columns: x_scales[r, b] * w_scales[e, n, b] * (x[r, b] . weight[e, n, b]) +
    bias[e])

    x [R, K] with rows sorted by expert and offsets [X + 1], or [X, M, K] and counts [X], as in `grouped_linear`; weight
    [X, N, K]; both float8_e4m3fn or float8_e5m2, of the same dtype, dense along K. x_scales [R, K / 128] or [X, M, K / 128],
    w_scales [X, N / 128, K / 128], one per 128 x 128 elements; scales are float32, quotients are rounded up. bias [X, N] of
    `dtype` -> y [R, N] or [X, M, N] of `dtype`, bf16 or fp16; on a CPU, where the reference runs, also float32

Blocks are added in float32. The tensor cores themselves add only within a block, of at most 128 products (quantized/
block_scaled.py). The epilogue is float32, with one rounding at the end. Rows that belong to no expert are zeros. Bounds are
read on the device, and clamped to the existing rows. Activations are those of `grouped_linear`.

    triton      from sm_89 on
    sm90        Hopper: Gluon, persistent, on the schedule of hopper/groups.py
    invariant   `triton` with one config for every number of rows

With 32 rows per expert and more, `sm90` is preferred, with fewer `triton`. Not supported: gradients, gathered rows, other block
sizes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.gemm.grouped.block_scaled_sm90 import (
    BLOCK_SM90_SPACE,
    GroupedBlockProblem,
    launch_grouped_block_sm90,
    refuse_block_sm90,
)
from tilewright.kernels.gemm.grouped.inputs import grouped_block_arguments
from tilewright.kernels.gemm.grouped.linear import check_shapes, grouped_linear_op
from tilewright.kernels.gemm.grouped.problem import (
    GROUPED_ACTIVATIONS,
    LARGEST_BUCKET,
    finish_rows,
    group_of,
    most_tiles,
)
from tilewright.kernels.gemm.grouped.work import group_sizes
from tilewright.kernels.gemm.problem import weight_rows
from tilewright.kernels.gemm.quantized_operands import FLOAT8, check_output, refuse_float8
from tilewright.kernels.gemm.tile import grouped
from tilewright.kernels.launch.shapes import ceil_div, check_tensor, next_pow2
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["grouped_block_scaled_linear", "grouped_block_scaled_linear_op"]


def _reference(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    dtype: torch.dtype, clear: bool = True,
) -> Tensor:  # fmt: skip
    wide, n, k = x_scales.dtype, weight.shape[1], x.shape[-1]
    rows = x.to(wide) * x_scales.repeat_interleave(128, -1)[..., :k]
    scales = w_scales.repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :k]
    more = None if bias is None else bias.to(wide)
    y = grouped_linear_op.reference(rows, weight.to(wide) * scales, bounds, more, activation, None, 1)
    return y if wide == torch.float64 else y.to(dtype)


def _empty(x: Tensor, weight: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    n = weight.shape[1] // 2 if GROUPED_ACTIVATIONS[activation][1] else weight.shape[1]
    return torch.empty((*x.shape[:-1], n), dtype=dtype, device=x.device)


def _fake(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    dtype: torch.dtype, clear: bool = True,
) -> Tensor:  # fmt: skip
    return _empty(x, weight, activation, dtype)


# ---- problem, cost, examples


def _problem(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, *_: Any
) -> GroupedBlockProblem:
    rows = x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0]
    places = x.data_ptr() | weight.data_ptr() | x.stride(-2) | weight.stride(1)
    return GroupedBlockProblem(
        x.dtype,
        min(next_pow2(rows), LARGEST_BUCKET),
        *weight.shape,
        activation,
        bias is not None,
        x.dim() == 3,
        places % 16 == 0 and (x.dim() == 2 or x.stride(0) == x.shape[1] * x.stride(1)),
        weight.stride(0) == weight.shape[1] * weight.stride(1),
    )


def _cost(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    dtype: torch.dtype, clear: bool = True,
) -> Cost:  # fmt: skip
    n, k = weight.shape[1:]
    sizes = group_sizes(x, bounds, weight.shape[0], None)
    rows, active = sum(sizes), sum(size > 0 for size in sizes)
    lead = x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0]
    out = (lead if clear else rows) * (n // 2 if GROUPED_ACTIVATIONS[activation][1] else n) * dtype.itemsize
    scales = 4 * ceil_div(k, 128) * (rows + active * ceil_div(n, 128))
    moved = rows * k + active * n * (k + (0 if bias is None else bias.element_size())) + scales + out
    return Cost(flops=2 * rows * n * k, bytes=moved + bounds.nbytes)


_example = Example.sized(grouped_block_arguments)
EXAMPLES = (
    _example("rows", 3, 90, 160, 256, skew="random"),
    _example("decode", 4, 5, 64, 128, skew="random", bias=True),
    _example("gated", 2, 70, 256, 128, activation="silu_mul", out=torch.float16),
    _example("ragged", 3, 33, 75, 300, skew="random", activation="gelu"),
    _example("clamped", 2, 20, 96, 128, activation="clamped_silu_mul", bias=True),
    _example("masked", 3, 60, 72, 192, layout="masked", bias=True),
    _example("tail", 2, 40, 48, 64, skew="tail", dtype=torch.float8_e5m2),
    _example("no rows", 2, 0, 16, 32),
    _example("no k", 2, 3, 8, 0, bias=True),
)

# ---- triton

_BLOCK_K = 128
# The most rows per expert for which a tile is used, and the tile: BLOCK_M, BLOCK_N, num_warps, num_stages
_TILES = ((16, (16, 64, 4, 4)), (64, (64, 128, 4, 4)), (1 << 30, (128, 128, 8, 4)))


def _smem_bytes(c: Config) -> int:
    return (c["BLOCK_M"] + c["BLOCK_N"]) * _BLOCK_K * c["num_stages"]


def _default(device: Device, problem: GroupedBlockProblem) -> Config:
    tile = next(tile for most, tile in _TILES if problem.rows_each <= most)
    config: dict[str, int] = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), tile, strict=True))
    while _smem_bytes(config) > device.smem_bytes and config["num_stages"] > 2:
        config["num_stages"] -= 1
    return config


def _config_refusal(device: Device, problem: GroupedBlockProblem, c: Config) -> str | None:
    if _smem_bytes(c) > device.smem_bytes:
        return "more shared memory than the device has"
    # The product of a block needs registers in addition to the accumulators.
    accumulators = c["BLOCK_M"] * c["BLOCK_N"] // (32 * c["num_warps"])
    if not 8 <= accumulators <= 64:
        return "not a supported tile: too many accumulators per thread for the registers, or too few for its warps"
    if c["BLOCK_M"] > max(16, 2 * problem.rows_each):
        return "BLOCK_M is at least twice the number of rows per expert"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (16, 64, 128), "BLOCK_N": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)},
    refusal=_config_refusal,
)


@triton.jit(do_not_specialize=["R", "M", "xs_m_stride", "xs_k_stride"])
def _block_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bounds_ptr, bias_ptr, y_ptr, R, M, X, N, K, x_stride, w_x_stride, w_n_stride,
    xs_m_stride, xs_k_stride, ws_x_stride, ws_n_stride, ws_k_stride,
    MASKED: tl.constexpr, CLEAR: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BLOCK_N)
    expert, tile, high, first, end, limit = group_of(
        bounds_ptr, tl.program_id(0), across, R, X, M, MASKED, BLOCK_M, BLOCK_X
    )  # fmt: skip
    if expert > X:
        return
    if not CLEAR:
        limit = end
    row, col = grouped(tile, high, across, GROUP_M)
    first_row, first_col = first + row * BLOCK_M, col * BLOCK_N
    if first_row >= limit:
        return
    place = tl.minimum(expert, X - 1).to(tl.int64)
    rows = (first_row + tl.arange(0, BLOCK_M))[:, None]
    cols = (first_col + tl.arange(0, BLOCK_N))[:, None]
    ks = tl.arange(0, BLOCK_K)[None, :]
    weights = weight_rows(cols, N, GATED)
    x_ptrs = x_ptr + rows.to(tl.int64) * x_stride + ks
    w_ptrs = w_ptr + place * w_x_stride + weights.to(tl.int64) * w_n_stride + ks
    xs_ptrs = x_scales_ptr + rows.to(tl.int64) * xs_m_stride
    ws_ptrs = w_scales_ptr + place * ws_x_stride + (weights // 128).to(tl.int64) * ws_n_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, tl.where(first_row < end, K, 0), BLOCK_K):
        inside = ks < K - k
        x = tl.load(x_ptrs, mask=(rows < end) & inside, other=0.0)
        w = tl.load(w_ptrs, mask=(cols < N) & inside, other=0.0)
        x_scales = tl.load(xs_ptrs, mask=rows < end, other=0.0)
        w_scales = tl.load(ws_ptrs, mask=cols < N, other=0.0)
        acc += tl.dot(x, tl.trans(w)) * (x_scales * tl.trans(w_scales))
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
        xs_ptrs += xs_k_stride
        ws_ptrs += ws_k_stride
    if bias_ptr is not None:
        bias_ptr += place * N
    finish_rows(acc, y_ptr, bias_ptr, first_row, first_col, end, limit, N, ACTIVATION, GATED)


def _launch(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None,
    activation: str, dtype: torch.dtype, clear: bool = True,
) -> Tensor:  # fmt: skip
    y = _empty(x, weight, activation, dtype)
    if not y.numel():
        return y
    (experts, n, k), masked = weight.shape, x.dim() == 3
    function, gated = GROUPED_ACTIVATIONS[activation]
    each, flat, scales = x.shape[1] if masked else 0, x.flatten(0, -2), x_scales.flatten(0, -2)
    high = experts * ceil_div(each, config["BLOCK_M"]) if masked else most_tiles(x.shape[0], experts, config["BLOCK_M"])
    _block_kernel[(high * ceil_div(n, config["BLOCK_N"]),)](
        flat, weight, scales, w_scales, bounds, bias, y, flat.shape[0], each, experts, n, k, flat.stride(0),
        weight.stride(0), weight.stride(1), *scales.stride(), *w_scales.stride(), MASKED=masked, CLEAR=clear,
        ACTIVATION=function, GATED=gated, BLOCK_X=next_pow2(experts + 1), BLOCK_K=_BLOCK_K, GROUP_M=8, **config,
    )  # fmt: skip
    return y


# Fits every card from sm_89 on.
_ANY_ROWS = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4}


def _launch_sm90(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bounds: Tensor, bias: Tensor | None,
    activation: str, dtype: torch.dtype, clear: bool = True,
) -> Tensor:  # fmt: skip
    y, masked = _empty(x, weight, activation, dtype), x.dim() == 3
    if not y.numel():
        return y
    flat, scales = x.flatten(0, -2), x_scales.flatten(0, -2)
    return launch_grouped_block_sm90(config, y, flat, weight, scales, w_scales, bounds, bias, activation, masked, clear)


# ---- op


def _first(device: Device, problem: GroupedBlockProblem) -> str | None:
    """The implementation to try first.

    H200: sm90 reaches 1,210 T with 4 x 8192 rows by 4096 x 7168, 1,112 T in the masked layout with 256 rows each, and 1,163 T
    with a gate. Microseconds of triton and sm90, 128 experts of 1536 x 2048 with a gate: 8 rows each 110 and 122, 32 rows 127
    and 125, 128 rows 399 and 166.
    """
    return "sm90" if problem.rows_each >= 32 else None


grouped_block_scaled_linear_op = Op(
    name="grouped_block_scaled_linear",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=grouped_block_arguments,
    first=_first,
    fake=_fake,
    rows_in_problem=True,
    impls=(
        Impl(name="triton", launch=_launch, space=SPACE, refuse=refuse_float8),
        Impl(name="sm90", launch=_launch_sm90, space=BLOCK_SM90_SPACE, written_for=90, refuse=refuse_block_sm90),
        Impl(
            name="invariant", launch=lambda config, *args: _launch(_ANY_ROWS, *args), refuse=refuse_float8, batch_invariant=True
        ),
    ),
)  # fmt: skip


def grouped_block_scaled_linear(
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    bounds: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    dtype: torch.dtype = torch.bfloat16,
    clear: bool = True,
) -> Tensor:
    """activation((x * x_scales) @ (weight[e] * w_scales[e])^T + bias[e]), each row by the weight of its expert e.

    Args:
        x: [R, K] sorted by expert, or [X, M, K]; float8_e4m3fn or float8_e5m2, as `quantize_blocks` writes them.
        weight: [X, N, K] of the same dtype, dense along K.
        x_scales: [R, K / 128 rounded up], or [X, M, K / 128], float32.
        w_scales: [X, N / 128, K / 128] rounded up, float32.
        bounds, bias, activation, dtype, clear: as in `grouped_scaled_linear`; so are the result and the errors.
    """
    name = "grouped_block_scaled_linear"
    check_shapes(name, x, weight.shape, bounds, bias, activation)
    if weight.device != x.device:
        raise ValueError(f"{name}: weight must be on the device of x, {x.device}; got {weight.device}")
    if x.dtype not in FLOAT8 or weight.dtype != x.dtype:
        raise ValueError(
            f"{name}: x and weight must be float8_e4m3fn or float8_e5m2, both the same; got {x.dtype}, {weight.dtype}"
        )
    check_output(name, dtype, x)
    if bias is not None and bias.dtype != dtype:
        raise ValueError(f"{name}: bias must be of the output's dtype, {dtype}; got {bias.dtype}")
    blocks = ceil_div(x.shape[-1], 128)
    for what, t, wanted in (
        ("x_scales", x_scales, (*x.shape[:-1], blocks)),
        ("w_scales", w_scales, (weight.shape[0], ceil_div(weight.shape[1], 128), blocks)),
    ):
        check_tensor(name, what, t, (wanted,), (torch.float32,), x, why=", a scale for each 128 of K")
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    bias = None if bias is None else bias.contiguous()
    return grouped_block_scaled_linear_op(x, weight, x_scales, w_scales, bounds, bias, activation, dtype, clear)
