"""`grouped_linear` through torch's `grouped_mm`: the implementation `vendor`.

Rows are gathered, and an activation is applied, by a kernel each: 16-bit results carry one rounding more than the definition's
one. Rows that no expert has are set to zero afterwards.

Refuses what torch has no kernel for, and computes expert by expert from offsets that the host waits for: other cards than sm_90
and sm_100, other dtypes than bfloat16, operands whose rows do not start at multiples of 16 bytes. Also a bias, which torch does
not take, and the masked layout.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.hw.device import Device
from tilewright.kernels.elementwise.glu import gelu_mul, silu_mul
from tilewright.kernels.experts.permute import permute_tokens_op
from tilewright.kernels.gemm.grouped.problem import GroupedProblem, grouped_activated
from tilewright.kernels.gemm.grouped.work import grouped_library_work
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["GROUPED_VENDOR", "library_grouped", "refuses_library"]


def refuses_library(device: Device, dtype: torch.dtype, aligned: bool) -> str | None:
    """Why torch's `grouped_mm` is not called for such operands on this card, or None where it is."""
    if not hasattr(F, "grouped_mm"):
        return "this torch has no grouped_mm"
    if device.arch not in (90, 100):
        return f"torch's kernels are for sm_90 and sm_100, this is sm_{device.arch}"
    if dtype != torch.bfloat16:
        return "torch's kernels take bfloat16 alone"
    return None if aligned else "torch's kernels take rows that start at multiples of 16 bytes"


def _refuse(device: Device, problem: GroupedProblem) -> str | None:
    if problem.masked:
        return "takes rows sorted by expert, not the masked layout"
    if problem.bias:
        return "torch's grouped_mm takes no bias"
    if not problem.k or problem.n % 8:
        return "takes results whose rows start at multiples of 16 bytes, of a K that is not 0"
    return refuses_library(device, problem.dtype, problem.aligned)


def library_grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [R, K] @ weight[e]^T for the rows of each expert, [R, N]; rows that no expert has are not written."""
    return F.grouped_mm(x, weight.mT, offs=offsets[1:])


def _launch(
    config: Config, x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None,
    chosen: int, clear: bool = True,
) -> Tensor:  # fmt: skip
    x = x if order is None else permute_tokens_op.run(x.contiguous(), order, chosen, None)
    y = library_grouped(x, weight, bounds)
    match activation:
        case "silu_mul":
            y = silu_mul(*y.chunk(2, -1))
        case "gelu_mul":
            y = gelu_mul(*y.chunk(2, -1))
        case "none":
            pass
        case _:
            y = grouped_activated(y, activation)
    if not clear:
        return y
    row = torch.arange(y.shape[0], device=y.device)[:, None]
    return y.masked_fill_(row >= bounds[-1], 0.0)


GROUPED_VENDOR = Impl(
    name="vendor", library=True, launch=_launch, refuse=_refuse, interpretable=False, extra_roundings=1,
    work=grouped_library_work,
)  # fmt: skip
