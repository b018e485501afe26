"""Grouped products through torch's `grouped_mm`: the implementations `vendor` of `grouped_linear` and of its weight's gradient.

Gathering the rows and applying the activation are separate kernels. So 16-bit results have one rounding more than the single
one of the definition. torch does not write rows of no expert, nor gradients of experts without rows; these are set to zero
afterwards. Bounds that do not ascend trigger an assertion in torch's kernel.

Refuses the cases in which torch has no grouped kernel, reads the offsets on the host and computes expert by expert: cards other
than sm_90 and sm_100, dtypes other than bfloat16, operands whose rows do not start at multiples of 16 bytes. Also refuses a
bias, which torch does not accept, and the masked layout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from tilewright.hw.device import Device
from tilewright.kernels.elementwise.glu import gelu_mul, silu_mul
from tilewright.kernels.experts.permute import permute_tokens_op
from tilewright.kernels.gemm.grouped.problem import GroupedProblem, grouped_activated
from tilewright.kernels.gemm.grouped.work import grouped_library_work
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["GROUPED_VENDOR", "launch_library_gradient", "refuses_library"]


def refuses_library(device: Device, dtype: torch.dtype, aligned: bool) -> str | None:
    """Why torch's `grouped_mm` is not called for such operands on this card; None if it is."""
    if not hasattr(F, "grouped_mm"):
        return "this version of torch has no grouped_mm"
    if device.arch not in (90, 100):
        return f"torch's kernels are for sm_90 and sm_100, this is sm_{device.arch}"
    if dtype != torch.bfloat16:
        return "torch's kernels support bfloat16 only"
    return None if aligned else "torch's kernels need rows that start at multiples of 16 bytes"


def _refuse(device: Device, problem: GroupedProblem) -> str | None:
    if problem.masked:
        return "supports rows sorted by expert only, not the masked layout"
    if problem.bias:
        return "torch's grouped_mm does not support a bias"
    if not problem.k or problem.n % 8:
        return "needs results whose rows start at multiples of 16 bytes, and a K above 0"
    return refuses_library(device, problem.dtype, problem.aligned)


_CLEARED = 8192
"""The number of elements that a program sets to zero."""


@triton.jit(do_not_specialize=["R"])
def _clear_rows_kernel(y_ptr, offsets_ptr, R, X, N, BLOCK: tl.constexpr):
    """Set the rows after the last expert's rows to zero, BLOCK elements per program. Programs before these rows end at once."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = tl.maximum(tl.load(offsets_ptr + X), 0).to(tl.int64) * N
    if start + BLOCK <= first:
        return
    at = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.zeros([BLOCK], y_ptr.dtype.element_ty), mask=(at >= first) & (at < R.to(tl.int64) * N))


@triton.jit
def _clear_experts_kernel(dw_ptr, offsets_ptr, SIZE, BLOCK: tl.constexpr):
    """Set the gradients of experts without rows to zero."""
    expert = tl.program_id(1)
    if tl.load(offsets_ptr + expert + 1) > tl.load(offsets_ptr + expert):
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dw_ptr + expert.to(tl.int64) * SIZE + at, tl.zeros([BLOCK], dw_ptr.dtype.element_ty), mask=at < SIZE)


def launch_library_gradient(config: Config, dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """The gradient [X, N, K] of the weights, from dy [R, N] and x [R, K]. `refuses_library` must have accepted the operands."""
    dw = F.grouped_mm(dy.mT, x, offs=offsets[1:])
    size = dw.shape[1] * dw.shape[2]
    _clear_experts_kernel[(ceil_div(size, _CLEARED), dw.shape[0])](dw, offsets, size, BLOCK=_CLEARED)
    return dw


def _launch(
    config: Config, x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None,
    chosen: int, clear: bool = True,
) -> Tensor:  # fmt: skip
    x = x if order is None else permute_tokens_op.run(x.contiguous(), order, chosen, None)
    y = F.grouped_mm(x, weight.mT, offs=bounds[1:])
    match activation:
        case "silu_mul":
            y = silu_mul(*y.chunk(2, -1))
        case "gelu_mul":
            y = gelu_mul(*y.chunk(2, -1))
        case "none":
            pass
        case _:
            y = grouped_activated(y, activation)
    if clear and y.numel():
        grid = (ceil_div(y.numel(), _CLEARED),)
        _clear_rows_kernel[grid](y, bounds, y.shape[0], weight.shape[0], y.shape[1], BLOCK=_CLEARED)
    return y


GROUPED_VENDOR = Impl(name="vendor", library=True, launch=_launch, refuse=_refuse, extra_roundings=1, work=grouped_library_work)
