"""The gradients of attention, with the weights computed again.

    # B sequences, T query rows of all sequences, S keys, H query heads, G key/value heads, D head dim, V value head dim
    out[t, h] = sum_s p[t, s] v[s, g]     p[t, s] = exp(z[t, s] - lse[t, h])     z = scale * q[t, h] . k[s, g]

    with g = h // (H / G)

    delta[t, h] = do[t, h] . out[t, h]
    dp[t, s]    = do[t, h] . v[s, g]
    ds[t, s]    = p[t, s] (dp[t, s] - delta[t, h])
    dv[s, g]    = sum_h sum_t p[t, s] do[t, h]
    dk[s, g]    = scale sum_h sum_t ds[t, s] q[t, h]
    dq[t, h]    = scale sum_s ds[t, s] k[s, g]

Shapes, masks and the options that change scores are those of attention/attention.py: q, do, out [B, S, H, ..], k and v
[B, SK, G, ..], or packed with cumulative lengths. lse is as the op `attention` returns it, float32 [H, T]. A query that sees no
key has lse -inf (or its sink); it contributes zeros to gradients, and its own gradient is zero. A soft cap, with the scores
z = cap tanh(scale q . k / cap), multiplies ds by its derivative, 1 - (z / cap)^2. With ALiBi, distance times slope is a
constant, and slopes have no gradient. A sink is a key with the value zero, so dp = 0 and

    dsink[h]    = -sum_t exp(sink[h] - lse[t, h]) delta[t, h]

**Why only lse is kept** (Dao et al., "FlashAttention", 2022). The weights of one head are Q x K numbers. The forward pass does
not store them, and the backward pass does not read them: with the logarithm of each row's sum, a block of weights is one
product and one exponential, without a maximum and in any order. The second term of ds is the derivative of the softmax's sum.
Computed as sum_s p[t, s] dp[t, s] it would need a whole row of dp, but it equals do . sum_s p[t, s] v[s] = do . out, which
costs one pass over two tensors.

**What limits it.** There are five products per pair of blocks: 6 D + 4 V operations per pair of a query and a key, compared
with 2 D + 2 V in the forward pass. dk and dv are sums over queries, dq is a sum over keys. A program that accumulates one kind
in registers has only parts of the other. Either the programs of the keys add their parts of dq to float32 memory (five
products; the order of addition changes from run to run unless the programs wait for each other), or a second kernel computes
the scores again only for dq (seven products, no addition in memory).

Products are accumulated in float32. p and ds are rounded to the inputs' dtype for the products that use them, and the gradients
are rounded once at the end. The implementations, in order of preference:

    sm90      Hopper, written in Gluon (sm90_kernel.py): five products; equal lengths, or packed documents that attend to
              themselves; causal masks, windows under them, sinks
    triton    sm_80 and up, any head dim up to 256, any layout and mask (tile.py): seven products,
              deterministic

Not supported: options that attention/attention.py does not support, and gradients of lse and of ALiBi's slopes.
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.attention import attention_example, attention_op
from tilewright.kernels.attention.backward.problem import Gradients, arguments_of, empty_gradients, problem_of
from tilewright.kernels.attention.backward.sm90 import SM90
from tilewright.kernels.attention.backward.tile import TRITON
from tilewright.kernels.attention.problem import lengths_of, pairs_seen
from tilewright.kernels.attention.reference import Bends, alike, by_group, inverted, scores_of, sequences, stacked
from tilewright.op import Example, Inputs, Op

__all__ = ["attention_backward_op"]

# ---- reference


def _gradients(do: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float, bends: Bends) -> Gradients:
    """Gradients of q [..., Q, H, D], k [..., K, G, D], v [..., K, G, V] and the sinks [..., H], in float32 or wider; lse
    [..., H, Q]. The leading dims are sequences of equal shape."""
    groups = k.shape[-2]
    do, q, out, k, v = (by_group(t, groups) for t in (do, q, out, k, v))
    lse = lse.to(q.dtype).unflatten(-2, (groups, -1))
    scores, slope = scores_of(q, k, scale, bends)
    p = (scores - inverted(lse)[..., None]).exp()
    delta = (do * out).sum(-1)
    ds = p * (do @ v.mT - delta[..., None]) * slope * scale
    dq = (ds @ k).flatten(-4, -3).transpose(-3, -2)
    dk, dv = ((weights.mT @ rows).sum(-3).transpose(-3, -2) for weights, rows in ((ds, q), (p, do)))
    if bends.sinks is None:
        return dq, dk, dv, lse.new_zeros(*lse.shape[:-3], 0)
    of_sinks = (bends.sinks.to(q.dtype).view(groups, -1, 1) - lse).exp()  # the value of a sink is 0, and so is its dp
    return dq, dk, dv, -(of_sinks * delta).sum(-1).flatten(-2)


def _reference(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool, left: int | None = None,
    right: int | None = None, prefix: int = 0, prefixes: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    parts = sequences((do, q, out), (k, v), cu_q, cu_k)
    parts = [(*part, rows) for part, rows in zip(parts, lse.split([len(part[0]) for part in parts], 1), strict=True)]
    of_each = [prefix] * len(parts) if prefixes is None else prefixes.tolist()
    behind = 0 if causal else right
    by_place: dict[int, Gradients] = {}
    for places in alike(parts, 3, of_each):
        bends = Bends(left, behind, of_each[places[0]], softcap, sinks, slopes)
        by_place.update(zip(places, zip(*_gradients(*stacked(parts, places), scale=scale, bends=bends))))
    found = [by_place[place] for place in range(len(parts))]
    results = empty_gradients(q, k, v, sinks)
    for i, result in enumerate(results[:3]):
        if found:
            result.copy_(torch.cat([each[i] for each in found]).view(result.shape))
    results[3].copy_(sum((each[3] for each in found), torch.zeros(results[3].shape, dtype=lse.dtype, device=lse.device)))
    return results


def _fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool, left: int | None = None,
    right: int | None = None, prefix: int = 0, prefixes: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_gradients(q, k, v, sinks)


def _cost(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool, left: int | None = None,
    right: int | None = None, prefix: int = 0, prefixes: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> Cost:  # fmt: skip
    """If the lengths are on a device, this waits for it. On meta tensors every sequence counts as long as the longest."""
    behind = 0 if causal else right
    lengths = lengths_of(q, cu_q, cu_k, max_q, max_k)
    of_each = [prefix] * len(lengths) if prefixes is None or prefixes.is_meta else prefixes.tolist()
    each = Counter((*length, own) for length, own in zip(lengths, of_each, strict=True))
    pairs = sum(count * pairs_seen(queries, keys, left, behind, own) for (queries, keys, own), count in each.items())
    heads, dim, value_dim = q.shape[-2], q.shape[-1], v.shape[-1]
    moved = 2 * (q.nbytes + k.nbytes + v.nbytes) + do.nbytes + out.nbytes + lse.nbytes
    return Cost(flops=2 * pairs * heads * (3 * dim + 2 * value_dim), bytes=moved + (0 if sinks is None else 2 * sinks.nbytes))


# ---- examples


def _example(
    label: str,
    lengths: tuple[tuple[int, int], ...],
    *args: Any,
    spoilt: int | None = None,
    deterministic: bool = True,
    alike: bool = False,
    **more: Any,
) -> Example:
    """An example of `attention`, extended by the results of its forward pass. `spoilt`: all tensors of that sequence are NaN.
    `alike`: the lengths of queries and keys are one tensor."""

    def with_gradients(
        inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, *options: Any
    ) -> tuple[object, ...]:
        max_q, max_k, scale, causal, _, *bends = options
        cu_k = cu_q if alike else cu_k
        out, lse = attention_op.reference(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, True, *bends)
        do = inputs.randn(*out.shape, dtype=out.dtype)
        if spoilt is not None:
            for t in sequences((q, do, out), (k, v), cu_q, cu_k)[spoilt]:
                t.fill_(math.nan)
        return do, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal, deterministic, *bends

    return attention_example(label, lengths, *args, spoilt=spoilt, **more).then(with_gradients)


# Interpreted on two cores each of these takes seconds. So every feature occurs once, usually combined with others.
EXAMPLES = (
    _example("full", ((40, 70),), (1, 1), dim=128),
    _example("causal", ((70, 70),), (1, 1), dim=128, causal=True),
    _example("packed", ((33, 40), (0, 5), (7, 0)), (2, 1), 16, packed=True, causal=True),
    _example("packed documents", ((70, 70), (5, 5), (0, 0), (66, 66)), (2, 1), 128, packed=True, causal=True, alike=True),
    _example("no key seen", ((40, 20),), (1, 1), causal=True, dtype=torch.float16),
    _example("one query", ((1, 50),), (2, 1), causal=True),
    _example("spoilt neighbour", ((20, 30), (9, 37), (17, 31)), (1, 1), packed=True, spoilt=1),
    _example("merged", ((35, 35),), (2, 1), merged=True, causal=True),
    _example("wide", ((34, 34),), (1, 1), 256, causal=True),
    _example("dim 80 fp16", ((20, 40),), (1, 1), 80, torch.float16, causal=True),
    _example("dim 20 fp32", ((20, 35),), (2, 1), 20, torch.float32, causal=True),
    _example("window", ((75, 75),), (1, 1), causal=True, left=20),
    _example("both sides, packed", ((30, 50), (40, 40)), (1, 1), 96, packed=True, left=13, right=12),
    _example("prefix of each, window", ((60, 70), (33, 33)), (1, 1), packed=True, causal=True, prefix=(50, 0), left=30),
    _example("soft cap", ((35, 40),), (1, 1), softcap=5.0, dtype=torch.float16),
    _example("sinks", ((40, 10),), (2, 1), causal=True, sinks=True),
    _example("alibi", ((30, 40),), (2, 1), causal=True, alibi=True),
    _example("narrow values", ((35, 40),), (1, 1), 192, causal=True, value_dim=128),
    _example(
        "all of it", ((34, 50),), (2, 1), 128, packed=True, causal=True, left=35, prefix=9, softcap=20.0, alibi=True,
        sinks=True, value_dim=64,
    ),
    _example("no rows", ((0, 5),)),
    _example("no keys", ((3, 0),) * 2, sinks=True),
)  # fmt: skip


attention_backward_op = Op(
    name="attention_backward",
    reference=_reference,
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    impls=(SM90, TRITON),
    make=arguments_of,
    fake=_fake,
    rows_in_problem=True,
    roundings=2,  # the weights or their gradients, then the result
)
