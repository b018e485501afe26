"""x <- factor x in place, for a factor in device memory. If the factor is 1, x is neither read nor written.

    x: [T, V] of bf16, fp16 or fp32, contiguous; factor: [] or [1], float32. The product is float32, rounded once.

This is for a gradient that was computed before its factor was known. The factor is nearly always 1, but the host would have to
wait for the device to know this. A few programs that read the factor and return cost 3 microseconds. With another factor the
kernel is memory-bound: each element in and out.
Not supported: strides, one factor per row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.elementwise.inputs import scale_in_place_arguments
from tilewright.kernels.launch.row_space import flat_problem
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["scale_in_place_op"]


def _reference(x: Tensor, factor: Tensor) -> None:
    wide = torch.promote_types(x.dtype, torch.float32)
    x.copy_(x.to(wide) * factor.to(wide))


def _cost(x: Tensor, factor: Tensor) -> Cost:
    return Cost(flops=x.numel(), bytes=2 * x.nbytes + factor.nbytes)


# ---- space and examples


SPACE = Space(
    default=lambda device, problem: {"BLOCK": 16384 // problem.dtype.itemsize, "num_warps": 8},
    axes={"BLOCK": (4096, 8192), "num_warps": (4, 8)},
)


@Example.of
def _example(inputs: Inputs, rows: int, cols: int, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return inputs.randn(rows, cols, dtype=dtype), inputs.tensor(factor, torch.float32)


EXAMPLES = (
    _example("as it is", 3, 50, 1.0, torch.bfloat16),
    _example("scaled", 3, 5001, -0.37, torch.bfloat16),
    _example("fp16", 1, 1, 3.0, torch.float16),
    _example("fp32", 5, 1700, 1 / 3, torch.float32),
    _example("nothing", 0, 8, 2.0, torch.float32),
)

# ---- kernel

_PROGRAMS = 1024  # at least seven per SM of the largest card: enough to fill it, and quick to launch if there is nothing to do


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["factor_ptr"])
def _scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
            at = start + tl.arange(0, BLOCK)
            if start + BLOCK <= n:
                x = tl.load(x_ptr + at)
                tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x.dtype))
            else:
                x = tl.load(x_ptr + at, mask=at < n, other=0.0)
                tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x.dtype), mask=at < n)


def _launch(config: Config, x: Tensor, factor: Tensor) -> None:
    n = x.numel()
    if n:
        _scale_kernel[(min(_PROGRAMS, triton.cdiv(n, config["BLOCK"])),)](x, factor, n, **config)


scale_in_place_op = Op(
    name="scale_in_place",
    reference=_reference,
    problem=flat_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=scale_in_place_arguments,
    mutates=("x",),
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)
