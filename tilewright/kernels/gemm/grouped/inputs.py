"""Example arguments of the grouped products for given dimensions: the `Op.make` of each."""

# X experts, M rows of all experts, N rows of an expert's weight, K the shared dimension

import math

import torch
from torch import Tensor

from tilewright.kernels.gemm.quantized.inputs import scaled_linear_arguments
from tilewright.kernels.gemm.weight_only.inputs import mixed_linear_arguments
from tilewright.op import Args, Inputs

__all__ = [
    "SKEWS",
    "grouped_arguments",
    "grouped_block_arguments",
    "grouped_gradient_arguments",
    "grouped_mixed_arguments",
    "grouped_scaled_arguments",
    "row_offsets",
]


SKEWS = ("even", "random", "one", "tail")
"""How rows are distributed to experts: as evenly as possible, at random, all to one expert, or half of them to none."""


def row_offsets(inputs: Inputs, rows: int, experts: int, skew: str) -> Tensor:
    """Offsets [X + 1], int32, for `rows` rows.

    Raises:
        ValueError: an unknown skew.
    """
    if skew not in SKEWS:
        raise ValueError(f"grouped product: skew is {skew!r}, wanted {', '.join(SKEWS)}")
    if inputs.device.type == "meta":
        return inputs.randint(0, 1, experts + 1, dtype=torch.int32)
    if skew == "random":
        sizes = torch.bincount(inputs.randint(0, experts, rows), minlength=experts)
        return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)
    if skew == "one":
        return inputs.tensor([0] * (experts // 2 + 1) + [rows] * (experts - experts // 2), torch.int32)
    used = rows // 2 if skew == "tail" else rows
    return inputs.tensor([used * e // experts for e in range(experts + 1)], torch.int32)


def _counts(inputs: Inputs, experts: int, each: int, count: int) -> Tensor:
    low, high = (count, count + 1) if count else (each // 2, each + 1)
    return inputs.randint(low, high, experts, dtype=torch.int32)


def _by_expert(
    inputs: Inputs, experts: int, rows: int, layout: str, skew: str, chosen: int, count: int
) -> tuple[tuple[int, ...], Tensor, Tensor | None]:
    """(the shape of x without K, bounds, order)."""
    if layout not in ("sorted", "masked"):
        raise ValueError(f"grouped product: layout is {layout!r}, wanted sorted or masked")
    if layout == "masked":
        return (experts, rows // experts), _counts(inputs, experts, rows // experts, count), None
    offsets = row_offsets(inputs, rows, experts, skew)
    if not chosen:
        return (rows,), offsets, None
    return (rows // chosen,), offsets, inputs.permutation(rows).to(torch.int32)


def grouped_arguments(
    inputs: Inputs,
    *,
    X: int,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = torch.bfloat16,
    skew: str = "even",
    layout: str = "sorted",
    chosen: int = 0,
    w_major: str = "k",
    bias: bool = False,
    activation: str = "none",
    count: int = 0,
    clear: bool = True,
) -> Args:
    """x [M, K] sorted by expert, weight [X, N, K]. With layout "masked", x is [X, M / X, K].

    count: with "masked", the number of rows of each expert; 0: random, at least half of M / X. chosen: the number of experts
    per token; then x is [M / chosen, K], and rows are gathered by an order. w_major: "k" or "n", along which the weight is
    dense.

    Raises:
        ValueError: an unknown layout or skew.
    """
    lead, bounds, order = _by_expert(inputs, X, M, layout, skew, chosen, count)
    weight = (
        inputs.randn(X, K, N, dtype=dtype, scale=max(K, 1) ** -0.5).mT
        if w_major == "n"
        else inputs.randn(X, N, K, dtype=dtype, scale=max(K, 1) ** -0.5)
    )
    more = inputs.randn(X, N, dtype=dtype) if bias else None
    return inputs.randn(*lead, K, dtype=dtype), weight, bounds, more, activation, order, max(chosen, 1), clear


def grouped_gradient_arguments(
    inputs: Inputs, *, X: int, M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, skew: str = "even"
) -> Args:
    """dy [M, N] and x [M, K], sorted by expert."""
    return inputs.randn(M, N, dtype=dtype), inputs.randn(M, K, dtype=dtype), row_offsets(inputs, M, X, skew)


def grouped_block_arguments(
    inputs: Inputs,
    *,
    X: int,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = torch.float8_e4m3fn,
    skew: str = "even",
    layout: str = "sorted",
    bias: bool = False,
    activation: str = "none",
    out: torch.dtype = torch.bfloat16,
    count: int = 0,
    clear: bool = True,
) -> Args:
    """x [M, K] sorted by expert, or [X, M / X, K]; weight [X, N, K]; scales per 128 columns of K for results of about 1.

    Raises:
        ValueError: an unknown layout or skew.
    """
    lead, bounds, _ = _by_expert(inputs, X, M, layout, skew, 0, count)
    blocks, padded = -(-K // 128), -(-K // 16) * 16
    x, weight = (inputs.randn(*rows, padded, scale=60.0).clamp(-448, 448).to(dtype)[..., :K] for rows in (lead, (X, N)))
    return (
        x,
        weight,
        # Dense along rows, as the quantisers write them.
        inputs.randn(blocks, math.prod(lead)).abs().add(0.1).div(60.0).t().unflatten(0, lead),
        inputs.randn(X, -(-N // 128), blocks).abs().add(0.1).div(60.0 * max(K, 1) ** 0.5),
        bounds,
        inputs.randn(X, N, dtype=out) if bias else None,
        activation,
        out,
        clear,
    )


def grouped_mixed_arguments(
    inputs: Inputs,
    *,
    X: int,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = torch.bfloat16,
    format: str = "int4",
    group: int = 0,
    block_rows: int = 1,
    zeros: bool = False,
    skew: str = "even",
    layout: str = "sorted",
    chosen: int = 0,
    bias: bool = False,
    activation: str = "none",
    count: int = 0,
    clear: bool = True,
) -> Args:
    """x as `grouped_arguments` makes it, codes and scales of X weights as `mixed_linear_arguments` makes one.

    Raises:
        ValueError: an unknown format, layout or skew.
    """
    lead, bounds, order = _by_expert(inputs, X, M, layout, skew, chosen, count)
    # Experts follow each other in memory, each with whole blocks of rows.
    each = -(-N // block_rows) * block_rows
    _, codes, scales, points, *_ = mixed_linear_arguments(
        inputs, M=0, N=X * each, K=K, format=format, group=group, block_rows=block_rows, zeros=zeros
    )
    codes = codes.unflatten(0, (X, each))[:, :N]
    scales, points = (None if t is None else t.unflatten(0, (X, -1)) for t in (scales, points))
    more = inputs.randn(X, N, dtype=dtype) if bias else None
    x = inputs.randn(*lead, K, dtype=dtype)
    return x, codes, scales, points, bounds, more, activation, order, max(chosen, 1), block_rows, group, clear


def grouped_scaled_arguments(
    inputs: Inputs,
    *,
    X: int,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = torch.int8,
    skew: str = "even",
    layout: str = "sorted",
    chosen: int = 0,
    bias: bool = False,
    activation: str = "none",
    out: torch.dtype = torch.bfloat16,
    count: int = 0,
    clear: bool = True,
) -> Args:
    """x and X weights of `dtype` with their scales, as `scaled_linear_arguments` makes them.

    Raises:
        ValueError: an unknown layout or skew.
    """
    lead, bounds, order = _by_expert(inputs, X, M, layout, skew, chosen, count)
    x, weight, x_scales, w_scales, *_ = scaled_linear_arguments(inputs, M=math.prod(lead), N=X * N, K=K, dtype=dtype)
    more = inputs.randn(X, N, dtype=out) if bias else None
    return (
        x.unflatten(0, lead), weight.unflatten(0, (X, N)), x_scales.unflatten(0, lead), w_scales.unflatten(0, (X, N)), bounds,
        more, activation, order, max(chosen, 1), out, clear,
    )  # fmt: skip
