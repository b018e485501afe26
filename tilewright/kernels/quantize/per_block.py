"""Quantises activations in blocks of a row; q are the quantised values (codes). One read, one write.

    quantize_blocks   a float32 scale for each 128 columns:   fp8 (e4m3fn), fp8-e5m2
    quantize_mx       an E8M0 scale for each 32 columns:      mxfp8, mxfp8-e5m2 (OCP Microscaling Formats v1.0)

    x: [..., K] of bf16, fp16 or fp32; q: [..., K]; scale: [..., K / 128 rounded up] float32, [..., K / 32] float8_e8m0fnu.

`tilewright.formats.encode` defines the results bit by bit. Zeros, NaN, infinities and the padding of rows are treated as in
`per_row.py`, with blocks instead of rows. A zero block of MX has the smallest scale, 2^-127.

Limited by bytes: K elements in, K bytes and the scales out.
Not supported: 128 x 128 blocks (for weights: `tilewright.formats`); in quantize_mx, a K that is not a multiple of 32; a last
dimension with a stride other than 1 (the public functions copy it first); cards before sm_89.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats import FORMATS, encode
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.quantize import UNFUSED, encode_tile, magnitude, padded_width, scales_of
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.pdl import release
from tilewright.kernels.launch.shapes import ceil_div, rows_of, rows_ready
from tilewright.kernels.quantize.inputs import quantize_blocks_arguments, quantize_mx_arguments
from tilewright.kernels.quantize.per_row import (
    check_format,
    format_example,
    format_problem,
    matrix_of,
    padded_codes,
    refuse_format,
)
from tilewright.op import Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["MX_FORMATS", "power_scales_of", "quantize_blocks", "quantize_blocks_op", "quantize_mx", "quantize_mx_op"]

_BLOCK_FORMATS = ("fp8", "fp8-e5m2")
MX_FORMATS = ("mxfp8", "mxfp8-e5m2")


def _blocks_reference(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    codes, scales, _ = encode(matrix_of(x), format, (1, 128))
    return padded_codes(codes, x), scales.view(*x.shape[:-1], scales.shape[-1])


def _mx_reference(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    codes, scales, _ = encode(matrix_of(x), format)
    return codes.view(x.shape), scales.view(*x.shape[:-1], scales.shape[-1])


def _blocks_cost(x: Tensor, format: str) -> Cost:
    return Cost(flops=4 * x.numel(), bytes=x.nbytes + x.numel() + 4 * x.shape[:-1].numel() * -(-x.shape[-1] // 128))


def _mx_cost(x: Tensor, format: str) -> Cost:
    return Cost(flops=4 * x.numel(), bytes=x.nbytes + x.numel() + x.numel() // 32)


# ---- space and examples

BLOCKS_SPACE = Space(
    default=lambda device, problem: {"BLOCK_G": 32, "num_warps": 2},
    axes={"BLOCK_G": (8, 16, 32, 64), "num_warps": (2, 4, 8)},
)
MX_SPACE = Space(
    default=lambda device, problem: {"BLOCK_G": 64, "num_warps": 2},
    axes={"BLOCK_G": (32, 64, 128, 256), "num_warps": (2, 4, 8)},
)


_BLOCKS_EXAMPLES = (
    format_example("blocks", "fp8", 4, 256),
    format_example("ragged", "fp8", 2, 3, 300),
    format_example("strided", "fp8", 5, 128, row_stride=192, dtype=torch.float16),
    format_example("one", "fp8", 1, 1, dtype=torch.float32),
    format_example("e5m2", "fp8-e5m2", 3, 130),
)
_MX_EXAMPLES = (
    format_example("rows", "mxfp8", 4, 256),
    format_example("deep", "mxfp8", 2, 3, 96),
    format_example("strided", "mxfp8", 5, 128, row_stride=192, dtype=torch.float16),
    format_example("one", "mxfp8", 1, 32, dtype=torch.float32),
    format_example("e5m2", "mxfp8-e5m2", 3, 160),
)

# ---- kernel


@triton.jit
def power_scales_of(bits, EXPONENT: tl.constexpr):
    """(E8M0 scale, its inverse) from the bits of the largest magnitude; (255, 0) for NaN and infinity."""
    finite = bits < 0x7F800000
    biased = tl.maximum((bits >> 23) - EXPONENT, 0)
    inverse = ((254 - biased) << 23).to(tl.float32, bitcast=True)
    return tl.where(finite, biased, 255).to(tl.uint8), tl.where(finite, inverse, 0.0)


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def _groups_kernel(
    x_ptr, q_ptr, scale_ptr, n_rows, x_row_stride,
    D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, EXPONENT: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A tile is BLOCK_G groups of GROUP columns, numbered through all rows, so their scales are contiguous in memory."""
    release()
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    group = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    row = (group // GROUPS).to(tl.int64)
    rows = row[:, None]
    cols = (group % GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row_start(rows, x_row_stride, D) + cols, mask=(rows < n_rows) & (cols < D), other=0.0)
    bits = tl.max(magnitude(x), axis=1)
    if EXPONENT is None:
        scale, inverse = scales_of(bits, LARGEST)
    else:
        scale, inverse = power_scales_of(bits, EXPONENT)
    q = encode_tile(x, inverse[:, None], q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows * W + cols, q, mask=(rows < n_rows) & (cols < W))
    tl.store(scale_ptr + group, scale, mask=row < n_rows)


# ---- launchers and ops


def _groups(config: Config, x: Tensor, format: str, group: int) -> tuple[Tensor, Tensor]:
    form, cols = FORMATS[format], x.shape[-1]
    width, groups = padded_width(cols), -(-cols // group)
    rows, row_stride = rows_of(x)
    dtype = torch.float32 if form.exponent is None else torch.uint8
    q = torch.empty((*x.shape[:-1], width), dtype=form.dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], groups), dtype=dtype, device=x.device)
    if rows:
        _groups_kernel[(ceil_div(rows * groups, config["BLOCK_G"]),)](
            x, q, scale, rows, row_stride,
            D=cols, W=width, GROUP=group, LARGEST=form.largest, EXPONENT=form.exponent, **UNFUSED, **config,
        )  # fmt: skip
    return q[..., :cols], scale if form.exponent is None else scale.view(torch.float8_e8m0fnu)


def _impl(group: int, space: Space) -> Impl:
    launch = lambda config, x, format: _groups(config, x, format, group)  # noqa: E731
    return Impl(name="triton", launch=launch, space=space, refuse=refuse_format, batch_invariant=True)


quantize_blocks_op = Op(
    name="quantize_blocks",
    reference=_blocks_reference,
    problem=format_problem,
    cost=_blocks_cost,
    examples=_BLOCKS_EXAMPLES,
    make=quantize_blocks_arguments,
    impls=(_impl(128, BLOCKS_SPACE),),
)

quantize_mx_op = Op(
    name="quantize_mx",
    reference=_mx_reference,
    problem=format_problem,
    cost=_mx_cost,
    examples=_MX_EXAMPLES,
    make=quantize_mx_arguments,
    impls=(_impl(32, MX_SPACE),),
)


# ---- public functions


def quantize_blocks(x: Tensor, format: str = "fp8") -> tuple[Tensor, Tensor]:
    """Quantise each block of 128 columns of a row with its own scale; the last block of a row may be narrower.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        format: fp8 or fp8-e5m2.

    Returns:
        (codes [..., K] in rows that start at multiples of 16 bytes, scale [..., K / 128 rounded up] float32).

    Raises:
        ValueError: another format or dtype, or a scalar.
        Refused: on a card before sm_89.
    """
    check_format("quantize_blocks", x, format, _BLOCK_FORMATS)
    return quantize_blocks_op(rows_ready(x), format)


def quantize_mx(x: Tensor, format: str = "mxfp8") -> tuple[Tensor, Tensor]:
    """Quantise each block of 32 columns of a row to MX (OCP Microscaling Formats v1.0).

    Args:
        x: [..., K], bf16, fp16 or fp32; K is a multiple of 32.
        format: mxfp8 or mxfp8-e5m2.

    Returns:
        (codes [..., K], contiguous, scale [..., K / 32] float8_e8m0fnu).

    Raises:
        ValueError: another format or dtype, a scalar, or K is not a multiple of 32.
        Refused: on a card before sm_89.
    """
    check_format("quantize_mx", x, format, MX_FORMATS)
    if x.shape[-1] % 32:
        raise ValueError(f"quantize_mx: K is {x.shape[-1]} in x {tuple(x.shape)}, wanted a multiple of 32; pad x, or use fp8")
    return quantize_mx_op(rows_ready(x), format)
