"""Products whose result has another dtype than the operands: quantised to 8 bits for the next layer, or float32.

    y = cast(activation((x @ weight^T) * x_scales * w_scales + bias) + residual)

    x [M, K], weight [N, K]: bf16 or fp16 without scales; or int8 or float8 with scales, as in `scaled_linear`
    y [M, N]: int8, float8_e4m3fn or float8_e5m2: y / y_scale, rounded to nearest even and saturated, with a single scale that
              is known in advance (calibrated); or float32, without y_scale

Everything before the cast is float32. The rows of a quantised result are padded to a multiple of 16 bytes, as products need
them; the padding is not written. Infinities saturate. A NaN stays a NaN in float8 and becomes 0 in int8, which has no NaN.
Compared with a 16-bit result followed by `quantize_static`, this saves memory, a launch, one rounding and time. With GELU on an
H100: int8 2048x4096x4096 52 us instead of 60, 2048x14336x4096 167 instead of 207, 128x4096x4096 14 instead of 16; bf16
2048x4096x4096 99 instead of 107.

    sm90       Hopper: the Gluon kernel of `linear`
    triton     from sm_80 on, float8 from sm_89 on: the kernel of `scaled_linear`
    invariant  `triton` with one config for every number of rows: the bits of a row do not depend on its batch

Not supported: gradients, batches, zero points of the result, operands that are not dense along K, float32 operands. There is no
`vendor` implementation, because no vendor library has such a product.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.formats import FORMATS
from tilewright.hw.device import Device
from tilewright.kernels.device.quantize import padded_width
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, problem_of
from tilewright.kernels.gemm.quantized.inputs import cast_linear_arguments
from tilewright.kernels.gemm.quantized.row_scaled import LONGEST, finished, halved, launch_scaled, refuse_sm90
from tilewright.kernels.gemm.quantized_operands import FLOAT8, check_operands, dense_along_columns, product_cost
from tilewright.kernels.gemm.sm90 import launch_sm90
from tilewright.kernels.gemm.sm90_configs import SPACE as SM90_SPACE
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["cast_linear", "cast_linear_op"]

_LARGEST = {form.dtype: form.largest for form in FORMATS.values()}


def _reference(
    x: Tensor, weight: Tensor, x_scales: Tensor | None, w_scales: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, y_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    y = x.to(torch.float32) @ weight.to(torch.float32).mT
    if x_scales is not None and w_scales is not None:
        y = y * x_scales[:, None] * w_scales
    y = finished(y, bias, activation, residual)
    if y_scale is None:
        return y.to(dtype)
    largest = _LARGEST[dtype]
    y = (y * (torch.ones_like(y_scale) / y_scale)).clamp(-largest, largest)
    codes = _empty(x, weight, activation, dtype)
    return codes.copy_((y.nan_to_num(0.0).round() if dtype == torch.int8 else y).to(dtype))


def _empty(x: Tensor, weight: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """Memory for the result. The rows of an 8-bit result are padded to a multiple of 16 bytes."""
    width = weight.shape[0] // 2 if ACTIVATIONS[activation][1] else weight.shape[0]
    row = padded_width(width) if dtype.itemsize == 1 else width
    return torch.empty((x.shape[0], row), dtype=dtype, device=x.device)[:, :width]


# ---- problem, cost, examples


class CastProblem(NamedTuple):
    """A product and the dtype of its result."""

    product: Problem
    out: torch.dtype


def _problem(
    x: Tensor, weight: Tensor, x_scales: Tensor | None, w_scales: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, y_scale: Tensor | None,
) -> CastProblem:  # fmt: skip
    return CastProblem(problem_of(x, weight, bias, activation, residual), dtype)


_example = Example.sized(cast_linear_arguments)
EXAMPLES = (
    _example("codes", 70, 96, 128, activation="silu", bias=True),
    _example("ragged codes", 33, 75, 104, out=torch.float8_e4m3fn, dtype=torch.float16),
    _example("float32", 20, 40, 64, out=torch.float32, residual=True),
    _example("int8 to int8", 40, 150, 64, dtype=torch.int8, activation="silu_mul", residual=True),
    _example("e4m3 to e4m3", 5, 48, 200, dtype=torch.float8_e4m3fn, out=torch.float8_e4m3fn, bias=True),
    _example("int8 to float32", 18, 33, 32, dtype=torch.int8, out=torch.float32, activation="gelu"),
    _example("no rows", 0, 16, 32),
)

# ---- sm90


def _sixteen(problem: CastProblem) -> Problem:
    """The 16-bit product that takes the same time."""
    return problem.product if problem.product.dtype.itemsize == 2 else halved(problem.product)


_TILES = ((128, 256, "m"), (128, 128, "tiles"), (128, 128, "m"), (64, 256, "n"), (64, 128, "n"))


def _default_sm90(device: Device, problem: CastProblem) -> Config:
    """The largest of five tiles of `linear` with which more than half of the SMs have a tile, otherwise the smallest.

    Other tiles would gain very little. Consumers that alternate tiles ("tiles") are used with an activation or a residual,
    because then one consumer's epilogue overlaps the other's products.
    """
    product, config = _sixteen(problem), {}
    long_end = product.activation != "none" or product.residual
    for m, n, consumers in _TILES:
        if ((m, n) == (128, 256) and long_end) or (consumers == "tiles" and not long_end):
            continue
        tile = {"BLOCK_M": m, "BLOCK_N": n, "CONSUMERS": consumers, "SPLIT_K": 1, "UNALIGNED": "copy"}
        if SM90_SPACE.refusal(device, product, tile) is None:
            config = tile
            if 2 * -(-product.m_bucket // m) * -(-product.n // n) > device.sms:
                break
    return config


def _refuse_config_sm90(device: Device, problem: CastProblem, c: Config) -> str | None:
    if (c["BLOCK_M"], c["BLOCK_N"], c["CONSUMERS"]) not in _TILES:
        return "not one of the five tiles of `linear` that are supported here"
    return SM90_SPACE.refusal(device, _sixteen(problem), c)


SM90_CAST_SPACE = Space(
    default=_default_sm90,
    axes={
        "BLOCK_M": (64, 128),
        "BLOCK_N": (128, 256),
        "CONSUMERS": ("m", "n", "tiles"),
        "SPLIT_K": (1,),
        "UNALIGNED": ("copy",),
    },
    refusal=_refuse_config_sm90,
)


def _launch_sm90(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor | None, w_scales: Tensor | None, bias: Tensor | None,
    activation: str, residual: Tensor | None, dtype: torch.dtype, y_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    y = _empty(x, weight, activation, dtype)
    if not y.numel():
        return y
    return launch_sm90(config, y, x, weight, bias, activation, residual, x_scales, w_scales, y_scale=y_scale)


# ---- triton


def _refuse_triton(device: Device, problem: CastProblem) -> str | None:
    if device.arch < 89 and (problem.product.dtype in FLOAT8 or problem.out in FLOAT8):
        return f"float8 needs sm_89, this is sm_{device.arch}"
    return None


def _default_triton(device: Device, problem: CastProblem) -> Config:
    low = problem.product.m_bucket <= 64
    return {"BLOCK_M": 64 if low else 128, "BLOCK_N": 128, "num_warps": 4 if low else 8, "num_stages": 3}


TRITON_CAST_SPACE = Space(
    default=_default_triton,
    axes={"BLOCK_M": (64, 128), "BLOCK_N": (128,), "num_warps": (4, 8), "num_stages": (3,)},
    refusal=lambda device, problem, c: "num_warps must be BLOCK_M / 16" if c["num_warps"] != c["BLOCK_M"] // 16 else None,
)


def _launch_triton(
    config: Config, x: Tensor, weight: Tensor, x_scales: Tensor | None, w_scales: Tensor | None, bias: Tensor | None,
    activation: str, residual: Tensor | None, dtype: torch.dtype, y_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    y, config = _empty(x, weight, activation, dtype), {"BLOCK_K": 128 // x.element_size(), **config}
    return launch_scaled(config, y, x, weight, x_scales, w_scales, bias, activation, residual, y_scale)


_ANY_M = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3}


cast_linear_op = Op(
    name="cast_linear",
    reference=_reference,
    problem=_problem,
    cost=product_cost,
    examples=EXAMPLES,
    make=cast_linear_arguments,
    rows_in_problem=True,
    codes_may_move=True,
    impls=(
        Impl(
            name="sm90", launch=_launch_sm90, space=SM90_CAST_SPACE, written_for=90,
            refuse=lambda device, problem: refuse_sm90(device, problem.product),
        ),
        Impl(name="triton", launch=_launch_triton, space=TRITON_CAST_SPACE, refuse=_refuse_triton),
        Impl(
            name="invariant", launch=lambda config, *args: _launch_triton(_ANY_M, *args), refuse=_refuse_triton,
            batch_invariant=True,
        ),
    ),
)  # fmt: skip


def cast_linear(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    y_scale: Tensor | None = None,
    *,
    x_scales: Tensor | None = None,
    w_scales: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """activation((x @ weight^T) * x_scales * w_scales + bias) + residual, quantised to 8 bits or in float32.

    Args:
        x: [M, K], bf16 or fp16; int8 or float8, dense along K, with scales.
        weight: [N, K] of the same dtype, dense along K.
        dtype: of the output: int8, float8_e4m3fn or float8_e5m2, with y_scale; or float32.
        y_scale: one float32 on x's device, by which the result is divided. It must be positive and finite; this is not checked.
        x_scales: [M], float32; only for 8-bit operands, which need it.
        w_scales: [N], float32; likewise.
        bias: [N]; of x's dtype, or with 8-bit operands bf16, fp16 or float32.
        activation: those of `scaled_linear`.
        residual: the shape of the output; of x's dtype, or with 8-bit operands bf16 or fp16. Added last.

    Returns:
        [M, N] ([M, F] with silu_mul and gelu_mul). The rows of an 8-bit result start at multiples of 16 bytes.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, a scale is missing or not allowed, or the activation is unknown.
        Refused: float8 on a card before sm_89.
    """
    if x.dtype == torch.int8 and x.dim() == 2 and x.shape[1] > LONGEST:
        raise ValueError(f"cast_linear: K must be at most {LONGEST}, or an int32 could overflow; got {x.shape[1]}")
    coded = x.dtype in (torch.int8, *FLOAT8)
    kinds = (torch.bfloat16, torch.float16) if coded else (x.dtype,)
    check_operands(
        "cast_linear", (torch.bfloat16, torch.float16, torch.int8, *FLOAT8), x, weight, bias, activation, residual,
        (*kinds, torch.float32) if coded else kinds, kinds,
    )  # fmt: skip
    if dtype not in (torch.float32, torch.int8, *FLOAT8):
        raise ValueError(f"cast_linear: dtype must be float32, int8 or a float8; got {dtype} (`linear` returns the dtype of x)")
    vectors = (("x_scales", x_scales, x.shape[:1], coded), ("w_scales", w_scales, weight.shape[:1], coded))
    for name, t, wanted, needed in (*vectors, ("y_scale", y_scale, (), dtype.itemsize == 1)):
        if (t is not None) != needed:
            raise ValueError(f"cast_linear: with x {x.dtype} and dtype {dtype}, {name} must {'' if needed else 'not '}be given")
        if t is not None and (t.numel() != torch.Size(wanted).numel() or t.dtype != torch.float32 or t.device != x.device):
            raise ValueError(
                f"cast_linear: {name} must be {list(wanted)}, float32 on {x.device}; "
                f"got {list(t.shape)}, {t.dtype} on {t.device}"
            )
    residual = dense_along_columns(residual)
    scales = (None if t is None else t.contiguous() for t in (x_scales, w_scales))
    return cast_linear_op(x, weight, *scales, bias, activation, residual, dtype, y_scale)
