"""Quantises a matrix and its transpose in one operation. A training step needs both forms of a weight: the forward pass uses
its quantised values (codes) by rows, the backward pass by columns.

    q, scale = quantize(x),  qt, scale_t = quantize(x^T),  quantize: `quantize_rows` (per "row") or `quantize_tensor` ("tensor")

    x: [N, K] of bf16, fp16 or fp32; q: [N, K] and qt: [K, N] of int8, fp8 e4m3fn or e5m2; scale: [N], scale_t: [K], fp32.

The result has the same bits as those two calls of `per_row.py` or `per_tensor.py`, including the padding, but x^T is not
copied. The first launch finds the largest magnitude of each row and each column (or of all of x), tile by tile. A maximum does
not depend on the order, so two runs give the same bits. The second launch reads the tiles again and writes both results of
each. It begins with the last tiles, because these are still in L2.

Limited by bytes. Per row: K elements in, twice, where a part of the second read comes from L2; 2 K bytes out.
Not supported: other numbers of dimensions; a last dimension with a stride other than 1 (the public function copies it first);
fp8 before sm_89.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats import FORMATS
from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.quantize import UNFUSED, encode_tile, magnitude, padded_width, scales_of
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.shapes import ceil_div, rows_of, rows_ready
from tilewright.kernels.quantize.inputs import quantize_both_ways_arguments
from tilewright.kernels.quantize.per_row import (
    ROW_FORMATS,
    Problem,
    check_format,
    format_problem,
    quantize_rows_op,
    refuse_format,
)
from tilewright.kernels.quantize.per_tensor import quantize_tensor_op
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["ONE_WAY", "quantize_both_ways", "quantize_both_ways_op"]

CodedTwice = tuple[Tensor, Tensor, Tensor, Tensor]

ONE_WAY = {"row": quantize_rows_op, "tensor": quantize_tensor_op}
"""`per` -> the op that quantises in this way, without the transpose."""


def _reference(x: Tensor, per: str, format: str) -> CodedTwice:
    one_way = ONE_WAY[per].reference
    return *one_way(x, format), *one_way(x.mT.contiguous(), format)


def _cost(x: Tensor, per: str, format: str) -> Cost:
    return Cost(flops=8 * x.numel(), bytes=2 * x.nbytes + 2 * x.numel() + 4 * sum(x.shape))


# ---- space and examples


def _problem(x: Tensor, per: str, format: str) -> Problem:
    return format_problem(x, format)


def _refusal(device: Device, problem: Problem, c: Config) -> str | None:
    a_thread = c["BLOCK_N"] * c["BLOCK_K"] // (32 * c["num_warps"])
    if not 8 <= a_thread <= 64:
        return f"{a_thread} elements per thread, wanted 8 to 64"
    return None


_SPACE = Space(
    # H100, bf16 to fp8, 3072 x 8192: 52 us, with 8 warps 57. A copy of the codes of both results alone would take 50.
    default=lambda device, problem: {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4},
    axes={"BLOCK_N": (32, 64, 128), "BLOCK_K": (64, 128), "num_warps": (4, 8)},
    refusal=_refusal,
)


@Example.of
def _example(
    inputs: Inputs, per: str, format: str, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16, row_stride: int = 0
) -> tuple[object, ...]:
    return inputs.randn(rows, row_stride or cols, dtype=dtype)[:, :cols], per, format


_EXAMPLES = (
    _example("rows", "row", "fp8", 160, 96),
    _example("ragged", "row", "fp8", 131, 77),
    _example("strided", "row", "int8", 40, 128, dtype=torch.float16, row_stride=192),
    _example("one", "row", "int8", 1, 1, dtype=torch.float32),
    _example("e5m2", "row", "fp8-e5m2", 3, 272),
    _example("tensor", "tensor", "fp8", 160, 96),
    _example("tensor ragged", "tensor", "int8", 5, 301, dtype=torch.float32),
)

# ---- kernels


@triton.jit
def _tile(pid, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows and columns of a tile. Consecutive programs have adjacent columns of the same rows."""
    PER_ROW: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    row = pid // PER_ROW * BLOCK_N + tl.arange(0, BLOCK_N)
    col = pid % PER_ROW * BLOCK_K + tl.arange(0, BLOCK_K)
    return row.to(tl.int64), col


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def _maxima_kernel(
    x_ptr, maxima_ptr, n_rows, x_row_stride, D: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Write the largest magnitudes of columns, then rows, to maxima [D + n_rows], which is zero before.

    WHOLE: the largest magnitude of the matrix, to maxima [1].
    """
    row, col = _tile(tl.program_id(0), D, BLOCK_N, BLOCK_K)
    mask = (row < n_rows)[:, None] & (col < D)[None, :]
    x = tl.load(x_ptr + row_start(row, x_row_stride, D)[:, None] + col[None, :], mask=mask, other=0.0)
    bits = magnitude(x)
    if WHOLE:
        tl.atomic_max(maxima_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
    else:
        tl.atomic_max(maxima_ptr + col, tl.max(bits, axis=0), mask=col < D, sem="relaxed")
        tl.atomic_max(maxima_ptr + D + row, tl.max(bits, axis=1), mask=row < n_rows, sem="relaxed")


@triton.jit(do_not_specialize=["n_rows", "x_row_stride", "qt_units"])
def _codes_kernel(
    x_ptr, maxima_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, n_rows, x_row_stride, qt_units,
    D: tl.constexpr, W: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the codes in rows of W bytes, and those of the transpose in rows of 16 qt_units bytes."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = _tile(pid, D, BLOCK_N, BLOCK_K)
    row_in, col_in = row < n_rows, col < D
    x = tl.load(
        x_ptr + row_start(row, x_row_stride, D)[:, None] + col[None, :], mask=row_in[:, None] & col_in[None, :], other=0.0
    )
    if WHOLE:
        of_all = tl.load(maxima_ptr)
        of_rows, of_cols = tl.zeros([BLOCK_N], tl.int32) + of_all, tl.zeros([BLOCK_K], tl.int32) + of_all
    else:
        of_rows = tl.load(maxima_ptr + D + row, mask=row_in, other=0)
        of_cols = tl.load(maxima_ptr + col, mask=col_in, other=0)
    scale, inverse = scales_of(of_rows, LARGEST)
    q = encode_tile(x, inverse[:, None], dtype)
    tl.store(q_ptr + row[:, None] * W + col[None, :], q, mask=row_in[:, None] & (col < W)[None, :])
    scale_t, inverse_t = scales_of(of_cols, LARGEST)
    qt = encode_tile(x, inverse_t[None, :], dtype)
    # For this store the compiler changes the tile's layout, because here adjacent rows are adjacent bytes.
    qt_width = qt_units * 16
    qt_ptrs = qt_ptr + col.to(tl.int64)[None, :] * qt_width + row[:, None]
    tl.store(qt_ptrs, qt, mask=col_in[None, :] & (row < qt_width)[:, None])
    if pid % ((D + BLOCK_K - 1) // BLOCK_K) == 0:
        tl.store(scale_ptr + row, scale, mask=row_in)
    if pid < (D + BLOCK_K - 1) // BLOCK_K:
        tl.store(scale_t_ptr + col, scale_t, mask=col_in)


# ---- launcher and op


def _launch(config: Config, x: Tensor, per: str, format: str) -> CodedTwice:
    form, (rows, cols) = FORMATS[format], x.shape
    width, width_t = padded_width(cols), padded_width(rows)
    q = torch.empty(rows, width, dtype=form.dtype, device=x.device)
    qt = torch.empty(cols, width_t, dtype=form.dtype, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    scale_t = torch.empty(cols, dtype=torch.float32, device=x.device)
    if x.numel():
        whole = per == "tensor"
        stride = rows_of(x)[1]
        maxima = torch.zeros(1 if whole else cols + rows, dtype=torch.int32, device=x.device)
        # The padding of the last rows and columns is within the last tiles: blocks are multiples of 16.
        grid = (ceil_div(rows, config["BLOCK_N"]) * ceil_div(cols, config["BLOCK_K"]),)
        _maxima_kernel[grid](x, maxima, rows, stride, D=cols, WHOLE=whole, **config)
        _codes_kernel[grid](
            x, maxima, q, scale, qt, scale_t, rows, stride, width_t // 16,
            D=cols, W=width, LARGEST=form.largest, WHOLE=whole, **UNFUSED, **config,
        )  # fmt: skip
    return q[:, :cols], scale, qt[:, :rows], scale_t


quantize_both_ways_op = Op(
    name="quantize_both_ways",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=_EXAMPLES,
    make=quantize_both_ways_arguments,
    impls=(Impl(name="triton", launch=_launch, space=_SPACE, refuse=refuse_format),),
)

# ---- public function


def quantize_both_ways(x: Tensor, format: str = "fp8", per: str = "row") -> CodedTwice:
    """`quantize_rows` or `quantize_tensor` of a matrix and of its transpose, in one operation.

    Args:
        x: [N, K], bf16, fp16 or fp32.
        format: int8, fp8 or fp8-e5m2.
        per: "row" for a scale per row (`quantize_rows`), or "tensor" for a single scale (`quantize_tensor`).

    Returns:
        (codes [N, K], scale [N], codes of the transpose [K, N], its scale [K]). Rows of codes start at multiples of 16 bytes;
        scales are float32.

    Raises:
        ValueError: another format, dtype or `per`, or x is not a matrix.
        Refused: fp8 on a card before sm_89.
    """
    check_format("quantize_both_ways", x, format, ROW_FORMATS)
    if x.dim() != 2:
        raise ValueError(f"quantize_both_ways: x must be [N, K], got {tuple(x.shape)}")
    if per not in ONE_WAY:
        raise ValueError(f"quantize_both_ways: per is {per!r}, wanted {' or '.join(ONE_WAY)}")
    return quantize_both_ways_op(rows_ready(x), per, format)
