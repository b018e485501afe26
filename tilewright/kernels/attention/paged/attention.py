"""Causal attention over a paged KV cache, for prefill, chunked prefill and decode rows in one batch.

    # T tokens of B sequences packed, H query heads, G key/value heads, D head dim, P pages, S tokens per page
    o[t, h, :] = sum_n softmax_n(scale * q[t, h, :] . k[n, g, :]) v[n, g, :]        g = h // (H / G)

over the keys n of the token's own sequence, up to and including the token itself (and fewer than `window` back). Sequence b has
the queries cu_q[b] .. cu_q[b+1]. They are the last of its kv_lens[b] tokens, and their keys and values are already in the
cache. Key n of sequence b is in page block_table[b, n // S] at offset n % S. A row without keys (kv_lens 0) gives zeros.

The incremental softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022) goes through the keys in tiles. For each query row it keeps the running maximum m, the sum l of
exp2(s - m) and the weighted sum of values acc. A new tile with maximum m' rescales l and acc by exp2(m - m'). Scores are
multiplied by log2(e) once, so that the hardware's exp2 can be used.

The caches have q's dtype, or contain 8-bit codes, int8 or float8 e4m3, with a float32 scale for each token and head:
k = code * k_scale. Values in codes are stored by columns, [P, G, D, S]. An attention sink is a logit for each head that takes
part in the softmax and has no value.

Six schedules:
- `sm90` (decode_sm90_kernel.py, decode_sm90_kernel_8bit.py): `stream` for Hopper, in Gluon; head dims 64 and 128, caches of
  16 bits or codes.
- `stream` (split_kv.py), for few queries per sequence (decode), limited by the bytes of the cache: all programs process equal
  shares of all keys, whatever the lengths; the last program to finish a sequence combines the partial results.
- `varlen_sm90` (prefill_sm90_kernel.py), for many queries per sequence: the loop of attention/sm90_kernel.py, over pages; head
  dims as `sm90`, caches of 16 bits.
- `varlen` (varlen.py), for any lengths and head dims: a program has one key/value head and a tile of queries x shared heads.
- `invariant_sm90` and `invariant`: `varlen_sm90` and `varlen` with one tile for every batch, so a row's bits are the same
  in prefill, in a chunk and in decode.

`capped_paged_attention` is an op of its own: scores z become cap tanh(z / cap), as in Gemma 2 (Gemma Team, "Gemma 2", 2024),
with tanh(x) = 1 - 2 / (exp(2 x) + 1). It runs `varlen` with one tile for every batch, so long sequences are not split. Its
caches have q's dtype, and there are no sinks.

Not supported: backward, dropout, biases, non-causal masks. On a GPU a wrong length or page is not reported, but never leads to
a read outside the cache (checks.py).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.formats import encode
from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.paged.checks import at_hand, check_lengths, check_numbers, check_tables
from tilewright.kernels.attention.paged.configs import (
    CODES,
    FEW_QUERIES,
    INVARIANT_SPACE,
    VARLEN_SPACE,
    Problem,
    misfit,
    problem_of,
    value_shape,
)
from tilewright.kernels.attention.paged.decode_sm90 import SM90
from tilewright.kernels.attention.paged.inputs import attention_arguments, capped_arguments
from tilewright.kernels.attention.paged.prefill_sm90 import INVARIANT_SM90, VARLEN_SM90
from tilewright.kernels.attention.paged.split_kv import STREAM
from tilewright.kernels.attention.paged.varlen import launch_varlen
from tilewright.kernels.attention.paged.work import varlen_work
from tilewright.kernels.attention.problem import DTYPES, LARGEST_HEAD_DIM
from tilewright.kernels.device.quantize import UNFUSED
from tilewright.kernels.launch.shapes import tokens_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["CODES", "FEW_QUERIES", "capped_paged_attention_op", "paged_attention", "paged_attention_op"]

# ---- reference

_MOST_GATHERED = 1 << 22
"""The most numbers of keys that are gathered at once for sequences of equal lengths; a longer sequence is gathered alone."""


def _gather(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of N sequences, [N, G, length, D]; pages [N, pages of a sequence]."""
    _, heads, page_size, dim = cache.shape
    needed = pages[:, : -(-length // page_size)]
    held = cache.index_select(0, needed.flatten()).unflatten(0, needed.shape)
    return held.transpose(1, 2).reshape(len(pages), heads, -1, dim)[:, :, :length]


def _alike(counts: list[int], lengths: list[int], width: int) -> list[list[int]]:
    """The indices of the sequences, grouped by equal numbers of queries and of tokens. A group stays small if its tokens, of
    `width` numbers each, are many."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    for place, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        groups = found.setdefault((count, length), [[]])
        if groups[-1] and (len(groups[-1]) + 1) * length * width > _MOST_GATHERED:
            groups.append([])
        groups[-1].append(place)
    return [places for groups in found.values() for places in groups]


def _decoded(cache: Tensor, scale: Tensor | None, by_columns: bool, dtype: torch.dtype) -> Tensor:
    """A cache as numbers [P, G, S, D]."""
    if scale is None:
        return cache
    numbers = cache.to(dtype)
    return (numbers.mT if by_columns else numbers) * scale[..., None].to(dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    """q [N, G, rows, D], k and v [N, G, n, D], sinks [G, rows]: logits that take part in the softmax without a value."""
    if sinks is None and softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scale * (q.to(wide) @ k.to(wide).mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(wide)[None, :, :, None].expand(len(scores), -1, -1, -1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.to(wide)).to(q.dtype)


def _definition(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor, scale: float,
    window: int | None, k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    kv_heads, dim = k_cache.shape[1], q.shape[2]
    group = q.shape[1] // kv_heads
    wide = q.dtype if k_scale is None else torch.promote_types(q.dtype, torch.float32)
    bounds, lengths = cu_q.tolist(), kv_lens.tolist()
    keys, values = _decoded(k_cache, k_scale, False, wide), _decoded(v_cache, v_scale, True, wide)
    counts = [end - begin for begin, end in pairwise(bounds)]
    parts = q.split(counts) if len(counts) > 1 else (q,)
    outputs: dict[int, Tensor] = {}
    for places in _alike(counts, lengths, kv_heads * dim):
        count, length = counts[places[0]], lengths[places[0]]
        rows = torch.stack([parts[place] for place in places])
        if count == 0 or length == 0:
            outputs.update(zip(places, torch.zeros_like(rows)))
            continue
        pages = block_table[places] if len(places) < len(lengths) else block_table
        k, v = (_gather(cache, pages, length) for cache in (keys, values))
        mask = None
        if count > 1 or window is not None:
            at = torch.arange(length - count, length, device=q.device).repeat_interleave(group)[:, None]
            others = torch.arange(length, device=q.device)[None, :]
            mask = (others <= at) if window is None else (others <= at) & (others > at - window)
        # The heads that share keys become rows of one head: query 0's heads, then query 1's ...
        rows = rows.unflatten(2, (kv_heads, group)).transpose(1, 2).flatten(2, 3)
        of_rows = None if sinks is None else sinks.view(-1, group).repeat(1, count)
        out = _attend(rows.to(wide), k, v, mask, scale, of_rows, softcap)
        out = out.to(q.dtype).unflatten(2, (count, group)).transpose(1, 2).flatten(2, 3)
        outputs.update(zip(places, out))
    if not outputs:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return torch.cat([outputs[place] for place in range(len(lengths))])


def _reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    return _definition(q, k_cache, v_cache, block_table, kv_lens, cu_q, scale, window, k_scale, v_scale, sinks)


def _capped_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, softcap: float,
) -> Tensor:  # fmt: skip
    return _definition(q, k_cache, v_cache, block_table, kv_lens, cu_q, scale, window, None, None, None, softcap)


def _cost(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, *rest: object,
) -> Cost:  # fmt: skip
    """Waits for the device, because the cost depends on the lengths."""
    heads, dim = q.shape[1:]
    pairs = keys = 0
    for length, queries in zip(kv_lens.tolist(), cu_q.diff().tolist(), strict=True):
        span = length if window is None else min(length, window + max(queries - 1, 0))
        keys += span
        pairs += sum(min(length - i, window or length) for i in range(min(queries, length)))
    scale_bytes = 4 if k_cache.dtype in CODES else 0
    kv_bytes = 2 * keys * k_cache.shape[1] * (dim * k_cache.element_size() + scale_bytes)
    return Cost(flops=4 * pairs * heads * dim, bytes=2 * q.nbytes + kv_bytes)


# ---- examples


@Example.of
def _example(
    inputs: Inputs, lengths: tuple[tuple[int, int], ...], heads: tuple[int, int] = (4, 2), dim: int = 32,
    page_size: int = 16, window: int | None = None, dtype: torch.dtype = torch.bfloat16,
    format: str = "", sinks: bool = False,
) -> tuple[object, ...]:  # fmt: skip
    """`lengths`: (query length, total length) of each sequence. Pages are scattered; everything after a length is NaN."""
    needed = [-(-kv // page_size) for _, kv in lengths]
    pages = 1 + sum(needed)
    order = inputs.permutation(pages)
    caches = [inputs.randn(pages, heads[1], page_size, dim, dtype=dtype) for _ in range(2)]
    table = inputs.tensor([[0] * max(needed) for _ in lengths], torch.int32)
    at = 0
    for b, (count, (_, kv)) in enumerate(zip(needed, lengths, strict=True)):
        table[b, :count] = order[at : at + count]
        if kv % page_size:
            for cache in caches:
                cache[order[at + count - 1], :, kv % page_size :] = float("nan")
        at += count
    for cache in caches:
        cache[order[at:]] = float("nan")
    scales: Sequence[Tensor | None] = (None, None)
    if format:
        # Where there is no token the scale is NaN, so that any value read from there becomes NaN.
        coded = [encode(cache, format) for cache in caches]
        caches, scales = [coded[0][0], coded[1][0].mT.contiguous()], [scale.squeeze(-1) for _, scale, _ in coded]
    ends = [0]
    for queries, _ in lengths:
        ends.append(ends[-1] + queries)
    q = inputs.randn(ends[-1], heads[0], dim, dtype=dtype)
    kv_lens = inputs.tensor([kv for _, kv in lengths], torch.int32)
    longest = max(queries for queries, _ in lengths)
    ends, sink = inputs.tensor(ends, torch.int32), inputs.randn(heads[0]) if sinks else None
    return q, *caches, table, kv_lens, ends, longest, dim**-0.5, window, *scales, sink


EXAMPLES = (
    _example("decode", ((1, 70), (1, 1), (1, 0), (1, 33))),
    _example("decode-long", ((1, 600),), heads=(2, 1), dim=16),
    _example("decode-window", ((1, 70), (1, 5)), window=20, dtype=torch.float16),
    _example("prefill", ((33, 33), (7, 7)), heads=(2, 2), dtype=torch.float32),
    _example("mixed", ((1, 40), (5, 69), (0, 16), (1, 1), (17, 17))),
    _example("window", ((20, 70), (3, 3)), window=9),
    _example("ragged-heads", ((5, 21),), heads=(6, 2), dim=24, page_size=4, dtype=torch.float16),
    _example("few", ((3, 300), (16, 16), (0, 40), (1, 77)), page_size=32),
    _example("few-window", ((16, 130), (2, 9)), heads=(2, 2), page_size=64, window=30, sinks=True),
    _example("sinks", ((1, 200), (1, 0), (1, 1)), dim=64, page_size=128, sinks=True, dtype=torch.float32),
    _example("wide", ((1, 140), (1, 64), (1, 0)), (8, 2), 128),
    _example("wide-mixed", ((40, 170), (1, 33), (0, 9)), (4, 2), 128),
    _example("wide-few", ((3, 70), (0, 20), (1, 1)), (4, 2), 64, 64, sinks=True, dtype=torch.float16),
    _example("int8", ((1, 150), (1, 1), (1, 300)), format="int8"),
    _example("fp8", ((2, 150), (1, 17)), dim=64, format="fp8", dtype=torch.float16),
    _example("int8-prefill", ((40, 150), (1, 17)), format="int8", page_size=64, sinks=True),
)


def _capped(softcap: float, example: Example) -> Example:
    return example.then(lambda inputs, *args: (*args[:9], softcap))


CAPPED_EXAMPLES = (
    _capped(2.0, _example("decode", ((1, 70), (1, 1), (1, 0), (1, 33)))),
    _capped(50.0, _example("mixed", ((1, 40), (5, 69), (0, 16), (17, 17)))),
    _capped(2.0, _example("window", ((20, 70), (3, 3)), window=9, dtype=torch.float16)),
    _capped(2.0, _example("ragged-heads", ((5, 21),), heads=(6, 2), dim=24, page_size=4, dtype=torch.float32)),
    _capped(0.1, _example("steep", ((7, 40),), dim=64, dtype=torch.float32)),
)


def _invariant_launch(config: Config, *args: Any) -> Tensor:
    """Gives a query the same bits alone and among others. Scores of codes are scaled before the mask. In tiles without a mask
    the compiler would fuse this product with the subtraction that follows, and round less; so fusing is off for codes."""
    coded = args[9] is not None
    return launch_varlen({**config, **UNFUSED} if coded else config, *args)


def _capped_launch(config: Config, *args: Any) -> Tensor:
    return launch_varlen(config, *args[:9], None, None, None, args[9])


def _first(device: Device, problem: Problem) -> str | None:
    # H100, docs/log.md#paged-decode: with its default config it is nearly always the fastest of those for few queries.
    return "sm90" if problem.queries else None


paged_attention_op = Op(
    name="paged_attention",
    reference=_reference,
    fake=lambda q, *rest: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    make=attention_arguments,
    rows_in_problem=True,
    first=_first,
    roundings=2,  # the softmax's weights, then the result
    impls=(
        SM90,
        STREAM,
        VARLEN_SM90,
        Impl(name="varlen", launch=launch_varlen, space=VARLEN_SPACE, work=varlen_work),
        INVARIANT_SM90,
        Impl(name="invariant", launch=_invariant_launch, space=INVARIANT_SPACE, batch_invariant=True, work=varlen_work),
    ),
)

capped_paged_attention_op = Op(
    name="capped_paged_attention",
    reference=_capped_reference,
    fake=lambda q, *rest: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    problem=problem_of,
    cost=_cost,
    examples=CAPPED_EXAMPLES,
    make=capped_arguments,
    rows_in_problem=True,
    roundings=2,
    impls=(Impl(name="triton", launch=_capped_launch, space=INVARIANT_SPACE, batch_invariant=True, work=varlen_work),),
)

# ---- public function


def _check_codes(q: Tensor, k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    if (k_cache.dtype in CODES) != (k_scale is not None) or (k_scale is None) != (v_scale is None):
        raise ValueError(
            f"paged_attention: caches of {k_cache.dtype} with k_scale {'absent' if k_scale is None else 'given'} and v_scale "
            f"{'absent' if v_scale is None else 'given'}: int8 and float8_e4m3fn need both, {q.dtype} needs none"
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (why := misfit(scale, k_cache, k_scale)):
            raise ValueError(f"paged_attention: {name} {why}")


def _check_operands(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, *CODES):
        raise ValueError(
            f"paged_attention: dtypes differ: q {q.dtype}, caches {k_cache.dtype}, {v_cache.dtype}; wanted caches of q's "
            "dtype, or both of int8 or float8_e4m3fn with scales"
        )
    if q.dim() != 3 or k_cache.dim() != 4 or q.shape[2] != k_cache.shape[3] or v_cache.shape != value_shape(k_cache):
        raise ValueError(
            "paged_attention: needs q [T, H, D] and caches [P, G, S, D] with one D, values in codes [P, G, D, S]; "
            f"got {tuple(q.shape)}, {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    if not k_cache.shape[1] or not q.shape[1] or q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"paged_attention: {q.shape[1]} query heads are not a multiple of {k_cache.shape[1]} key/value heads")
    if not 1 <= q.shape[2] <= LARGEST_HEAD_DIM:
        raise ValueError(f"paged_attention: head dim is {q.shape[2]}, wanted 1 to {LARGEST_HEAD_DIM}")
    if not q.device == k_cache.device == v_cache.device:
        raise ValueError(
            "paged_attention: needs all tensors on one device; got q on "
            f"{q.device}, caches on {k_cache.device} and {v_cache.device}"
        )
    if q.stride(2) != 1 or q.stride(1) != q.shape[2] or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(
            f"paged_attention: needs q with dense heads and contiguous caches; got strides {q.stride()}, {k_cache.stride()}, "
            f"{v_cache.stride()}: call .contiguous() first"
        )


def _check_sinks(q: Tensor, sinks: Tensor) -> None:
    if sinks.shape != q.shape[1:2] or sinks.dtype not in DTYPES or sinks.device != q.device or not sinks.is_contiguous():
        raise ValueError(
            f"paged_attention: sinks must be [{q.shape[1]}], one per query head, contiguous, bfloat16, float16 or float32 on "
            f"{q.device}; got {tuple(sinks.shape)} {sinks.dtype} on {sinks.device} with strides {sinks.stride()}"
        )


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed queries over a paged cache that already holds their own keys and values.

    Args:
        q: [T, H, D] bf16, fp16 or fp32, heads dense; H a multiple of G, D at most 256.
        k_cache: [P, G, S, D] of q's dtype, contiguous; or codes of int8 or float8_e4m3fn.
        v_cache: like k_cache; codes by columns, [P, G, D, S].
        block_table: [B, max_pages] int32, the page of each S tokens of a sequence.
        kv_lens: [B] int32, tokens of each sequence in the cache, this call's included.
        cu_q: [B + 1] int32, where each sequence's queries start in q.
        max_q_len: the longest query length; 1 means that every sequence has exactly one query (decode).
        scale: factor on q . k, above 0.
        window: each query sees at most this many keys, its own included; None for all.
        k_scale: [P, G, S] float32, the factors of the codes of keys; for caches of codes only.
        v_scale: likewise for values, with the same strides: both may be views of one [P, G, 2, S].
        sinks: [H] floating point, a logit for each head that takes part in the softmax and has no value; None: no sinks.
        softcap: scores z become softcap * tanh(z / softcap), above 0; with caches of q's dtype and without sinks.

    Returns:
        [T, H, D] of q's dtype, contiguous. Zeros for sequences with kv_lens 0.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit; on a CPU also lengths or pages (see `ops.check_paged`).
    """
    _check_operands(q, k_cache, v_cache)
    check_numbers("paged_attention", q, max_q_len, scale)
    _check_codes(q, k_cache, k_scale, v_scale)
    check_tables("paged_attention", q, block_table, kv_lens, cu_q, max_q_len)
    if at_hand(kv_lens):
        pages, page_size = k_cache.shape[0], k_cache.shape[2]
        check_lengths("paged_attention", block_table, kv_lens, page_size, pages, cu_q, q.shape[0], max_q_len)
    if sinks is not None:
        _check_sinks(q, sinks)
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1, or None for all keys; got {window}")
    q = tokens_ready(q)
    if softcap is not None:
        if not 0.0 < softcap < float("inf") or k_scale is not None or sinks is not None:
            raise ValueError(
                f"paged_attention: softcap is {softcap}, with caches of {k_cache.dtype}, sinks {sinks is not None}; wanted a "
                f"finite number above 0, caches of {q.dtype} and no sinks"
            )
        return capped_paged_attention_op(q, k_cache, v_cache, block_table, kv_lens, cu_q, max_q_len, scale, window, softcap)
    return paged_attention_op(
        q, k_cache, v_cache, block_table, kv_lens, cu_q, max_q_len, scale, window, k_scale, v_scale, sinks
    )
