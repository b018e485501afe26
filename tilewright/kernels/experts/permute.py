"""Moves rows to their experts: `permute_tokens` puts them in the order of `sort_by_expert`.

    y[r, :] = x[order[r] // K, :]                        order [R] int32, R = T * K rows
    y[r, :] = weights[order[r]] * x[order[r] // K, :]    with weights [T, K] float32: the gradient of `combine_tokens`

    x: [T, N], bf16, fp16 or fp32, contiguous -> [R, N]. The product is float32, rounded once.

Limited by bytes: each of the R rows is read and written once. Entries of `order` outside of [0, R) are clamped to this range.
combine.py is the reverse; with K = 1 and no weights the two are inverse to each other.
"""

# T tokens, K experts per token, R rows, N columns

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.experts.inputs import permute_arguments
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["ROW_SPACE", "RowProblem", "permute_tokens_op"]


def _reference(x: Tensor, order: Tensor, chosen: int, weights: Tensor | None) -> Tensor:
    order = order.long().clamp(0, max(order.shape[0] - 1, 0))
    rows = x[order // chosen]
    if weights is None:
        return rows
    wide = torch.promote_types(x.dtype, torch.float32)
    return (rows.to(wide) * weights.flatten()[order, None].to(wide)).to(x.dtype)


def _fake(x: Tensor, order: Tensor, chosen: int, weights: Tensor | None) -> Tensor:
    return x.new_empty((order.shape[0], x.shape[1]))


# ---- cost, problem, examples


def _cost(x: Tensor, order: Tensor, chosen: int, weights: Tensor | None) -> Cost:
    moved = order.shape[0] * x.shape[1] * x.element_size()
    return Cost(flops=0 if weights is None else moved // x.element_size(), bytes=x.nbytes + moved + order.nbytes)


class RowProblem(NamedTuple):
    """The dtype and width of the rows. Their number is not part of the problem."""

    dtype: torch.dtype
    cols: int


def _problem(x: Tensor, order: Tensor, chosen: int, weights: Tensor | None) -> RowProblem:
    return RowProblem(x.dtype, x.shape[1])


def _default(device: Device, problem: RowProblem) -> Config:
    block = max(32, min(1024, next_pow2(problem.cols)))
    return {"BLOCK_N": block, "num_warps": 4 if block >= 1024 else 1 if block <= 256 else 2}


ROW_SPACE = Space(
    default=_default,
    axes={"BLOCK_N": (256, 512, 1024, 2048), "num_warps": (1, 2, 4)},
    refusal=lambda device, problem, c: (
        "BLOCK_N wider than the row needs"
        if c["BLOCK_N"] >= max(512, 2 * problem.cols)
        else "fewer than two elements per thread"
        if c["BLOCK_N"] < 64 * c["num_warps"]
        else None
    ),
)


_example = Example.sized(permute_arguments)
EXAMPLES = (
    _example("rows", 5, 64, 2),
    _example("ragged", 3, 75, 3, dtype=torch.float16),
    _example("weighted", 4, 1300, 2, weighted=True),
    _example("inverse", 7, 33, 1, dtype=torch.float32),
    _example("none", 0, 16, 2),
)


@triton.jit(do_not_specialize=["R", "chosen"])
def _permute_kernel(x_ptr, order_ptr, weights_ptr, y_ptr, R, chosen, N, BLOCK_N: tl.constexpr):
    parts = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // parts
    cols = tl.program_id(0) % parts * BLOCK_N + tl.arange(0, BLOCK_N)
    source = tl.minimum(tl.maximum(tl.load(order_ptr + row), 0), R - 1)
    x = tl.load(x_ptr + (source // chosen).to(tl.int64) * N + cols, mask=cols < N, other=0.0)
    if weights_ptr is not None:
        x = (x.to(tl.float32) * tl.load(weights_ptr + source)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row.to(tl.int64) * N + cols, x, mask=cols < N)


def _launch(config: Config, x: Tensor, order: Tensor, chosen: int, weights: Tensor | None) -> Tensor:
    y = _fake(x, order, chosen, weights)
    rows, cols = y.shape
    if y.numel():
        grid = (rows * ceil_div(cols, config["BLOCK_N"]),)
        _permute_kernel[grid](x, order, weights, y, rows, chosen, cols, **config)
    return y


permute_tokens_op = Op(
    name="permute_tokens",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=permute_arguments,
    fake=_fake,
    impls=(Impl(name="triton", launch=_launch, space=ROW_SPACE, batch_invariant=True),),
)
