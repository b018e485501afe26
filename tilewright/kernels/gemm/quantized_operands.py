"""Host code that the products of two quantised matrices share: cost, argument checks, memory for the result.

The arguments of these products begin with x [M, K], weight [N, K], their scales, bias, activation, residual, the dtype of the
output, and `chained`, a hint for the launch (launch/pdl.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.gemm.problem import ACTIVATIONS
from tilewright.kernels.launch.shapes import check_tensor

__all__ = [
    "FLOAT8",
    "check_epilogue",
    "check_operands",
    "check_output",
    "check_product",
    "dense_along_columns",
    "empty_product",
    "float8_span",
    "product_cost",
    "refuse_float8",
]

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_SPAN = 256


def refuse_float8(device: Device, problem: Any) -> str | None:
    """Why the card cannot multiply the problem's operands if they are float8; None if it can, or if they are not float8."""
    if problem.dtype in FLOAT8 and device.arch < 89 and device.kind != "interpret":
        return f"float8 products need sm_89, this is sm_{device.arch}"
    return None


def float8_span(dtype: torch.dtype, k: int) -> int:
    """How many of the K products the tensor cores sum before the sum is added to a float32 total; 0: all of them.

    The result is a multiple of 128. sm_90 keeps some 14 bits of a sum of float8 products. Among 25 million sums of 4,096
    products, the largest error is 0.022 of the RMS; with spans of 1,024 it is 0.015, with spans of 256 0.005, of which 0.0036
    is the rounding to bf16 (docs/log.md, sums of float8).
    """
    return _SPAN if dtype in FLOAT8 and k > _SPAN else 0


def product_cost(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype, *_: object,
) -> Cost:  # fmt: skip
    """The cost of a product with its epilogue."""
    (m, k), n = x.shape, weight.shape[0]
    out = m * (n // 2 if ACTIVATIONS[activation][1] else n) * dtype.itemsize
    moved = (m + n) * k * x.element_size() + sum(t.nbytes for t in (x_scales, w_scales, bias, residual) if t is not None)
    return Cost(flops=2 * m * n * k, bytes=moved + out)


def empty_product(x: Tensor, weight: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """Memory for the result. It has one column per weight row (half as many if gated)."""
    n = weight.shape[0]
    return torch.empty((x.shape[0], n // 2 if ACTIVATIONS[activation][1] else n), dtype=dtype, device=x.device)


def check_product(
    op: str, dtypes: Sequence[torch.dtype], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raise ValueError unless operands of one of `dtypes`, the epilogue and the output's dtype fit each other."""
    check_output(op, dtype, x)
    check_operands(op, dtypes, x, weight, bias, activation, residual, (dtype, torch.float32), (dtype,))


def dense_along_columns(t: Tensor | None) -> Tensor | None:
    """The residual itself if it is dense along its columns, otherwise a contiguous copy."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def check_output(op: str, dtype: torch.dtype, x: Tensor) -> None:
    """Raise ValueError unless a product of a quantised x may have this output dtype."""
    if dtype not in (torch.bfloat16, torch.float16) and not (dtype == torch.float32 and x.device.type == "cpu"):
        raise ValueError(f"{op}: dtype must be bfloat16 or float16, on a CPU also float32; got {dtype}")


def check_operands(
    op: str, dtypes: Sequence[torch.dtype], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, bias_dtypes: Sequence[torch.dtype], residual_dtypes: Sequence[torch.dtype],
) -> None:  # fmt: skip
    """Raise ValueError unless operands of one of `dtypes` and the epilogue fit each other."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x must be [M, K] and weight [N, K] with one K; got x {list(x.shape)} and weight {list(weight.shape)}"
        )
    if x.dtype not in dtypes or weight.dtype != x.dtype:
        *names, last = [str(name).removeprefix("torch.") for name in dtypes]
        raise ValueError(
            f"{op}: x and weight must be {', '.join(names)} or {last}, both the same; got {x.dtype} and {weight.dtype}"
        )
    for name, t in (("x", x), ("weight", weight)):
        if t.shape[1] > 1 and t.stride(1) != 1:
            raise ValueError(f"{op}: {name} must be dense along K; got strides {t.stride()}")
    check_epilogue(op, x, weight.shape[0], bias, activation, residual, bias_dtypes, residual_dtypes)


def check_epilogue(
    op: str, x: Tensor, n: int, bias: Tensor | None, activation: str, residual: Tensor | None,
    bias_dtypes: Sequence[torch.dtype], residual_dtypes: Sequence[torch.dtype],
) -> None:  # fmt: skip
    """Raise ValueError unless the epilogue fits the product of x [M, K] and a weight of n rows."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    gated = ACTIVATIONS[activation][1]
    if gated and n % 2:
        raise ValueError(f"{op}: {activation} needs an even number of rows, for a gate half and an up half; got {n}")
    check_tensor(op, "bias", bias, ((n,),), bias_dtypes, x)
    check_tensor(op, "residual", residual, ((x.shape[0], n // 2 if gated else n),), residual_dtypes, x)
