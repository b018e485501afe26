"""Quantises activations by rows, with one scale per token; q are the quantised values (codes). One read, one write.

    quantize_rows: q[t, :] = round(x[t, :] * (largest / amax[t])), scale[t] = amax[t] / largest, amax[t] = max |x[t, :]|

    x: [..., K] of bf16, fp16 or fp32; q: [..., K] of int8 (largest 127), fp8 e4m3fn (448) or e5m2 (57344); scale: [...] fp32.

`tilewright.formats.encode` defines the results bit by bit: rounding to nearest, ties to even; x is about q * scale. A row of
zeros has the scale 2^-100 / largest and codes of 0. A row that contains a NaN or an infinity has the scale NaN and codes of 0,
so all its values decode to NaN. Rows of q start at multiples of 16 bytes: q is a view of a buffer whose rows are padded with
zeros to such a width. So for any K, this kernel and those that read q can use full vectors.

Limited by bytes: K elements in, K bytes out. A row of up to 32 KB stays in registers between the maximum and the rounding. Of a
wider row, the last 48 or 96 KB stay in registers, and the rest is read again, from L2 (device/multi_pass_rows.py). This module
also contains helpers for the other quantising kernels, and its kernel accepts a given scale (per_tensor.py).
Not supported: a last dimension with a stride other than 1 (the public function copies it first); fp8 before sm_89.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats import FORMATS, encode
from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.multi_pass_rows import load_block, store_block
from tilewright.kernels.device.quantize import UNFUSED, encode_tile, magnitude, padded_width, scales_of
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.pdl import release
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of, rows_ready
from tilewright.kernels.quantize.inputs import quantize_rows_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = [
    "ROWS_SPACE",
    "ROW_FORMATS",
    "Problem",
    "check_format",
    "format_example",
    "format_problem",
    "launch_rows",
    "matrix_of",
    "padded_codes",
    "quantize_rows",
    "quantize_rows_op",
    "refuse_format",
]

ROW_FORMATS = ("int8", "fp8", "fp8-e5m2")

# ---- reference


def matrix_of(x: Tensor) -> Tensor:
    """x of any leading dims as rows [M, K]."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


def padded_codes(codes: Tensor, x: Tensor) -> Tensor:
    """Codes [M, K] in the shape of x, as a view of rows that are padded with zeros."""
    rows = codes.new_zeros(*x.shape[:-1], padded_width(x.shape[-1]))[..., : x.shape[-1]]
    return rows.copy_(codes.view(x.shape))


def _rows_reference(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    codes, scales, _ = encode(matrix_of(x), format, "row")
    return padded_codes(codes, x), scales.view(x.shape[:-1])


def _rows_cost(x: Tensor, format: str) -> Cost:
    rows = x.numel() // max(x.shape[-1], 1)
    return Cost(flops=4 * x.numel(), bytes=x.nbytes + x.numel() + 4 * (rows or x.shape[:-1].numel()))


# ---- space and examples


class Problem(NamedTuple):
    """Everything that a config may depend on. The number of rows is not part of it."""

    dtype: torch.dtype
    cols: int
    format: str


def format_problem(x: Tensor, format: str) -> Problem:
    """The problem of a call (x, format)."""
    return Problem(x.dtype, x.shape[-1], format)


def refuse_format(device: Device, problem: Problem) -> str | None:
    """The reason why a card cannot use the problem's format, or None."""
    if problem.format != "int8" and device.arch < 89:
        return f"{problem.format} needs sm_89 or newer, which converts to fp8; this is sm_{device.arch}, use int8 here"
    return None


def _rows_default(device: Device, problem: Problem) -> Config:
    width, widest = padded_width(problem.cols), 32768 // problem.dtype.itemsize
    if width > widest:
        # H100, 4096 x 28672 bf16: 0.97 of a device copy's speed with all four blocks kept in registers, 1.01 with the first
        # block read again.
        if width <= 2 * widest:
            return {"BLOCK_T": 1, "BLOCK_D": widest // 2, "HELD": 3, "num_warps": 16}
        return {"BLOCK_T": 1, "BLOCK_D": widest, "HELD": 3, "num_warps": 32}
    block_d = max(16, next_pow2(width))
    return {
        "BLOCK_T": max(1, min(16, 4096 // block_d)),
        "BLOCK_D": block_d,
        "HELD": 1,
        "num_warps": max(4, min(16, block_d // 512)),
    }


def _rows_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    width, tile = padded_width(problem.cols), c["BLOCK_T"] * c["BLOCK_D"]
    if tile > 16384 or tile < 64 * c["num_warps"]:
        return "tile over 16384 elements" if tile > 16384 else "under two elements per thread"
    if c["BLOCK_D"] >= 2 * width and c["BLOCK_D"] > 64:
        return "BLOCK_D wider than the row needs"
    if width <= c["BLOCK_D"]:
        return "HELD must be 1 if one block holds the whole row" if c["HELD"] > 1 else None
    if c["BLOCK_T"] > 1 or c["BLOCK_D"] < 2048:
        return (
            "BLOCK_T must be 1 if a row is wider than a block"
            if c["BLOCK_T"] > 1
            else "blocks must have at least 2048 columns if a row is wider than a block"
        )
    if c["BLOCK_D"] < 256 * c["num_warps"]:
        # For such a short loop, LLVM generates a second version for rows that are not finite, and ptxas 12.8 compiles the fp8
        # zeros of that version incorrectly.
        return "fewer than 8 adjacent columns per thread"
    most = 24 if c["num_warps"] == 32 else 40
    if c["HELD"] * c["BLOCK_D"] * problem.dtype.itemsize > 4 * most * 32 * c["num_warps"]:
        return f"the blocks kept in registers need more than {most} registers per thread"
    return None


ROWS_SPACE = Space(
    default=_rows_default,
    axes={
        "BLOCK_T": (1, 2, 4, 8, 16),
        "BLOCK_D": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        "HELD": (1, 2, 3, 4),
        "num_warps": (4, 8, 16, 32),
    },
    refusal=_rows_refusal,
)


@Example.of
def format_example(
    inputs: Inputs, format: str, *shape: int, dtype: torch.dtype = torch.bfloat16, row_stride: int = 0
) -> tuple[Tensor, str]:
    """Arguments (x, format)."""
    return inputs.randn(*shape[:-1], row_stride or shape[-1], dtype=dtype)[..., : shape[-1]], format


_ROWS_EXAMPLES = (
    format_example("rows", "int8", 4, 256),
    format_example("ragged", "int8", 3, 5, 100),
    format_example("strided", "int8", 5, 128, row_stride=192, dtype=torch.float16),
    format_example("one", "int8", 1, 1, dtype=torch.float32),
    format_example("wide", "int8", 2, 16500),
    format_example("many blocks", "int8", 1, 70001, dtype=torch.float16),
    format_example("fp8", "fp8", 4, 256),
    format_example("fp8 ragged", "fp8", 3, 101, dtype=torch.float32),
    format_example("fp8 wide", "fp8", 1, 20000, dtype=torch.float16),
    format_example("e5m2", "fp8-e5m2", 3, 72),
)
# ---- kernels


@triton.jit
def _scales(bits, given_ptr, GIVEN: tl.constexpr, LARGEST: tl.constexpr):
    """(scale, inverse): by `scales_of` if GIVEN is 0, else the given scale, or (NaN, 0) for rows that are not finite.

    given_ptr: (scale) if GIVEN is 1, (scale, inverse) if it is 2.
    """
    if GIVEN == 0:
        return scales_of(bits, LARGEST)
    else:
        given = tl.load(given_ptr)
        finite = tl.maximum(bits, magnitude(given)) < 0x7F800000
        inverse = tl.load(given_ptr + 1) if GIVEN == 2 else tl.div_rn(1.0, given)
        return tl.where(finite, given, float("nan")), tl.where(finite, inverse, 0.0)


@triton.jit
def _wide_row(
    x_ptr, q_ptr, scale_ptr, given_ptr, zero,
    D: tl.constexpr, W: tl.constexpr, LARGEST: tl.constexpr, GIVEN: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """One row that is wider than a block. The pointers point to its start. The last HELD blocks stay in registers."""
    LAST: tl.constexpr = (W + BLOCK_D - 1) // BLOCK_D - 1
    FIRST_HELD: tl.constexpr = LAST + 1 - min(HELD, LAST + 1)
    RAGGED: tl.constexpr = D % BLOCK_D != 0
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    largest = tl.zeros([BLOCK_D // 8], tl.int32)
    for i in range(FIRST_HELD):
        x = load_block(x_ptr, i, D, BLOCK_D, False, "again", 0.0)
        largest = tl.maximum(largest, tl.max(magnitude(x), axis=1))
    held = ()
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        x = load_block(x_ptr, block, D, BLOCK_D, RAGGED and block == LAST, "once", 0.0)
        held = held + (x,)
        largest = tl.maximum(largest, tl.max(magnitude(x), axis=1))
    scale, inverse = _scales(tl.max(largest, axis=0), given_ptr, GIVEN, LARGEST)
    tl.store(scale_ptr, scale)
    for block in tl.static_range(LAST, FIRST_HELD - 1, -1):
        q = encode_tile(held[block - FIRST_HELD], inverse, dtype, zero)
        store_block(q_ptr, block, q, W, BLOCK_D, RAGGED and block == LAST)
    for i in range(FIRST_HELD):
        j = FIRST_HELD - 1 - i
        x = load_block(x_ptr, j, D, BLOCK_D, False, "last time", 0.0)
        store_block(q_ptr, j, encode_tile(x, inverse, dtype, zero), W, BLOCK_D, False)


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def rows_kernel(
    x_ptr, q_ptr, scale_ptr, given_ptr, zero_ptr, n_rows, x_row_stride,
    D: tl.constexpr, W: tl.constexpr, LARGEST: tl.constexpr, GIVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Write codes in rows of W bytes, and scales.

    GIVEN: how many numbers given_ptr has: 0, or 1 (a scale), or 2 (a scale and its inverse). zero_ptr: zero point or None.
    """
    release()
    zero = None
    if zero_ptr is not None:
        zero = tl.load(zero_ptr)
    if W <= BLOCK_D:
        row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        rows = row[:, None]
        cols = tl.arange(0, BLOCK_D)[None, :]
        x = tl.load(x_ptr + row_start(rows, x_row_stride, D) + cols, mask=(rows < n_rows) & (cols < D), other=0.0)
        scale, inverse = _scales(tl.max(magnitude(x), axis=1), given_ptr, GIVEN, LARGEST)
        q = encode_tile(x, inverse[:, None], q_ptr.dtype.element_ty, zero)
        tl.store(q_ptr + rows * W + cols, q, mask=(rows < n_rows) & (cols < W))
        tl.store(scale_ptr + row, scale, mask=row < n_rows)
    else:
        row = tl.program_id(0).to(tl.int64)
        x_ptr += row_start(row, x_row_stride, D)
        _wide_row(x_ptr, q_ptr + row * W, scale_ptr + row, given_ptr, zero, D, W, LARGEST, GIVEN, BLOCK_D, HELD)


# ---- launchers and ops


def launch_rows(
    config: Config, x: Tensor, format: str, given: Tensor | None = None, zero: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(codes in padded rows, scale of each row).

    Args:
        config, x, format: as in `Impl.launch`.
        given: one scale for all rows, or this scale and its inverse; None: each row's own scale is computed.
        zero: the zero point (the code of 0), or None.
    """
    form, cols = FORMATS[format], x.shape[-1]
    width, rows = padded_width(cols), x.shape[:-1].numel()
    q = torch.empty((*x.shape[:-1], width), dtype=form.dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if rows:
        rows_kernel[(ceil_div(rows, config["BLOCK_T"]),)](
            x, q, scale, given, zero, rows, rows_of(x)[1],
            D=cols, W=width, LARGEST=form.largest, GIVEN=0 if given is None else given.numel(),
            **UNFUSED, **config,
        )  # fmt: skip
    return q[..., :cols], scale


quantize_rows_op = Op(
    name="quantize_rows",
    reference=_rows_reference,
    problem=format_problem,
    cost=_rows_cost,
    examples=_ROWS_EXAMPLES,
    make=quantize_rows_arguments,
    impls=(Impl(name="triton", launch=launch_rows, space=ROWS_SPACE, refuse=refuse_format, batch_invariant=True),),
)

# ---- public functions


def quantize_rows(x: Tensor, format: str = "int8") -> tuple[Tensor, Tensor]:
    """Quantise each row of the last dimension with its own scale.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        format: int8, fp8 or fp8-e5m2.

    Returns:
        (codes [..., K] in rows that start at multiples of 16 bytes, scale [...] float32): x is about codes * scale.

    Raises:
        ValueError: another format or dtype, or a scalar.
        Refused: fp8 on a card before sm_89.
    """
    check_format("quantize_rows", x, format, ROW_FORMATS)
    return quantize_rows_op(rows_ready(x), format)


def check_format(op: str, x: Tensor, format: str, formats: tuple[str, ...]) -> None:
    """Raise ValueError unless the format is one of `formats`, and x is bf16, fp16 or fp32 and not a scalar."""
    if format not in formats:
        raise ValueError(f"{op}: format is {format!r}, wanted {' or '.join(formats)}")
    if x.dim() == 0 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{op}: x must be bf16, fp16 or fp32 with a last dimension, got {tuple(x.shape)} {x.dtype}")
