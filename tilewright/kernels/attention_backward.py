"""The gradients of attention, from the weights computed again.

    # B sequences, T query rows of all of them, S keys, H query heads, G key/value heads, D head dim
    out[t, h] = sum_s p[t, s] v[s, g]     p[t, s] = exp(scale * q[t, h] . k[s, g] - lse[t, h])     g = h // (H / G)

    delta[t, h] = do[t, h] . out[t, h]
    dp[t, s]    = do[t, h] . v[s, g]
    ds[t, s]    = p[t, s] (dp[t, s] - delta[t, h])
    dv[s, g]    = sum_h sum_t p[t, s] do[t, h]
    dk[s, g]    = scale sum_h sum_t ds[t, s] q[t, h]
    dq[t, h]    = scale sum_s ds[t, s] k[s, g]

Shapes and masks as in attention.py: q, do, out [B, S, H, D], k and v [B, SK, G, D], or packed with cumulative lengths; lse as
the op `attention` returns it, float32 [H, T]. A query that sees no key has lse -inf, gives zeros and receives zeros.

**Why nothing but lse is kept** (Dao et al., "FlashAttention", 2022). The weights of one head are Q x K numbers. The forward
pass did not write them down, and this one does not read them: with the logarithm of each row's sum a block of weights is one
product and one exponential, without a maximum and in any order. The second term of ds is the derivative of the softmax's sum:
sum_s p[t, s] dp[t, s] would want a whole row of dp, but it is do . sum_s p[t, s] v[s] = do . out, which costs one pass over
two tensors.

**What limits it.** Five products a pair of blocks, 10 D operations a pair of a query and a key against 4 D forward. dk and dv
are sums over queries, dq is one over keys: whoever keeps one in registers must share out the other. Either the keys' programs
add their parts of dq to float32 memory (five products, and an order of addition that changes from run to run unless they wait
for each other), or a second kernel computes the scores again for dq alone (seven products, and no addition in memory).

Products are accumulated in float32; p and ds are rounded to the inputs' dtype for the products that they enter, the gradients
once at the end. The implementations, in the order in which they are asked:

    sm90      Hopper, by hand in Gluon (attention_backward_sm90.py): five products; equal lengths
    triton    sm_80 and up, any head dim up to 256, any layout (attention_backward_tile.py): seven products, deterministic

Not supported: what attention.py does not support, and gradients of lse.
"""

import math
from collections import Counter
from itertools import accumulate

import torch
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.attention_backward_common import Gradients, arguments_of, empty_gradients, inverted, problem_of
from tilewright.kernels.attention_backward_sm90_launch import SM90
from tilewright.kernels.attention_backward_tile import TRITON
from tilewright.kernels.attention_common import lengths_of, pairs_seen
from tilewright.op import Example, Inputs, Op

__all__ = ["attention_backward_op"]

# ---- reference


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """scale * q k^T [G, H / G, Q, K] of q [G, H / G, Q, D] and k [G, 1, K, D], with -inf where a query does not see a key."""
    scores = q @ k.mT * scale
    if not causal:
        return scores
    rows, keys = scores.shape[-2:]
    at = torch.arange(keys - rows, keys, device=q.device)[:, None]
    return scores.masked_fill(torch.arange(keys, device=q.device) > at, -math.inf)


def _by_group(t: Tensor, groups: int, wide: torch.dtype) -> Tensor:
    """[T, H, D] as [G, H / G, T, D]."""
    return t.to(wide).transpose(0, 1).unflatten(0, (groups, -1))


def _one_sequence(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> Gradients:
    """Gradients of q [Q, H, D], k and v [K, G, D], in float32 or wider; lse [H, Q]."""
    groups, wide = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    do, q, out = (_by_group(t, groups, wide) for t in (do, q, out))
    k, v = (_by_group(t, groups, wide) for t in (k, v))
    p = (_scores(q, k, scale, causal) - inverted(lse.to(wide)).unflatten(0, (groups, -1))[..., None]).exp()
    ds = p * (do @ v.mT - (do * out).sum(-1, keepdim=True))
    dq = (ds @ k * scale).flatten(0, 1).transpose(0, 1)
    dk, dv = ((weights.mT @ rows).sum(1).transpose(0, 1) for weights, rows in ((ds * scale, q), (p, do)))
    return dq, dk, dv


def _reference(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_queries, of_keys = (do, q, out), (k, v)
    if cu_q is None or cu_k is None:
        do_, q_, out_, k_, v_ = (t.unbind() for t in (*of_queries, *of_keys))
        lse_ = lse.unflatten(1, q.shape[:2]).unbind(1)
    else:
        q_lengths, k_lengths = cu_q.diff().tolist(), cu_k.diff().tolist()
        do_, q_, out_ = (t.split(q_lengths) for t in of_queries)
        k_, v_ = (t.split(k_lengths) for t in of_keys)
        lse_ = lse.split(q_lengths, 1)
    parts = [
        _one_sequence(do, q, k, v, out, lse, scale, causal)
        for do, q, k, v, out, lse in zip(do_, q_, k_, v_, out_, lse_, strict=True)
    ]
    results = empty_gradients(q, k, v)
    if parts:
        for result, rows in zip(results, zip(*parts, strict=True), strict=True):
            result.copy_(torch.cat(rows).view(result.shape))
    return results


def _fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_gradients(q, k, v)


# ---- cost


def _cost(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool,
) -> Cost:  # fmt: skip
    """Waits for the device where lengths are there. On meta tensors every sequence counts as long as the longest."""
    each = Counter(lengths_of(q, cu_q, cu_k, max_q, max_k))
    pairs = sum(count * pairs_seen(*length, None, 0 if causal else None) for length, count in each.items())
    heads, dim = q.shape[-2:]
    return Cost(flops=10 * pairs * heads * dim, bytes=4 * q.nbytes + 2 * k.nbytes + 2 * v.nbytes + lse.nbytes)


# ---- examples


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out [Q, H, D] in q's dtype, lse [H, Q] in float32) of one sequence."""
    groups = k.shape[1]
    wide = torch.float32
    scores = _scores(_by_group(q, groups, wide), _by_group(k, groups, wide), scale, causal)
    lse = scores.logsumexp(-1)
    out = (scores - inverted(lse)[..., None]).exp() @ _by_group(v, groups, wide)
    return out.flatten(0, 1).transpose(0, 1).to(q.dtype), lse.flatten(0, 1)


def _example(
    label: str, lengths: tuple[tuple[int, int], ...], heads: tuple[int, int] = (2, 2), dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, *, packed: bool = False, causal: bool = False, merged: bool = False,
    spoilt: int | None = None, deterministic: bool = True,
) -> Example:  # fmt: skip
    """`lengths`: (queries, keys) of each sequence; all alike unless `packed`.

    `merged`: q, k and v are views of one projection. `spoilt`: all of that sequence is NaN; its neighbours must not notice.
    """

    def make(inputs: Inputs) -> tuple[object, ...]:
        ends = [list(accumulate((one[i] for one in lengths), initial=0)) for i in (0, 1)]
        if merged:
            both = inputs.randn(ends[0][-1], heads[0] + 2 * heads[1], dim, dtype=dtype)
            q, k, v = both.split((heads[0], heads[1], heads[1]), 1)
        else:
            q = inputs.randn(ends[0][-1], heads[0], dim, dtype=dtype)
            k, v = (inputs.randn(ends[1][-1], heads[1], dim, dtype=dtype) for _ in range(2))
        do = inputs.randn(ends[0][-1], heads[0], dim, dtype=dtype)
        sequences = [slice(a, b) for a, b in zip(ends[0], ends[0][1:], strict=False)]
        of_keys = [slice(a, b) for a, b in zip(ends[1], ends[1][1:], strict=False)]
        made = [_forward(q[i], k[j], v[j], dim**-0.5, causal) for i, j in zip(sequences, of_keys, strict=True)]
        out, lse = torch.cat([o for o, _ in made]), torch.cat([x for _, x in made], 1)
        if spoilt is not None:
            for t, where in ((do, sequences), (q, sequences), (out, sequences), (k, of_keys), (v, of_keys)):
                t[where[spoilt]] = math.nan
        cu_q = cu_k = None
        if packed:
            cu_q, cu_k = (inputs.tensor(one, torch.int32) for one in ends)
        else:
            do, q, k, v, out = (t.unflatten(0, (len(lengths), -1)) for t in (do, q, k, v, out))
        longest = [max(one[i] for one in lengths) for i in (0, 1)]
        return do, q, k, v, out, lse, cu_q, cu_k, *longest, dim**-0.5, causal, deterministic

    return Example(label, make)


EXAMPLES = (
    _example("full", ((130, 70),) * 2, dim=128),
    _example("causal", ((140, 140),), (4, 2), dim=128, causal=True),
    _example("packed", ((33, 33), (0, 5), (7, 0), (1, 129), (65, 64)), (4, 2), packed=True, causal=True),
    _example("no key seen", ((70, 20),), causal=True, dtype=torch.float16),
    _example("one query", ((1, 100),) * 3, (6, 2), dim=128, causal=True),
    _example("spoilt neighbour", ((20, 30), (9, 77), (17, 31)), (2, 1), packed=True, spoilt=1),
    _example("merged", ((65, 65),) * 2, (4, 1), dim=128, merged=True, causal=True),
    _example("wide", ((66, 66),), (2, 1), 256, causal=True),
    _example("wide fp16", ((40, 50),), (1, 1), 256, torch.float16),
    _example("dim 80", ((40, 70),), (2, 1), 80, torch.float16, causal=True),
    _example("dim 96", ((20, 20), (3, 40)), (2, 2), 96, packed=True),
    _example("dim 20 fp32", ((35, 50),) * 2, (2, 1), 20, torch.float32, causal=True),
    _example("no rows", ((0, 5),)),
    _example("no keys", ((3, 0),) * 2),
)

# ---- op


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
