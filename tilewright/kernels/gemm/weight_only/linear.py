"""Products of 16-bit activations with a quantised weight: y = activation(x @ ((code - zero) * scale)^T + bias) + residual.

    x [M, K] bf16 or fp16 -> y [M, N] of x's dtype
    codes (the quantised weight) int8, float8_e4m3fn or float8_e5m2 [N, K]; or int4, in uint8 [N, 64 * ceil(K / 128)] in the
          order of int4_layout.py
    scales float32, one per block of rows and columns of W:     block_rows, block_cols    scales
        a row                                                   1, 0                      [N]
        a group of 32, 64 or 128 columns                        1, G                      [N, K / G] rounded up
        128 x 128                                               128, 128                  [N / 128, K / 128] rounded up
    zeros uint8 in the shape of scales, only for int4; None means 8

With few rows, reading the codes sets the time: half or a quarter of that of a 16-bit weight. With hundreds of rows the tensor
cores set it, at the rate of x's dtype. A code is converted to bf16 or fp16 without rounding, and products are summed in
float32. The epilogue is float32, with one rounding at the end; activations are those of `linear`. The implementations, in order
of preference:

    skinny        at most 32 rows: codes are loaded straight into the tensor cores' operand registers; scales multiply the sums
    registers     Hopper, any rows: codes become wgmma's register operand, and the product is transposed. Scales multiply the
                  sums; but from 65 rows on, group scales multiply the weight, which is then rounded to x's dtype
    dequantized   512 rows and more: W is written to memory in x's dtype, rounded once, and multiplied by `linear`
    sm90          Hopper, int4, more than 1024 rows: the same in one launch; some warps write W while others multiply
    triton        any shape, any alignment, from sm_80 on; scales of int4 groups of 32 and 64 multiply the weight
    invariant     `triton` with one config for every number of rows: the bits of a row do not depend on its batch

Float8 codes that stand for NaN or infinity (no quantiser here makes them) are treated as finite numbers by skinny and registers
(device/dequant.py).

Not supported: gradients, fp32 x on a GPU (the CPU's reference accepts it), columns in activation order (GPTQ's desc_act).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.problem import ACTIVATIONS, finish, weight_rows
from tilewright.kernels.gemm.quantized_operands import check_epilogue, dense_along_columns, empty_product
from tilewright.kernels.gemm.tile import grouped
from tilewright.kernels.gemm.weight_only.dequant_then_gemm import DEQUANTIZED
from tilewright.kernels.gemm.weight_only.inputs import mixed_linear_arguments
from tilewright.kernels.gemm.weight_only.int4_layout import CHUNK, prepare, restore, unpack
from tilewright.kernels.gemm.weight_only.problem import (
    FORMATS,
    MixedProblem,
    as_units,
    block_k,
    load_blocks,
    load_codes,
    mixed_problem,
)
from tilewright.kernels.gemm.weight_only.skinny import MIXED_SKINNY
from tilewright.kernels.gemm.weight_only.sm90 import MIXED_SM90, tiles_of
from tilewright.kernels.gemm.weight_only.sm90_rs import MIXED_REGISTERS
from tilewright.kernels.launch.shapes import ceil_div, check_tensor
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["mixed_linear", "mixed_linear_op", "prepare", "restore"]

_GROUPS = (32, 64, 128)


def _reference(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, block_rows: int, block_cols: int,
) -> Tensor:  # fmt: skip
    wide = scales.dtype
    if codes.dtype == torch.uint8:
        weight = unpack(codes, x.shape[1]).to(wide)
        blocks, zero = (weight, 8.0) if zeros is None else _facing(weight, zeros.to(wide), block_rows, block_cols)
        blocks.sub_(zero)
    else:
        weight = codes.to(wide)
    blocks, scale = _facing(weight, scales, block_rows, block_cols)
    blocks.mul_(scale)
    other = (None if t is None else t.to(wide) for t in (bias, residual))
    return linear_op.reference(x.to(wide), weight, next(other), activation, next(other)).to(x.dtype)


def _facing(values: Tensor, t: Tensor, block_rows: int, block_cols: int) -> tuple[Tensor, Tensor]:
    """Views of a matrix and of a tensor with one number per block, such that the two broadcast with each other."""
    n, k = values.shape
    if not block_cols:
        return values, t[:, None]
    if block_rows == 1 and k % block_cols == 0:
        return values.view(n, k // block_cols, block_cols), t[:, :, None]
    return values, t.repeat_interleave(block_rows, 0)[:n].repeat_interleave(block_cols, 1)[:, :k]


# ---- cost, examples


def _cost(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, block_rows: int, block_cols: int,
) -> Cost:  # fmt: skip
    (m, k), n = x.shape, codes.shape[0]
    out = m * (n // 2 if ACTIVATIONS[activation][1] else n) * x.element_size()
    moved = sum(t.nbytes for t in (x, codes, scales, zeros, bias, residual) if t is not None)
    return Cost(flops=2 * m * n * k, bytes=moved + out)


_example = Example.sized(mixed_linear_arguments)
EXAMPLES = (
    _example("decode int4", 1, 32, 256, group=128),
    _example("decode int4 gated", 3, 48, 512, group=64, zeros=True, activation="silu_mul", residual=True),
    _example("decode int8", 2, 24, 512, format="int8", bias=True, activation="gelu"),
    _example("decode e4m3 blocks", 9, 150, 384, format="e4m3", group=128, block_rows=128, dtype=torch.float16),
    _example("decode e5m2", 4, 40, 256, format="e5m2", residual=True, dtype=torch.float16),
    _example("rows int4", 70, 96, 128, group=32, activation="silu", bias=True),
    _example("rows int4 by rows", 20, 40, 64, activation="relu", dtype=torch.float16),
    _example("rows int8 gated", 33, 72, 160, format="int8", activation="gelu_mul", bias=True, residual=True),
    _example("ragged e4m3", 35, 75, 200, format="e4m3", group=128, activation="gelu_tanh"),
    _example("odd int8", 5, 9, 33, format="int8", bias=True),
    _example("no rows", 0, 16, 32),
    _example("no k", 3, 8, 0, format="int8", bias=True),
)

# ---- triton


def _refuse_triton(device: Device, problem: MixedProblem) -> str | None:
    return f"does not support {problem.dtype}" if problem.dtype.itemsize != 2 else None


# BLOCK_M, BLOCK_N, num_warps
_TILES = ((16, 64, 4), (32, 64, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8))


def _default_triton(device: Device, problem: MixedProblem) -> Config:
    tall = problem.format != "int4"
    fitting = [t for t in _TILES if (t[0] == 16 or t[0] <= problem.m_bucket) and (tall or t[1] <= 64)]
    # The largest tile that still gives every SM one; the smallest where none does.
    full = [t for t in fitting if -(-problem.m_bucket // t[0]) * -(-problem.n // t[1]) >= device.sms]
    block_m, block_n, warps = full[-1] if full else fitting[-1 if problem.m_bucket <= 64 else 0]
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": 3}


def _triton_refusal(device: Device, problem: MixedProblem, c: Config) -> str | None:
    if (c["BLOCK_M"], c["BLOCK_N"], c["num_warps"]) not in _TILES:
        return "not a supported tile: too many accumulators per thread for the registers, or too few for its warps"
    if problem.format == "int4" and c["BLOCK_N"] > 64:
        return "int4 needs BLOCK_N of at most 64: the float32 values of a chunk of 128 columns fill the registers"
    if c["BLOCK_M"] > max(16, problem.m_bucket):
        return "BLOCK_M is larger than the number of rows of x"
    return None


TRITON_SPACE = Space(
    default=_default_triton,
    axes={"BLOCK_M": (16, 32, 64, 128), "BLOCK_N": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)},
    refusal=_triton_refusal,
)


@triton.jit(do_not_specialize=["M"])
def _mixed_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, x_stride, w_stride, scales_stride,
    residual_stride, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    row, col = grouped(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    rows = (row * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = (col * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    ks = tl.arange(0, BLOCK_K)[None, :]
    weights = weight_rows(cols, N, GATED)
    live = cols < N
    x_ptrs = x_ptr + rows.to(tl.int64) * x_stride + ks
    w_ptrs = w_ptr + weights.to(tl.int64) * w_stride + tl.arange(0, BLOCK_K // 8 if FORMAT == "int4" else BLOCK_K)[None, :]
    blocks = weights // BLOCK_ROWS * scales_stride
    # The scale of a group of columns multiplies the weight if the group is shorter than a step, otherwise the sums.
    SHORT: tl.constexpr = BLOCK_COLS > 0 and BLOCK_COLS < BLOCK_K
    # The weight is the tall operand. sm_90's tensor cores can read that one from registers, where codes are converted.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k, mask=(rows < M) & (ks < K - k), other=0.0)
        w = load_codes(w_ptrs, live, k, K, FORMAT, BLOCK_N, BLOCK_K)
        if FORMAT == "int4":
            w -= load_blocks(zeros_ptr, blocks, live, k, K, 8, BLOCK_COLS, BLOCK_N, BLOCK_K).to(tl.float32)
        if SHORT:
            w *= load_blocks(scales_ptr, blocks, live, k, K, 1.0, BLOCK_COLS, BLOCK_N, BLOCK_K)
        if BLOCK_COLS and not SHORT:
            part = dot(w.to(x.dtype), tl.trans(x), tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
            acc += part * load_blocks(scales_ptr, blocks, live, k, K, 1.0, BLOCK_COLS, BLOCK_N, BLOCK_K)
        else:
            acc = dot(w.to(x.dtype), tl.trans(x), acc)
    if BLOCK_COLS == 0:
        acc *= tl.load(scales_ptr + blocks, mask=live, other=0.0)
    finish(tl.trans(acc), y_ptr, bias_ptr, residual_ptr, row * BLOCK_M, col * BLOCK_N, M, N, residual_stride, ACTIVATION, GATED)


def _launch_triton(
    config: Config, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, block_rows: int, block_cols: int,
) -> Tensor:  # fmt: skip
    y = empty_product(x, codes, activation, x.dtype)
    if not y.numel():
        return y
    (m, k), n, format = x.shape, codes.shape[0], FORMATS[codes.dtype]
    function, gated = ACTIVATIONS[activation]
    words = as_units(codes)
    _mixed_kernel[(ceil_div(m, config["BLOCK_M"]) * ceil_div(n, config["BLOCK_N"]),)](
        x, words, scales, zeros, bias, residual, y, m, n, k, x.stride(0), words.stride(0), scales.stride(0),
        0 if residual is None else residual.stride(0), FORMAT=format, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        ACTIVATION=function, GATED=gated, BLOCK_K=block_k(format, block_cols), GROUP_M=8, **config,
    )  # fmt: skip
    return y


# ---- op

_ONE_CONFIG: Config = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
TRITON = Impl(name="triton", launch=_launch_triton, space=TRITON_SPACE, refuse=_refuse_triton)
INVARIANT = Impl(
    name="invariant", launch=lambda config, *args: _launch_triton(_ONE_CONFIG, *args), refuse=_refuse_triton,
    batch_invariant=True,
)  # fmt: skip


def _first(device: Device, problem: MixedProblem) -> str | None:
    """The implementation to try first. With few rows skinny is, because it has no partial sums of tiles to add.

    With many rows, the weight is converted once, not again for every tile. H100, speed relative to cuBLAS in bf16, with the
    best configs: 4 rows of int4 skinny 2.1 to 3.1, registers 1.7 to 3.0, 8 rows 1.6 to 1.7 and 1.7 to 2.5; 16 rows of int8 1.5
    to 1.9 and 1.4 to 1.9; 2048 rows of int8 dequantized 0.84 to 0.86, registers 0.94 to 0.98. For int4, the means of 12
    projections with dequantized, registers, sm90 are: 2048 rows 0.861, 0.898, 0.904 (sm90 has 0.860 up to three tiles per SM,
    above that 0.937), 4096 rows 0.927, 0.900, 0.970, 8192 rows 0.967, 0.904, 0.992; 1024 rows, in an earlier run, registers
    0.884, sm90 0.748.
    """
    m, int4 = problem.m_bucket, problem.format == "int4"
    if not device.is_hopper:
        return "dequantized" if m >= (2048 if problem.block_cols else 4096) else None
    if int4 and m > 1024 and MIXED_SM90.refusal(device, problem) is None and tiles_of(problem) > 3 * device.sms:
        return "sm90"
    return "dequantized" if int4 and m > 2048 else "registers" if m > (4 if int4 else 16) else None


mixed_linear_op = Op(
    name="mixed_linear",
    reference=_reference,
    problem=mixed_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=mixed_linear_arguments,
    first=_first,
    rows_in_problem=True,
    impls=(MIXED_SKINNY, MIXED_REGISTERS, DEQUANTIZED, MIXED_SM90, TRITON, INVARIANT),
)


def mixed_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    block_rows: int = 1,
    block_cols: int = 0,
) -> Tensor:
    """activation(x @ W^T + bias) + residual, W = (code - zero) * scale.

    Args:
        x: [M, K], bf16 or fp16 (on the CPU fp32 too), dense along K.
        codes: [N, K] int8, float8_e4m3fn or float8_e5m2, dense along K; or int4, uint8 [N, 64 * ceil(K / 128)], contiguous,
            which `prepare` makes from the result of `formats.pack_int4`.
        scales: float32, contiguous: [N] with block_cols 0, otherwise [N / block_rows, K / block_cols], rounded up.
        zeros: uint8 in the shape of scales, only for int4 codes; None means 8.
        bias: [N] of x's dtype.
        activation: none, relu, gelu, gelu_tanh, silu; or silu_mul, gelu_mul, where W is [2F, K], gate half first.
        residual: the shape of the output, of x's dtype; added last.
        block_rows: rows of W that share a scale: 1, or 128 together with block_cols 128.
        block_cols: columns of W that share a scale: 32, 64, 128, or 0 for all.

    Returns:
        [M, N] ([M, F] with silu_mul and gelu_mul), contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, int4's group does not divide K, or the activation is unknown.
    """
    _check(x, codes, scales, zeros, block_rows, block_cols)
    check_epilogue("mixed_linear", x, codes.shape[0], bias, activation, residual, (x.dtype,), (x.dtype,))
    residual = dense_along_columns(residual)
    return mixed_linear_op(x, codes, scales, zeros, bias, activation, residual, block_rows, block_cols)


def _check(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, block_rows: int, block_cols: int) -> None:
    """Raise ValueError unless x, codes, scales and zeros fit each other and the block."""
    if codes.dtype not in FORMATS or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            "mixed_linear: x must be bfloat16 or float16 and codes int8, float8_e4m3fn, float8_e5m2 or uint8 (two int4 per "
            f"byte); got {x.dtype} and {codes.dtype}"
        )
    packed = codes.dtype == torch.uint8
    fits = x.dim() == codes.dim() == 2 and codes.shape[1] == (-(-x.shape[1] // CHUNK) * 64 if packed else x.shape[1])
    if not fits or (packed and not codes.is_contiguous()):
        wanted = "64 * ceil(K / 128)] from int4_layout.prepare" if packed else "K]"
        raise ValueError(
            f"mixed_linear: x must be [M, K] and codes [N, {wanted}, with one K; "
            f"got x {list(x.shape)} and codes {list(codes.shape)}"
        )
    if (block_rows, block_cols) not in {(1, 0), (128, 128), *((1, g) for g in _GROUPS)}:
        raise ValueError(
            "mixed_linear: a scale is for a row (block_rows 1, block_cols 0), for 32, 64 or 128 columns of one, "
            f"or for 128 x 128; got block_rows {block_rows}, block_cols {block_cols}"
        )
    n, k = codes.shape[0], x.shape[1]
    if packed and block_cols and k % block_cols:
        raise ValueError(f"mixed_linear: K must be a multiple of {block_cols}, the group size of the int4 codes; got {k}")
    for name, t in (("x", x), ("codes", codes)):
        if t.shape[1] > 1 and t.stride(1) != 1:
            raise ValueError(f"mixed_linear: {name} must be dense along K; got strides {t.stride()}")
    if codes.device != x.device:
        raise ValueError(f"mixed_linear: x and codes must be on one device; got {x.device} and {codes.device}")
    if zeros is not None and not packed:
        raise ValueError(f"mixed_linear: only int4 codes have zero points; got zeros with {codes.dtype}")
    wanted = (-(-n // block_rows), -(-k // block_cols)) if block_cols else (n,)
    for name, t, dtype in (("scales", scales, torch.float32), ("zeros", zeros, torch.uint8)):
        check_tensor("mixed_linear", name, t, (wanted,), (dtype,), x, contiguous=True)
