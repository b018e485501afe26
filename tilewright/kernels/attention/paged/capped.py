"""Attention over a paged cache whose scores are capped, as Gemma 2 has it (Gemma Team, "Gemma 2", 2024).

    # T tokens of B sequences packed, H query heads, G key/value heads, D head dim, P pages, S tokens a page
    o[t, h, :] = sum_n softmax_n(cap tanh(scale q[t, h, :] . k[n, g, :] / cap)) v[n, g, :]        g = h // (H / G)

over the keys that attention.py names, with its arguments and layouts. tanh(x) = 1 - 2 / (exp(2 x) + 1), whose exponential is
the hardware's exp2 with log2(e) folded into the factor before it.

A program takes one key/value head and a tile of queries x shared heads and walks the keys, as `varlen` of attention.py does,
with one tile for every batch: a row's bits are the same in prefill, in a chunk and in decode. Limited by the bytes of the cache
where queries are few, and there it does not fill a card: long sequences are not split.

Not supported: backward, caches of 8 bits, sinks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.paged.configs import INVARIANT_SPACE, problem_of, room_of
from tilewright.kernels.attention.paged.inputs import attention_arguments
from tilewright.kernels.attention.paged.tile_mainloop import length_of, normalise, pages_of
from tilewright.kernels.attention.paged.work import varlen_work
from tilewright.kernels.device.dot import dot
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.shapes import next_pow2, token_stride
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["capped_paged_attention_op"]

# ---- reference


def _reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, softcap: float,
) -> Tensor:  # fmt: skip
    _, kv_heads, page_size, dim = k_cache.shape
    group, wide = q.shape[1] // kv_heads, torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    bounds = cu_q.tolist()
    for b, length in enumerate(kv_lens.tolist()):
        rows = q[bounds[b] : bounds[b + 1]]
        if not len(rows) or not length:
            continue
        pages = block_table[b, : -(-length // page_size)]
        k, v = (
            cache.index_select(0, pages).transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length].to(wide)
            for cache in (k_cache, v_cache)
        )
        heads = rows.to(wide).unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)  # [G, group, rows, D]
        scores = softcap * torch.tanh(scale / softcap * (heads @ k[:, None].mT))
        at = torch.arange(length - len(rows), length, device=q.device)[:, None]
        keys = torch.arange(length, device=q.device)[None, :]
        seen = keys <= at if window is None else (keys <= at) & (keys > at - window)
        found = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, None]
        out[bounds[b] : bounds[b + 1]] = found.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


# ---- cost


def _cost(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, softcap: float,
) -> Cost:  # fmt: skip
    """Waits for the device: the work depends on the lengths."""
    heads, dim = q.shape[1:]
    pairs = keys = 0
    for length, queries in zip(kv_lens.tolist(), cu_q.diff().tolist(), strict=True):
        keys += length if window is None else min(length, window + max(queries - 1, 0))
        pairs += sum(min(length - i, window or length) for i in range(min(queries, length)))
    kv_bytes = 2 * keys * k_cache.shape[1] * dim * k_cache.element_size()
    return Cost(flops=4 * pairs * heads * dim, bytes=2 * q.nbytes + kv_bytes)


# ---- examples


def _arguments(
    inputs: Inputs, *, B: int, KV: int, Q: int = 1, H: int = 32, G: int = 8, D: int = 128, S: int = 16,
    window: int | None = None, ragged: bool = False, softcap: float = 50.0, dtype: torch.dtype = torch.bfloat16,
) -> tuple[object, ...]:  # fmt: skip
    """As `attention_arguments` makes them, without codes and sinks."""
    dims = {"B": B, "KV": KV, "Q": Q, "H": H, "G": G, "D": D, "S": S, "window": window, "ragged": ragged, "dtype": dtype}
    return *attention_arguments(inputs, **dims)[:9], softcap  # pyright: ignore[reportArgumentType]


@Example.of
def _example(
    inputs: Inputs, lengths: tuple[tuple[int, int], ...], heads: tuple[int, int] = (4, 2), dim: int = 32,
    page_size: int = 16, window: int | None = None, softcap: float = 2.0, dtype: torch.dtype = torch.bfloat16,
) -> tuple[object, ...]:  # fmt: skip
    """`lengths`: (query length, total length) of each sequence. Pages are scattered; what lies past a length is NaN."""
    needed = [-(-kv // page_size) for _, kv in lengths]
    order = inputs.permutation(1 + sum(needed))
    caches = [inputs.randn(len(order), heads[1], page_size, dim, dtype=dtype) for _ in range(2)]
    table = inputs.tensor([[0] * max(needed) for _ in lengths], torch.int32)
    at, ends = 0, [0]
    for b, (queries, kv) in enumerate(lengths):
        table[b, : needed[b]] = order[at : at + needed[b]]
        at += needed[b]
        ends.append(ends[-1] + queries)
        for cache in caches if kv % page_size else ():
            cache[order[at - 1], :, kv % page_size :] = float("nan")
    for cache in caches:
        cache[order[at:]] = float("nan")
    q = inputs.randn(ends[-1], heads[0], dim, dtype=dtype)
    lens, longest = inputs.tensor([kv for _, kv in lengths], torch.int32), max(queries for queries, _ in lengths)
    return q, *caches, table, lens, inputs.tensor(ends, torch.int32), longest, dim**-0.5, window, softcap


EXAMPLES = (
    _example("decode", ((1, 70), (1, 1), (1, 0), (1, 33))),
    _example("mixed", ((1, 40), (5, 69), (0, 16), (17, 17)), softcap=50.0),
    _example("window", ((20, 70), (3, 3)), window=9, dtype=torch.float16),
    _example("ragged-heads", ((5, 21),), heads=(6, 2), dim=24, page_size=4, dtype=torch.float32),
    _example("steep", ((7, 40),), dim=64, softcap=0.1, dtype=torch.float32),
)

# ---- kernel


@triton.jit
def _tile_step(
    q, acc, m, l, k_cache_ptr, v_cache_ptr, page, start, end, at, before, cap_log2, window,
    PAGE_STRIDE: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Take the keys start .. start + BLOCK_N into (m, l, acc). The pointers to caches point at the head."""
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    offsets = (page * PAGE_STRIDE + (keys % S) * D)[:, None] + dims[None, :]
    inside = (keys < end)[:, None] & (dims < D)[None, :]
    k = tl.load(k_cache_ptr + offsets, mask=inside, other=0.0)
    s = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
    s = cap_log2 * (1.0 - 2.0 / (tl.exp2(s * before) + 1.0))
    seen = (keys < end)[None, :] & (keys[None, :] <= at[:, None])
    if HAS_WINDOW:
        seen &= keys[None, :] > at[:, None] - window
    s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen no key yet has m = -inf; subtracting 0 instead keeps its weights exp2(-inf) = 0, not NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    v = tl.load(v_cache_ptr + offsets, mask=inside, other=0.0)
    return dot(p.to(q.dtype), v, acc * alpha[:, None]), m_new, l * alpha + tl.sum(p, 1)


@triton.jit(do_not_specialize=["batch", "tokens", "pages", "room", "q_row_stride", "table_row_stride", "window"])
def _capped_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, kv_lens_ptr, cu_q_ptr, o_ptr,
    batch, tokens, pages, room, q_row_stride, table_row_stride, before, cap_log2, window,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
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
    kv_len = length_of(kv_lens_ptr, b, True, room)
    q_first = (tile - (q_begin // BLOCK_Q + b)) * BLOCK_Q
    if q_first >= q_len:
        return
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = q_first + rows // GROUP
    heads = g * GROUP + rows % GROUP
    token = (q_begin + queries).to(tl.int64)
    live_rows = (queries < q_len) & (rows < BLOCK_Q * GROUP) & (token >= 0) & (token < tokens)
    live = live_rows[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + (row_start(token, q_row_stride, D) + heads * D)[:, None] + dims[None, :], mask=live, other=0.0)
    at = kv_len - q_len + queries
    first_at = kv_len - q_len + q_first
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, first_at + 1 - window) // BLOCK_N * BLOCK_N
    table_ptr += b.to(tl.int64) * table_row_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(first, tl.minimum(kv_len, first_at + BLOCK_Q), BLOCK_N):
        page = pages_of(table_ptr, start, kv_len, pages, S, BLOCK_N).to(tl.int64)
        acc, m, l = _tile_step(
            q, acc, m, l, k_cache_ptr + g * S * D, v_cache_ptr + g * S * D, page, start, kv_len, at, before, cap_log2, window,
            G * S * D, S, D, BLOCK_N, BLOCK_D, HAS_WINDOW,
        )  # fmt: skip
    o = normalise(acc, m, l, q_ptr, heads, live_rows, False).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + (token * G * GROUP * D + heads * D)[:, None] + dims[None, :], o, mask=live)


# ---- launcher and op

_LOG2_E = 1.4426950408889634


def _launch(
    config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, softcap: float,
) -> Tensor:  # fmt: skip
    (tokens, heads, dim), (_, kv_heads, page_size, _), batch = q.shape, k_cache.shape, kv_lens.shape[0]
    o = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    group = heads // kv_heads
    if tokens:
        _capped_kernel[(tokens // (config["BLOCK_M"] // group) + batch, kv_heads)](
            q, k_cache, v_cache, block_table, kv_lens, cu_q, o,
            batch, tokens, k_cache.shape[0], room_of(k_cache, block_table), token_stride(q), block_table.stride(0),
            2 * scale / softcap * _LOG2_E, softcap * _LOG2_E, window or 0, G=kv_heads, GROUP=group, D=dim, S=page_size,
            HAS_WINDOW=window is not None, BLOCK_D=max(16, next_pow2(dim)), **config,
        )  # fmt: skip
    return o


capped_paged_attention_op = Op(
    name="capped_paged_attention",
    reference=_reference,
    fake=lambda q, *rest: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    make=_arguments,
    rows_in_problem=True,
    roundings=2,  # the softmax's weights, then the result
    impls=(Impl(name="triton", launch=_launch, space=INVARIANT_SPACE, batch_invariant=True, work=varlen_work),),
)
