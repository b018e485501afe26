"""Example arguments of `linear` for given dimensions: its `Op.make`."""

import math

import torch
from torch import Tensor

from tilewright.op import Args, Inputs

__all__ = ["linear_arguments"]

_BF16 = torch.bfloat16


def linear_arguments(
    inputs: Inputs,
    *,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = _BF16,
    layout: str = "nt",
    batch: int = 0,
    bias: bool = False,
    activation: str = "none",
    residual: bool = False,
    offset: str = "none",
) -> Args:
    """Random x [M, K] and weight [N, K], or a batch of both, and the other arguments.

    layout: "nt" has both operands dense along K; "nn" has the weight dense along N; "tn" also has x dense along M.
    offset: "x" or "weight" starts one element into its memory, as a view may.

    Raises:
        ValueError: an unknown layout or operand.
    """
    if layout not in ("nt", "nn", "tn"):
        raise ValueError(f"linear: layout is {layout!r}, wanted nt, nn or tn")
    if offset not in ("none", "x", "weight"):
        raise ValueError(f"linear: offset is {offset!r}, wanted none, x or weight")
    lead = (batch,) if batch else ()

    def matrix(rows: int, cols: int, transposed: bool, scale: float, shifted: bool) -> Tensor:
        shape = (*lead, cols, rows) if transposed else (*lead, rows, cols)
        start = int(shifted)
        t = inputs.randn(math.prod(shape) + start, dtype=dtype, scale=scale)[start:].view(shape)
        return t.mT if transposed else t

    width = N // 2 if activation.endswith("_mul") else N
    return (
        matrix(M, K, layout == "tn", 1.0, offset == "x"),
        matrix(N, K, layout != "nt", max(K, 1) ** -0.5, offset == "weight"),
        inputs.randn(N, dtype=dtype) if bias else None,
        activation,
        inputs.randn(*lead, M, width, dtype=dtype) if residual else None,
    )
