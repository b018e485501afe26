"""Layer norm over the last dimension (Ba, Kiros and Hinton, "Layer normalization", 2016).

    y[t, :] = (x[t, :] - mean) / sqrt(variance + eps) * weight[:] + bias[:],     mean and (biased) variance of x[t, :]

    x, y: [..., D] of bf16, fp16 or fp32; weight, bias: [D], the bias may be missing. Statistics are float32 and never the
    difference of two large sums: the variance is that of x - mean, and a row that does not fit into registers is reduced
    by Welford's recurrence a lane, joined by Chan's formula (Chan, Golub and LeVeque, 1983).

Limited by bytes: D elements in, D out. A row up to 16384 elements wide is held in registers; a wider one is read again,
from L2. Rows may be strided, the last dimension may not.
Not supported: backward, a last dimension with a stride other than 1 (it is copied first by the public function).
"""

# Pyright does not see what a jitted function returns.
# pyright: reportGeneralTypeIssues=false
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

__all__ = ["layer_norm", "layer_norm_op"]

# ---- reference


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


# ---- cost


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Cost:
    return Cost(flops=7 * x.numel(), bytes=2 * x.nbytes + (1 + (bias is not None)) * weight.nbytes)


# ---- space and examples


class Problem(NamedTuple):
    """All that a config may depend on: not the number of rows."""

    dtype: torch.dtype
    cols: int


def _problem(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Problem:
    return Problem(x.dtype, x.shape[-1])


def _default(device: Device, problem: Problem) -> Config:
    block_d = min(next_pow2(problem.cols), 16384)
    # 16 elements a thread: two 16-byte loads of bf16 in flight, and room for weight and bias beside them.
    return {
        "BLOCK_T": max(1, min(16, 2048 // block_d)),
        "BLOCK_D": block_d,
        "num_warps": max(4, min(16, block_d // 512)),
    }


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_T": (1, 2, 4, 8, 16),
        "BLOCK_D": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        "num_warps": (1, 2, 4, 8, 16, 32),
    },
    refusal=lambda device, problem, c: (
        "tile over 16384 elements"
        if c["BLOCK_T"] * c["BLOCK_D"] > 16384
        else "BLOCK_D wider than the row needs"
        if c["BLOCK_D"] >= 2 * problem.cols and c["BLOCK_D"] > 64
        else "over 64 elements a thread"
        if c["BLOCK_T"] * c["BLOCK_D"] > 64 * 32 * c["num_warps"]
        else None
    ),
)


def _example(
    label: str, *shape: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True, row_stride: int = 0, mean: float = 0.0
) -> Example:
    def make(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None, float]:
        x = inputs.randn(*shape[:-1], row_stride or shape[-1], dtype=dtype)[..., : shape[-1]]
        weight = inputs.randn(shape[-1], dtype=dtype)
        return x + mean if mean else x, weight, inputs.randn(shape[-1], dtype=dtype) if bias else None, 1e-5

    return Example(label, make)


EXAMPLES = (
    _example("rows", 4, 256),
    _example("ragged", 3, 5, 100, bias=False),
    _example("strided", 5, 128, row_stride=192, dtype=torch.float16),
    _example("one", 1, 1, dtype=torch.float32),
    _example("wide", 2, 16500),
    _example("far from zero", 2, 16900, mean=30.0, dtype=torch.float16),
)

# ---- kernel


@triton.jit
def _welford(x_ptr, x_rows, live, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """(mean, variance) of rows wider than a block, [BLOCK_T, 1]."""
    block = tl.arange(0, BLOCK_D)[None, :]
    mean = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        mask = live & (start + block < D)
        x = tl.load(x_ptr + x_rows + start + block, mask=mask, other=0.0).to(tl.float32)
        gap = tl.where(mask, x - mean, 0.0)
        mean += gap * (1.0 / (start // BLOCK_D + 1))
        squares += tl.where(mask, gap * (x - mean), 0.0)
    # How many of the D columns fell to each lane.
    count = ((D - block + BLOCK_D - 1) // BLOCK_D).to(tl.float32)
    row_mean = tl.sum(mean * count, axis=1, keep_dims=True) / D
    gap = mean - row_mean
    return row_mean, tl.sum(squares + gap * gap * count, axis=1, keep_dims=True) / D


@triton.jit(do_not_specialize=["n_rows"])
def _layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, n_rows, x_row_stride, eps,
    D: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    x_rows, y_rows = rows * x_row_stride, rows * D
    live = rows < n_rows
    block = tl.arange(0, BLOCK_D)[None, :]
    if D <= BLOCK_D:
        mask = live & (block < D)
        x = tl.load(x_ptr + x_rows + block, mask=mask, other=0.0).to(tl.float32)
        # Asked for before the sums are waited for.
        weight = tl.load(weight_ptr + block, mask=block < D, other=0.0)
        bias = tl.load(bias_ptr + block, mask=block < D, other=0.0) if HAS_BIAS else weight
        x = tl.where(mask, x - tl.sum(x, axis=1, keep_dims=True) / D, 0.0)
        y = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps) * weight.to(tl.float32)
        if HAS_BIAS:
            y += bias.to(tl.float32)
        tl.store(y_ptr + y_rows + block, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        mean, variance = _welford(x_ptr, x_rows, live, D, BLOCK_T, BLOCK_D)
        scale = tl.rsqrt(variance + eps)
        for start in range(0, D, BLOCK_D):
            cols = start + block
            mask = live & (cols < D)
            x = tl.load(x_ptr + x_rows + cols, mask=mask, other=0.0).to(tl.float32)
            y = (x - mean) * scale * tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
            if HAS_BIAS:
                y += tl.load(bias_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
            tl.store(y_ptr + y_rows + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


# ---- launcher and op


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, row_stride = rows_of(x)
    if rows:
        _layer_norm_kernel[(triton.cdiv(rows, config["BLOCK_T"]),)](
            x, weight, weight if bias is None else bias, y, rows, row_stride, eps,
            D=x.shape[-1], HAS_BIAS=bias is not None, **config,
        )  # fmt: skip
    return y


layer_norm_op = Op(
    name="layer_norm",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


# ---- public function


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dimension.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        weight: [D].
        bias: [D] or None.
        eps: added to the variance.

    Returns:
        [..., D] of x's dtype, contiguous.

    Raises:
        ValueError: weight or bias does not match the last dimension.
    """
    if bias is None:
        check_last_dim("layer_norm", x, weight=weight)
    else:
        check_last_dim("layer_norm", x, weight=weight, bias=bias)
    return layer_norm_op(rows_ready(x), weight, bias, eps)
