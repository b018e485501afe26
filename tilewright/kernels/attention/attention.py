"""Attention: the output of each query is the average of the values, weighted by how well each key matches the query.

    # B sequences, T query rows of all sequences, S keys, H query heads, G key/value heads, D head dim, V value head dim
    out[t, h] = sum_s p[s] v[s, g]      p = softmax_s(z[t, s])      z[t, s] = scale * q[t, h] . k[s, g]      g = h // (H / G)
    lse[t, h] = log sum_s exp(z[t, s])

The operands are q [B, S, H, D], k [B, SK, G, D] and v [B, SK, G, V]. Sequences of different lengths are packed: q [T, H, D],
k [TK, G, D], v [TK, G, V], where sequence b has rows cu_q[b] .. cu_q[b + 1] of q and rows cu_k[b] .. cu_k[b + 1] of k and v.
In a sequence of Q queries and K keys, key i + K - Q is query i's own key; so the last query's own key is the last key. These
options restrict the keys that a query sees, or change its scores:

    causal      a query sees the keys up to its own
    window      (left, right): a query sees the keys from own - left to own + right
    prefix      under a causal mask a query also sees keys 0 .. P - 1, with one P for all sequences or one per sequence;
                the left bound of a window still applies
    softcap     z = cap tanh(scale q . k / cap)                                      (Gemma 2)
    ALiBi       z - slope[h] |own - s|, after the cap                                (Press et al., "Train Short, Test Long")
    sinks       one more score z = sink[h], of a key with the value zero; lse includes it (Xiao et al., 2023; gpt-oss)

For a query that sees no key, the output is zero and lse is -inf (with a sink, lse is the sink).

**Tiling.** The scores of one head are Q x K numbers. At 16384 tokens in bf16 that is half a gigabyte, which would be written
and read several times to compute an output of 4 MB. So the scores are never stored in global memory (Dao et al.,
"FlashAttention", 2022). A tile of M queries stays on the chip, and the keys and values pass through in blocks of N. Only the
[M, N] scores of the current block exist, in registers. A block is 4 N D bytes in 16 bits and needs 4 M N D operations, which
is M operations per byte: tiles of 128 rows are limited by the tensor cores.

**Incremental softmax** (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). A softmax needs the maximum
and the sum of its whole row before it can weigh the first value, but both are known only after the last block of keys. However,
weights computed relative to a maximum m that is too small are all wrong by the same factor, exp(m - m'), which can be corrected
afterwards. Per row, with the scores s_j = scale * q . k_j of a block:

    m' = max(m, max_j s_j)                      the maximum so far;           at first -inf
    a  = exp(m - m')                            the correction of earlier sums
    l' = a l + sum_j exp(s_j - m')              the sum of weights so far;    at first 0
    o' = a o + sum_j exp(s_j - m') v_j          the weighted values so far;   at first 0

and after the last block  out = o / l,  lse = m + log l.  By induction m, l and o are what one pass over all keys so far would
give, for any blocks in any order. So a mask sets scores to -inf, and blocks beyond the diagonal are not visited at all: this
is the half of the work that a causal mask saves. GPUs compute exp2, not exp. With c = scale * log2(e), and m the maximum of
the unscaled q . k, exp(s_j - m) = exp2(c q . k_j - c m): one multiply-add and one exp2 per score. So scale must be above 0.

The products are accumulated in float32. The weights are rounded to the inputs' dtype for the second product, and the result is
rounded once at the end: two roundings. The implementations, best first:

    sm90              Hopper, written in Gluon (sm90_kernel.py): one warp loads, two or three warpgroups multiply
    vendor            scaled_dot_product_attention: equal lengths, no lse, no mask but a causal one
    sm90_invariant    the kernel of sm90 with one config for every length: the same bits alone, in a batch, packed, in chunks
    short             Hopper, up to 256 keys, no mask, head dims 32 and 64 (short.py): where measurements show that it is faster
    triton            sm_80 and up, any head dim up to 256, any layout and mask (tile.py); batch-invariant too

Gradients are in attention/backward/backward.py, masks and biases given as tensors in biased.py, and paged caches in
attention/paged/attention.py. Not supported: dropout. Cumulative lengths and prefixes that are on a GPU are not checked.
"""

import math
from collections import Counter
from itertools import accumulate

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.checks import check_bends, check_lengths, check_operands, scale_of, window_bounds
from tilewright.kernels.attention.inputs import dense_attention_arguments
from tilewright.kernels.attention.problem import Problem, empty_outputs, lengths_of, pairs_seen, problem_of
from tilewright.kernels.attention.reference import Bends, alike, attend, sequences, stacked
from tilewright.kernels.attention.sdpa import VENDOR
from tilewright.kernels.attention.short import SHORT
from tilewright.kernels.attention.sm90 import SM90, SM90_INVARIANT
from tilewright.kernels.attention.tile import TRITON
from tilewright.op import Example, Inputs, Op

__all__ = ["attention", "attention_example", "attention_op"]


def _reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, scale: float,
    causal: bool, want_lse: bool, left: int | None = None, right: int | None = None, prefix: int = 0,
    prefixes: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parts = sequences((q,), (k, v), cu_q, cu_k)
    behind = 0 if causal else right
    of_each = [prefix] * len(parts) if prefixes is None else prefixes.tolist()
    results: dict[int, tuple[Tensor, Tensor]] = {}
    for places in alike(parts, 1, of_each):
        bends = Bends(left, behind, of_each[places[0]], softcap, sinks, slopes)
        results.update(zip(places, zip(*attend(*stacked(parts, places), scale=scale, bends=bends))))
    out, lse = empty_outputs(q, v, want_lse)
    if results:
        out.copy_(torch.cat([results[i][0] for i in range(len(parts))]).view(out.shape))
        if want_lse:
            lse = torch.cat([results[i][1] for i in range(len(parts))], 1).contiguous()
    return out, lse


def _cost(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, scale: float,
    causal: bool, want_lse: bool, left: int | None = None, right: int | None = None, prefix: int = 0,
    prefixes: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> Cost:  # fmt: skip
    """If the lengths are on a device, this waits for it. On meta tensors every sequence counts as long as the longest."""
    behind = 0 if causal else right
    lengths = lengths_of(q, cu_q, cu_k, max_q, max_k)
    of_each = [prefix] * len(lengths) if prefixes is None or prefixes.is_meta else prefixes.tolist()
    each = Counter((*length, own) for length, own in zip(lengths, of_each, strict=True))
    pairs = sum(count * pairs_seen(queries, keys, left, behind, own) for (queries, keys, own), count in each.items())
    heads, dim, value_dim = q.shape[-2], q.shape[-1], v.shape[-1]
    out_bytes = q.shape[:-1].numel() * (value_dim * q.element_size() + 4 * want_lse)
    return Cost(flops=2 * pairs * heads * (dim + value_dim), bytes=q.nbytes + k.nbytes + v.nbytes + out_bytes)


# ---- examples


@Example.of
def attention_example(
    inputs: Inputs, lengths: tuple[tuple[int, int], ...], heads: tuple[int, int] = (2, 2), dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, *, packed: bool = False, causal: bool = False, lse: bool = False,
    merged: bool = False, spoilt: int | None = None, value_dim: int | None = None, left: int | None = None,
    right: int | None = None, prefix: int | tuple[int, ...] = 0, softcap: float | None = None, sinks: bool = False,
    alibi: bool = False,
) -> tuple[object, ...]:  # fmt: skip
    """The arguments of a call. `lengths`: (queries, keys) of each sequence, all equal unless `packed`.

    `merged`: q, k and v are views of one projection. `spoilt`: the keys of that sequence are NaN; other sequences must not
    change.
    """
    ends = [list(accumulate((one[i] for one in lengths), initial=0)) for i in (0, 1)]
    if merged:
        both = inputs.randn(ends[0][-1], heads[0] + 2 * heads[1], dim, dtype=dtype)
        q, k, v = both.split((heads[0], heads[1], heads[1]), 1)
    else:
        q = inputs.randn(ends[0][-1], heads[0], dim, dtype=dtype)
        k, v = (inputs.randn(ends[1][-1], heads[1], width, dtype=dtype) for width in (dim, value_dim or dim))
    if spoilt is not None:
        for t in (k, v):
            t[ends[1][spoilt] : ends[1][spoilt + 1]] = math.nan
    cu_q = cu_k = None
    if packed:
        cu_q, cu_k = (inputs.tensor(one, torch.int32) for one in ends)
    else:
        q, k, v = (t.unflatten(0, (len(lengths), -1)) for t in (q, k, v))
    longest = [max(one[i] for one in lengths) for i in (0, 1)]
    of_all, of_each = (prefix, None) if isinstance(prefix, int) else (0, inputs.tensor(prefix, torch.int32))
    sink = inputs.randn(heads[0], dtype=dtype) if sinks else None
    slopes = inputs.tensor([2.0 ** -(i + 1) for i in range(heads[0])], torch.float32) if alibi else None
    factor = dim**-0.5
    return q, k, v, cu_q, cu_k, *longest, factor, causal, lse, left, right, of_all, of_each, softcap, sink, slopes


EXAMPLES = (
    attention_example("full", ((130, 70),) * 2, dim=128, lse=True),
    attention_example("causal", ((140, 140),), (4, 2), dim=128, causal=True),
    attention_example("packed", ((33, 33), (0, 5), (7, 0), (1, 129), (65, 64)), (4, 2), packed=True, causal=True, lse=True),
    attention_example("no key seen", ((70, 20),), causal=True, dtype=torch.float16, lse=True),
    attention_example("one query", ((1, 100),) * 3, (6, 2), dim=128, causal=True),
    attention_example("spoilt neighbour", ((20, 30), (9, 77), (17, 31)), (2, 1), packed=True, spoilt=1),
    attention_example("merged", ((65, 65),) * 2, (4, 1), dim=128, merged=True, causal=True),
    attention_example("wide", ((66, 66),), (2, 1), 256, causal=True),
    attention_example("wide fp16", ((40, 50),), (1, 1), 256, torch.float16),
    attention_example("dim 80", ((40, 70),), (2, 1), 80, torch.float16, causal=True),
    attention_example("dim 96", ((20, 20), (3, 40)), (2, 2), 96, packed=True),
    attention_example("dim 20 fp32", ((35, 50),) * 2, (2, 1), 20, torch.float32, causal=True, lse=True),
    attention_example("window", ((200, 200),), (2, 1), causal=True, left=40, lse=True),
    attention_example("window of both sides", ((130, 140),) * 2, left=20, right=30),
    attention_example("window beyond the keys", ((90, 20), (5, 70)), (2, 1), packed=True, left=3, right=2, lse=True),
    attention_example("right bound alone", ((70, 50),), right=5, dim=128),
    attention_example("prefix", ((100, 100),) * 2, causal=True, prefix=37),
    attention_example("prefix of each", ((60, 80), (33, 33)), (2, 1), packed=True, causal=True, prefix=(70, 0), left=50),
    attention_example("sinks", ((66, 66),), (4, 2), causal=True, left=30, sinks=True, lse=True),
    attention_example("sinks, no key seen", ((40, 10),), causal=True, sinks=True, lse=True),
    attention_example("soft cap", ((65, 70),), (2, 1), softcap=5.0, dtype=torch.float16, lse=True),
    attention_example("alibi", ((70, 100),), (4, 2), causal=True, alibi=True),
    attention_example(
        "all of it", ((50, 90), (64, 64)), (4, 2), 128, packed=True, causal=True, left=45, softcap=20.0, alibi=True, sinks=True
    ),
    attention_example("narrow values", ((70, 130),), (2, 2), 192, causal=True, value_dim=128, lse=True),
    attention_example("narrow values fp16", ((20, 30),) * 2, (4, 1), 80, torch.float16, value_dim=64),
    attention_example("few keys", ((70, 200),) * 2, (4, 2), dtype=torch.float16),
    attention_example("fewer keys", ((20, 50),), dim=32),
    attention_example("no rows", ((0, 5),)),
    attention_example("no keys", ((3, 0),) * 2, lse=True),
    attention_example("no keys, sinks", ((3, 0),), lse=True, sinks=True),
)

# ---- op


def _vendor_up_to(problem: Problem) -> int:
    """The largest number of keys up to which cuDNN was measured to be no slower than sm90 (docs/log.md#attention).

    A power of two, as `max_k` is. Up to it sm90 has 0.91 to 1.01 times cuDNN's speed, because the beginning and the end of a
    tile have no products to compute. From the next power of two on it has 0.996 to 1.26 times cuDNN's speed.
    """
    # Speed of sm90 relative to cuDNN at 512 keys and 512 queries: 32/8 heads of 128 dims 1.14 without a mask and 1.03 causal,
    # heads of 64 dims 1.03 without a mask and 0.95 causal.
    ahead = problem.heads > problem.kv_heads if problem.head_dim == 128 else problem.head_dim == 64 and not problem.causal
    return 256 if problem.square and ahead else 512


def _first(device: Device, problem: Problem) -> str | None:
    """The vendor's library, where it was measured to be no slower than sm90."""
    return "vendor" if device.is_hopper and problem.max_k <= _vendor_up_to(problem) else None


attention_op = Op(
    name="attention",
    reference=_reference,
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    impls=(SM90, VENDOR, SM90_INVARIANT, SHORT, TRITON),
    make=dense_attention_arguments,
    first=_first,
    fake=lambda q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, want_lse, *_: empty_outputs(q, v, want_lse),
    rows_in_problem=True,
    roundings=2,  # the weights, then the result
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, cu_q: Tensor | None = None,
    cu_k: Tensor | None = None, max_q: int | None = None, max_k: int | None = None, return_lse: bool = False,
    window: int | tuple[int | None, int | None] | None = None, prefix: int | Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The forward pass of `ops.attention`, which documents the arguments and results; nothing is kept for gradients.

    Raises:
        ValueError: shapes, dtypes, devices, strides, lengths, the scale, or the options that change scores do not fit.
    """
    check_operands(q, k, v)
    factor = scale_of(q, scale)
    if q.dim() == 4:
        given = {"cu_q": cu_q, "cu_k": cu_k, "max_q": max_q, "max_k": max_k}
        if names := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"attention: {', '.join(names)} are for packed operands [T, H, D]; got q {list(q.shape)}")
        batch, max_q, max_k = q.shape[0], q.shape[1], k.shape[1]
    else:
        cu_q, max_q = check_lengths("q", cu_q, max_q, q)
        cu_k, max_k = check_lengths("k", cu_k, max_k, k)
        if cu_q.shape != cu_k.shape:
            raise ValueError(f"attention: cu_q is for {cu_q.shape[0] - 1} sequences, cu_k for {cu_k.shape[0] - 1}")
        batch = cu_q.shape[0] - 1
    arguments = (q, k, v, cu_q, cu_k, max_q, max_k, factor, causal, return_lse)
    if not (window is prefix is softcap is sinks is alibi_slopes is None):
        left, right = window_bounds(window, causal)
        check_bends(q, batch, causal, prefix, softcap, sinks, alibi_slopes)
        of_all, of_each = (0, prefix) if isinstance(prefix, Tensor) else (prefix or 0, None)
        arguments = (*arguments, left, right, of_all, of_each, softcap, sinks, alibi_slopes)
    out, lse = attention_op(*arguments)
    if not return_lse:
        return out
    return out, lse.unflatten(1, q.shape[:2]).transpose(0, 1) if q.dim() == 4 else lse
