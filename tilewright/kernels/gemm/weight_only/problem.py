"""Code that the implementations of `mixed_linear` share: the problem, block sizes, and the decoding of codes."""

# M rows of x, N rows of the weight, K the shared dimension, G columns that share a scale

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.gemm.problem import ACTIVATIONS, LARGEST_BUCKET
from tilewright.kernels.gemm.weight_only.int4_layout import CHUNK
from tilewright.kernels.launch.shapes import next_pow2

__all__ = [
    "FORMATS",
    "MixedProblem",
    "as_units",
    "block_k",
    "load_blocks",
    "load_codes",
    "mixed_problem",
]

FORMATS = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""dtype of the codes -> the name of the format in kernels."""


class MixedProblem(NamedTuple):
    """Everything that the choice of a kernel may depend on. `n` counts rows of the weight."""

    dtype: torch.dtype
    m_bucket: int
    n: int
    k: int
    activation: str
    bias: bool
    residual: bool
    format: str
    """int8, int4, e4m3 or e5m2."""
    block_rows: int
    block_cols: int
    """Columns of the weight that share a scale; 0: all."""
    zeros: bool
    aligned: bool
    """Whether all rows of x and of the codes start at multiples of 16 bytes."""

    @property
    def gated(self) -> bool:
        """Whether the weight has a gate half and an up half."""
        return ACTIVATIONS[self.activation][1]


def mixed_problem(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, block_rows: int, block_cols: int,
) -> MixedProblem:  # fmt: skip
    """The problem of a call. Its m_bucket is the number of rows, rounded up to a power of two, at most LARGEST_BUCKET."""
    # This runs at every call, so it avoids keyword arguments and slices, which are slower.
    m, k = x.shape
    return MixedProblem(
        x.dtype,
        min(next_pow2(m), LARGEST_BUCKET),
        codes.shape[0],
        k,
        activation,
        bias is not None,
        residual is not None,
        FORMATS[codes.dtype],
        block_rows,
        block_cols,
        zeros is not None,
        (x.data_ptr() | codes.data_ptr() | x.stride(0) * x.dtype.itemsize | codes.stride(0)) % 16 == 0,
    )


def as_units(codes: Tensor) -> Tensor:
    """Codes as the Triton kernels load them: int4 as 32-bit words of 8 codes; float8 as bytes, which any card can load."""
    if codes.dtype == torch.uint8:
        return codes.view(torch.int32)
    return codes.view(torch.uint8) if codes.is_floating_point() else codes


def block_k(format: str, block_cols: int) -> int:
    """The columns per step: a chunk of int4; of 8-bit codes 64, or a group if that is shorter."""
    return CHUNK if format == "int4" else min(block_cols or 64, 64)


# ---- shared Triton code


@triton.jit
def _code_values(codes, FORMAT: tl.constexpr):
    """float32 values of a tile of codes in the form that `as_units` returns."""
    if FORMAT == "e4m3":
        bits = codes.to(tl.int32)
        # The exponent field keeps its bias of 7 inside a float32, whose bias is 127; the factor corrects this. Subnormal codes
        # become subnormal float32 numbers here, and the product is exact.
        x = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), x)
    elif FORMAT == "e5m2":
        bits = codes.to(tl.int32)
        x = (((bits & 0x80) << 24) | ((bits & 0x7F) << 21)).to(tl.float32, bitcast=True) * 2.0**112
        x = tl.where((bits & 0x7F) == 0x7C, x * float("inf"), x)
        return tl.where((bits & 0x7F) > 0x7C, float("nan"), x)
    else:
        return codes.to(tl.float32)


@triton.jit
def load_codes(w_ptrs, live, k, K, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load codes as float32 [BLOCK_N, BLOCK_K], before zero points are subtracted.

    Elements outside of the matrix are not read, and have arbitrary values.
    """
    if FORMAT == "int4":
        words = tl.load(w_ptrs + k // 8, mask=live, other=0)
        e = tl.arange(0, 8)[None, None, :]
        codes = (words[:, :, None] >> (e // 2 * 4 + e % 2 * 16)) & 15
        # Word 4 t + c contains columns 32 c + 8 i + 2 t + j. Permute them into the order of columns.
        codes = tl.permute(tl.reshape(codes, [BLOCK_N, 4, 4, 4, 2]), [0, 2, 3, 1, 4])
        return tl.reshape(codes, [BLOCK_N, BLOCK_K]).to(tl.float32)
    else:
        inside = tl.arange(0, BLOCK_K)[None, :] < K - k
        return _code_values(tl.load(w_ptrs + k, mask=live & inside, other=0), FORMAT)


@triton.jit
def load_blocks(
    ptr, blocks, live, k, K, other: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Scales or zero points for a step's tile of codes: [BLOCK_N, 1], or [BLOCK_N, BLOCK_K] for int4 groups below a step.

    blocks [BLOCK_N, 1]: the offset of each row's first scale. If ptr is None, the result is `other`.
    """
    if ptr is None:
        return tl.full([BLOCK_N, 1], other, tl.float32)
    elif BLOCK_COLS == 0:
        return tl.load(ptr + blocks, mask=live, other=other)
    elif BLOCK_COLS >= BLOCK_K:
        return tl.load(ptr + blocks + k // BLOCK_COLS, mask=live, other=other)
    else:
        first = k + tl.arange(0, 4)[None, :] * 32
        each = tl.load(ptr + blocks + first // BLOCK_COLS, mask=live & (first < K), other=other)
        return tl.reshape(tl.broadcast_to(each[:, :, None], [BLOCK_N, 4, 32]), [BLOCK_N, BLOCK_K])
