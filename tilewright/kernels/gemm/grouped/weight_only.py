"""Grouped products of 16-bit activations with quantised weights of 8 or 4 bits, for experts limited by memory bandwidth.

    y[r] = activation(x[r] @ W[e]^T + bias[e])        for the rows r of expert e;    W = (code - zero) * scale

x, bounds, order and `chosen` are those of `grouped_linear`: sorted, gathered or masked rows, bf16 or fp16. The weight of each
expert has the form that `mixed_linear` accepts: codes [X, N, K] int8, float8_e4m3fn or float8_e5m2, or int4 in uint8
[X, N, 64 * ceil(K / 128)] in the order of weight_only/int4_layout.py; scales float32 [X, N], or
[X, N / block_rows, K / block_cols] rounded up; zeros in the shape of scales, for int4 -> y [R, N] or [X, M, N]

A code is exact in 16 bits. As in `triton` of `mixed_linear`, its scale multiplies the float32 sums of a row or a block, or the
code if blocks are shorter than a step. The result is rounded once, at the end. Rows that belong to no expert are zeros. The
bounds are read on the device: nothing waits for the host. With few rows per expert, reading the codes of the chosen experts
sets the time. For int4, x is copied first, with its columns in the order of the codes in a word. Then a thread can unpack its
words without data from other threads.

    triton      any card
    invariant   `triton` with one config for every number of rows

Nothing was measured yet. Not supported: gradients, float32 beyond the definition.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.grouped.codes import (
    GroupedCodesProblem,
    check_codes,
    codes_cost,
    codes_problem,
    empty_rows,
    programs,
)
from tilewright.kernels.gemm.grouped.inputs import grouped_mixed_arguments
from tilewright.kernels.gemm.grouped.problem import GROUPED_ACTIVATIONS, finish_rows, group_of, grouped_activated
from tilewright.kernels.gemm.grouped.work import group_places
from tilewright.kernels.gemm.problem import weight_rows
from tilewright.kernels.gemm.tile import grouped
from tilewright.kernels.gemm.weight_only.int4_layout import CHUNK
from tilewright.kernels.gemm.weight_only.linear import mixed_linear_op
from tilewright.kernels.gemm.weight_only.problem import FORMATS, as_units, block_k, load_blocks, load_codes
from tilewright.kernels.launch.shapes import check_tensor, next_pow2
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["grouped_mixed_linear", "grouped_mixed_linear_op"]


def _reference(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, block_rows: int, block_cols: int, clear: bool = True,
) -> Tensor:  # fmt: skip
    y = empty_rows(x, codes, activation, order, x.dtype).zero_()
    if not y.numel():
        return y
    if order is not None:
        x = x[(order.long() // chosen).clamp(0, x.shape[0] - 1)]
    for e, at in group_places(x, bounds, codes.shape[0]):
        own = (None if t is None else t[e] for t in (zeros, bias))
        zero, more = next(own), next(own)
        rows, more = x[at].to(scales.dtype), None if more is None else more.to(scales.dtype)
        z = mixed_linear_op.reference(rows, codes[e], scales[e], zero, more, "none", None, block_rows, block_cols)
        y[at] = grouped_activated(z, activation).to(y.dtype)
    return y


def _fake(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, block_rows: int, block_cols: int, clear: bool = True,
) -> Tensor:  # fmt: skip
    return empty_rows(x, codes, activation, order, x.dtype)


# ---- problem, cost, examples


def _problem(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, block_rows: int, block_cols: int, clear: bool = True,
) -> GroupedCodesProblem:  # fmt: skip
    format = FORMATS[codes.dtype]
    return codes_problem(x, codes, bias, activation, order, format, block_rows, block_cols, zeros is not None)


def _cost(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, block_rows: int, block_cols: int, clear: bool = True,
) -> Cost:  # fmt: skip
    return codes_cost(x, codes, (scales, zeros), bounds, bias, activation, order, chosen, clear, x.dtype)


def _example(label: str, experts: int, rows: int, n: int, k: int, format: str, **more: object) -> Example:
    return Example(
        label, lambda inputs: grouped_mixed_arguments(inputs, X=experts, M=rows, N=n, K=k, format=format, **more)  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


EXAMPLES = (
    _example("decode", 5, 4, 48, 256, "int4", group=128, zeros=True, chosen=4, skew="random", activation="silu_mul"),
    _example("decode int8", 4, 6, 40, 136, "int8", chosen=2, skew="random", bias=True),
    _example("rows", 3, 90, 72, 128, "int4", group=32, bias=True, activation="gelu", dtype=torch.float16),
    _example("by rows", 2, 41, 40, 64, "int4", activation="relu", skew="random"),
    _example("gated int8", 3, 70, 64, 160, "int8", activation="gelu_mul"),
    _example("blocks", 2, 40, 130, 200, "e4m3", group=128, block_rows=128, skew="random"),
    _example("e5m2", 2, 12, 24, 96, "e5m2", dtype=torch.float16, activation="silu"),
    _example("clamped", 3, 24, 32, 64, "int8", chosen=2, bias=True, activation="clamped_silu_mul"),
    _example("masked", 3, 60, 40, 128, "int4", group=64, zeros=True, layout="masked", activation="silu_mul"),
    _example("tail", 3, 40, 33, 75, "int8", skew="tail", layout="sorted"),
    _example("no rows", 2, 0, 16, 32, "int8"),
    _example("no k", 2, 5, 8, 0, "int8", bias=True),
)

# ---- triton


def _refuse(device: Device, problem: GroupedCodesProblem) -> str | None:
    return f"does not support {problem.dtype}" if problem.dtype.itemsize != 2 else None


# The most rows per expert for which a tile is used, and the tile: BLOCK_M, BLOCK_N, num_warps
_TILES = ((16, (16, 64, 4)), (32, (32, 64, 4)), (64, (64, 64, 4)), (128, (64, 128, 4)), (1 << 30, (128, 128, 8)))
_SHAPES = tuple(tile for _, tile in _TILES)


def _default(device: Device, problem: GroupedCodesProblem) -> Config:
    most = 2 if problem.format == "int4" else 4
    tile = next(t for i, (rows, t) in enumerate(_TILES) if problem.rows_each <= rows or i == most)
    return {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "num_warps": tile[2], "num_stages": 3}


def _config_refusal(device: Device, problem: GroupedCodesProblem, c: Config) -> str | None:
    if (c["BLOCK_M"], c["BLOCK_N"], c["num_warps"]) not in _SHAPES:
        return "not a supported tile: too many accumulators per thread for the registers, or too few for its warps"
    if problem.format == "int4" and c["BLOCK_N"] > 64:
        return "int4 needs BLOCK_N of at most 64: the float32 values of a chunk of 128 columns fill the registers"
    if c["BLOCK_M"] > max(16, 2 * problem.rows_each):
        return "BLOCK_M is at least twice the number of rows per expert"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (16, 32, 64, 128), "BLOCK_N": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)},
    refusal=_config_refusal,
)


_MAGIC = tl.constexpr(8388608.0)
"""2^23. Float32 values with this exponent have a spacing of 1, so a code in the low bits of the mantissa adds its value."""


def _in_order_of_words(x: Tensor) -> Tensor:
    """x [..., K] with its columns in the order of int4 words (int4_layout.py), padded with zeros to whole chunks."""
    chunks = F.pad(x, (0, -x.shape[-1] % CHUNK)).unflatten(-1, (-1, 4, 4, 4, 2))  # c, i, t, j of column 32 c + 8 i + 2 t + j
    return chunks.movedim(-2, -4).flatten(-5)  # t, c, i, j


@triton.jit
def _load_codes(w_ptrs, live, k, K, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """As `load_codes`, but int4 codes keep the order of the words, so that no data moves between threads; `_MAGIC` is added."""
    if FORMAT == "int4":
        words = tl.load(w_ptrs + k // 8, mask=live, other=0)
        # The code of i and j is at bits 4 i + 16 j. After the joins, the last dimensions are i / 2, i % 2 and j.
        evens = tl.join(tl.join(words, words >> 8), tl.join(words >> 4, words >> 12))
        odds = tl.join(tl.join(words >> 16, words >> 24), tl.join(words >> 20, words >> 28))
        codes = tl.join(evens, odds) & 15 | 0x4B000000
        return tl.reshape(codes, [BLOCK_N, BLOCK_K]).to(tl.float32, bitcast=True)
    else:
        return load_codes(w_ptrs, live, k, K, FORMAT, BLOCK_N, BLOCK_K)


@triton.jit
def _load_blocks(
    ptr, blocks, live, k, K, other: tl.constexpr, FORMAT: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`load_blocks` for tiles of `_load_codes`."""
    if FORMAT == "int4" and ptr is not None and BLOCK_COLS > 0 and BLOCK_COLS < BLOCK_K:
        first = k + tl.arange(0, 4)[None, :] * 32
        each = tl.load(ptr + blocks + first // BLOCK_COLS, mask=live & (first < K), other=other)
        return tl.reshape(tl.broadcast_to(each[:, None, :, None], [BLOCK_N, 4, 4, 8]), [BLOCK_N, BLOCK_K])
    else:
        return load_blocks(ptr, blocks, live, k, K, other, BLOCK_COLS, BLOCK_N, BLOCK_K)


@triton.jit
def _walk_codes(
    x_ptrs, w_ptrs, scales_ptr, zeros_ptr, blocks, row_live, col_live, K, FORMAT: tl.constexpr, BLOCK_COLS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The float32 tile of W @ x^T, transposed. W is the tall operand, which sm_90's tensor cores can read from registers."""
    # The scale of a group of columns multiplies the weight if the group is shorter than a step, otherwise the sums.
    SHORT: tl.constexpr = BLOCK_COLS > 0 and BLOCK_COLS < BLOCK_K
    ks = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, K, BLOCK_K):
        if FORMAT == "int4":  # x is padded with zeros
            x = tl.load(x_ptrs + k, mask=row_live, other=0.0)
        else:
            x = tl.load(x_ptrs + k, mask=row_live & (ks < K - k), other=0.0)
        w = _load_codes(w_ptrs, col_live, k, K, FORMAT, BLOCK_N, BLOCK_K)
        if FORMAT == "int4":
            zero = _load_blocks(zeros_ptr, blocks, col_live, k, K, 8, FORMAT, BLOCK_COLS, BLOCK_N, BLOCK_K).to(tl.float32)
            w -= zero + _MAGIC
        if SHORT:
            w *= _load_blocks(scales_ptr, blocks, col_live, k, K, 1.0, FORMAT, BLOCK_COLS, BLOCK_N, BLOCK_K)
        if BLOCK_COLS and not SHORT:
            part = dot(w.to(x.dtype), tl.trans(x), tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
            acc += part * load_blocks(scales_ptr, blocks, col_live, k, K, 1.0, BLOCK_COLS, BLOCK_N, BLOCK_K)
        else:
            acc = dot(w.to(x.dtype), tl.trans(x), acc)
    if BLOCK_COLS == 0:
        acc *= tl.load(scales_ptr + blocks, mask=col_live, other=0.0)
    return tl.trans(acc)


@triton.jit(do_not_specialize=["R", "M", "T", "chosen"])
def _grouped_mixed_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bounds_ptr, order_ptr, bias_ptr, y_ptr, R, M, T, X, N, K, chosen,
    x_stride, w_x_stride, w_n_stride, s_x_stride, s_n_stride,
    MASKED: tl.constexpr, CLEAR: tl.constexpr, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
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
    live = rows < end
    if order_ptr is not None:
        source = tl.load(order_ptr + rows, mask=live, other=0) // chosen
        rows = tl.minimum(tl.maximum(source, 0), T - 1)
    place = tl.minimum(expert, X - 1).to(tl.int64)
    cols = (first_col + tl.arange(0, BLOCK_N))[:, None]
    weights = weight_rows(cols, N, GATED)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + tl.arange(0, BLOCK_K)[None, :]
    units = tl.arange(0, BLOCK_K // 8 if FORMAT == "int4" else BLOCK_K)[None, :]
    w_ptrs = w_ptr + place * w_x_stride + weights.to(tl.int64) * w_n_stride + units
    if zeros_ptr is not None:
        zeros_ptr += place * s_x_stride
    acc = _walk_codes(
        x_ptrs, w_ptrs, scales_ptr + place * s_x_stride, zeros_ptr, weights // BLOCK_ROWS * s_n_stride, live[:, None],
        cols < N, tl.where(first_row < end, K, 0), FORMAT, BLOCK_COLS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptr += place * N
    finish_rows(acc, y_ptr, bias_ptr, first_row, first_col, end, limit, N, ACTIVATION, GATED)


def _launch(
    config: Config, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bounds: Tensor, bias: Tensor | None,
    activation: str, order: Tensor | None, chosen: int, block_rows: int, block_cols: int, clear: bool = True,
) -> Tensor:  # fmt: skip
    y = empty_rows(x, codes, activation, order, x.dtype)
    if not y.numel():
        return y
    function, gated = GROUPED_ACTIVATIONS[activation]
    (experts, n), k, masked, format = codes.shape[:2], x.shape[-1], x.dim() == 3, FORMATS[codes.dtype]
    units = as_units(codes)
    if format == "int4":
        x = _in_order_of_words(x)
    _grouped_mixed_kernel[(programs(y, experts, n, config),)](
        x, units, scales, zeros, bounds, order, bias, y, y.numel() // y.shape[-1], x.shape[1] if masked else 0, x.shape[0],
        experts, n, k, chosen, x.stride(-2), units.stride(0), units.stride(1), scales.stride(0), scales.stride(1),
        MASKED=masked, CLEAR=clear, FORMAT=format, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, ACTIVATION=function,
        GATED=gated, BLOCK_X=next_pow2(experts + 1), BLOCK_K=block_k(format, block_cols), GROUP_M=8, **config,
    )  # fmt: skip
    return y


_ANY_ROWS: Config = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


grouped_mixed_linear_op = Op(
    name="grouped_mixed_linear",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=grouped_mixed_arguments,
    fake=_fake,
    rows_in_problem=True,
    impls=(
        Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse),
        Impl(
            name="invariant", launch=lambda config, *args: _launch(_ANY_ROWS, *args), refuse=_refuse, batch_invariant=True
        ),
    ),
)  # fmt: skip


def grouped_mixed_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bounds: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    order: Tensor | None = None,
    chosen: int = 1,
    block_rows: int = 1,
    block_cols: int = 0,
    clear: bool = True,
) -> Tensor:
    """activation(x @ W[e]^T + bias[e]), each row by the weight of its expert e, W = (code - zero) * scale.

    Args:
        x: [R, K] sorted by expert, [T, K] with an order, or [X, M, K]; bf16 or fp16 (on a CPU fp32 too), dense along K.
        codes: [X, N, K] int8, float8_e4m3fn or float8_e5m2, dense along K; or int4, uint8 [X, N, 64 * ceil(K / 128)],
            contiguous, which `int4_layout.prepare` makes from the result of `formats.pack_int4`.
        scales: float32, contiguous: [X, N] with block_cols 0, otherwise [X, N / block_rows, K / block_cols], rounded up.
        zeros: uint8 in the shape of scales, only for int4 codes; None means 8.
        bounds, bias, activation, order, chosen, clear: as in `grouped_scaled_linear`; bias of x's dtype.
        block_rows: rows of W that share a scale: 1, or 128 together with block_cols 128.
        block_cols: columns of W that share a scale: 32, 64, 128, or 0 for all.

    Returns:
        [R, N] or [X, M, N] (half as wide with a gate) of x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, int4's group does not divide K, or the activation is unknown.
    """
    name = "grouped_mixed_linear"
    if codes.dtype not in FORMATS or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"{name}: x must be bfloat16 or float16 and codes int8, float8_e4m3fn, float8_e5m2 or uint8 (two int4 per byte); "
            f"got {x.dtype} and {codes.dtype}"
        )
    check_codes(name, x, codes, bounds, bias, activation, order, chosen, x.dtype, packed=codes.dtype == torch.uint8)
    _check_blocks(name, x, codes, scales, zeros, block_rows, block_cols)
    bias = None if bias is None else bias.contiguous()
    return grouped_mixed_linear_op(
        x, codes, scales, zeros, bounds, bias, activation, order, chosen, block_rows, block_cols, clear
    )


def _check_blocks(
    name: str, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, block_rows: int, block_cols: int
) -> None:
    """Raise ValueError unless scales and zero points fit the codes and the block."""
    if (block_rows, block_cols) not in {(1, 0), (128, 128), (1, 32), (1, 64), (1, 128)}:
        raise ValueError(
            f"{name}: a scale is for a row (block_rows 1, block_cols 0), for 32, 64 or 128 columns of one, or for 128 x 128; "
            f"got block_rows {block_rows}, block_cols {block_cols}"
        )
    (experts, n), k, packed = codes.shape[:2], x.shape[-1], codes.dtype == torch.uint8
    if packed and ((block_cols and k % block_cols) or not codes.is_contiguous()):
        raise ValueError(f"{name}: int4 codes must be contiguous, and their group size {block_cols} must divide K; got K = {k}")
    if zeros is not None and not packed:
        raise ValueError(f"{name}: only int4 codes have zero points; got zeros with {codes.dtype}")
    wanted = (experts, -(-n // block_rows), -(-k // block_cols)) if block_cols else (experts, n)
    for what, t, dtype in (("scales", scales, torch.float32), ("zeros", zeros, torch.uint8)):
        check_tensor(name, what, t, (wanted,), (dtype,), x, contiguous=True)
