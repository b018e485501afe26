"""Sums, means and maxima over the middle dimension of [N, R, C]. A reduction over any axis can be written in this form.

    sum, mean:  y[n, c] = sum_r x[n, r, c],  or that / R                        accumulated in float32, rounded once
    max:        y[n, c] = max_r x[n, r, c],  i[n, c] = the first r with this value   NaN is larger than any number

    x: [N, R, C] of bf16, fp16 or fp32, R at least 1 and below 2^31, dense in memory as [N, R, C] or as [N, C, R]; y: [N, C] of
    x's dtype, i: [N, C] int64

If there are only a few long columns, they are split into parts, so that there are enough programs to fill the card. A second
launch combines the parts in the order of their numbers, so the result has the same bits every time. Among equal values the
first one is chosen, as in torch on a CPU.

Memory-bound: each element is read once.
Not supported: integers, other layouts (the public functions copy).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device, device_of
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.partial_sums import column_sums
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.row_space import row_space
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.kernels.reduce.inputs import reduce_max_arguments, reduce_sum_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["reduce_max_op", "reduce_sum_op"]


def _sum_reference(x: Tensor, mean: bool) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide.mean(1) if mean else wide.sum(1)).to(x.dtype)


def _max_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    # On a GPU, torch.max may return the index of any of several equal values.
    values = x.amax(1, keepdim=True)
    hit = torch.where(values.isnan(), x.isnan(), x == values)
    return values[:, 0].clone(), hit.to(torch.uint8).argmax(1)


def _sum_cost(x: Tensor, mean: bool) -> Cost:
    return Cost(flops=x.numel(), bytes=x.nbytes + x.shape[0] * x.shape[2] * x.element_size())


def _max_cost(x: Tensor) -> Cost:
    return Cost(flops=x.numel(), bytes=x.nbytes + x.shape[0] * x.shape[2] * (x.element_size() + 8))


# ---- space and examples


class Problem(NamedTuple):
    """Everything that a config may depend on."""

    dtype: torch.dtype
    last: bool
    """Whether the kept dimension C is dense in memory, rather than the reduced dimension R."""
    kept: int
    """C as a power of two, at most 256."""
    reduced: int
    """R as a power of two, at most 4096."""


def _problem(x: Tensor, *rest: object) -> Problem:
    return Problem(x.dtype, _kept_last(x), min(256, next_pow2(x.shape[2])), min(4096, next_pow2(x.shape[1])))


def _kept_last(x: Tensor) -> bool:
    return x.is_contiguous() and (x.shape[2] > 1 or x.shape[1] == 1)


def _default(device: Device, problem: Problem) -> Config:
    if problem.last and problem.reduced <= 64:
        # Short columns, such as the 7 x 7 pixels at the end of a network, fit in one block. So no second launch is needed.
        block_r = max(16, problem.reduced)
        return {"BLOCK_C": max(16, min(problem.kept, 4096 // block_r)), "BLOCK_R": block_r, "num_warps": 4}
    if problem.last:
        block_c = max(16, problem.kept)
        return {"BLOCK_C": block_c, "BLOCK_R": 4096 // block_c, "num_warps": 4}
    block_r = min(max(16, problem.reduced), 4096 // min(problem.kept, 4))
    return {"BLOCK_C": 4096 // block_r, "BLOCK_R": block_r, "num_warps": 4}


SPACE = row_space(
    _default,
    BLOCK_C=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    BLOCK_R=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    num_warps=(4, 8),
)


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"supports bfloat16, float16 and float32 only, not {problem.dtype}"
    return None


@Example.of
def _example(
    inputs: Inputs, *shape: int, dtype: torch.dtype = torch.bfloat16, last: bool = True, special: tuple[float, ...] = ()
) -> tuple[Tensor]:  # fmt: skip
    """`special`: the first elements of the first column. In 16 bits, random numbers already contain a few ties."""
    n, r, c = shape
    x = inputs.randn(n, r, c, dtype=dtype) if last else inputs.randn(n, c, r, dtype=dtype).mT
    if special:
        x[0, : len(special), 0] = inputs.tensor(special, dtype)
    return (x,)


_INF, _NAN = float("inf"), float("nan")
MAX_EXAMPLES = (
    _example("rows", 1, 300, 6, last=False),
    _example("columns", 2, 130, 40, dtype=torch.float16),
    _example("one row", 1, 9000, 1, last=False, dtype=torch.float32),
    _example("few columns", 1, 2000, 3),
    _example("one", 1, 1, 1, dtype=torch.float32),
    _example("infinities", 1, 4, 2, last=False, special=(-_INF, -_INF, -_INF, -_INF)),
    _example("not a number", 1, 700, 2, last=False, special=(1.0, _NAN, _INF, _NAN)),
    _example("nothing", 0, 5, 3),
)
SUM_EXAMPLES = tuple(
    Example(e.label + (", mean" if mean else ""), lambda inputs, e=e, m=mean: (*e.make(inputs), m))
    for e, mean in zip(MAX_EXAMPLES, (False, True, True, False, False, False, True, False), strict=True)
)

# ---- kernels


@triton.jit
def _tile(x_ptr, image, r, c, R, C, mask, LAST: tl.constexpr, OTHER: tl.constexpr):
    """A tile [BLOCK_R, BLOCK_C] of an image, in float32."""
    at = r.to(tl.int64)[:, None] * C + c[None, :] if LAST else c.to(tl.int64)[None, :] * R + r[:, None]
    return tl.load(x_ptr + image * R * C + at, mask=mask, other=OTHER).to(tl.float32)


@triton.jit(do_not_specialize=["r_units", "c_units", "n_images", "share"])
def _sum_kernel(
    x_ptr, y_ptr, r_units, c_units, n_images, share, factor,
    VECTOR: tl.constexpr, LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid axis 0 selects the image, axis 1 the columns, axis 2 the part: `share` blocks of rows."""
    R = r_units * (1 if LAST else VECTOR)
    C = c_units * (VECTOR if LAST else 1)
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    begin = tl.program_id(2) * share * BLOCK_R
    for start in tl.range(begin, tl.minimum(begin + share * BLOCK_R, R), BLOCK_R, num_stages=2):
        r = start + tl.arange(0, BLOCK_R)
        total += _tile(x_ptr, image, r, c, R, C, (r < R)[:, None] & (c < C)[None, :], LAST, 0.0)
    at = (tl.program_id(2).to(tl.int64) * n_images + image) * C + c
    tl.store(y_ptr + at, (tl.sum(total, axis=0) * factor).to(y_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def _first_of_largest(best, index):
    """(maximum over axis 0, the smallest index with this value). NaN counts as the largest value."""
    missing = best != best
    any_missing = tl.max(missing.to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(missing, float("-inf"), best), axis=0)
    hit = tl.where(any_missing[None, :], missing, best == top[None, :])
    return tl.where(any_missing, float("nan"), top), tl.min(tl.where(hit, index, 2147483647), axis=0)


@triton.jit(do_not_specialize=["r_units", "c_units", "n_images", "share"])
def _max_kernel(
    x_ptr, y_ptr, i_ptr, r_units, c_units, n_images, share,
    VECTOR: tl.constexpr, LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The grid axes are those of `_sum_kernel`."""
    R = r_units * (1 if LAST else VECTOR)
    C = c_units * (VECTOR if LAST else 1)
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.program_id(2) * share * BLOCK_R
    best = tl.full([BLOCK_R, BLOCK_C], float("-inf"), tl.float32)
    # The index of a lane is its first row until a larger value is found. A lane without rows must not win.
    lane = begin + tl.arange(0, BLOCK_R)[:, None] + tl.zeros([BLOCK_R, BLOCK_C], tl.int32)
    index = tl.where(lane < R, lane, 2147483647)
    for start in tl.range(begin, tl.minimum(begin + share * BLOCK_R, R), BLOCK_R, num_stages=2):
        r = start + tl.arange(0, BLOCK_R)
        x = _tile(x_ptr, image, r, c, R, C, (r < R)[:, None] & (c < C)[None, :], LAST, float("-inf"))
        larger = (x > best) | ((x != x) & (best == best))
        best = tl.where(larger, x, best)
        index = tl.where(larger, r[:, None], index)
    value, place = _first_of_largest(best, index)
    at = (tl.program_id(2).to(tl.int64) * n_images + image) * C + c
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=c < C)
    tl.store(i_ptr + at, place.to(tl.int64), mask=c < C)


@triton.jit(do_not_specialize=["n_parts", "n"])
def _join_kernel(parts_ptr, places_ptr, y_ptr, i_ptr, n_parts, n, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):
    """For each column, the largest value among its parts."""
    part, at = tl.arange(0, BLOCK_P), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (part < n_parts)[:, None] & (at < n)[None, :]
    from_part = part.to(tl.int64)[:, None] * n + at[None, :]
    best = tl.load(parts_ptr + from_part, mask=mask, other=float("-inf")).to(tl.float32)
    index = tl.load(places_ptr + from_part, mask=mask, other=2147483647).to(tl.int32)
    value, place = _first_of_largest(best, index)
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=at < n)
    tl.store(i_ptr + at, place.to(tl.int64), mask=at < n)


# ---- launchers and ops


def _plan(config: Config, x: Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int, int], int, bool]:
    """(grid, the kernels' arguments r_units to share, elements per vector, whether C is dense)."""
    (n, r, c), last = x.shape, _kept_last(x)
    vector = 16 // x.element_size()
    while (c if last else r) % vector:
        vector //= 2
    groups, blocks = -(-c // config["BLOCK_C"]), -(-r // config["BLOCK_R"])
    share = -(-blocks // min(blocks, -(-4 * device_of(x.get_device()).sms // (n * groups))))
    units = (r, c // vector) if last else (r // vector, c)
    return (n, groups, -(-blocks // share)), (*units, n, share), vector, last


def _sum_launch(config: Config, x: Tensor, mean: bool) -> Tensor:
    n, r, c = x.shape
    y = torch.empty(n, c, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    grid, sizes, vector, last = _plan(config, x)
    out = y if grid[2] == 1 else torch.empty(grid[2], n * c, dtype=torch.float32, device=x.device)
    launch(_sum_kernel, grid, (x, out), (*sizes, 1 / r if mean else 1.0), {"VECTOR": vector, "LAST": last, **config})
    return y if grid[2] == 1 else column_sums(x.dtype, out)[0].view(n, c)


def _max_launch(config: Config, x: Tensor) -> tuple[Tensor, Tensor]:
    n, _, c = x.shape
    y, i = torch.empty(n, c, dtype=x.dtype, device=x.device), torch.empty(n, c, dtype=torch.int64, device=x.device)
    if not y.numel():
        return y, i
    grid, sizes, vector, last = _plan(config, x)
    if grid[2] == 1:
        _max_kernel[grid](x, y, i, *sizes, VECTOR=vector, LAST=last, **config)
        return y, i
    parts, places = (torch.empty(grid[2], n * c, dtype=t.dtype, device=x.device) for t in (y, i))
    _max_kernel[grid](x, parts, places, *sizes, VECTOR=vector, LAST=last, **config)
    _join_kernel[(ceil_div(n * c, 4),)](parts, places, y, i, grid[2], n * c, BLOCK_P=next_pow2(grid[2]), BLOCK=4, num_warps=4)
    return y, i


reduce_sum_op = Op(
    name="reduce_sum",
    reference=_sum_reference,
    problem=_problem,
    cost=_sum_cost,
    examples=SUM_EXAMPLES,
    make=reduce_sum_arguments,
    impls=(Impl(name="triton", launch=_sum_launch, space=SPACE, refuse=_refuse),),
)

reduce_max_op = Op(
    name="reduce_max",
    reference=_max_reference,
    problem=_problem,
    cost=_max_cost,
    examples=MAX_EXAMPLES,
    make=reduce_max_arguments,
    impls=(Impl(name="triton", launch=_max_launch, space=SPACE, refuse=_refuse),),
)
