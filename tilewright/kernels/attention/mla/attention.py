"""Multi-head latent attention over a paged cache of latents, absorbed (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

    # T tokens of B sequences packed, H query heads, R rank of the latent, E rotated dims, P pages, S tokens per page
    o[t, h, :] = sum_n softmax_n(scale * q[t, h, :] . c[n, :]) c[n, :R]

over the rows c [R + E] that the cache contains for the token's own sequence, up to its own row. A layer has keys W_k c[:R] and
values W_v c[:R] for each head. It multiplies W_k into the query (q_h = W_k,h^T q'_h) and applies W_v to the result. So all
heads share one row of R + E numbers per token, whose first R numbers are also the value. The other E numbers are rotated by
position, and used only in scores.

Sequence b has the queries cu_q[b] .. cu_q[b+1]. They are the last of its kv_lens[b] tokens, whose rows are already in the
cache. Row n of sequence b is in page block_table[b, n // S] at offset n % S. A sequence with kv_lens 0 gives zeros.

With 128 heads, each cached number is used in 128 x 2 products while its tile is loaded once. This is near the ridge point of an
H100, so decode can be limited by bytes or by tensor cores. Prefill of long chunks is cheaper with expanded keys and values
(nn/mla.py).

Implementations: `sm90` and `sm90_invariant` (sm90_kernel.py), `triton` and `invariant` (tile.py).
Not supported: backward, windows, sinks, 8-bit caches. Lengths and block tables that are on a GPU are not checked.
"""

import torch
from torch import Tensor

from tilewright.kernels.attention.mla.problem import cost, mla_attention_arguments, problem_of
from tilewright.kernels.attention.mla.sm90 import SM90, SM90_INVARIANT
from tilewright.kernels.attention.mla.tile import INVARIANT, TRITON
from tilewright.kernels.attention.paged.checks import at_hand, check_lengths, check_numbers, check_tables
from tilewright.op import Example, Inputs, Op

__all__ = ["mla_attention", "mla_attention_op"]


def _reference(
    q: Tensor, cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor, max_q_len: int, rank: int, scale: float
) -> Tensor:
    (_, heads, width), page_size = q.shape, cache.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    bounds = cu_q.tolist()
    outputs = []
    for b, length in enumerate(kv_lens.tolist()):
        rows = q[bounds[b] : bounds[b + 1]]
        count = rows.shape[0]
        if not count or not length:
            outputs.append(rows.new_zeros(count, heads, rank))
            continue
        held = cache.index_select(0, block_table[b, : -(-length // page_size)]).view(-1, width)[:length].to(wide)
        scores = (rows.to(wide).view(-1, width) @ held.mT).mul_(scale).view(count, heads, length)
        if count > 1:
            keys = torch.arange(length, device=q.device)
            hidden = keys > torch.arange(length - count, length, device=q.device)[:, None]
            scores.masked_fill_(hidden[:, None], float("-inf"))
        outputs.append((scores.softmax(-1).view(-1, length) @ held[:, :rank]).view(count, heads, rank).to(q.dtype))
    return torch.cat(outputs) if outputs else q.new_zeros(0, heads, rank)


# ---- examples


@Example.of
def _example(
    inputs: Inputs, lengths: tuple[tuple[int, int], ...], heads: int = 4, rank: int = 32, rotated: int = 16,
    page_size: int = 16, dtype: torch.dtype = torch.bfloat16,
) -> tuple[object, ...]:  # fmt: skip
    """`lengths`: (query length, total length) of each sequence. Pages are scattered; everything after a length is NaN."""
    needed = [-(-kv // page_size) for _, kv in lengths]
    order = inputs.permutation(1 + sum(needed))
    cache = inputs.randn(1 + sum(needed), page_size, rank + rotated, dtype=dtype)
    table = inputs.tensor([[0] * max(*needed, 1) for _ in lengths], torch.int32)
    at = 0
    for b, (count, (_, kv)) in enumerate(zip(needed, lengths, strict=True)):
        table[b, :count] = order[at : at + count]
        if kv % page_size:
            cache[order[at + count - 1], kv % page_size :] = float("nan")
        at += count
    cache[order[at:]] = float("nan")
    ends = [0]
    for queries, _ in lengths:
        ends.append(ends[-1] + queries)
    q = inputs.randn(ends[-1], heads, rank + rotated, dtype=dtype)
    kv_lens = inputs.tensor([kv for _, kv in lengths], torch.int32)
    longest = max(queries for queries, _ in lengths)
    return q, cache, table, kv_lens, inputs.tensor(ends, torch.int32), longest, rank, (rank + rotated) ** -0.5


EXAMPLES = (
    _example("decode", ((1, 70), (1, 1), (1, 0), (1, 33))),
    _example("decode-long", ((1, 600),), heads=20, dtype=torch.float16),
    _example("mixed", ((1, 40), (5, 69), (0, 16), (1, 1), (17, 17)), rank=24, rotated=8),
    _example("prefill", ((33, 33), (7, 7)), heads=3, dtype=torch.float32),
    _example("few", ((3, 100), (2, 7)), heads=16, page_size=64),
    _example("deepseek", ((1, 130), (1, 64), (1, 0)), heads=128, rank=512, rotated=64, page_size=64),
    _example("deepseek-few", ((2, 65), (1, 257)), heads=64, rank=512, rotated=64, page_size=64, dtype=torch.float16),
)

mla_attention_op = Op(
    name="mla_attention",
    reference=_reference,
    fake=lambda q, cache, table, lens, cu_q, longest, rank, scale: q.new_empty(q.shape[0], q.shape[1], rank),
    problem=problem_of,
    cost=cost,
    examples=EXAMPLES,
    make=mla_attention_arguments,
    rows_in_problem=True,
    roundings=2,  # the softmax's weights, then the result
    impls=(SM90, TRITON, SM90_INVARIANT, INVARIANT),
)


def mla_attention(
    q: Tensor, cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor, max_q_len: int, *, rank: int, scale: float
) -> Tensor:
    """Causal attention of absorbed queries over a paged cache of latents.

    Args:
        q: [T, H, R + E] bf16, fp16 or fp32, contiguous: the absorbed query, then its rotated part.
        cache: [P, S, R + E] of q's dtype, contiguous.
        block_table: [B, max_pages] int32, the page of each S tokens of a sequence.
        kv_lens: [B] int32, tokens of each sequence in the cache, this call's included.
        cu_q: [B + 1] int32, where each sequence's queries start in q.
        max_q_len: the longest query length; 1 means that every sequence has exactly one query (decode).
        rank: R, the number of leading elements of a cached row that are its value.
        scale: factor on q . c, above 0.

    Returns:
        [T, H, R] of q's dtype, contiguous: averages of latents. Zeros for sequences with kv_lens 0.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    if q.dim() != 3 or cache.dim() != 3 or q.shape[2] != cache.shape[2] or not 0 < rank < q.shape[2]:
        raise ValueError(
            "mla_attention: needs q [T, H, R + E] and cache [P, S, R + E] with R the rank, E above 0; "
            f"got {tuple(q.shape)}, {tuple(cache.shape)} and rank {rank}"
        )
    if q.dtype != cache.dtype or q.device != cache.device:
        raise ValueError(
            f"mla_attention: q is {q.dtype} on {q.device}, the cache {cache.dtype} on {cache.device}; they must match"
        )
    if not (q.is_contiguous() and cache.is_contiguous()):
        raise ValueError(
            f"mla_attention: needs contiguous q and cache; got strides {q.stride()}, {cache.stride()}: call .contiguous() first"
        )
    check_numbers("mla_attention", q, max_q_len, scale)
    check_tables("mla_attention", q, block_table, kv_lens, cu_q, max_q_len)
    if at_hand(kv_lens):
        pages, page_size = cache.shape[:2]
        check_lengths("mla_attention", block_table, kv_lens, page_size, pages, cu_q, q.shape[0], max_q_len)
    return mla_attention_op(q, cache, block_table, kv_lens, cu_q, max_q_len, rank, scale)
