"""Routing: selects the K experts of each token, and computes their weights.

    scores  = softmax(logits) over the X experts, or sigmoid(logits)
    ranked  = logits, or scores + bias
    experts = the K largest of ranked, among the groups that may be chosen
    weights = scale * scores[experts]; with `normalise`, scores[experts] is first divided by its sum

    logits: [T, X] float32; bias: [X] float32 or None -> weights [T, K] float32, experts [T, K] int32

Of equal values, the one with the lowest expert number comes first, so the choice is the same in every run and batch. A NaN
counts as the largest value. The X experts may be divided into `groups` of adjacent experts. Then experts are chosen only among
the `chosen_groups` best groups. The value of a group is its largest entry of `ranked` (softmax) or the sum of its two largest
(sigmoid). Softmax does not change the order of the logits, so with softmax the logits themselves are compared: then rounding
cannot create equal values.

Routers that this covers: Mixtral and gpt-oss (`normalise` is the same as a softmax over the chosen logits only), Qwen3-MoE,
DeepSeek-V2 (groups, softmax) and DeepSeek-V3 (groups, sigmoid, bias). Limited by launch latency and by K successive searches
for a maximum; there is one program per token. Not supported: gradients (ops/experts.py has those of the weights), more than
1,024 experts.
"""

# T tokens, X experts, K chosen experts per token

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.experts.inputs import route_arguments
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["MOST_EXPERTS", "route_experts_op", "routed_weights"]

MOST_EXPERTS = 1024

# ---- reference


def routed_weights(logits: Tensor, experts: Tensor, softmax: bool, normalise: bool, scale: float) -> Tensor:
    """The weights [T, K] of the chosen experts, in the dtype of the logits; differentiable."""
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    weights = scores.gather(1, experts.long())
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def _largest(values: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest values of each row; of equal values, the lowest index comes first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _reference(
    logits: Tensor, bias: Tensor | None, chosen: int, softmax: bool, groups: int, chosen_groups: int, normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranked = logits if softmax else logits.sigmoid()
    ranked = ranked if bias is None else ranked + bias
    if groups > 1:
        grouped = ranked.unflatten(1, (groups, -1))
        worth = grouped.amax(-1) if softmax else grouped.sort(-1).values[..., -2:].sum(-1)
        is_open = torch.zeros_like(worth, dtype=torch.bool).scatter(1, _largest(worth, chosen_groups), True)
        closed = torch.full_like(grouped, -torch.inf)
        ranked = torch.where(is_open[..., None], grouped, closed).flatten(1)
    experts = _largest(ranked, chosen)
    return routed_weights(logits, experts, softmax, normalise, scale), experts.to(torch.int32)


def _fake(logits: Tensor, bias: Tensor | None, chosen: int, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], chosen)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


# ---- cost, problem, examples


def _cost(logits: Tensor, bias: Tensor | None, chosen: int, *_: Any) -> Cost:
    return Cost(flops=(6 + chosen) * logits.numel(), bytes=logits.nbytes + logits.shape[0] * chosen * 8)


class Problem(NamedTuple):
    """The sizes that a router fixes. The number of tokens is not part of the problem."""

    experts: int
    chosen: int


def _problem(logits: Tensor, bias: Tensor | None, chosen: int, *_: Any) -> Problem:
    return Problem(logits.shape[1], chosen)


SPACE = Space(
    default=lambda device, problem: {"num_warps": 1 if problem.experts <= 256 else 2},
    axes={"num_warps": (1, 2, 4)},
    refusal=lambda device, problem, c: "more threads than experts" if 32 * c["num_warps"] > max(32, problem.experts) else None,
)


_example = Example.sized(route_arguments)


def _equal(inputs: Inputs) -> tuple[object, ...]:
    return inputs.tensor([[1.0, 2.0, 2.0, 0.5, 2.0]], torch.float32), None, 3, True, 1, 1, False, 1.0


EXAMPLES = (
    _example("mixtral", 5, 8, 2, normalise=True),
    _example("ragged", 3, 13, 4, scale=2.5),
    _example("groups", 4, 24, 4, groups=4, chosen_groups=2),
    _example("sigmoid", 4, 24, 6, softmax=False, groups=4, chosen_groups=3, normalise=True, scale=2.5),
    _example("one", 1, 1, 1),
    _example("no tokens", 0, 8, 2),
    Example("equal", _equal),
)

# ---- kernel

_LOWEST = tl.constexpr(-2147483648)


@triton.jit
def _sortable(x):
    """Integers with the same order as the float32 numbers x. Equal numbers give equal integers; a NaN gives the largest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, keys, 0x7FFFFFFF)


@triton.jit
def _first_largest(keys, places):
    """The lowest index at which the largest key occurs."""
    return tl.min(tl.where(keys == tl.max(keys, 0), places, 2147483647), 0)


@triton.jit
def _worth_of_groups(ranked, keys, at, X, SOFTMAX: tl.constexpr, GROUPS: tl.constexpr):
    """For each expert, the value of its group, as a sortable integer."""
    per = X // GROUPS
    worth = tl.full(keys.shape, _LOWEST, tl.int32)
    for g in range(GROUPS):
        own = (at // per == g) & (at < X)
        best = _first_largest(tl.where(own, keys, _LOWEST), at)
        first = tl.sum(tl.where(at == best, ranked, 0.0), 0)
        if not SOFTMAX:
            second = _first_largest(tl.where(own & (at != best), keys, _LOWEST), at)
            first += tl.sum(tl.where(at == second, ranked, 0.0), 0)
        worth = tl.where(own, _sortable(first), worth)
    return worth


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, X, scale,
    K: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr, SOFTMAX: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_X)
    logits = tl.load(logits_ptr + token * X + at, mask=at < X, other=float("-inf"))
    ranked = logits
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        ranked = scores
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + at, mask=at < X, other=0.0)
    keys = tl.where(at < X, _sortable(ranked), _LOWEST)
    if GROUPS > 1:
        worth = _worth_of_groups(ranked, keys, at, X, SOFTMAX, GROUPS)
        is_open = at < 0
        for _ in range(CHOSEN_GROUPS):
            group = _first_largest(worth, at) // (X // GROUPS)
            own = at // (X // GROUPS) == group
            is_open |= own
            worth = tl.where(own, _LOWEST, worth)
        keys = tl.where(is_open, keys, _LOWEST)
    ks = tl.arange(0, BLOCK_K)
    weights = tl.zeros([BLOCK_K], tl.float32)
    experts = tl.zeros([BLOCK_K], tl.int32)
    total = 0.0
    for k in range(K):
        expert = _first_largest(keys, at)
        weight = tl.sum(tl.where(at == expert, scores, 0.0), 0)
        keys = tl.where(at == expert, _LOWEST, keys)
        weights = tl.where(ks == k, weight, weights)
        experts = tl.where(ks == k, expert, experts)
        total += weight
    if NORMALISE:
        weights = weights / (total + 1e-20)
    tl.store(weights_ptr + token * K + ks, weights * scale, mask=ks < K)
    tl.store(experts_ptr + token * K + ks, experts, mask=ks < K)


# ---- launcher and op


def _refuse(device: Device, problem: Problem) -> str | None:
    return f"supports at most {MOST_EXPERTS} experts, not {problem.experts}" if problem.experts > MOST_EXPERTS else None


def _launch(
    config: Config, logits: Tensor, bias: Tensor | None, chosen: int, softmax: bool, groups: int, chosen_groups: int,
    normalise: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights, experts = _fake(logits, bias, chosen, softmax, groups, chosen_groups, normalise, scale)
    tokens, count = logits.shape
    if tokens:
        _route_kernel[(tokens,)](
            logits, bias, weights, experts, count, scale, K=chosen, BLOCK_X=next_pow2(count), BLOCK_K=next_pow2(chosen),
            SOFTMAX=softmax, GROUPS=groups, CHOSEN_GROUPS=chosen_groups, NORMALISE=normalise, **config,
        )  # fmt: skip
    return weights, experts


route_experts_op = Op(
    name="route_experts",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=route_arguments,
    fake=_fake,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True),),
)
