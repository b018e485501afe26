"""Combines the results of the experts: the weighted sum of the K rows of each token, and the gradient of the weights.

    combine_tokens    y[t, :]      = sum over k of weights[t, k] * rows[places[t, k], :]
    combine_gradient  dweights[t, k] = sum over n of dy[t, n] * rows[places[t, k], n]

    rows: [R, N] bf16, fp16 or fp32, contiguous; places: [T, K] int32, rows in the order of `sort_by_expert`; weights: [T, K]
    float32, or None for ones -> y [T, N] of the rows' dtype; dweights [T, K] float32, from dy [T, N].

The sum is float32, added in the order of k and rounded once, so the bits are the same in any batch. There are no scattered
stores and no atomic additions. A place outside of [0, R) is clamped to this range. Limited by bytes: K rows in, one out.
"""

# T tokens, K experts per token, R rows, N columns

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.experts.inputs import combine_arguments
from tilewright.kernels.experts.permute import ROW_SPACE, RowProblem
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["combine_gradient_op", "combine_tokens_op"]

# ---- references


def _reference(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    places = places.long().clamp(0, max(rows.shape[0] - 1, 0))
    total = torch.zeros((places.shape[0], rows.shape[1]), dtype=wide, device=rows.device)
    for k in range(places.shape[1]):
        part = rows[places[:, k]].to(wide)
        total += part if weights is None else part * weights[:, k : k + 1].to(wide)
    return total.to(rows.dtype)


def _gradient_reference(dy: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    places = places.long().clamp(0, max(rows.shape[0] - 1, 0))
    return torch.einsum("tn,tkn->tk", dy.to(wide), rows[places].to(wide))


# ---- cost, problem, examples


def _cost(rows: Tensor, places: Tensor, weights: Tensor | None) -> Cost:
    out = places.shape[0] * rows.shape[1] * rows.element_size()
    return Cost(flops=2 * places.numel() * rows.shape[1], bytes=rows.nbytes + out + 2 * places.nbytes)


def _gradient_cost(dy: Tensor, rows: Tensor, places: Tensor) -> Cost:
    return Cost(flops=2 * places.numel() * rows.shape[1], bytes=rows.nbytes + dy.nbytes + 2 * places.nbytes)


def _problem(rows: Tensor, places: Tensor, weights: Tensor | None) -> RowProblem:
    return RowProblem(rows.dtype, rows.shape[1])


def _gradient_problem(dy: Tensor, rows: Tensor, places: Tensor) -> RowProblem:
    return RowProblem(rows.dtype, rows.shape[1])


_example = Example.sized(combine_arguments)


def _gradient_arguments(
    inputs: Inputs, *, T: int, N: int, chosen: int = 8, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    rows, places, _ = combine_arguments(inputs, T=T, N=N, chosen=chosen, dtype=dtype, weighted=False)
    return inputs.randn(T, N, dtype=dtype), rows, places


_gradient_example = Example.sized(_gradient_arguments)
EXAMPLES = (
    _example("weighted", 5, 64, 2),
    _example("ragged", 3, 75, 3, dtype=torch.float16),
    _example("wide", 2, 1300, 6),
    _example("sum", 4, 33, 4, dtype=torch.float32, weighted=False),
    _example("inverse", 7, 40, 1, weighted=False),
    _example("none", 0, 16, 2),
)
GRADIENT_EXAMPLES = (
    _gradient_example("rows", 5, 64, 2),
    _gradient_example("ragged", 3, 75, 3, torch.float16),
    _gradient_example("wide", 2, 5000, 6),
    _gradient_example("float32", 3, 33, 1, torch.float32),
    _gradient_example("none", 0, 16, 2),
)


@triton.jit(do_not_specialize=["R"])
def _combine_kernel(rows_ptr, places_ptr, weights_ptr, y_ptr, R, N, K: tl.constexpr, BLOCK_N: tl.constexpr):
    parts = tl.cdiv(N, BLOCK_N)
    token = (tl.program_id(0) // parts).to(tl.int64)
    cols = tl.program_id(0) % parts * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for k in range(K):
        place = tl.minimum(tl.maximum(tl.load(places_ptr + token * K + k), 0), R - 1).to(tl.int64)
        part = tl.load(rows_ptr + place * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            part *= tl.load(weights_ptr + token * K + k)
        total += part
    tl.store(y_ptr + token * N + cols, total.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["R"])
def _gradient_kernel(dy_ptr, rows_ptr, places_ptr, dweights_ptr, R, N, K: tl.constexpr, BLOCK_N: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    place = tl.minimum(tl.maximum(tl.load(places_ptr + entry), 0), R - 1).to(tl.int64)
    dy_ptr += entry // K * N
    rows_ptr += place * N
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, N, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        total += dy * tl.load(rows_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(dweights_ptr + entry, tl.sum(total, 0))


# ---- launchers and ops


def _launch(config: Config, rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    (tokens, chosen), cols = places.shape, rows.shape[1]
    y = rows.new_empty((tokens, cols))
    if y.numel():
        grid = (tokens * ceil_div(cols, config["BLOCK_N"]),)
        _combine_kernel[grid](rows, places, weights, y, rows.shape[0], cols, K=chosen, **config)
    return y


def _launch_gradient(config: Config, dy: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    dweights = torch.empty(places.shape, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    if dweights.numel():
        block = min(1024, max(32, next_pow2(rows.shape[1])))
        _gradient_kernel[(dweights.numel(),)](
            dy, rows, places, dweights, rows.shape[0], rows.shape[1], K=places.shape[1], BLOCK_N=block, num_warps=4
        )
    return dweights


combine_tokens_op = Op(
    name="combine_tokens",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=combine_arguments,
    impls=(Impl(name="triton", launch=_launch, space=ROW_SPACE, batch_invariant=True),),
)

combine_gradient_op = Op(
    name="combine_gradient",
    reference=_gradient_reference,
    problem=_gradient_problem,
    cost=_gradient_cost,
    examples=GRADIENT_EXAMPLES,
    make=_gradient_arguments,
    impls=(Impl(name="triton", launch=_launch_gradient, batch_invariant=True),),
)
