"""Causal attention over a paged KV cache, for prefill, chunked prefill and decode rows in one batch.

    # T tokens of B sequences packed, H query heads, G key/value heads, D head dim, P pages, S tokens a page
    o[t, h, :] = sum_n softmax_n(scale * q[t, h, :] . k[n, g, :]) v[n, g, :]        g = h // (H / G)

over the keys n of the token's own sequence that stand at or before it (and fewer than `window` back). Sequence b brings the
queries cu_q[b] .. cu_q[b+1]; they are the last of its kv_lens[b] tokens, whose keys and values are in the cache already.
Key n of sequence b lies in page block_table[b, n // S] at offset n % S. A row without keys (kv_lens 0) gives zeros.

The incremental softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022) walks over the keys in tiles and keeps, per query row, the running maximum m, the sum l of
exp2(s - m) and the weighted sum of values acc. A new tile with maximum m' rescales l and acc by exp2(m - m'). Scores are
scaled by log2(e) once, so that the hardware's exp2 serves.

Two schedules:
- `split_kv`, one query a sequence (decode), limited by the bytes of the cache: a program takes one key/value head of one
  sequence and a range of its keys; the H / G query heads of that head share the tile. Several programs share a sequence;
  the last to finish combines their (m, l, acc), in the order of the ranges. How many there are follows from the batch and
  the card; how long a range is, from the length on the device: no host sync, one launch, safe in a CUDA graph.
- `varlen`, any lengths: a program takes one key/value head and a tile of queries x shared heads, walks the keys from the
  first, and masks only where the diagonal or the window passes.

- `invariant` is `varlen` with one tile for every batch, so that a row's bits are the same in prefill, in a chunk and in decode.

Not supported: backward, dropout, biases, non-causal masks, caches in 8 bits. Block table entries are trusted on a GPU.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.arguments import attention_arguments
from tilewright.kernels.paged_space import INVARIANT_SPACE, SPLIT_SPACE, VARLEN_SPACE, problem_of
from tilewright.kernels.paged_walk import walk
from tilewright.kernels.shapes import next_pow2
from tilewright.kernels.work import split_work, varlen_work
from tilewright.kernels.workspace import tickets
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["paged_attention", "paged_attention_op"]

# ---- reference


def _gather(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one sequence, [G, length, D]."""
    _, heads, page_size, dim = cache.shape
    held = cache.index_select(0, pages[: -(-length // page_size)])
    return held.transpose(0, 1).reshape(heads, -1, dim)[:, :length]


def _reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    kv_heads, dim = k_cache.shape[1], q.shape[2]
    group = q.shape[1] // kv_heads
    bounds, lengths = cu_q.tolist(), kv_lens.tolist()
    outputs = []
    for b, length in enumerate(lengths):
        rows = q[bounds[b] : bounds[b + 1]] if len(lengths) > 1 else q
        count = rows.shape[0]
        if count == 0 or length == 0:
            outputs.append(torch.zeros_like(rows))
            continue
        k, v = (_gather(cache, block_table[b], length) for cache in (k_cache, v_cache))
        mask = None
        if count > 1 or window is not None:
            at = torch.arange(length - count, length, device=q.device).repeat_interleave(group)[:, None]
            keys = torch.arange(length, device=q.device)[None, :]
            mask = (keys <= at) if window is None else (keys <= at) & (keys > at - window)
        # The heads that share keys become rows of one head: query 0's heads, then query 1's ...
        rows = rows.view(-1, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask, scale=scale)
        outputs.append(out.view(kv_heads, -1, group, dim).transpose(0, 1).reshape(count, -1, dim))
    return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)


# ---- cost


def _cost(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None,
) -> Cost:  # fmt: skip
    """Waits for the device: the work depends on the lengths."""
    heads, dim = q.shape[1:]
    pairs = keys = 0
    for length, queries in zip(kv_lens.tolist(), cu_q.diff().tolist(), strict=True):
        span = length if window is None else min(length, window + max(queries - 1, 0))
        keys += span
        pairs += sum(min(length - i, window or length) for i in range(min(queries, length)))
    kv_bytes = 2 * keys * k_cache.shape[1] * dim * k_cache.element_size()
    return Cost(flops=4 * pairs * heads * dim, bytes=2 * q.nbytes + kv_bytes)


# ---- examples


def _example(
    label: str, lengths: tuple[tuple[int, int], ...], heads: tuple[int, int] = (4, 2), dim: int = 32,
    page_size: int = 16, window: int | None = None, dtype: torch.dtype = torch.bfloat16,
) -> Example:  # fmt: skip
    """`lengths`: (query length, total length) of each sequence. Pages are scattered; what lies past a length is NaN."""

    def make(inputs: Inputs) -> tuple[object, ...]:
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
        ends = [0]
        for queries, _ in lengths:
            ends.append(ends[-1] + queries)
        q = inputs.randn(ends[-1], heads[0], dim, dtype=dtype)
        kv_lens = inputs.tensor([kv for _, kv in lengths], torch.int32)
        longest = max(queries for queries, _ in lengths)
        return q, *caches, table, kv_lens, inputs.tensor(ends, torch.int32), longest, dim**-0.5, window

    return Example(label, make)


EXAMPLES = (
    _example("decode", ((1, 70), (1, 1), (1, 0), (1, 33))),
    _example("decode-long", ((1, 600),), heads=(2, 1), dim=16),
    _example("decode-window", ((1, 70), (1, 5)), window=20, dtype=torch.float16),
    _example("prefill", ((33, 33), (7, 7)), heads=(2, 2), dtype=torch.float32),
    _example("mixed", ((1, 40), (5, 69), (0, 16), (1, 1), (17, 17))),
    _example("window", ((20, 70), (3, 3)), window=9),
    _example("ragged-heads", ((5, 21),), heads=(6, 2), dim=24, page_size=4, dtype=torch.float16),
)

# ---- kernels


@triton.jit
def _combine(part_ptr, used, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """(acc, l) over the first `used` partial results [SPLITS, BLOCK_M, BLOCK_D + 2]: acc, m, l in each row."""
    rows = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for i in range(used):
        part = part_ptr + (i * BLOCK_M + rows) * (BLOCK_D + 2)
        # .cg: another SM wrote these, so this SM's L1 must not answer.
        m_i = tl.load(part + BLOCK_D, cache_modifier=".cg")
        l_i = tl.load(part + BLOCK_D + 1, cache_modifier=".cg")
        acc_i = tl.load(part[:, None] + tl.arange(0, BLOCK_D)[None, :], cache_modifier=".cg")
        m_new = tl.maximum(m, m_i)
        old, new = tl.exp2(m - m_new), tl.exp2(m_i - m_new)
        acc = acc * old[:, None] + acc_i * new[:, None]
        l = l * old + l_i * new
        m = m_new
    return acc, l


@triton.jit(do_not_specialize=["table_row_stride", "window"])
def _split_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, kv_lens_ptr, o_ptr, part_ptr, ticket_ptr,
    q_row_stride, table_row_stride, scale_log2, window,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, HAS_WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    g = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = g * GROUP + rows
    live = (rows < GROUP)[:, None] & (dims < D)[None, :]
    o_ptrs = o_ptr + (b * G * GROUP + heads)[:, None] * D + dims[None, :]
    kv_len = tl.load(kv_lens_ptr + b)
    at = tl.full([BLOCK_M], kv_len - 1, tl.int32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, kv_len - window) // BLOCK_N * BLOCK_N
    # Every range but the last is full; `used` ranges hold keys, and at least one program answers for a row without keys.
    span = tl.cdiv(tl.cdiv(kv_len - begin, SPLITS), BLOCK_N) * BLOCK_N
    used = tl.maximum(1, tl.cdiv(kv_len - begin, tl.maximum(span, 1)))
    if split >= used:
        return
    first = begin + split * span
    last = tl.minimum(first + span, kv_len)
    q = tl.load(q_ptr + b * q_row_stride + heads[:, None] * D + dims[None, :], mask=live, other=0.0)
    PAGE_STRIDE: tl.constexpr = G * S * D
    acc, m, l = walk(
        q, k_cache_ptr + g * S * D, v_cache_ptr + g * S * D, table_ptr + b * table_row_stride, first, last, kv_len, at,
        kv_len - 1, scale_log2, window, PAGE_STRIDE, S, D, BLOCK_M, BLOCK_N, BLOCK_D, HAS_WINDOW,
    )  # fmt: skip
    out = o_ptr.dtype.element_ty
    if used == 1:
        tl.store(o_ptrs, (acc / tl.where(l == 0.0, 1.0, l)[:, None]).to(out), mask=live)
        return
    ROW: tl.constexpr = BLOCK_D + 2
    base = part_ptr + (b * G + g) * SPLITS * BLOCK_M * ROW
    mine = base + split * BLOCK_M * ROW + rows * ROW
    tl.store(mine[:, None] + dims[None, :], acc)
    tl.store(mine + BLOCK_D, m)
    tl.store(mine + BLOCK_D + 1, l)
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr + b * G + g, 1, sem="acq_rel", scope="gpu")
    if ticket == used - 1:
        tl.store(ticket_ptr + b * G + g, 0)
        acc, l = _combine(base, used, BLOCK_M, BLOCK_D)
        tl.store(o_ptrs, (acc / l[:, None]).to(out), mask=live)


@triton.jit(do_not_specialize=["batch", "table_row_stride", "window"])
def _varlen_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, kv_lens_ptr, cu_q_ptr, o_ptr,
    batch, q_row_stride, table_row_stride, scale_log2, window,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Late tiles see the most keys: start them first, so that no long one is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    # Sequence b owns the tiles from cu_q[b] // BLOCK_Q + b on: at least ceil(its queries / BLOCK_Q) of them.
    b = tl.full((), 0, tl.int32)
    high = batch
    while b + 1 < high:
        middle = (b + high) // 2
        if tl.load(cu_q_ptr + middle) // BLOCK_Q + middle <= tile:
            b = middle
        else:
            high = middle
    q_begin = tl.load(cu_q_ptr + b)
    q_len = tl.load(cu_q_ptr + b + 1) - q_begin
    kv_len = tl.load(kv_lens_ptr + b)
    q_first = (tile - (q_begin // BLOCK_Q + b)) * BLOCK_Q
    if q_first >= q_len:
        return
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = q_first + rows // GROUP
    heads = g * GROUP + rows % GROUP
    live = ((queries < q_len) & (rows < BLOCK_Q * GROUP))[:, None] & (dims < D)[None, :]
    tokens = (q_begin + queries).to(tl.int64)
    q = tl.load(q_ptr + (tokens * q_row_stride + heads * D)[:, None] + dims[None, :], mask=live, other=0.0)
    at = kv_len - q_len + queries
    first_at = kv_len - q_len + q_first
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, first_at + 1 - window) // BLOCK_N * BLOCK_N
    last = tl.minimum(kv_len, first_at + BLOCK_Q)
    PAGE_STRIDE: tl.constexpr = G * S * D
    table_ptr += b.to(tl.int64) * table_row_stride
    acc, _, l = walk(  # pyright: ignore[reportGeneralTypeIssues] (it follows the literal first = 0 into no return)
        q, k_cache_ptr + g * S * D, v_cache_ptr + g * S * D, table_ptr, first, last, kv_len, at, first_at, scale_log2,
        window, PAGE_STRIDE, S, D, BLOCK_M, BLOCK_N, BLOCK_D, HAS_WINDOW,
    )  # fmt: skip
    o = (acc / tl.where(l == 0.0, 1.0, l)[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + (tokens * G * GROUP * D + heads * D)[:, None] + dims[None, :], o, mask=live)


# ---- launchers and op

_LOG2_E = 1.4426950408889634


def _split_launch(
    config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    (_, heads, dim), (_, kv_heads, page_size, _), batch = q.shape, k_cache.shape, kv_lens.shape[0]
    o = torch.empty((q.shape[0], heads, dim), dtype=q.dtype, device=q.device)
    group, block_d, splits = heads // kv_heads, max(16, next_pow2(dim)), config["SPLITS"]
    block_m = max(16, next_pow2(group))
    if not batch:
        return o
    part, ticket = o, o
    if splits > 1:
        part = torch.empty(batch * kv_heads * splits * block_m * (block_d + 2), dtype=torch.float32, device=q.device)
        ticket = tickets(q.device, batch * kv_heads)
    _split_kernel[(splits, kv_heads, batch)](
        q, k_cache, v_cache, block_table, kv_lens, o, part, ticket,
        q.stride(0), block_table.stride(0), scale * _LOG2_E, window or 0,
        G=kv_heads, GROUP=group, D=dim, S=page_size, HAS_WINDOW=window is not None, BLOCK_M=block_m, BLOCK_D=block_d, **config,
    )  # fmt: skip
    return o


def _varlen_launch(
    config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    (tokens, heads, dim), (_, kv_heads, page_size, _), batch = q.shape, k_cache.shape, kv_lens.shape[0]
    o = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    group, block_d = heads // kv_heads, max(16, next_pow2(dim))
    tiles = tokens // (config["BLOCK_M"] // group) + batch
    if tokens:
        _varlen_kernel[(tiles, kv_heads)](
            q, k_cache, v_cache, block_table, kv_lens, cu_q, o,
            batch, q.stride(0), block_table.stride(0), scale * _LOG2_E, window or 0,
            G=kv_heads, GROUP=group, D=dim, S=page_size, HAS_WINDOW=window is not None, BLOCK_D=block_d, **config,
        )  # fmt: skip
    return o


paged_attention_op = Op(
    name="paged_attention",
    reference=_reference,
    fake=lambda q, *rest: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    make=attention_arguments,
    rows_in_problem=True,
    roundings=2,  # the softmax's weights, then the result
    impls=(
        Impl(
            name="split_kv",
            launch=_split_launch,
            space=SPLIT_SPACE,
            refuse=lambda device, problem: None if problem.decode else "takes one query a sequence",
            work=split_work,
        ),
        Impl(name="varlen", launch=_varlen_launch, space=VARLEN_SPACE, work=varlen_work),
        Impl(name="invariant", launch=_varlen_launch, space=INVARIANT_SPACE, batch_invariant=True, work=varlen_work),
    ),
)

# ---- public function


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed queries over a paged cache that already holds their own keys and values.

    Args:
        q: [T, H, D] bf16, fp16 or fp32, heads dense; H a multiple of G.
        k_cache: [P, G, S, D] of q's dtype, contiguous.
        v_cache: like k_cache.
        block_table: [B, max_pages] int32, the page of each S tokens of a sequence.
        kv_lens: [B] int32, tokens of each sequence in the cache, this call's included.
        cu_q: [B + 1] int32, where each sequence's queries start in q.
        max_q_len: the longest query length; 1 means that every sequence brings exactly one query (decode).
        scale: factor on q . k.
        window: each query sees at most this many keys, its own included; None for all.

    Returns:
        [T, H, D] of q's dtype, contiguous. Sequences with kv_lens 0 give zeros.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            "paged_attention: wants q [T, H, D] and caches [P, G, S, D] with one D; "
            f"got {tuple(q.shape)}, {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"paged_attention: {q.shape[1]} query heads are no multiple of {k_cache.shape[1]} key/value heads")
    if not (q.dtype == k_cache.dtype == v_cache.dtype):
        raise ValueError(f"paged_attention: dtypes differ: q {q.dtype}, caches {k_cache.dtype}, {v_cache.dtype}")
    if cu_q.shape[0] != kv_lens.shape[0] + 1 or block_table.shape[0] != kv_lens.shape[0]:
        raise ValueError(
            f"paged_attention: for kv_lens [{kv_lens.shape[0]}] wants cu_q one longer and as many rows in block_table; "
            f"got {tuple(cu_q.shape)} and {tuple(block_table.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1, or None for all keys; got {window}")
    if max_q_len == 1 and q.shape[0] != kv_lens.shape[0]:
        raise ValueError(f"paged_attention: max_q_len 1 wants one query a sequence; got {q.shape[0]} for {kv_lens.shape[0]}")
    return paged_attention_op(q, k_cache, v_cache, block_table, kv_lens, cu_q, max_q_len, scale, window)
