"""Attention of sequences of one shape in plain torch: the scores, which query sees which key, and the average. Reference for
the forward and the backward pass.

attention.py has the formulae. Computed in float32, or in float64 if the operands are float64.
"""

# ... sequences of equal shape, any leading dims; Q query rows, K keys, H query heads, G key/value heads, D head dim, V value
# head dim

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Bends", "alike", "attend", "by_group", "inverted", "scores_of", "sequences", "stacked"]

_MOST_SCORES = 1 << 22
"""The most scores that are computed at once for sequences of equal shape; a longer sequence is computed alone."""


class Bends(NamedTuple):
    """The options that change the mask or the scores of one sequence; `right` is 0 under a causal mask."""

    left: int | None = None
    right: int | None = None
    prefix: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None


def sequences(
    of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...], cu_q: Tensor | None, cu_k: Tensor | None
) -> list[tuple[Tensor, ...]]:
    """The rows of each sequence: [Q, H, ..] of each of `of_queries`, then [K, G, ..] of `of_keys`. Waits for the device."""
    if cu_q is None or cu_k is None:
        q_parts, k_parts = ([t.unbind() for t in some] for some in (of_queries, of_keys))
    else:
        q_parts = [t.split(cu_q.diff().tolist()) for t in of_queries]
        k_parts = [t.split(cu_k.diff().tolist()) for t in of_keys]
    return list(zip(*q_parts, *k_parts, strict=True))


def alike(parts: Sequence[tuple[Tensor, ...]], keys: int, prefixes: Sequence[int]) -> list[list[int]]:
    """The indices of the sequences, grouped by equal shape and prefix, so that many short sequences need few products.

    keys: the index of the part whose rows are the keys; the rows of the first part are the queries.
    """
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for place, (part, prefix) in enumerate(zip(parts, prefixes, strict=True)):
        rows, seen = len(part[0]), len(part[keys])
        groups = found.setdefault((rows, seen, prefix), [[]])
        if (len(groups[-1]) + 1) * part[0].shape[1] * rows * seen > _MOST_SCORES and groups[-1]:
            groups.append([])
        groups[-1].append(place)
    return [places for groups in found.values() for places in groups]


def stacked(parts: Sequence[tuple[Tensor, ...]], places: Sequence[int]) -> list[Tensor]:
    """The parts of these sequences as [N, ...] each."""
    return [torch.stack(tensors) for tensors in zip(*(parts[place] for place in places))]


def inverted(lse: Tensor) -> Tensor:
    """lse with +inf where it is -inf, so that exp(score - lse) is 0 in a row that sees no key."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def by_group(t: Tensor, groups: int) -> Tensor:
    """[..., T, H, D] as [..., G, H / G, T, D], in float32 or wider."""
    return t.to(torch.promote_types(t.dtype, torch.float32)).transpose(-3, -2).unflatten(-3, (groups, -1))


def _seen(rows: int, keys: int, bends: Bends, device: torch.device) -> Tensor:
    """bool [Q, K]: which key each query sees."""
    own = torch.arange(keys - rows, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if bends.right is not None:
        seen &= (key <= own + bends.right) | (key < bends.prefix)
    if bends.left is not None:
        seen &= key >= own - bends.left
    return seen


def scores_of(q: Tensor, k: Tensor, scale: float, bends: Bends) -> tuple[Tensor, Tensor | float]:
    """(scores [..., G, H / G, Q, K], -inf where a query does not see a key; their derivative with respect to scale * q . k,
    which is below 1 with a cap).

    q [..., G, H / G, Q, D], k [..., G, 1, K, D].
    """
    (groups, _, rows, _), keys = q.shape[-4:], k.shape[-2]
    scores, slope = q @ k.mT * scale, 1.0
    if bends.softcap is not None:
        bent = (scores / bends.softcap).tanh()
        scores, slope = bends.softcap * bent, 1.0 - bent.square()
    if bends.slopes is not None:
        own = torch.arange(keys - rows, keys, device=q.device)[:, None]
        distance = (own - torch.arange(keys, device=q.device)).abs()
        scores = scores - bends.slopes.to(scores.dtype).view(groups, -1, 1, 1) * distance
    return scores.masked_fill(~_seen(rows, keys, bends, q.device), -math.inf), slope


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bends: Bends) -> tuple[Tensor, Tensor]:
    """(out [..., Q, H, V], lse [..., H, Q]) of q [..., Q, H, D], k [..., K, G, D], v [..., K, G, V]."""
    groups = k.shape[-2]
    scores, _ = scores_of(by_group(q, groups), by_group(k, groups), scale, bends)
    lse = scores.logsumexp(-1)
    if bends.sinks is not None:
        lse = torch.logaddexp(lse, bends.sinks.to(lse.dtype).view(groups, -1, 1))
    out = (scores - inverted(lse)[..., None]).exp() @ by_group(v, groups)
    return out.flatten(-4, -3).transpose(-3, -2), lse.flatten(-3, -2)
