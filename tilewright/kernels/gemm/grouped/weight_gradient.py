"""The gradient of grouped weights: a product over the rows of each expert.

    dw[e] = the sum over the rows r of expert e of dy[r]^T x[r]

    dy [R, N], x [R, K], rows sorted by expert, dense along their columns; offsets [X + 1] int32 as in `grouped_linear`
    -> dw [X, N, K]. bf16, fp16 or fp32, one for all. Accumulated in float32, rounded once; an expert without rows has zeros.

A program computes a tile of an expert's dw, in a loop over the expert's rows, whose number only the device knows. No element is
written by two programs, so two runs give the same bits. Limited by the tensor cores if experts have hundreds of rows, otherwise
by writing dw. The sum over an expert's rows is not split. So if one expert has all rows, only the programs of its tiles work.

    vendor      torch's grouped_mm (CUTLASS), bf16 on sm_90 and sm_100
    triton      any card and dtype
"""

# X experts, R rows, N rows of an expert's weight, K columns

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.grouped.inputs import grouped_gradient_arguments
from tilewright.kernels.gemm.grouped.library import launch_library_gradient, refuses_library
from tilewright.kernels.gemm.grouped.problem import LARGEST_BUCKET
from tilewright.kernels.gemm.grouped.work import group_sizes
from tilewright.kernels.gemm.tile import grouped
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["grouped_weight_gradient_op"]

# ---- reference, cost


def _reference(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dw = _fake(dy, x, offsets).zero_()
    start = 0
    for e, size in enumerate(group_sizes(x, offsets, dw.shape[0], None)):
        if size:
            torch.mm(dy[start : start + size].mT, x[start : start + size], out=dw[e])
        start += size
    return dw


def _fake(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, dy.shape[1], x.shape[1]))


def _cost(dy: Tensor, x: Tensor, offsets: Tensor) -> Cost:
    rows = sum(group_sizes(x, offsets, offsets.shape[0] - 1, None))
    out = (offsets.shape[0] - 1) * dy.shape[1] * x.shape[1]
    moved = (rows * (dy.shape[1] + x.shape[1]) + out) * x.element_size()
    return Cost(flops=2 * rows * dy.shape[1] * x.shape[1], bytes=moved + offsets.nbytes)


# ---- problem, space, examples


class Problem(NamedTuple):
    """Everything that the choice of a kernel may depend on."""

    dtype: torch.dtype
    rows: int
    """R, rounded up to a power of two."""
    experts: int
    n: int
    k: int
    aligned: bool
    """Whether all rows of dy and x start at multiples of 16 bytes."""


def _problem(dy: Tensor, x: Tensor, offsets: Tensor) -> Problem:
    places = dy.data_ptr() | x.data_ptr() | (dy.stride(0) | x.stride(0)) * x.element_size()
    rows = min(next_pow2(x.shape[0]), LARGEST_BUCKET)
    return Problem(x.dtype, rows, offsets.shape[0] - 1, dy.shape[1], x.shape[1], places % 16 == 0)


def _default(device: Device, problem: Problem) -> Config:
    large = problem.dtype.itemsize == 2 and min(problem.n, problem.k) >= 128
    config = {"BLOCK_N": 64, "BLOCK_K": 64, "BLOCK_R": 32, "GROUP_N": 8, "num_warps": 4, "num_stages": 3}
    if large:
        config |= {"BLOCK_N": 128, "BLOCK_K": 128, "BLOCK_R": 64, "num_warps": 8}
    elif problem.dtype.itemsize == 4:
        config |= {"num_warps": 8}
    return config


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    itemsize = problem.dtype.itemsize
    if (c["BLOCK_N"] + c["BLOCK_K"]) * c["BLOCK_R"] * c["num_stages"] * itemsize > device.smem_bytes:
        return "more shared memory than the device has"
    if c["BLOCK_N"] >= 2 * max(64, problem.n) or c["BLOCK_K"] >= 2 * max(64, problem.k):
        return "a side of the tile is at least twice that of an expert's weight"
    accumulators = c["BLOCK_N"] * c["BLOCK_K"] // (32 * c["num_warps"])
    if accumulators > (32 if itemsize == 4 else 128 if device.multiplies_by_warpgroup else 64):
        return "the accumulators and operands need more registers than a thread has"
    return "too many warps for so small a tile" if accumulators < 16 else None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_N": (64, 128),
        "BLOCK_K": (64, 128, 256),
        "BLOCK_R": (32, 64),
        "GROUP_N": (8,),
        "num_warps": (4, 8),
        "num_stages": (3,),
    },
    refusal=_config_refusal,
)


_example = Example.sized(grouped_gradient_arguments)
EXAMPLES = (
    _example("rows", 3, 90, 64, 48, skew="random"),
    _example("one expert", 3, 40, 40, 72, skew="one", dtype=torch.float16),
    _example("tail", 2, 50, 37, 75, skew="tail"),
    _example("float32", 3, 70, 24, 33, skew="random", dtype=torch.float32),
    _example("experts", 5, 130, 64, 48, skew="one"),
    _example("no rows", 2, 0, 16, 32),
)


@triton.jit(do_not_specialize=["R"])
def _gradient_kernel(
    dy_ptr, x_ptr, offsets_ptr, dw_ptr, R, N, K, dy_stride, x_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    FLOAT32: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    SPAN: tl.constexpr = 512 // BLOCK_R
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    expert = tl.program_id(0) // (tiles_n * tiles_k)
    down, across = grouped(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, GROUP_N)
    first = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert), 0), R)
    end = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert + 1), first), R)
    ns = down * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = across * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = first + tl.arange(0, BLOCK_R)
    dy_ptrs = dy_ptr + rows[:, None].to(tl.int64) * dy_stride + ns[None, :]
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + ks[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    steps = tl.cdiv(end - first, BLOCK_R)
    for step in range(steps):
        live = (rows < end - step * BLOCK_R)[:, None]
        dy = tl.load(dy_ptrs, mask=live & (ns[None, :] < N), other=0.0)
        x = tl.load(x_ptrs, mask=live & (ks[None, :] < K), other=0.0)
        acc = dot(tl.trans(dy), x, acc)
        if FLOAT32:
            if step % SPAN == SPAN - 1:
                total += acc
                acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        dy_ptrs += BLOCK_R * dy_stride
        x_ptrs += BLOCK_R * x_stride
    acc += total
    places = expert.to(tl.int64) * N * K + ns[:, None].to(tl.int64) * K + ks[None, :]
    tl.store(dw_ptr + places, acc.to(dw_ptr.dtype.element_ty), mask=(ns[:, None] < N) & (ks[None, :] < K))


def _launch(config: Config, dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dw = _fake(dy, x, offsets)
    experts, n, k = dw.shape
    if dw.numel():
        grid = (experts * ceil_div(n, config["BLOCK_N"]) * ceil_div(k, config["BLOCK_K"]),)
        _gradient_kernel[grid](dy, x, offsets, dw, x.shape[0], n, k, dy.stride(0), x.stride(0), **config)
    return dw


def _refuse_vendor(device: Device, problem: Problem) -> str | None:
    if problem.rows < 64 or not problem.n or problem.k % 8:
        return "needs at least 64 rows, and results whose rows start at multiples of 16 bytes"
    return refuses_library(device, problem.dtype, problem.aligned)


def _first(device: Device, problem: Problem) -> str | None:
    """The implementation to try first.

    H200, microseconds of triton and torch. 128 experts of 1536 x 2048: 16 rows each 390 and 382, 128 rows 509 and 459, 2,048
    rows 2,950 and 2,283; the latter with all rows at one expert 3,867 and 2,918. 128 experts of 2048 x 768, 2,048 rows each
    1,785 and 1,340; all rows at one expert 2,099 and 2,464. Fewer rows were not measured.
    """
    return "triton" if problem.rows < 16 * problem.experts else None


grouped_weight_gradient_op = Op(
    name="grouped_weight_gradient",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=grouped_gradient_arguments,
    first=_first,
    fake=_fake,
    rows_in_problem=True,
    impls=(
        Impl(name="vendor", library=True, launch=launch_library_gradient, refuse=_refuse_vendor),
        Impl(
            name="triton",
            launch=_launch,
            space=SPACE,
            refuse=lambda device, problem: f"does not support {problem.dtype}" if problem.dtype.itemsize > 4 else None,
        ),
    ),
)
