"""RMS norm, alone and with the residual addition before it (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).

    y[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * weight[:]

    x, residual, y: [..., D] of bf16, fp16 or fp32; weight: [D]. The sum of squares is accumulated in float32.
    add_rms_norm: r = x + residual, rounded to x.dtype as the eager sum would be; returns (rms_norm(r), r).

Limited by bytes: D elements in, D out, a handful of flops each. A row up to 16384 elements wide is held in registers between
the two passes; a wider one is read again, from L2. Rows may be strided, the last dimension may not.
Not supported: backward, a last dimension with a stride other than 1 (it is copied first by the public function).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.shapes import check_last_dim, next_pow2, rows_of, rows_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["add_rms_norm", "add_rms_norm_op", "rms_norm", "rms_norm_op"]

# ---- reference


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def _add_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _reference(total, weight, eps), total


# ---- cost


def _cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(flops=4 * x.numel(), bytes=2 * x.nbytes + weight.nbytes)


def _add_cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(flops=5 * x.numel(), bytes=4 * x.nbytes + weight.nbytes)


# ---- space and examples


class Problem(NamedTuple):
    """All that a config may depend on: not the number of rows."""

    dtype: torch.dtype
    cols: int


def _problem(x: Tensor, weight: Tensor, eps: float) -> Problem:
    return Problem(x.dtype, x.shape[-1])


def _add_problem(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Problem:
    return Problem(x.dtype, x.shape[-1])


def _default(device: Device, problem: Problem) -> Config:
    block_d = min(next_pow2(problem.cols), 16384)
    # A program wants about 4096 elements in flight; 32 a thread still fit in registers beside the weights.
    return {
        "BLOCK_T": max(1, min(16, 2048 // block_d)),
        "BLOCK_D": block_d,
        "num_warps": max(1, min(16, max(block_d, 2048) // 512)),
    }


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_T": (1, 2, 4, 8, 16),
        "BLOCK_D": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        "num_warps": (1, 2, 4, 8, 16),
    },
    refusal=lambda device, problem, c: (
        "tile over 16384 elements"
        if c["BLOCK_T"] * c["BLOCK_D"] > 16384
        else "BLOCK_D wider than the row needs"
        if c["BLOCK_D"] >= 2 * problem.cols and c["BLOCK_D"] > 64
        else None
    ),
)


def _example(label: str, *shape: int, dtype: torch.dtype = torch.bfloat16, row_stride: int = 0) -> Example:
    def make(inputs: Inputs) -> tuple[Tensor, Tensor, float]:
        x = inputs.randn(*shape[:-1], row_stride or shape[-1], dtype=dtype)[..., : shape[-1]]
        return x, inputs.randn(shape[-1], dtype=dtype), 1e-6

    return Example(label, make)


EXAMPLES = (
    _example("rows", 4, 256),
    _example("ragged", 3, 5, 100),
    _example("strided", 5, 128, row_stride=192, dtype=torch.float16),
    _example("one", 1, 1, dtype=torch.float32),
    _example("wide", 2, 16500),
)


def _with_residual(example: Example) -> Example:
    def make(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, float]:
        x, weight, eps = example.make(inputs)
        return x, inputs.randn(*x.shape, dtype=x.dtype), weight, eps

    return Example(example.label, make)


# ---- kernel


@triton.jit
def _load_total(x_ptr, residual_ptr, offsets, residual_offsets, mask, HAS_RESIDUAL: tl.constexpr):
    """x, or x + residual rounded to x's dtype. The sum is formed in float32: the same bits, and the interpreter can do it."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    return x


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr,
    n_rows, x_row_stride, residual_row_stride, eps,
    D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    x_rows, residual_rows, y_rows = rows * x_row_stride, rows * residual_row_stride, rows * D
    live = rows < n_rows
    block = tl.arange(0, BLOCK_D)[None, :]
    if D <= BLOCK_D:
        mask = live & (block < D)
        x = _load_total(x_ptr, residual_ptr, x_rows + block, residual_rows + block, mask, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(total_ptr + y_rows + block, x, mask=mask)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / D + eps)
        weight = tl.load(weight_ptr + block, mask=block < D, other=0.0).to(tl.float32)
        tl.store(y_ptr + y_rows + block, (wide * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            cols = start + block
            mask = live & (cols < D)
            x = _load_total(x_ptr, residual_ptr, x_rows + cols, residual_rows + cols, mask, HAS_RESIDUAL)
            if HAS_RESIDUAL:
                tl.store(total_ptr + y_rows + cols, x, mask=mask)
            wide = x.to(tl.float32)
            squares += wide * wide
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / D + eps)
        for start in range(0, D, BLOCK_D):
            cols = start + block
            mask = live & (cols < D)
            x = _load_total(x_ptr, residual_ptr, x_rows + cols, residual_rows + cols, mask, HAS_RESIDUAL)
            weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
            y = x.to(tl.float32) * scale * weight
            tl.store(y_ptr + y_rows + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


# ---- launchers and ops


def _launch(config: Config, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, row_stride = rows_of(x)
    grid = (triton.cdiv(rows, config["BLOCK_T"]),)
    if rows:
        _rms_norm_kernel[grid](x, x, weight, y, y, rows, row_stride, 0, eps, D=x.shape[-1], HAS_RESIDUAL=False, **config)
    return y


def _add_launch(config: Config, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, row_stride = rows_of(x)
    grid = (triton.cdiv(rows, config["BLOCK_T"]),)
    if rows:
        _rms_norm_kernel[grid](
            x, residual, weight, y, total, rows, row_stride, rows_of(residual)[1], eps,
            D=x.shape[-1], HAS_RESIDUAL=True, **config,
        )  # fmt: skip
    return y, total


# add_rms_norm rounds twice: the sum that it returns, then the norm of that sum.
_TOLERANCE = {torch.bfloat16: (8e-3, 4e-3), torch.float16: (1e-3, 5e-4)}

rms_norm_op = Op(
    name="rms_norm",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    tolerance=_TOLERANCE,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)

add_rms_norm_op = Op(
    name="add_rms_norm",
    reference=_add_reference,
    problem=_add_problem,
    cost=_add_cost,
    examples=tuple(_with_residual(e) for e in EXAMPLES),
    tolerance=_TOLERANCE,
    impls=(Impl(name="triton", launch=_add_launch, space=SPACE, batch_invariant=True),),
)


# ---- public functions


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last dimension.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        weight: [D].
        eps: added to the mean square.

    Returns:
        [..., D] of x's dtype, contiguous.

    Raises:
        ValueError: the weight does not match the last dimension.
    """
    check_last_dim("rms_norm", x, weight=weight)
    return rms_norm_op(rows_ready(x), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add a residual, then RMS norm over the last dimension: one pass instead of two.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        residual: the shape and dtype of x.
        weight: [D].
        eps: added to the mean square.

    Returns:
        (rms_norm(x + residual), x + residual), both of x's dtype and contiguous.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_last_dim("add_rms_norm", x, weight=weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: residual must be like x, {tuple(x.shape)} {x.dtype}; got {tuple(residual.shape)} {residual.dtype}"
        )
    return add_rms_norm_op(rows_ready(x), rows_ready(residual), weight, eps)
