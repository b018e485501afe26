"""The peers of the operators of a mixture of experts in benchmarks, and the dimensions to measure."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.kernels.gemm.grouped.linear import grouped_activated

__all__ = ["PEERS", "SHAPES"]

Call = Callable[[], Any]


def _grouped_linear(
    x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None, chosen: int,
    clear: bool,
) -> Call:  # fmt: skip
    """torch's `grouped_mm`, with a kernel for the order of the rows and one for the activation; `bmm` for the masked layout."""
    w, ends = weight.mT, bounds[1:]
    if x.dim() == 3:
        after = (torch.arange(x.shape[1], device=x.device)[None] < bounds[:, None])[..., None]
        add = None if bias is None else bias[:, None]

        def masked() -> Tensor:
            y = torch.bmm(x, w) if add is None else torch.baddbmm(add, x, w)
            return grouped_activated(y, activation) * after

        return masked
    sources = None if order is None else order.long() // chosen
    sizes = (ends - bounds[:-1]).long()
    rows = None if bias is None else bias.repeat_interleave(sizes, 0)

    def call() -> Tensor:
        y = F.grouped_mm(x if sources is None else x[sources], w, offs=ends)
        return grouped_activated(y if rows is None else y + rows, activation)

    return call


def _route(
    logits: Tensor, bias: Tensor | None, chosen: int, softmax: bool, groups: int, chosen_groups: int, normalise: bool,
    scale: float,
) -> Call:  # fmt: skip
    def call() -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
        ranked = scores if bias is None else scores + bias
        if groups > 1:
            grouped = ranked.unflatten(1, (groups, -1))
            worth = grouped.amax(-1) if softmax else grouped.topk(2, -1).values.sum(-1)
            is_open = torch.zeros_like(worth, dtype=torch.bool).scatter(1, worth.topk(chosen_groups, -1).indices, True)
            ranked = torch.where(is_open[..., None], grouped, -torch.inf).flatten(1)
        experts = ranked.topk(chosen, -1).indices
        weights = scores.gather(1, experts)
        return (weights / weights.sum(-1, keepdim=True) if normalise else weights) * scale, experts

    return call


def _sort(experts: Tensor, count: int) -> Call:
    every = torch.arange(count + 1, device=experts.device)

    def call() -> tuple[Tensor, ...]:
        by_expert, order = experts.flatten().sort(stable=True)
        offsets = torch.searchsorted(by_expert, every)
        return offsets, order, torch.empty_like(order).index_copy_(0, order, torch.arange(order.shape[0], device=order.device))

    return call


def _combine_gradient(dy: Tensor, rows: Tensor, places: Tensor) -> Call:
    index = places.long()
    return lambda: torch.bmm(rows[index], dy[..., None])[..., 0]


def _combine(rows: Tensor, places: Tensor, weights: Tensor | None) -> Call:
    index = places.long()
    if weights is None:
        return lambda: rows[index].sum(1)
    return lambda: (rows[index] * weights[..., None]).sum(1).to(rows.dtype)


def _permute(x: Tensor, order: Tensor, chosen: int, weights: Tensor | None) -> Call:
    sources = order.long() // chosen
    if weights is None:
        return lambda: x[sources]
    factors = weights.flatten()[order.long(), None]
    return lambda: (x[sources] * factors).to(x.dtype)


PEERS: dict[str, Callable[..., Call]] = {
    "combine_gradient": _combine_gradient,
    "combine_tokens": _combine,
    "grouped_linear": _grouped_linear,
    "grouped_weight_gradient": lambda dy, x, offsets: lambda: F.grouped_mm(dy.mT, x, offs=offsets[1:]),
    "permute_tokens": _permute,
    "route_experts": _route,
    "sort_by_expert": _sort,
}

# Qwen3-30B-A3B (128 experts, 8 chosen) with 32,768 tokens; Mixtral-8x7B (8, 2) at 1, 16 and 64; half-filled rooms.
_QWEN_UP, _QWEN_DOWN = "X=128 N=1536 K=2048", "X=128 N=2048 K=768"
_MIXTRAL_UP, _MIXTRAL_DOWN = "X=8 N=28672 K=4096", "X=8 N=4096 K=14336"
_PREFILL = (f"{_QWEN_UP} M=262144", f"{_QWEN_DOWN} M=262144")
SHAPES: dict[str, tuple[str, ...]] = {
    "grouped_linear": (
        *(f"{shape} skew={skew}" for shape in _PREFILL for skew in ("even", "random", "one")),
        f"{_QWEN_UP} M=262144 activation=silu_mul",
        f"{_QWEN_UP} M=262144 activation=silu_mul chosen=8",
        f"{_QWEN_UP} M=262144 w_major=n",
        "X=4 M=32768 N=4096 K=7168",
        "X=4 M=16384 N=4096 K=7168 layout=masked count=256 clear=false",
        *(f"{_MIXTRAL_UP} M={2 * t} chosen=2 skew=random activation=silu_mul" for t in (1, 16, 64)),
        *(f"{_MIXTRAL_DOWN} M={2 * t} skew=random" for t in (1, 16, 64)),
        *(f"{_QWEN_UP} M={8 * t} chosen=8 skew=random activation=silu_mul" for t in (1, 16, 64)),
        *(f"{_QWEN_DOWN} M={8 * t} skew=random" for t in (1, 16, 64)),
    ),
    "grouped_block_scaled_linear": (
        "X=4 M=32768 N=4096 K=7168",
        "X=4 M=16384 N=4096 K=7168 layout=masked count=256 clear=false",
        "X=8 M=32768 N=4096 K=7168 activation=silu_mul",
    ),
    "grouped_mixed_linear": tuple(
        f"{shape} M={chosen * t} {form} {more}"
        for form in ("format=int4 group=128 zeros=true", "format=int8")
        for shape, chosen, more in (
            (_MIXTRAL_UP, 2, "chosen=2 skew=random activation=silu_mul"),
            (_MIXTRAL_DOWN, 2, "skew=random"),
            (_QWEN_UP, 8, "chosen=8 skew=random activation=silu_mul"),
            (_QWEN_DOWN, 8, "skew=random"),
        )
        for t in (1, 16, 64)
    ),
    "grouped_scaled_linear": (
        *(f"{shape} dtype={dtype}" for shape in _PREFILL for dtype in ("int8", "fp8")),
        f"{_QWEN_UP} M=262144 chosen=8 activation=silu_mul dtype=int8",
        "X=4 M=16384 N=4096 K=7168 layout=masked count=256 clear=false dtype=int8",
    ),
    "grouped_weight_gradient": tuple(f"{shape} skew={skew}" for shape in _PREFILL for skew in ("even", "one")),
    "route_experts": ("T=1", "T=64", "T=32768", "T=32768 X=256 softmax=false groups=8 chosen_groups=4"),
    "sort_by_expert": ("T=1", "T=64", "T=32768", "T=32768 skew=one"),
    "permute_tokens": ("T=64 N=2048", "T=32768 N=2048"),
    "combine_tokens": ("T=1 N=2048", "T=64 N=2048", "T=32768 N=2048"),
    "combine_gradient": ("T=32768 N=2048",),
}
