"""Quantises activations with one scale for all rows: computed from the tensor, or given; q are the quantised values (codes).

    quantize_tensor   scale = amax / largest, amax = max |x| over all of x: two launches, the host does not wait
    quantize_static   the scale is given (calibrated): q = round(x * (1 / scale)), saturating; for int8 a zero point may be
                      given, too: q = round(x * (1 / scale)) + zero, and x is about (q - zero) * scale

    x: [..., K] of bf16, fp16 or fp32; q: [..., K] of int8, fp8 e4m3fn or e5m2; returned scale: [...] fp32, one per row, as
    `scaled_linear` accepts them. All are the same, except that a row that is not finite has the scale NaN and codes of 0.

quantize_tensor gives the same bits as `tilewright.formats.encode(x, format, "tensor")`: a NaN or an infinity makes all of x
NaN. Its first launch computes the largest magnitude. A maximum does not depend on the order, so two runs give the same bits.
Rows are padded as in `per_row.py`, whose kernel is also used here.

Limited by bytes. quantize_static: K elements in, K bytes out. quantize_tensor reads x twice; a part of the second read comes
from L2.
Not supported: computing zero points; a given scale that is not positive and finite (this is not checked); a last dimension with
a stride other than 1 (the public functions copy it first); fp8 before sm_89.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats import FORMATS, encode
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.multi_pass_rows import load_block
from tilewright.kernels.device.quantize import magnitude, scales_of
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of, rows_ready
from tilewright.kernels.quantize.inputs import quantize_rows_arguments, quantize_static_arguments
from tilewright.kernels.quantize.per_row import (
    ROW_FORMATS,
    ROWS_SPACE,
    check_format,
    format_example,
    format_problem,
    launch_rows,
    matrix_of,
    padded_codes,
    refuse_format,
)
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["quantize_static", "quantize_static_op", "quantize_tensor", "quantize_tensor_op"]

Coded = tuple[Tensor, Tensor]


def _tensor_reference(x: Tensor, format: str) -> Coded:
    codes, scales, _ = encode(matrix_of(x), format, "tensor")
    rows = x.shape[:-1]
    return padded_codes(codes, x), scales.flatten()[:1].expand(rows.numel()).clone().view(rows)


def _static_reference(x: Tensor, scale: Tensor, format: str, zero: Tensor | None = None) -> Coded:
    form, wide, scale = FORMATS[format], x.to(torch.float32), scale.to(torch.float32)
    finite = wide.isfinite().all(-1, keepdim=True)
    # Divide a tensor by a tensor: with a Python number, CUDA would multiply by the reciprocal.
    inverse = torch.ones_like(scale) / scale
    scaled = torch.where(finite, wide, 0.0) * inverse
    if zero is not None:
        codes = (scaled.clamp(-128 - zero, 127 - zero).round() + zero).to(form.dtype)
        return padded_codes(codes, x), torch.where(finite[..., 0], scale, torch.nan)
    scaled = scaled.clamp(-form.largest, form.largest)
    codes = (scaled if form.dtype.is_floating_point else scaled.round()).to(form.dtype)
    return padded_codes(codes, x), torch.where(finite[..., 0], scale, torch.nan)


def _tensor_cost(x: Tensor, format: str) -> Cost:
    return Cost(flops=5 * x.numel(), bytes=2 * x.nbytes + x.numel() + 4 * x.shape[:-1].numel())


def _static_cost(x: Tensor, scale: Tensor, format: str, zero: Tensor | None = None) -> Cost:
    return Cost(flops=3 * x.numel(), bytes=x.nbytes + x.numel() + 4 * (1 + x.shape[:-1].numel()))


# ---- examples

_TENSOR_EXAMPLES = (
    format_example("rows", "int8", 4, 256),
    format_example("ragged", "int8", 2, 3, 100),
    format_example("strided", "fp8", 5, 128, row_stride=192, dtype=torch.float16),
    format_example("one", "fp8", 1, 1, dtype=torch.float32),
    format_example("wide", "int8", 2, 16500),
    format_example("e5m2", "fp8-e5m2", 3, 72),
)


def _given(example: Example, zero: int | None = None) -> Example:
    """Arguments (x, scale, format, zero point). The scale is too small for some numbers, so they saturate."""

    def more(inputs: Inputs, x: Tensor, format: str) -> tuple[object, ...]:
        point = None if zero is None else inputs.tensor(float(zero), torch.float32)
        return x, inputs.tensor(2.0 / FORMATS[format].largest, torch.float32), format, point

    return example._replace(label=example.label if zero is None else f"{example.label}, zero {zero}").then(more)


@triton.jit(do_not_specialize=["tiles", "x_row_stride"])
def _largest_kernel(
    x_ptr, given_ptr, counters_ptr, tiles, x_row_stride, D: tl.constexpr, LARGEST: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Scale and its inverse from the largest magnitude of all tiles.

    The counters are a maximum and the number of finished programs. Both are zero before and after the launch.
    """
    PER_ROW: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    largest = tl.zeros([BLOCK_D // 8], tl.int32)
    for i in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
        tile = tl.program_id(0) + i * tl.num_programs(0)
        row_ptr = x_ptr + row_start((tile // PER_ROW).to(tl.int64), x_row_stride, D)
        x = load_block(row_ptr, tile % PER_ROW, D, BLOCK_D, D % BLOCK_D != 0, "once", 0.0)
        largest = tl.maximum(largest, tl.max(magnitude(x), axis=1))
    tl.atomic_max(counters_ptr, tl.max(largest, axis=0), sem="relaxed")
    if tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        scale, inverse = scales_of(tl.atomic_max(counters_ptr, 0, sem="relaxed"), LARGEST)
        tl.store(given_ptr, scale)
        tl.store(given_ptr + 1, inverse)
        tl.store(counters_ptr, 0)
        tl.store(counters_ptr + 1, 0)


# ---- launchers and ops

_BLOCK_D = 4096
# Eight thread blocks of 4 warps per SM on the largest cards.
_PROGRAMS = 1184


def _tensor_launch(config: Config, x: Tensor, format: str) -> Coded:
    rows, row_stride = rows_of(x)
    block_d = max(128, min(_BLOCK_D, next_pow2(x.shape[-1])))
    tiles = rows * ceil_div(x.shape[-1], block_d)
    given = torch.empty(2, dtype=torch.float32, device=x.device)
    _largest_kernel[(max(1, min(tiles, _PROGRAMS)),)](
        x, given, tickets(x.device, 2), tiles, row_stride,
        D=max(x.shape[-1], 1), LARGEST=FORMATS[format].largest, BLOCK_D=block_d, num_warps=max(1, block_d // 1024),
    )  # fmt: skip
    return launch_rows(config, x, format, given)


def _static_launch(config: Config, x: Tensor, scale: Tensor, format: str, zero: Tensor | None = None) -> Coded:
    return launch_rows(config, x, format, scale, zero)


quantize_tensor_op = Op(
    name="quantize_tensor",
    reference=_tensor_reference,
    problem=format_problem,
    cost=_tensor_cost,
    examples=_TENSOR_EXAMPLES,
    make=quantize_rows_arguments,
    impls=(Impl(name="triton", launch=_tensor_launch, space=ROWS_SPACE, refuse=refuse_format),),
)

quantize_static_op = Op(
    name="quantize_static",
    reference=_static_reference,
    problem=lambda x, scale, format, zero=None: format_problem(x, format),
    cost=_static_cost,
    examples=(
        *(_given(example) for example in _TENSOR_EXAMPLES),
        *(_given(example, zero) for example, zero in zip(_TENSOR_EXAMPLES[:2], (-128, 37), strict=True)),
        _given(_TENSOR_EXAMPLES[4], 5),
    ),
    make=quantize_static_arguments,
    impls=(Impl(name="triton", launch=_static_launch, space=ROWS_SPACE, refuse=refuse_format, batch_invariant=True),),
)

# ---- public functions


def quantize_tensor(x: Tensor, format: str = "int8") -> Coded:
    """Quantise x with one scale, that of its largest magnitude.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        format: int8, fp8 or fp8-e5m2.

    Returns:
        (codes [..., K] in rows that start at multiples of 16 bytes, scale [...] float32, the same for every row).

    Raises:
        ValueError: another format or dtype, or a scalar.
        Refused: fp8 on a card before sm_89.
    """
    check_format("quantize_tensor", x, format, ROW_FORMATS)
    return quantize_tensor_op(rows_ready(x), format)


def quantize_static(x: Tensor, scale: Tensor, format: str = "int8", zero: Tensor | None = None) -> Coded:
    """Quantise x with a given scale. Values outside the range become the largest code with their sign.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        scale: one float32, positive and finite, on x's device: the value of code 1.
        format: int8, fp8 or fp8-e5m2.
        zero: for int8, the zero point (the code of 0): one integer from -128 to 127, as float32 on x's device. With it, codes
            are from -128 to 127.

    Returns:
        (codes, scale) as `quantize_tensor`. The padding has the code of 0. Rows that are not finite have the scale NaN and
        the code of 0 everywhere.

    Raises:
        ValueError: another format or dtype, a scalar x, a scale or zero point that is not one float32 on x's device, or a
            zero point for a format other than int8.
        Refused: fp8 on a card before sm_89.
    """
    check_format("quantize_static", x, format, ROW_FORMATS)
    for name, t in (("scale", scale), ("zero", zero)):
        if t is not None and (t.numel() != 1 or t.dtype != torch.float32 or t.device != x.device):
            raise ValueError(
                f"quantize_static: {name} must be one float32 on {x.device}; got {tuple(t.shape)} {t.dtype} on {t.device}"
            )
    if zero is not None and format != "int8":
        raise ValueError(f"quantize_static: a zero point is for int8, {format} has its own zero; leave it out")
    return quantize_static_op(rows_ready(x), scale.reshape(()), format, None if zero is None else zero.reshape(()))
