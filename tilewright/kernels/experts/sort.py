"""Sorts rows by expert: a stable counting sort, whose result is the same in every run.

    experts [T, K] int32, each in [0, X) -> offsets [X + 1], order [T * K], places [T, K], all int32

A token has K experts, so there are T * K rows, numbered token by token. After sorting, order[r] is the row at place r, and
places[t, k] is the place of row t * K + k. The rows of expert e are at places offsets[e] to offsets[e + 1] - 1. Rows of one
expert keep their order. An expert number outside of [0, X) is clamped to this range, so that no later kernel can access memory
outside of a tensor.

Limited by latency. Up to 1,024 rows are sorted by one program (`one_program`). Its keys contain the expert and the row, so no
two keys are equal and a sorting network gives a stable order. More rows need three launches (`triton`). First, each block of
rows counts its rows per expert. Then one program per expert adds up its counts, block after block. Now each block knows where
its rows of an expert begin, and it ranks them by comparing all pairs. There are no atomic additions, so the order in which
programs run does not matter.
"""

# R = T * K rows, X experts

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.experts.inputs import sort_arguments
from tilewright.kernels.experts.route import MOST_EXPERTS
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["sort_by_expert_op"]


def _reference(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = experts.flatten().clamp(0, count - 1)
    order = flat.sort(stable=True).indices
    places = torch.empty_like(order).index_copy(0, order, torch.arange(flat.shape[0], device=flat.device))
    sizes = torch.zeros(count + 1, dtype=torch.int64, device=flat.device).index_add(0, flat.long() + 1, torch.ones_like(order))
    offsets = sizes.cumsum(0)
    return offsets.to(torch.int32), order.to(torch.int32), places.to(torch.int32).view(experts.shape)


def _fake(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    order = experts.new_empty(experts.numel(), dtype=torch.int32)
    return experts.new_empty(count + 1, dtype=torch.int32), order, torch.empty_like(experts, dtype=torch.int32)


# ---- cost, problem, examples


def _cost(experts: Tensor, count: int) -> Cost:
    return Cost(flops=experts.numel(), bytes=experts.nbytes + 2 * 4 * experts.numel() + 4 * (count + 1))


class Problem(NamedTuple):
    """Whether there are few enough rows for `one_program`, and the number of experts."""

    few: bool
    experts: int


_FEW = 1024


def _problem(experts: Tensor, count: int) -> Problem:
    return Problem(experts.numel() <= _FEW, count)


_example = Example.sized(sort_arguments)


def _outside(inputs: Inputs) -> tuple[Tensor, int]:
    return inputs.tensor([[3, -1], [7, 0]], torch.int32), 4


EXAMPLES = (
    _example("decode", 1, 128, 8),
    _example("few", 13, 7, 2),
    _example("more", 300, 20, 4),
    _example("all one", 600, 8, 2, skew="one"),
    _example("none", 0, 5, 2),
    Example("outside", _outside),
)


@triton.jit(do_not_specialize=["R", "X"])
def _one_program_kernel(
    experts_ptr, offsets_ptr, order_ptr, places_ptr, R, X,
    BLOCK_R: tl.constexpr, BLOCK_X: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_R)
    experts = tl.load(experts_ptr + rows, mask=rows < R, other=0)
    experts = tl.where(rows < R, tl.minimum(tl.maximum(experts, 0), X - 1), X)
    keys = tl.sort(experts * BLOCK_R + rows)
    order = keys % BLOCK_R
    tl.store(order_ptr + rows, order, mask=rows < R)
    tl.store(places_ptr + order, rows, mask=rows < R)
    for first in range(0, BLOCK_X, CHUNK):
        xs = first + tl.arange(0, CHUNK)
        below = tl.sum((experts[None, :] < xs[:, None]).to(tl.int32), 1)
        tl.store(offsets_ptr + xs, below, mask=xs <= X)


@triton.jit(do_not_specialize=["R", "X", "blocks"])
def _count_kernel(experts_ptr, counts_ptr, R, X, blocks, BLOCK_R: tl.constexpr, BLOCK_X: tl.constexpr, CHUNK: tl.constexpr):
    block = tl.program_id(0)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    experts = tl.load(experts_ptr + rows, mask=rows < R, other=0)
    experts = tl.where(rows < R, tl.minimum(tl.maximum(experts, 0), X - 1), X)
    for first in range(0, BLOCK_X, CHUNK):
        xs = first + tl.arange(0, CHUNK)
        counts = tl.sum((experts[None, :] == xs[:, None]).to(tl.int32), 1)
        tl.store(counts_ptr + xs.to(tl.int64) * blocks + block, counts, mask=xs < X)


@triton.jit(do_not_specialize=["blocks"])
def _add_kernel(counts_ptr, sizes_ptr, blocks, CHUNK: tl.constexpr):
    """Replace an expert's count in each block by the number of its rows in all earlier blocks, and store their total."""
    expert = tl.program_id(0)
    counts_ptr += expert.to(tl.int64) * blocks
    before = 0
    for first in range(0, blocks, CHUNK):
        at = first + tl.arange(0, CHUNK)
        counts = tl.load(counts_ptr + at, mask=at < blocks, other=0)
        tl.store(counts_ptr + at, before + tl.cumsum(counts, 0) - counts, mask=at < blocks)
        before += tl.sum(counts, 0)
    tl.store(sizes_ptr + expert, before)


@triton.jit(do_not_specialize=["R", "X", "blocks"])
def _place_kernel(
    experts_ptr, counts_ptr, sizes_ptr, offsets_ptr, order_ptr, places_ptr, R, X, blocks,
    BLOCK_R: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    xs = tl.arange(0, BLOCK_X)
    sizes = tl.load(sizes_ptr + xs, mask=xs < X, other=0)
    offsets = tl.cumsum(sizes, 0) - sizes
    if block == 0:
        tl.store(offsets_ptr + xs, offsets, mask=xs <= X)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    experts = tl.load(experts_ptr + rows, mask=rows < R, other=0)
    experts = tl.minimum(tl.maximum(experts, 0), X - 1)
    # The number of earlier rows of the same expert in this block.
    inside = tl.arange(0, BLOCK_R)
    earlier = (experts[:, None] == experts[None, :]) & (inside[None, :] < inside[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    start = tl.gather(offsets, experts, 0)
    before = tl.load(counts_ptr + experts.to(tl.int64) * blocks + block, mask=rows < R, other=0)
    place = start + before + rank
    tl.store(places_ptr + rows, place, mask=rows < R)
    tl.store(order_ptr + place, rows, mask=rows < R)


# ---- launchers and op

_BLOCK_R = 128


def _refuse(device: Device, problem: Problem) -> str | None:
    return f"supports at most {MOST_EXPERTS} experts, not {problem.experts}" if problem.experts > MOST_EXPERTS else None


def _refuse_one(device: Device, problem: Problem) -> str | None:
    return _refuse(device, problem) if problem.few else f"supports at most {_FEW} rows"


def _launch_one(config: Config, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    offsets, order, places = _fake(experts, count)
    block_r, block_x = max(16, next_pow2(experts.numel())), next_pow2(count + 1)
    _one_program_kernel[(1,)](
        experts, offsets, order, places, experts.numel(), count, BLOCK_R=block_r, BLOCK_X=block_x,
        CHUNK=min(block_x, max(1, 16384 // block_r)), num_warps=4,
    )  # fmt: skip
    return offsets, order, places


def _launch(config: Config, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    offsets, order, places = _fake(experts, count)
    rows, block_x = experts.numel(), next_pow2(count + 1)
    if not rows:
        return offsets.zero_(), order, places
    blocks = ceil_div(rows, _BLOCK_R)
    counts, sizes = order.new_empty(count * blocks), order.new_empty(count)
    _count_kernel[(blocks,)](
        experts, counts, rows, count, blocks, BLOCK_R=_BLOCK_R, BLOCK_X=block_x, CHUNK=min(block_x, 128), num_warps=4
    )
    _add_kernel[(count,)](counts, sizes, blocks, CHUNK=256, num_warps=1)
    _place_kernel[(blocks,)](
        experts, counts, sizes, offsets, order, places, rows, count, blocks, BLOCK_R=_BLOCK_R, BLOCK_X=block_x,
        num_warps=4,
    )  # fmt: skip
    return offsets, order, places


sort_by_expert_op = Op(
    name="sort_by_expert",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=sort_arguments,
    fake=_fake,
    rows_in_problem=True,
    impls=(
        Impl(name="one_program", launch=_launch_one, refuse=_refuse_one, batch_invariant=True),
        Impl(name="triton", launch=_launch, refuse=_refuse, batch_invariant=True),
    ),
)
