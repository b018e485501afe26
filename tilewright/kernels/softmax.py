"""Softmax over the last dimension.

    y[t, i] = exp(x[t, i] - max(x[t, :])) / sum_j exp(x[t, j] - max(x[t, :]))

    x, y: [..., D] of bf16, fp16 or fp32; exponentials and sums are float32. As in torch, a row of -inf alone, a row with +inf
    and a row with NaN give NaN; -inf beside finite numbers gives 0.

Limited by bytes: D elements in, D out. A row up to 16384 elements wide is held in registers; of a wider one each lane keeps a
running maximum and a sum relative to it (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and
the row is read again, from L2. Rows may be strided, the last dimension may not.
Not supported: backward, other dimensions, a last dimension with a stride other than 1 (it is copied first by the public
function).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.shapes import next_pow2, rows_of, rows_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["softmax", "softmax_op"]

# ---- reference


def _reference(x: Tensor) -> Tensor:
    return torch.softmax(x, -1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


# ---- cost


def _cost(x: Tensor) -> Cost:
    return Cost(flops=5 * x.numel(), bytes=2 * x.nbytes)


# ---- space and examples


class Problem(NamedTuple):
    """All that a config may depend on: not the number of rows."""

    dtype: torch.dtype
    cols: int


def _problem(x: Tensor) -> Problem:
    return Problem(x.dtype, x.shape[-1])


def _default(device: Device, problem: Problem) -> Config:
    # A wide row keeps a maximum and a sum for each lane of a block.
    block_d = next_pow2(problem.cols) if problem.cols <= 16384 else 8192
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


def _example(label: str, *shape: int, dtype: torch.dtype = torch.bfloat16, row_stride: int = 0, masked: int = 0) -> Example:
    def make(inputs: Inputs) -> tuple[Tensor]:
        x = inputs.randn(*shape[:-1], row_stride or shape[-1], dtype=dtype, scale=3.0)[..., : shape[-1]]
        x[..., shape[-1] - masked :] = -torch.inf
        return (x,)

    return Example(label, make)


EXAMPLES = (
    _example("rows", 4, 256),
    _example("ragged", 3, 5, 100),
    _example("strided", 5, 128, row_stride=192, dtype=torch.float16),
    _example("one", 1, 1, dtype=torch.float32),
    _example("masked", 2, 70, masked=37),
    _example("all masked", 2, 5, masked=5),
    _example("wide", 2, 16500, dtype=torch.float32),
    _example("wide, all masked", 1, 16500, masked=16500),
    _example("wide, masked", 1, 16500, masked=16490),
)

# ---- kernel

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_kernel(
    x_ptr, y_ptr, n_rows, x_row_stride, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    x_rows, y_rows = rows * x_row_stride, rows * D
    live = rows < n_rows
    block = tl.arange(0, BLOCK_D)[None, :]
    if D <= BLOCK_D:
        mask = live & (block < D)
        x = tl.load(x_ptr + x_rows + block, mask=mask, other=float("-inf")).to(tl.float32)
        y = tl.exp2((x - tl.max(x, axis=1, keep_dims=True)) * _LOG2E)
        y *= 1.0 / tl.sum(y, axis=1, keep_dims=True)
        tl.store(y_ptr + y_rows + block, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        # A lane that has only met -inf must not subtract it from itself: its maximum starts at the lowest finite float.
        top = tl.full([BLOCK_T, BLOCK_D], -3.4028234663852886e38, tl.float32)
        mass = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            x = tl.load(x_ptr + x_rows + start + block, mask=live & (start + block < D), other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, x)
            mass = mass * tl.exp2((top - higher) * _LOG2E) + tl.exp2((x - higher) * _LOG2E)
            top = higher
        row_top = tl.max(top, axis=1, keep_dims=True)
        scale = 1.0 / tl.sum(mass * tl.exp2((top - row_top) * _LOG2E), axis=1, keep_dims=True)
        for start in range(0, D, BLOCK_D):
            mask = live & (start + block < D)
            x = tl.load(x_ptr + x_rows + start + block, mask=mask, other=float("-inf")).to(tl.float32)
            y = tl.exp2((x - row_top) * _LOG2E) * scale
            tl.store(y_ptr + y_rows + start + block, y.to(y_ptr.dtype.element_ty), mask=mask)


# ---- launcher and op


def _launch(config: Config, x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, row_stride = rows_of(x)
    if rows:
        _softmax_kernel[(triton.cdiv(rows, config["BLOCK_T"]),)](x, y, rows, row_stride, D=x.shape[-1], **config)
    return y


softmax_op = Op(
    name="softmax",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


# ---- public function


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension.

    Args:
        x: [..., D], bf16, fp16 or fp32.

    Returns:
        [..., D] of x's dtype, contiguous. A row of -inf alone gives NaN, as in torch.

    Raises:
        ValueError: x is a scalar or does not hold floats.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"softmax: x must hold floats and have a last dimension, got {tuple(x.shape)} {x.dtype}")
    return softmax_op(rows_ready(x))
