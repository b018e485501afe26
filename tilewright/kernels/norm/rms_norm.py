"""RMS norm, alone and fused with the residual addition before it.

    y[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * weight[:]

    x, residual, y: [..., D] of bf16, fp16 or fp32; weight: [D]. The sum of squares is accumulated in float32.
    add_rms_norm: r = x + residual, rounded to x.dtype like the eager sum; returns (rms_norm(r), r).

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

The kernel makes two passes over a row: one for the sum of squares, one for the result. It is memory-bound: D elements in, D
out, a handful of flops each. A row up to 32 KB wide (16384 columns of bf16) stays in registers between the passes. Of a wider
row only the last blocks stay in registers; the second pass reads the other blocks again, from L1 and L2
(device/multi_pass_rows.py). There add_rms_norm reads the sum that it wrote, instead of both summands.

Rows may be strided. A last dimension with a stride other than 1 is not supported: the public functions copy such a tensor
first. The gradients are in backward.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.multi_pass_rows import load_block, narrow_rows, rows_space, store_block
from tilewright.kernels.device.row_start import head_start, row_start
from tilewright.kernels.hopper.early import early
from tilewright.kernels.launch.pdl import launch_options, release
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.shapes import ceil_div, check_alike, check_last_dim, rows_of, rows_of_heads, rows_ready
from tilewright.kernels.norm.cooperative import RMS_SPLIT, split_first
from tilewright.kernels.norm.inputs import add_norm_arguments, norm_arguments
from tilewright.kernels.norm.work import add_norm_work, norm_work
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["add_rms_norm", "add_rms_norm_op", "rms_norm", "rms_norm_op"]


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), eps).to(x.dtype)


def _add_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _reference(total, weight, eps), total


def _cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(flops=4 * x.numel(), bytes=2 * x.nbytes + weight.nbytes)


def _add_cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(flops=5 * x.numel(), bytes=4 * x.nbytes + weight.nbytes)


# ---- space and examples


class Problem(NamedTuple):
    """Everything that a config may depend on. The number of rows is not part of it."""

    dtype: torch.dtype
    cols: int
    residual: bool


def _default(device: Device, problem: Problem) -> Config:
    # One wide row per SM. HELD is the largest number of blocks that fit in registers without spills: 3, or 2 for 16-bit types
    # with a residual. H100, 4096 x 131072 bf16: 776 us (a copy: 710), with the residual 1530 us (a copy: 1420).
    widest = 32768 // problem.dtype.itemsize
    if problem.cols > widest:
        held = 2 if problem.residual and problem.dtype.itemsize == 2 else 3
        return {"BLOCK_T": 1, "BLOCK_D": widest, "HELD": held, "num_warps": 32}
    # About 2048 elements per program. Up to 32 elements per thread fit in registers together with the weights.
    return narrow_rows(problem.cols)


SPACE = rows_space(_default)


@Example.of
def _example(
    inputs: Inputs, *shape: int, dtype: torch.dtype = torch.bfloat16, row_stride: int = 0
) -> tuple[Tensor, Tensor, float]:
    x = inputs.randn(*shape[:-1], row_stride or shape[-1], dtype=dtype)[..., : shape[-1]]
    return x, inputs.randn(shape[-1], dtype=dtype), 1e-6


EXAMPLES = (
    _example("rows", 4, 256),
    _example("ragged", 3, 5, 100),
    _example("strided", 5, 128, row_stride=192, dtype=torch.float16),
    _example("one", 1, 1, dtype=torch.float32),
    _example("wide", 2, 16500),
    _example("many blocks", 1, 81920, dtype=torch.float16),
)


def _with_residual(inputs: Inputs, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, float]:
    return x, inputs.randn(*x.shape, dtype=x.dtype), weight, eps


# ---- kernel


@triton.jit
def _load_total(x_ptr, residual_ptr, offsets, residual_offsets, mask, HAS_RESIDUAL: tl.constexpr):
    """x, or x + residual rounded to x's dtype.

    The sum is computed in float32. After the rounding it has the same bits as a sum in x's dtype, and Triton's interpreter can
    compute it.
    """
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _wide_total(
    x_ptr, residual_ptr, total_ptr, block,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, HELD: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Return a block of x, or of x + residual, and the sums of squares of every 8 neighbouring columns. Stores x + residual."""
    if HAS_RESIDUAL:
        x = load_block(x_ptr, block, D, BLOCK_D, MASKED, "last time", 0.0)
        residual = load_block(residual_ptr, block, D, BLOCK_D, MASKED, "last time", 0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        store_block(total_ptr, block, x, D, BLOCK_D, MASKED, not HELD)
    else:
        x = load_block(x_ptr, block, D, BLOCK_D, MASKED, "once" if HELD else "again", 0.0)
    wide = x.to(tl.float32)
    return x, tl.sum(wide * wide, axis=1)


@triton.jit
def _wide_scaled(x, scale, weight_ptr, y_ptr, block, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    weight = load_block(weight_ptr, block, D, BLOCK_D, MASKED, "shared", 0.0).to(tl.float32)
    store_block(y_ptr, block, x.to(tl.float32) * scale * weight, D, BLOCK_D, MASKED)


@triton.jit
def _wide_row(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, eps,
    D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Normalise one row that is wider than a block. The pointers are at its start. The last HELD blocks stay in registers."""
    LAST: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D - 1
    FIRST_HELD: tl.constexpr = LAST + 1 - min(HELD, LAST)
    RAGGED: tl.constexpr = D % BLOCK_D != 0
    squares = tl.zeros([BLOCK_D // 8], tl.float32)
    for i in range(FIRST_HELD):
        _, more = _wide_total(x_ptr, residual_ptr, total_ptr, i, D, BLOCK_D, False, False, HAS_RESIDUAL)
        squares += more
    held = ()
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        x, more = _wide_total(x_ptr, residual_ptr, total_ptr, block, D, BLOCK_D, RAGGED and block == LAST, True, HAS_RESIDUAL)
        held = held + (x,)
        squares += more
    scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
    if HAS_RESIDUAL:
        # Below, a thread may read values that another thread has stored.
        tl.debug_barrier()
    for block in tl.static_range(LAST, FIRST_HELD - 1, -1):
        _wide_scaled(held[block - FIRST_HELD], scale, weight_ptr, y_ptr, block, D, BLOCK_D, RAGGED and block == LAST)
    for i in range(FIRST_HELD):
        j = FIRST_HELD - 1 - i
        again = load_block(total_ptr if HAS_RESIDUAL else x_ptr, j, D, BLOCK_D, False, "last time", 0.0)
        _wide_scaled(again, scale, weight_ptr, y_ptr, j, D, BLOCK_D, False)


@triton.jit(do_not_specialize=["n_rows", "x_row_stride", "residual_row_stride"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr,
    n_rows, x_row_stride, residual_row_stride, eps,
    D: tl.constexpr, HEADS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        release()
        gdc_wait()
    if D <= BLOCK_D:
        rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        y_rows = rows * D
        block = tl.arange(0, BLOCK_D)[None, :]
        mask = (rows < n_rows) & (block < D)
        x_at = head_start(rows, x_row_stride, D, HEADS) + block
        residual_at = row_start(rows, residual_row_stride, D) + block
        x = _load_total(x_ptr, residual_ptr, x_at, residual_at, mask, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(total_ptr + y_rows + block, x, mask=mask)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / D + eps)
        weight = tl.load(weight_ptr + block, mask=block < D, other=0.0).to(tl.float32)
        tl.store(y_ptr + y_rows + block, (wide * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        row = tl.program_id(0).to(tl.int64)
        x_ptr += row_start(row, x_row_stride, D)
        residual_ptr += row_start(row, residual_row_stride, D)
        _wide_row(
            x_ptr, residual_ptr, weight_ptr, y_ptr + row * D, total_ptr + row * D, eps, D, HAS_RESIDUAL, BLOCK_D, HELD
        )  # fmt: skip


# ---- launchers and ops


def _launch(config: Config, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _add_launch(config, x, None, weight, eps)[0]


def _add_launch(config: Config, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, row_stride, heads = rows_of_heads(x)
    other, other_stride = (x, 0) if residual is None else (residual, rows_of(residual)[1])
    if rows:
        launch(
            _rms_norm_kernel, (ceil_div(rows, config["BLOCK_T"]),), (x, other, weight, y, total),
            (rows, row_stride, other_stride, eps),
            {"D": x.shape[-1], "HEADS": heads, "HAS_RESIDUAL": residual is not None, **config}
            | launch_options(early(x, rows)),
        )  # fmt: skip
    return y, total


# add_rms_norm rounds twice: first the sum that it returns, then the norm of that sum.
_TOLERANCE = {torch.bfloat16: (8e-3, 4e-3), torch.float16: (1e-3, 5e-4)}

rms_norm_op = Op(
    name="rms_norm",
    reference=_reference,
    problem=lambda x, *_: Problem(x.dtype, x.shape[-1], False),
    cost=_cost,
    examples=EXAMPLES,
    make=norm_arguments,
    tolerance=_TOLERANCE,
    first=split_first,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True, work=norm_work), RMS_SPLIT),
)

add_rms_norm_op = Op(
    name="add_rms_norm",
    reference=_add_reference,
    problem=lambda x, *_: Problem(x.dtype, x.shape[-1], True),
    cost=_add_cost,
    examples=tuple(example.then(_with_residual) for example in EXAMPLES),
    make=add_norm_arguments,
    tolerance=_TOLERANCE,
    impls=(Impl(name="triton", launch=_add_launch, space=SPACE, batch_invariant=True, work=add_norm_work),),
)


# ---- public functions


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm without gradients. `ops.rms_norm` describes the arguments."""
    check_last_dim("rms_norm", x, weight=weight)
    return rms_norm_op(rows_ready(x), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Residual addition and RMS norm without gradients. `ops.add_rms_norm` describes the arguments."""
    check_last_dim("add_rms_norm", x, weight=weight)
    check_alike("add_rms_norm", "residual", residual, "x", x)
    return add_rms_norm_op(rows_ready(x), rows_ready(residual), weight, eps)
