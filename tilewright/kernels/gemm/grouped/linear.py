"""Grouped products, with one weight per expert: the matrix products of a mixture of experts.

    y[r] = activation(x[r] @ weight[e]^T + bias[e])        for the rows r of expert e

    sorted   x [R, K], rows sorted by expert; bounds: offsets [X + 1] int32, ascending from 0: expert e has the rows from
             offsets[e] to offsets[e + 1], and rows from offsets[X] on belong to no expert -> y [R, N]
    gathered x [T, K] and order [R] int32: row r is x[order[r] // chosen], where `chosen` is the number of experts per token
    masked   x [X, M, K]; bounds: counts [X] int32: expert e has the first counts[e] rows of x[e] -> y [X, M, N]

    Rows of y that belong to no expert are zeros; without `clear` they are not written, and their contents are undefined.

    weight [X, N, K], each expert's dense along K or along N; bias [X, N]. bf16, fp16 or fp32; all operands have the same dtype.
    The product is accumulated in float32, the epilogue is computed in float32, and the result is rounded once. The bounds are
    read on the device: nothing waits for the host, so a launch can be captured. Bounds that are not as described give wrong
    rows, but no access is out of bounds.

Activations are those of `linear`. With silu_mul, gelu_mul and clamped_silu_mul (that of gpt-oss) the weight is [X, 2F, K], gate
half first, and y is [.., F]. With few rows per expert, reading the weights of the chosen experts sets the time; with many rows,
the tensor cores.

    vendor      torch's grouped_mm (CUTLASS), bf16 on sm_90 and sm_100
    sm90        Hopper: Gluon, persistent, with the main loop and epilogue of `linear`'s kernel on a schedule of groups
    triton      any card, layout and dtype; tiles of 16 rows for decoding
    invariant   `triton` with one config for every number of rows

With 16 rows per expert and more, `sm90` is preferred, with fewer `triton` (figures in `_first`). On cards other than Hopper,
where nothing was measured yet, `vendor` is preferred for many rows.

Not supported: gradients (ops/experts.py has them), quantised weights, mixed dtypes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.gemm.grouped.inputs import grouped_arguments
from tilewright.kernels.gemm.grouped.library import GROUPED_VENDOR
from tilewright.kernels.gemm.grouped.problem import (
    GROUPED_ACTIVATIONS,
    GroupedProblem,
    empty_grouped,
    grouped_activated,
    grouped_problem,
)
from tilewright.kernels.gemm.grouped.sm90 import GROUPED_SM90
from tilewright.kernels.gemm.grouped.tile import INVARIANT, TRITON
from tilewright.kernels.gemm.grouped.work import group_places, grouped_cost
from tilewright.op import Example, Op

__all__ = ["check_grouped", "check_order", "check_shapes", "grouped_linear_op"]


def _reference(
    x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None, chosen: int,
    clear: bool = True,
) -> Tensor:  # fmt: skip
    y = empty_grouped(x, weight, activation, order).zero_()
    if not y.numel():
        return y
    if order is not None:
        x = x[(order.long() // chosen).clamp(0, x.shape[0] - 1)]
    for e, at in group_places(x, bounds, weight.shape[0]):
        z = F.linear(x[at], weight[e], None if bias is None else bias[e])
        y[at] = (z if activation == "none" else grouped_activated(_widened(z), activation)).to(y.dtype)
    return y


def _widened(z: Tensor) -> Tensor:
    return z.to(torch.promote_types(z.dtype, torch.float32))


def _fake(
    x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None, *_: Any
) -> Tensor:
    return empty_grouped(x, weight, activation, order)


# ---- examples


_example = Example.sized(grouped_arguments)
EXAMPLES = (
    _example("decode", 6, 4, 48, 128, chosen=4, skew="random", activation="silu_mul"),
    _example("few", 5, 19, 40, 136, skew="random"),
    _example("rows", 3, 150, 96, 128, bias=True),
    _example("one expert", 4, 70, 64, 64, skew="one", activation="gelu_mul", dtype=torch.float16),
    _example("ragged", 3, 41, 37, 75, skew="random", bias=True, activation="gelu"),
    _example("clamped", 4, 24, 32, 64, chosen=2, skew="random", bias=True, activation="clamped_silu_mul"),
    _example("tail", 3, 50, 40, 64, skew="tail", activation="silu"),
    _example("masked", 3, 60, 40, 64, layout="masked", bias=True, activation="silu_mul"),
    _example("float32", 3, 21, 24, 70, skew="random", dtype=torch.float32),
    _example("n major", 3, 40, 48, 64, w_major="n"),
    _example("one", 1, 1, 1, 1, dtype=torch.float32),
    _example("no rows", 3, 0, 16, 32),
    _example("no k", 2, 5, 8, 0, bias=True),
)

# ---- op

_MANY = 64
"""The rows per expert from which on torch's kernel is preferred on cards where nothing was measured."""
_HOPPER_MANY = 16


def _first(device: Device, problem: GroupedProblem) -> str | None:
    """The implementation to try first. With few rows it is triton: tiles of 16 rows, and x is gathered as it is read.

    H200, microseconds of triton and sm90. Mixtral-8x7B up with a gate and gathered: 0.25 rows per expert 117 and 120, 4 rows
    396 and 408, 16 rows 473 and 442; down 54 and 93, 230 and 216, 224 and 223. Qwen3-30B-A3B up: 0.06 rows 16 and 31, 1 row 126
    and 133, 4 rows 179 and 187, 16 rows 205 and 206, 32 rows 227 and 216; down 10 and 21, 64 and 67, 95 and 97, 116 and 105,
    137 and 108. With 2,048 rows per expert sm90 takes 0.65 to 0.99 of torch's time; with 256 rows in the masked layout, 0.70 of
    triton's.
    """
    return "triton" if problem.rows_each < (_HOPPER_MANY if device.is_hopper else _MANY) else None


grouped_linear_op = Op(
    name="grouped_linear",
    reference=_reference,
    problem=grouped_problem,
    cost=grouped_cost,
    examples=EXAMPLES,
    make=grouped_arguments,
    first=_first,
    fake=_fake,
    rows_in_problem=True,
    impls=(GROUPED_SM90, GROUPED_VENDOR, TRITON, INVARIANT),
)


def check_shapes(
    op: str, x: Tensor, weight: tuple[int, ...], bounds: Tensor, bias: Tensor | None, activation: str
) -> None:  # fmt: skip
    """Raise ValueError if x, the shape of the experts' weights, bounds, bias and activation do not fit together."""
    if activation not in GROUPED_ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(GROUPED_ACTIVATIONS)}; got {activation!r}")
    if len(weight) != 3 or x.dim() not in (2, 3) or x.shape[-1] != weight[2]:
        raise ValueError(
            f"{op}: x must be [R, K], or [X, M, K] with counts, and weight [X, N, K]; "
            f"got x {list(x.shape)} and weight {list(weight)}"
        )
    experts, n, masked = weight[0], weight[1], x.dim() == 3
    if not experts or (masked and x.shape[0] != experts):
        raise ValueError(
            f"{op}: x and weight must have the same number of experts, above 0; got {list(x.shape)} and {list(weight)}"
        )
    if n % 2 and GROUPED_ACTIVATIONS[activation][1]:
        raise ValueError(f"{op}: {activation} needs an even N, for a gate half and an up half; got {n}")
    wanted = experts + (not masked)
    if bounds.shape != (wanted,) or bounds.dtype != torch.int32:
        kind = "counts [X]" if masked else "offsets [X + 1]"
        raise ValueError(f"{op}: wanted {kind}, int32 [{wanted}]; got {bounds.dtype} {list(bounds.shape)}")
    if bias is not None and bias.shape != (experts, n):
        raise ValueError(f"{op}: bias must be [{experts}, {n}]; got {list(bias.shape)}")
    for name, other in (("bias", bias), ("bounds", bounds)):
        if other is not None and other.device != x.device:
            raise ValueError(f"{op}: {name} must be on the device of x, {x.device}; got {other.device}")


def check_order(op: str, x: Tensor, order: Tensor | None, chosen: int) -> None:
    """Raise ValueError if the rows of x cannot be gathered in that order."""
    if order is None:
        return
    if x.dim() == 3 or order.dim() != 1 or order.dtype != torch.int32 or chosen < 1:
        raise ValueError(
            f"{op}: order must be int32 [R], with x [T, K] (not the masked layout) and chosen at least 1; "
            f"got {order.dtype} {list(order.shape)}, chosen {chosen}, x {list(x.shape)}"
        )
    if order.device != x.device or (order.shape[0] and not x.shape[0]):
        raise ValueError(f"{op}: order has {order.shape[0]} rows on {order.device}, but x is {list(x.shape)} on {x.device}")


def check_grouped(
    x: Tensor, weight: Any, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None, chosen: int
) -> None:
    """Raise ValueError if the arguments of `grouped_linear` do not fit. Of a quantised weight only the shape is checked."""
    check_shapes("grouped_linear", x, weight.shape, bounds, bias, activation)
    check_order("grouped_linear", x, order, chosen)
    for name, other in (("weight", weight), ("bias", bias)):
        if isinstance(other, Tensor) and (other.dtype != x.dtype or other.device != x.device):
            raise ValueError(
                f"grouped_linear: {name} must have the dtype of x, {x.dtype}, and its device, {x.device}; "
                f"got {other.dtype} on {other.device}"
            )
