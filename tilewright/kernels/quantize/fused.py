"""The operator before a quantised product, fused with `quantize_rows`. The 16-bit tensor between them is never written.

    rms_norm_quantize      quantize_rows(rms_norm(x))
    add_rms_norm_quantize  the same after a residual addition, with the sum as third result
    silu_mul_quantize      quantize_rows(silu(gate) * up)

    x, residual, gate, up: [..., D] of bf16, fp16 or fp32; weight: [D]; q, scale as in `quantize_rows` (per_row.py).

Values are rounded to x's dtype before they are quantised, as in two separate calls. The implementation `separate` makes these
two calls and also accepts rows that are too wide for registers; it has the same definition. If a sum of squares or an
exponential differs in its last bit, a value may get the neighbouring code.

Limited by bytes: D elements in (silu_mul_quantize: two), D bytes out.
Not supported: backward, a last dimension with a stride other than 1 (the public functions copy it first), fp8 before sm_89.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats import FORMATS
from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import silu
from tilewright.kernels.device.quantize import UNFUSED, encode_tile, magnitude, padded_width, scales_of
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.elementwise.glu import silu_mul_op
from tilewright.kernels.launch.autograd import dense
from tilewright.kernels.launch.pdl import release
from tilewright.kernels.launch.shapes import ceil_div, check_alike, check_last_dim, next_pow2, rows_of, rows_ready
from tilewright.kernels.norm.rms_norm import add_rms_norm_op, rms_norm_op
from tilewright.kernels.quantize.inputs import add_norm_quantize_arguments, gated_quantize_arguments, norm_quantize_arguments
from tilewright.kernels.quantize.per_row import (
    ROW_FORMATS,
    Problem,
    check_format,
    quantize_rows_op,
    refuse_format,
)
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = [
    "add_rms_norm_quantize",
    "add_rms_norm_quantize_op",
    "rms_norm_quantize",
    "rms_norm_quantize_op",
    "silu_mul_quantize",
    "silu_mul_quantize_op",
]

Coded = tuple[Tensor, Tensor]
CodedSum = tuple[Tensor, Tensor, Tensor]


def _norm_reference(x: Tensor, weight: Tensor, eps: float, format: str) -> Coded:
    return quantize_rows_op.reference(rms_norm_op.reference(x, weight, eps), format)


def _add_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float, format: str) -> tuple[Tensor, Tensor, Tensor]:
    y, total = add_rms_norm_op.reference(x, residual, weight, eps)
    return *quantize_rows_op.reference(y, format), total


def _silu_reference(gate: Tensor, up: Tensor, format: str) -> Coded:
    return quantize_rows_op.reference(silu_mul_op.reference(gate, up), format)


# ---- cost


def _coded_bytes(x: Tensor) -> int:
    return x.numel() + 4 * x.shape[:-1].numel()


def _norm_cost(x: Tensor, weight: Tensor, eps: float, format: str) -> Cost:
    return Cost(flops=8 * x.numel(), bytes=x.nbytes + weight.nbytes + _coded_bytes(x))


def _add_norm_cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float, format: str) -> Cost:
    return Cost(flops=9 * x.numel(), bytes=3 * x.nbytes + weight.nbytes + _coded_bytes(x))


def _silu_cost(gate: Tensor, up: Tensor, format: str) -> Cost:
    return Cost(flops=9 * gate.numel(), bytes=2 * gate.nbytes + _coded_bytes(gate))


# ---- space and examples


def _problem(x: Tensor, *rest: Any) -> Problem:
    return Problem(x.dtype, x.shape[-1], rest[-1])


def _too_wide(problem: Problem, row_bytes: int) -> str | None:
    if padded_width(problem.cols) * problem.dtype.itemsize > row_bytes:
        return f"supports rows of up to {row_bytes} bytes only (in registers), not {problem.cols} numbers of {problem.dtype}"
    return None


def _refuse_norm(device: Device, problem: Problem) -> str | None:
    if not problem.cols:
        return "needs at least one column: an empty row has no mean"
    return _too_wide(problem, 32768) or refuse_format(device, problem)


def _refuse_silu(device: Device, problem: Problem) -> str | None:
    return _too_wide(problem, 65536) or refuse_format(device, problem)


def _norm_default(device: Device, problem: Problem) -> Config:
    block_d = next_pow2(padded_width(problem.cols))
    return {
        "BLOCK_T": max(1, min(16, 2048 // block_d)),
        "BLOCK_D": block_d,
        "num_warps": max(4, min(16, block_d // 512)),
    }


def _silu_default(device: Device, problem: Problem) -> Config:
    # 16 elements of each input per thread (fp32: 8), which are 16 bytes of codes. On an H100 (4096 x 28672 fp8), a row of 64 KB
    # in two parts with 32 warps reaches 0.98 of a device copy's speed; in four parts with 16 warps, 0.90.
    block_d = min(max(16, next_pow2(padded_width(problem.cols))), 32768 // problem.dtype.itemsize)
    return {
        "BLOCK_T": max(1, min(16, 2048 // block_d)),
        "BLOCK_D": block_d,
        "num_warps": max(4, min(32, block_d * problem.dtype.itemsize // 1024)),
    }


def _tile_refusal(problem: Problem, c: Config) -> str | None:
    tile = c["BLOCK_T"] * c["BLOCK_D"]
    if tile > 16384 or tile < 128 * c["num_warps"]:
        return "tile over 16384 elements" if tile > 16384 else "under four elements per thread"
    if c["BLOCK_T"] > 1 and tile > 4096:
        return "a tile of several rows must have at most 4096 elements"
    if c["BLOCK_D"] >= 2 * padded_width(problem.cols) and c["BLOCK_D"] > 64:
        return "BLOCK_D wider than the row needs"
    if tile * problem.dtype.itemsize > 4 * 32 * 32 * c["num_warps"]:
        return "the tile needs more than 32 registers per thread"
    return None


def _norm_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    if c["BLOCK_D"] < padded_width(problem.cols):
        return "BLOCK_D narrower than the row"
    return _tile_refusal(problem, c)


def _silu_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    parts = -(-padded_width(problem.cols) // c["BLOCK_D"])
    if parts > 1 and c["BLOCK_T"] > 1:
        return "BLOCK_T must be 1 if a row is wider than a block"
    if parts > 4:
        return "the row needs more than four blocks of BLOCK_D columns"
    words = c["BLOCK_D"] * problem.dtype.itemsize // (128 * c["num_warps"])
    if words > 24 or parts * words > 40:
        return "a block of an input needs more than 24 registers per thread, or the whole row more than 40"
    return _tile_refusal(problem, c)


_AXES = {
    "BLOCK_T": (1, 2, 4, 8, 16),
    "BLOCK_D": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "num_warps": (4, 8, 16, 32),
}
NORM_SPACE = Space(default=_norm_default, axes=_AXES, refusal=_norm_refusal)
SILU_SPACE = Space(default=_silu_default, axes=_AXES, refusal=_silu_refusal)

_CASES = (
    ("rows", "int8", (4, 256), torch.bfloat16, 0),
    ("ragged", "int8", (3, 5, 100), torch.bfloat16, 0),
    ("strided", "int8", (5, 128), torch.float16, 192),
    ("one", "int8", (1, 1), torch.float32, 0),
    ("wide", "int8", (2, 20000), torch.bfloat16, 0),
    ("fp8", "fp8", (3, 101), torch.float32, 0),
    ("e5m2", "fp8-e5m2", (3, 72), torch.bfloat16, 0),
)


def _examples(with_weight: bool, tensors: int) -> tuple[Example, ...]:
    """Arguments: `tensors` tensors of the same shape, then weight and eps if `with_weight`, then the format."""

    @Example.of
    def example(inputs: Inputs, format: str, shape: tuple[int, ...], dtype: torch.dtype, stride: int) -> tuple[object, ...]:
        like = [inputs.randn(*shape[:-1], stride or shape[-1], dtype=dtype)[..., : shape[-1]] for _ in range(tensors)]
        weight = (inputs.randn(shape[-1], dtype=dtype), 1e-6) if with_weight else ()
        return *like, *weight, format

    return tuple(example(*case) for case in _CASES)


@triton.jit(do_not_specialize=["n_rows", "x_row_stride", "residual_row_stride"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, q_ptr, scale_ptr, total_ptr, n_rows, x_row_stride, residual_row_stride, eps,
    D: tl.constexpr, W: tl.constexpr, LARGEST: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    release()
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    rows = row[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < n_rows) & (cols < D)
    x = tl.load(x_ptr + row_start(rows, x_row_stride, D) + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row_start(rows, residual_row_stride, D) + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + rows * D + cols, x, mask=mask)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / D + eps)
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    y = (wide * factor * weight).to(x.dtype)
    scale, inverse = scales_of(tl.max(magnitude(y), axis=1), LARGEST)
    q = encode_tile(y, inverse[:, None], q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows * W + cols, q, mask=(rows < n_rows) & (cols < W))
    tl.store(scale_ptr + row, scale, mask=row < n_rows)


@triton.jit
def _part(part: tl.constexpr, BLOCK_D: tl.constexpr):
    """The columns of a part of a row, [1, BLOCK_D / 16, 16]. A thread has 16 adjacent ones: their maximum needs no shuffle."""
    return part * BLOCK_D + tl.arange(0, BLOCK_D // 16)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]


@triton.jit(do_not_specialize=["n_rows", "gate_row_stride", "up_row_stride"])
def _silu_kernel(
    gate_ptr, up_ptr, q_ptr, scale_ptr, n_rows, gate_row_stride, up_row_stride,
    D: tl.constexpr, W: tl.constexpr, LARGEST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    release()
    PARTS: tl.constexpr = (W + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    rows = row[:, None, None]
    largest = tl.zeros([BLOCK_T, BLOCK_D // 16], tl.int32)
    held = ()
    for part in tl.static_range(PARTS):
        cols = _part(part, BLOCK_D)
        mask = (rows < n_rows) & (cols < D)
        gate = tl.load(gate_ptr + row_start(rows, gate_row_stride, D) + cols, mask=mask, other=0.0)
        up = tl.load(up_ptr + row_start(rows, up_row_stride, D) + cols, mask=mask, other=0.0)
        y = (silu(gate.to(tl.float32)) * up.to(tl.float32)).to(gate.dtype)
        held = held + (y,)
        largest = tl.maximum(largest, tl.max(magnitude(y), axis=2))
    scale, inverse = scales_of(tl.max(largest, axis=1), LARGEST)
    tl.store(scale_ptr + row, scale, mask=row < n_rows)
    for part in tl.static_range(PARTS):
        cols = _part(part, BLOCK_D)
        q = encode_tile(held[part], inverse[:, None, None], q_ptr.dtype.element_ty)
        tl.store(q_ptr + rows * W + cols, q, mask=(rows < n_rows) & (cols < W))


# ---- launchers and ops


def _coded(x: Tensor, format: str) -> Coded:
    """Memory for the codes, in padded rows, and for the scales."""
    q = torch.empty((*x.shape[:-1], padded_width(x.shape[-1])), dtype=FORMATS[format].dtype, device=x.device)
    return q, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _constants(x: Tensor, format: str) -> dict[str, object]:
    return {"D": x.shape[-1], "W": padded_width(x.shape[-1]), "LARGEST": FORMATS[format].largest, **UNFUSED}


def _norm_launch(config: Config, x: Tensor, weight: Tensor, eps: float, format: str) -> Coded:
    return _add_norm_launch(config, x, None, weight, eps, format)[:2]


def _add_norm_launch(config: Config, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, format: str) -> CodedSum:
    q, scale = _coded(x, format)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other, other_stride = (x, 0) if residual is None else (residual, rows_of(residual)[1])
    if rows := scale.numel():
        _norm_kernel[(ceil_div(rows, config["BLOCK_T"]),)](
            x, other, weight, q, scale, total, rows, rows_of(x)[1], other_stride, eps,
            HAS_RESIDUAL=residual is not None, **_constants(x, format), **config,
        )  # fmt: skip
    return q[..., : x.shape[-1]], scale, total


def _silu_launch(config: Config, gate: Tensor, up: Tensor, format: str) -> Coded:
    q, scale = _coded(gate, format)
    if rows := scale.numel():
        _silu_kernel[(ceil_div(rows, config["BLOCK_T"]),)](
            gate, up, q, scale, rows, rows_of(gate)[1], rows_of(up)[1], **_constants(gate, format), **config
        )
    return q[..., : gate.shape[-1]], scale


def _norm_separate(config: Config, x: Tensor, weight: Tensor, eps: float, format: str) -> Coded:
    return quantize_rows_op.run(rms_norm_op.run(x, weight, eps), format)


def _add_norm_separate(config: Config, x: Tensor, residual: Tensor, weight: Tensor, eps: float, format: str) -> CodedSum:
    y, total = add_rms_norm_op.run(x, residual, weight, eps)
    return *quantize_rows_op.run(y, format), total


def _silu_separate(config: Config, gate: Tensor, up: Tensor, format: str) -> Coded:
    return quantize_rows_op.run(silu_mul_op.run(gate, up), format)


def _impls(launch: Any, space: Space, refuse: Any, separate: Any) -> tuple[Impl, ...]:
    return (
        Impl(name="triton", launch=launch, space=space, refuse=refuse, batch_invariant=True),
        Impl(name="separate", launch=separate, refuse=refuse_format, batch_invariant=True),
    )


rms_norm_quantize_op = Op(
    name="rms_norm_quantize",
    reference=_norm_reference,
    problem=_problem,
    cost=_norm_cost,
    examples=_examples(True, 1),
    make=norm_quantize_arguments,
    codes_may_move=True,
    impls=_impls(_norm_launch, NORM_SPACE, _refuse_norm, _norm_separate),
)

add_rms_norm_quantize_op = Op(
    name="add_rms_norm_quantize",
    reference=_add_norm_reference,
    problem=_problem,
    cost=_add_norm_cost,
    examples=_examples(True, 2),
    make=add_norm_quantize_arguments,
    codes_may_move=True,
    impls=_impls(_add_norm_launch, NORM_SPACE, _refuse_norm, _add_norm_separate),
)

silu_mul_quantize_op = Op(
    name="silu_mul_quantize",
    reference=_silu_reference,
    problem=_problem,
    cost=_silu_cost,
    examples=_examples(False, 2),
    make=gated_quantize_arguments,
    codes_may_move=True,
    impls=_impls(_silu_launch, SILU_SPACE, _refuse_silu, _silu_separate),
)


# ---- public functions


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float = 1e-6, format: str = "int8") -> Coded:
    """RMS norm over the last dimension, quantised by rows.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        weight: [D].
        eps: added to the mean square.
        format: int8, fp8 or fp8-e5m2.

    Returns:
        (codes, scale) as `quantize_rows`.

    Raises:
        ValueError: the weight does not match the last dimension; another format or dtype.
        Refused: fp8 on a card before sm_89.
    """
    check_format("rms_norm_quantize", x, format, ROW_FORMATS)
    check_last_dim("rms_norm_quantize", x, weight=weight)
    return rms_norm_quantize_op(rows_ready(x), dense(weight), eps, format)


def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, format: str = "int8") -> CodedSum:
    """Add a residual, then RMS norm over the last dimension, quantised by rows.

    Args:
        x, weight, eps, format: as in `rms_norm_quantize`.
        residual: the shape and dtype of x.

    Returns:
        (codes, scale) as `quantize_rows`, and x + residual of x's dtype, contiguous. Errors are as in `rms_norm_quantize`.
    """
    check_format("add_rms_norm_quantize", x, format, ROW_FORMATS)
    check_last_dim("add_rms_norm_quantize", x, weight=weight)
    check_alike("add_rms_norm_quantize", "residual", residual, "x", x)
    return add_rms_norm_quantize_op(rows_ready(x), rows_ready(residual), dense(weight), eps, format)


def silu_mul_quantize(gate: Tensor, up: Tensor, format: str = "int8") -> Coded:
    """silu(gate) * up, quantised by rows.

    Args:
        gate: [..., F], bf16, fp16 or fp32; a half of a merged [..., 2F] tensor is read in place.
        up: the shape and dtype of gate.
        format: int8, fp8 or fp8-e5m2.

    Returns:
        (codes, scale) as `quantize_rows`. Errors are as in `rms_norm_quantize`.
    """
    check_format("silu_mul_quantize", gate, format, ROW_FORMATS)
    check_alike("silu_mul_quantize", "up", up, "gate", gate)
    return silu_mul_quantize_op(rows_ready(gate), rows_ready(up), format)
