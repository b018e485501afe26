"""From the sums of a batch's channels to what its map needs: the few numbers between two passes of batch norm, in one launch.

    # N rows of sums (images, or 1), C channels, n values a channel
    batch_statistics            mean = shift + sum first / n,   variance = sum second / n - (sum first / n)^2
                                scale = 1 / sqrt(variance + eps),   a = scale weight,   b = bias - mean a
                                running_mean += momentum (mean - running_mean), running_var likewise of n / (n - 1) variance
    batch_statistics_backward   dweight = scale sum crossed,   dbias = sum given
                                d = scale weight,   a = -scale d dweight / n,   b = -d dbias / n - mean a

    first, second, given, crossed: [N, C] float32, of `channel_sums`; shift [1, C]; mean, scale, a, b, d [1, C] float32.
    weight, bias, running_mean, running_var: [C] of bf16, fp16 or fp32, or None.

y = a x + b is the norm, dx = a x + b + d dy its gradient (`channel_affine`). Some thousands of numbers: limited by the launch,
of which plain torch takes fifteen. Rows are added in their order: the same bits every time.
Not supported: running_mean without running_var.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.arguments_conv import batch_statistics_arguments, batch_statistics_backward_arguments
from tilewright.kernels.prepared import launch
from tilewright.kernels.shapes import ceil_div
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["batch_statistics_backward_op", "batch_statistics_op"]

# ---- reference


def _wide(first: Tensor) -> torch.dtype:
    return torch.promote_types(first.dtype, torch.float32)


def _reference(
    first: Tensor, second: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, count: int, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(mean, scale, a, b)."""
    wide = _wide(first)
    gap = first.to(wide).sum(0, keepdim=True) / count
    mean = shift.to(wide) + gap
    variance = second.to(wide).sum(0, keepdim=True) / count - gap.square()
    scale = (variance + eps).rsqrt()
    a = scale.clone() if weight is None else scale * weight.to(wide)
    b = -mean * a if bias is None else bias.to(wide) - mean * a
    if running_mean is not None and running_var is not None:
        for running, now in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            running.copy_(running.to(wide) + momentum * (now[0] - running.to(wide)))
    return mean, scale, a, b


def _backward_reference(
    given: Tensor, crossed: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(a, b, d, dweight, dbias)."""
    wide = _wide(given)
    mean, scale = mean.to(wide), scale.to(wide)
    dweight, dbias = crossed.to(wide).sum(0, keepdim=True) * scale, given.to(wide).sum(0, keepdim=True)
    d = scale.clone() if weight is None else scale * weight.to(wide)
    a = -scale * d * dweight / count
    return a, -d * dbias / count - mean * a, d, dweight[0], dbias[0]


# ---- cost, problem, examples


def _cost(first: Tensor, *rest: object) -> Cost:
    return Cost(flops=4 * first.numel() + 12 * first.shape[1], bytes=2 * first.nbytes + 40 * first.shape[1])


class Problem(NamedTuple):
    """There is nothing to choose."""

    dtype: torch.dtype


def _problem(first: Tensor, *rest: object) -> Problem:
    return Problem(first.dtype)


def _example(label: str, n: int, c: int, dtype: torch.dtype = torch.float32, *, affine: bool = True) -> Example:
    def make(inputs: Inputs) -> tuple[object, ...]:
        first, second, shift, weight, bias, mean, var, *rest = batch_statistics_arguments(inputs, B=n, N=c, dtype=dtype)
        vectors = (weight, bias, mean, var) if affine else (None,) * 4
        return first, second, shift, *vectors, *rest

    return Example(label, make)


def _backward_example(label: str, n: int, c: int, dtype: torch.dtype = torch.float32, *, affine: bool = True) -> Example:
    def make(inputs: Inputs) -> tuple[object, ...]:
        *sums, weight, count = batch_statistics_backward_arguments(inputs, B=n, N=c, dtype=dtype)
        return *sums, weight if affine else None, count

    return Example(label, make)


# ---- kernels


@triton.jit
def _column(ptr, rows, C, c, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(rows):
        total += tl.load(ptr + row * C + c, mask=c < C, other=0.0)
    return total


@triton.jit(do_not_specialize=["rows", "C", "count"])
def _statistics_kernel(
    first_ptr, second_ptr, shift_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, mean_ptr, scale_ptr, a_ptr,
    b_ptr, rows, C, count, momentum, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    gap = _column(first_ptr, rows, C, c, BLOCK) / count
    mean = tl.load(shift_ptr + c, mask=mask, other=0.0) + gap
    variance = _column(second_ptr, rows, C, c, BLOCK) / count - gap * gap
    scale = tl.rsqrt(variance + eps)
    a = scale
    if weight_ptr is not None:
        a *= tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    b = -mean * a
    if bias_ptr is not None:
        b += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(mean_ptr + c, mean, mask=mask)
    tl.store(scale_ptr + c, scale, mask=mask)
    tl.store(a_ptr + c, a, mask=mask)
    tl.store(b_ptr + c, b, mask=mask)
    if running_mean_ptr is not None:
        unbiased = variance * (count.to(tl.float32) / (count - 1))
        before = tl.load(running_mean_ptr + c, mask=mask, other=0.0).to(tl.float32)
        after = before + momentum * (mean - before)
        tl.store(running_mean_ptr + c, after.to(running_mean_ptr.dtype.element_ty), mask=mask)
        before = tl.load(running_var_ptr + c, mask=mask, other=0.0).to(tl.float32)
        after = before + momentum * (unbiased - before)
        tl.store(running_var_ptr + c, after.to(running_var_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "C", "count"])
def _backward_kernel(
    given_ptr, crossed_ptr, mean_ptr, scale_ptr, weight_ptr, a_ptr, b_ptr, d_ptr, dweight_ptr, dbias_ptr, rows, C, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    scale = tl.load(scale_ptr + c, mask=mask, other=0.0)
    dweight = _column(crossed_ptr, rows, C, c, BLOCK) * scale
    dbias = _column(given_ptr, rows, C, c, BLOCK)
    d = scale
    if weight_ptr is not None:
        d *= tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    a = -scale * d * dweight / count
    b = -d * dbias / count - tl.load(mean_ptr + c, mask=mask, other=0.0) * a
    tl.store(a_ptr + c, a, mask=mask)
    tl.store(b_ptr + c, b, mask=mask)
    tl.store(d_ptr + c, d, mask=mask)
    tl.store(dweight_ptr + c, dweight, mask=mask)
    tl.store(dbias_ptr + c, dbias, mask=mask)


# ---- launchers and ops

_BLOCK = 128


def _launch(
    config: Config, first: Tensor, second: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, count: int, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n, c = first.shape
    mean, scale, a, b = (torch.empty(1, c, dtype=torch.float32, device=first.device) for _ in range(4))
    operands = (first, second, shift, weight, bias, running_mean, running_var, mean, scale, a, b)
    launch(_statistics_kernel, (ceil_div(c, _BLOCK),), operands, (n, c, count, momentum, eps), {"BLOCK": _BLOCK})
    return mean, scale, a, b


def _backward_launch(
    config: Config, given: Tensor, crossed: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, c = given.shape
    a, b, d = (torch.empty(1, c, dtype=torch.float32, device=given.device) for _ in range(3))
    dweight, dbias = (torch.empty(c, dtype=torch.float32, device=given.device) for _ in range(2))
    operands = (given, crossed, mean, scale, weight, a, b, d, dweight, dbias)
    launch(_backward_kernel, (ceil_div(c, _BLOCK),), operands, (n, c, count), {"BLOCK": _BLOCK})
    return a, b, d, dweight, dbias


batch_statistics_op = Op(
    name="batch_statistics",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=(
        _example("one row", 1, 300),
        _example("images", 5, 40, torch.float16),
        _example("no affine map", 3, 7, affine=False),
    ),
    make=batch_statistics_arguments,
    mutates=("running_mean", "running_var"),
    impls=(Impl(name="triton", launch=_launch),),
)

batch_statistics_backward_op = Op(
    name="batch_statistics_backward",
    reference=_backward_reference,
    problem=_problem,
    cost=_cost,
    examples=(
        _backward_example("one row", 1, 300),
        _backward_example("images", 5, 40, torch.bfloat16),
        _backward_example("no affine map", 3, 7, affine=False),
    ),
    make=batch_statistics_backward_arguments,
    impls=(Impl(name="triton", launch=_backward_launch),),
)
