"""Attention: every query's average of the values, weighted by how well its key fits.

    # B sequences, T query rows of all of them, S keys, H query heads, G key/value heads, D head dim
    out[t, h] = sum_s p[s] v[s, g]      p = softmax_s(scale * q[t, h] . k[s, g])      g = h // (H / G)
    lse[t, h] = log sum_s exp(scale * q[t, h] . k[s, g])

q [B, S, H, D], k and v [B, SK, G, D]; or, for sequences of different lengths, packed: q [T, H, D], k and v [TK, G, D], sequence
b in rows cu_q[b] .. cu_q[b + 1] of q and cu_k[b] .. cu_k[b + 1] of k and v. A causal mask aligns the last query with the last
key: query i of Q sees the keys up to i + K - Q. A query that sees no key gives zeros, and -inf for lse.

**Tiling.** Written down, the scores of one head are Q x K numbers: at 16384 tokens half a gigabyte in bf16, to be written and
read several times, for an average of 4 MB. So nobody writes them down (Dao et al., "FlashAttention", 2022). A tile of M queries
stays on the chip while keys and values go by in blocks of N; of a block's scores only [M, N] exist, in registers. A block is
4 N D bytes in 16 bits and 4 M N D operations, M operations a byte: tiles of 128 rows are limited by the tensor cores.

**Incremental softmax** (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). A softmax needs its row's
maximum, and its sum, before it can weigh the first value; the last block of keys brings both too late. But weights that were
taken relative to a maximum m too small are wrong by one factor for the whole row, exp(m - m'), and that can be made good
afterwards. Per row, with the scores s_j = scale * q . k_j of a block:

    m' = max(m, max_j s_j)                      the maximum so far;           at first -inf
    a  = exp(m - m')                            what the past is worth now
    l' = a l + sum_j exp(s_j - m')              the sum of weights so far;    at first 0
    o' = a o + sum_j exp(s_j - m') v_j          the weighted values so far;   at first 0

and after the last block  out = o / l,  lse = m + log l.  By induction m, l and o are what one pass over all keys so far would
have given, whatever the blocks and their order. So a mask is a score of -inf, and a block beyond the diagonal is not visited at
all: the half of the work that a causal mask saves. Cards have exp2, not exp: with c = scale * log2(e), and m taken of q . k
alone, exp(s_j - m) = exp2(c q . k_j - c m), one multiply-add and one exp2 a score. So scale must be above 0.

The products are accumulated in float32; the weights are rounded to the inputs' dtype for the second product, the result once at
the end: two roundings. The implementations, in the order in which they are asked:

    vendor    scaled_dot_product_attention: equal lengths, no lse
    triton    sm_80 and up, any head dim up to 256, any layout (attention_tile.py); a row's bits do not depend on its batch
    sm90      Hopper, by hand in Gluon (attention_sm90.py): one warp fetches, two or three groups of warps multiply

sm90 stands last, so that only `prefer("sm90")` or a measured record takes it: its loops were rearranged after the version that
docs/log.md#attention measured, and as it is now it compiles, but has not run on a card yet. Nor has triton, which Triton's
interpreter checks.

Not supported: backward, dropout, masks as tensors, windows, sinks, soft-cap, ALiBi, caches in pages (paged_attention.py has
them), values narrower than keys. Cumulative lengths on a GPU are trusted.
"""

import math
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.arguments import dense_attention_arguments
from tilewright.kernels.attention_common import DTYPES, LARGEST_HEAD_DIM, empty_outputs, problem_of
from tilewright.kernels.attention_sm90_launch import SM90
from tilewright.kernels.attention_tile import TRITON
from tilewright.kernels.attention_vendor import VENDOR
from tilewright.op import Example, Inputs, Op

__all__ = ["attention", "attention_op"]

# ---- reference


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out [Q, H, D], lse [H, Q]) of q [Q, H, D], k and v [K, G, D], in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, heads, dim = q.shape
    keys, groups, _ = k.shape
    # [G, H / G, Q, D] and [G, 1, K, D]
    q = q.to(wide).transpose(0, 1).reshape(groups, heads // groups, rows, dim)
    k, v = (t.to(wide).transpose(0, 1)[:, None] for t in (k, v))
    scores = q @ k.mT * scale
    if causal:
        at = torch.arange(keys - rows, keys, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(keys, device=q.device) > at, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return (weights @ v).reshape(heads, rows, dim).transpose(0, 1), lse.reshape(heads, rows)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, scale: float,
    causal: bool, want_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if cu_q is None or cu_k is None:
        parts = list(zip(q.unbind(), k.unbind(), v.unbind(), strict=True))
    else:
        of_q, of_k = cu_q.diff().tolist(), cu_k.diff().tolist()
        parts = list(zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True))
    results = [_one_sequence(*part, scale, causal) for part in parts]
    out, lse = empty_outputs(q, want_lse)
    if results:
        out.copy_(torch.cat([r for r, _ in results]).view(q.shape))
        if want_lse:
            lse = torch.cat([s for _, s in results], 1).contiguous()
    return out, lse


def _fake(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, scale: float,
    causal: bool, want_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return empty_outputs(q, want_lse)


# ---- cost


def _pairs(queries: int, keys: int, causal: bool) -> int:
    """Pairs of a query and a key that it sees."""
    if not causal:
        return queries * keys
    seeing = min(queries, keys)  # the last query sees all keys, the one before it one less ...
    return seeing * keys - seeing * (seeing - 1) // 2


def _cost(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, scale: float,
    causal: bool, want_lse: bool,
) -> Cost:  # fmt: skip
    """Waits for the device where lengths are there. On meta tensors every sequence counts as long as the longest."""
    if cu_q is None or cu_k is None:
        pairs = q.shape[0] * _pairs(max_q, max_k, causal)
    elif cu_q.is_meta:
        pairs = (cu_q.shape[0] - 1) * _pairs(max_q, max_k, causal)
    else:
        lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
        pairs = sum(_pairs(queries, keys, causal) for queries, keys in lengths)
    heads, dim = q.shape[-2:]
    lse_bytes = 4 * q.numel() // max(dim, 1) if want_lse else 0
    return Cost(flops=4 * pairs * heads * dim, bytes=2 * q.nbytes + k.nbytes + v.nbytes + lse_bytes)


# ---- examples


def _example(
    label: str, lengths: tuple[tuple[int, int], ...], heads: tuple[int, int] = (2, 2), dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, *, packed: bool = False, causal: bool = False, lse: bool = False,
    merged: bool = False, spoilt: int | None = None,
) -> Example:  # fmt: skip
    """`lengths`: (queries, keys) of each sequence; all alike unless `packed`.

    `merged`: q, k and v are views of one projection. `spoilt`: keys of that sequence are NaN; its neighbours must not notice.
    """

    def make(inputs: Inputs) -> tuple[object, ...]:
        ends = [list(accumulate((one[i] for one in lengths), initial=0)) for i in (0, 1)]
        if merged:
            both = inputs.randn(ends[0][-1], heads[0] + 2 * heads[1], dim, dtype=dtype)
            q, k, v = both.split((heads[0], heads[1], heads[1]), 1)
        else:
            q = inputs.randn(ends[0][-1], heads[0], dim, dtype=dtype)
            k, v = (inputs.randn(ends[1][-1], heads[1], dim, dtype=dtype) for _ in range(2))
        if spoilt is not None:
            for t in (k, v):
                t[ends[1][spoilt] : ends[1][spoilt + 1]] = math.nan
        cu_q = cu_k = None
        if packed:
            cu_q, cu_k = (inputs.tensor(one, torch.int32) for one in ends)
        else:
            q, k, v = (t.unflatten(0, (len(lengths), -1)) for t in (q, k, v))
        longest = [max(one[i] for one in lengths) for i in (0, 1)]
        return q, k, v, cu_q, cu_k, *longest, dim**-0.5, causal, lse

    return Example(label, make)


EXAMPLES = (
    _example("full", ((130, 70),) * 2, dim=128, lse=True),
    _example("causal", ((140, 140),), (4, 2), dim=128, causal=True),
    _example("packed", ((33, 33), (0, 5), (7, 0), (1, 129), (65, 64)), (4, 2), packed=True, causal=True, lse=True),
    _example("no key seen", ((70, 20),), causal=True, dtype=torch.float16, lse=True),
    _example("one query", ((1, 100),) * 3, (6, 2), dim=128, causal=True),
    _example("spoilt neighbour", ((20, 30), (9, 77), (17, 31)), (2, 1), packed=True, spoilt=1),
    _example("merged", ((65, 65),) * 2, (4, 1), dim=128, merged=True, causal=True),
    _example("wide", ((66, 66),), (2, 1), 256, causal=True),
    _example("wide fp16", ((40, 50),), (1, 1), 256, torch.float16),
    _example("dim 80", ((40, 70),), (2, 1), 80, torch.float16, causal=True),
    _example("dim 96", ((20, 20), (3, 40)), (2, 2), 96, packed=True),
    _example("dim 20 fp32", ((35, 50),) * 2, (2, 1), 20, torch.float32, causal=True, lse=True),
    _example("no rows", ((0, 5),)),
    _example("no keys", ((3, 0),) * 2, lse=True),
)

# ---- op


attention_op = Op(
    name="attention",
    reference=_reference,
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    impls=(VENDOR, TRITON, SM90),
    make=dense_attention_arguments,
    fake=_fake,
    rows_in_problem=True,
    roundings=2,  # the weights, then the result
)

# ---- public function


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() not in (3, 4) or k.dim() != q.dim() or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "attention: wants q [B, S, H, D] and k, v [B, SK, G, D], or packed q [T, H, D] and k, v [TK, G, D], with one D; "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.dim() == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"attention: q has {q.shape[0]} sequences, k and v have {k.shape[0]}: they must be equally many")
    heads, groups, dim = q.shape[-2], k.shape[-2], q.shape[-1]
    if not heads or not groups or heads % groups:
        raise ValueError(f"attention: {heads} query heads are no multiple of {groups} key/value heads")
    if not 1 <= dim <= LARGEST_HEAD_DIM:
        raise ValueError(f"attention: head dim is {dim}, wanted 1 to {LARGEST_HEAD_DIM}")
    if q.dtype not in DTYPES:
        raise ValueError(f"attention: q is {q.dtype}, wanted bfloat16, float16 or float32")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(f"attention: {name} is {t.dtype} on {t.device}; it must be as q, {q.dtype} on {q.device}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.stride(-1) != 1 and dim > 1:
            raise ValueError(f"attention: {name} has strides {t.stride()}; the last must be 1, call .contiguous()")


def _check_lengths(name: str, cu: Tensor | None, longest: int | None, t: Tensor) -> tuple[Tensor, int]:
    """The cumulative lengths of q or k, and the longest. Values are checked on the CPU alone: a GPU's would be waited for."""
    if cu is None or longest is None:
        raise ValueError(
            f"attention: packed operands want cu_q, cu_k, max_q and max_k; cu_{name} or max_{name} is missing "
            f"(max_{name} = int(cu_{name}.diff().max()) waits for the device: keep it)"
        )
    if cu.dim() != 1 or not cu.numel() or cu.dtype != torch.int32 or cu.device != t.device or not cu.is_contiguous():
        raise ValueError(
            f"attention: cu_{name} must be contiguous int32 [sequences + 1] on {t.device}; "
            f"got {cu.dtype} {list(cu.shape)} with strides {cu.stride()} on {cu.device}"
        )
    if not 0 <= longest <= t.shape[0]:
        raise ValueError(f"attention: max_{name} is {longest}, wanted 0 to {t.shape[0]}, the rows of all sequences")
    if type(cu) is Tensor and cu.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = cu.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] != t.shape[0] or min(lengths, default=0) < 0:
            raise ValueError(f"attention: cu_{name} must rise from 0 to {t.shape[0]}, the rows of all sequences; got {bounds}")
        if max(lengths, default=0) > longest:
            raise ValueError(f"attention: max_{name} is {longest}, the longest sequence of cu_{name} has {max(lengths)}")
    return cu, longest


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, cu_q: Tensor | None = None,
    cu_k: Tensor | None = None, max_q: int | None = None, max_k: int | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T) v for each head, over sequences of equal length, or packed ones of any length.

    Args:
        q: [B, S, H, D] bf16, fp16 or fp32, D at most 256; or packed, [T, H, D]. The last dimension is dense.
        k: [B, SK, G, D], H a multiple of G; or packed, [TK, G, D].
        v: like k.
        causal: each query sees the keys up to its own; the last query's is the last key.
        scale: factor on q . k, above 0; None for 1 / sqrt(D).
        cu_q: for packed operands: int32 [B + 1], sequence b has rows cu_q[b] .. cu_q[b + 1] of q. On a GPU it is trusted.
        cu_k: the same for k and v.
        max_q: for packed operands: the longest sequence's queries, or more.
        max_k: the same for its keys.
        return_lse: also return the logarithms of the softmax's sums.

    Returns:
        The averages, in q's shape and dtype, contiguous. With `return_lse` also lse, float32, [B, H, S] or packed [H, T]
        (natural logarithm). A query that sees no key gives zeros and -inf.

    Raises:
        ValueError: shapes, dtypes, devices, strides, lengths or the scale do not fit.
    """
    _check_operands(q, k, v)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not 0.0 < factor < math.inf:
        raise ValueError(f"attention: scale is {factor}, wanted a finite number above 0 (for a negative one negate q)")
    if q.dim() == 4:
        given = {"cu_q": cu_q, "cu_k": cu_k, "max_q": max_q, "max_k": max_k}
        if names := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"attention: {', '.join(names)} are for packed operands [T, H, D]; got q {list(q.shape)}")
        out, lse = attention_op(q, k, v, None, None, q.shape[1], k.shape[1], factor, causal, return_lse)
        return (out, lse.unflatten(1, q.shape[:2]).transpose(0, 1)) if return_lse else out
    cu_q, max_q = _check_lengths("q", cu_q, max_q, q)
    cu_k, max_k = _check_lengths("k", cu_k, max_k, k)
    if cu_q.shape != cu_k.shape:
        raise ValueError(f"attention: cu_q is for {cu_q.shape[0] - 1} sequences, cu_k for {cu_k.shape[0] - 1}")
    result = attention_op(q, k, v, cu_q, cu_k, max_q, max_k, factor, causal, return_lse)
    return result if return_lse else result[0]
