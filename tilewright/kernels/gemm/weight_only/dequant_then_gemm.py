"""`mixed_linear` for many rows on any card: the weight is written to memory in x's dtype, then `linear` multiplies.

W = (code - zero) * scale is rounded to x's dtype once. Writing it takes as long as reading a 16-bit weight, which is little
compared with a product of some thousand rows. The workspace is as large as the 16-bit weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.weight_only.problem import FORMATS, MixedProblem, as_units, block_k, load_blocks, load_codes
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["DEQUANTIZED"]

_FROM = 512  # rows; on an H100, with fewer rows, writing the weight takes longer than the product


def _refuse(device: Device, problem: MixedProblem) -> str | None:
    if problem.dtype.itemsize != 2:
        return f"does not support {problem.dtype}"
    if problem.m_bucket < _FROM:
        return f"is for {_FROM} rows and more: with fewer, writing the dequantised weight takes longer than the product"
    return None


@triton.jit
def _dequantize_kernel(
    w_ptr, scales_ptr, zeros_ptr, y_ptr, N, K, w_stride, scales_stride, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(K, BLOCK_K)
    rows = (tl.program_id(0) // across * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = tl.program_id(0) % across * BLOCK_K
    live = rows < N
    w_ptrs = w_ptr + rows.to(tl.int64) * w_stride + tl.arange(0, BLOCK_K // 8 if FORMAT == "int4" else BLOCK_K)[None, :]
    blocks = rows // BLOCK_ROWS * scales_stride
    w = load_codes(w_ptrs, live, k, K, FORMAT, BLOCK_N, BLOCK_K)
    if FORMAT == "int4":
        w -= load_blocks(zeros_ptr, blocks, live, k, K, 8, BLOCK_COLS, BLOCK_N, BLOCK_K).to(tl.float32)
    w *= load_blocks(scales_ptr, blocks, live, k, K, 1.0, BLOCK_COLS, BLOCK_N, BLOCK_K)
    cols = k + tl.arange(0, BLOCK_K)[None, :]
    tl.store(y_ptr + rows.to(tl.int64) * K + cols, w.to(y_ptr.dtype.element_ty), mask=live & (cols < K))


def _launch(
    config: Config, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, block_rows: int, block_cols: int,
) -> Tensor:  # fmt: skip
    n, k, format = codes.shape[0], x.shape[1], FORMATS[codes.dtype]
    weight, units = torch.empty((n, k), dtype=x.dtype, device=x.device), as_units(codes)
    if weight.numel():
        step = block_k(format, block_cols)
        _dequantize_kernel[(triton.cdiv(n, 32) * triton.cdiv(k, step),)](
            units, scales, zeros, weight, n, k, units.stride(0), scales.stride(0), FORMAT=format, BLOCK_ROWS=block_rows,
            BLOCK_COLS=block_cols, BLOCK_N=32, BLOCK_K=step,
        )  # fmt: skip
    return linear_op.run(x, weight, bias, activation, residual)


DEQUANTIZED = Impl(name="dequantized", launch=_launch, refuse=_refuse, interpretable=False, extra_roundings=1)
