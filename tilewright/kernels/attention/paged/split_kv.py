"""`stream`: paged attention for few queries per sequence; every program of the grid processes an equal share of all keys.

    # B sequences, H query heads, G key/value heads, D head dim, S tokens per page, P programs

The number of programs is fixed, a few per SM, whatever the batch. The keys of all (sequence, key/value head) pairs are
concatenated, in tiles of BLOCK_N. Program p processes the p-th of P equal ranges, as stream-K does for matrix products (Osama
et al., "Stream-K", 2023); if whole pairs are hardly longer than a range, it processes whole pairs. The lengths are read on the
device. So there is no host synchronisation, one grid serves a CUDA graph for all lengths, and no program waits for the one with
the longest sequence.

The H / G query heads of a key/value head, and up to 16 queries of the sequence, share a tile of rows: the cache is read once.
A program that processes all keys of a pair writes the result. Otherwise it stores its (m, l, acc) in scratch memory. A program
has two places there, because its range begins inside a pair at most once and ends inside a pair at most once. The program that
draws the last ticket of a pair combines the parts, in the order of the ranges: the bits are the same in every run.

The result depends on where the ranges end, and so on the other sequences: not batch-invariant. Limited by the bytes of the
cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.attention.paged.configs import STREAM_SPACE, codes_of, room_of, stream_refusal
from tilewright.kernels.attention.paged.tile_mainloop import length_of, normalise, walk
from tilewright.kernels.attention.paged.work import stream_work
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.hopper.early import early
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.pdl import release
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, token_stride
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["STREAM"]

_LOG2_E = 1.4426950408889634
_ONE_BY_ONE = tl.constexpr(8)  # up to so many sequences are counted in a loop, without reductions that synchronise all threads
_COUNTED = tl.constexpr(256)  # sequences whose lengths a program reads at a time


@triton.jit
def _tiles(
    kv_lens_ptr, cu_q_ptr, b, batch, room, window, QUERIES: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(length, queries, first key that is needed, tiles of keys) of each sequence b.

    A sequence has at least one tile, unless each has one query: then there is none for a sequence without keys, and `_clear`
    writes its zeros. There are none from `batch` on.
    """
    live = b < batch
    kv_len = length_of(kv_lens_ptr, b, live, room)
    if QUERIES == 1:
        q_len = tl.where(live, 1, 0)
    else:
        q_len = tl.load(cu_q_ptr + b + 1, mask=live, other=0) - tl.load(cu_q_ptr + b, mask=live, other=0)
        kv_len = tl.where(q_len > 0, kv_len, 0)
    begin = tl.zeros_like(kv_len)
    if HAS_WINDOW:
        begin = tl.maximum(0, kv_len - q_len + 1 - window) // BLOCK_N * BLOCK_N
    tiles = tl.where(live, tl.maximum(0 if QUERIES == 1 else 1, tl.cdiv(kv_len - begin, BLOCK_N)), 0)
    return kv_len, q_len, begin, tiles


@triton.jit
def _clear(o_ptr, kv_lens_ptr, batch, tokens, room, WIDTH: tl.constexpr):
    """Write zeros for the sequences without keys, each of which has one query; each program does a part of them.

    They are in no range. A captured step has them at its end, as padding: as pairs of one tile they would be all in one range,
    and its program would take longest. WIDTH: numbers in a row of o.
    """
    lanes = tl.arange(0, 256)
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        if length_of(kv_lens_ptr, b, b < tokens, room) == 0:
            for start in range(0, WIDTH, 256):
                at = start + lanes
                zeros = tl.zeros([256], o_ptr.dtype.element_ty)
                tl.store(o_ptr + tl.full((), WIDTH, tl.int64) * b + at, zeros, mask=(at < WIDTH) & (b < tokens))


@triton.jit
def _share_of(
    kv_lens_ptr, cu_q_ptr, batch, room, window,
    G: tl.constexpr, QUERIES: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(Tiles of the concatenation, tiles per range)."""
    lanes = tl.arange(0, _COUNTED)
    total = tl.full((), 0, tl.int32)
    longest = tl.full((), 0, tl.int32)
    if batch <= _ONE_BY_ONE:
        for b in range(batch):
            count = _tiles(kv_lens_ptr, cu_q_ptr, b, batch, room, window, QUERIES, HAS_WINDOW, BLOCK_N)[3]
            total += count
            longest = tl.maximum(longest, count)
    else:
        for start in range(0, batch, _COUNTED):
            counts = _tiles(kv_lens_ptr, cu_q_ptr, start + lanes, batch, room, window, QUERIES, HAS_WINDOW, BLOCK_N)[3]
            total += tl.sum(counts, 0)
            longest = tl.maximum(longest, tl.max(counts, 0))
    share = tl.maximum(tl.cdiv(total * G, tl.num_programs(0)), 1)
    # If rounding a range up to whole pairs adds few tiles, round it up: then no parts are left to combine. Only if all pairs
    # are of about the same length: otherwise ranges of whole average pairs cut pairs all the same, and are longer.
    pair = tl.maximum(tl.cdiv(total, batch), 1)
    whole = tl.cdiv(share, pair) * pair
    return total * G, tl.where((longest <= pair) & (whole - share <= 1 + share // 32), whole, share)


@triton.jit
def _sequence_at(
    at, kv_lens_ptr, cu_q_ptr, batch, room, window,
    G: tl.constexpr, QUERIES: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(The sequence that contains tile `at` of the concatenation, the tiles of one head before that sequence)."""
    lanes = tl.arange(0, _COUNTED)
    b = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int32)
    counted = tl.full((), 0, tl.int32)
    if batch <= _ONE_BY_ONE:
        for i in range(batch):
            counted += _tiles(kv_lens_ptr, cu_q_ptr, i, batch, room, window, QUERIES, HAS_WINDOW, BLOCK_N)[3]
            b = tl.where(counted * G <= at, i + 1, b)
            before = tl.where(counted * G <= at, counted, before)
    else:
        for start in range(0, batch, _COUNTED):
            counts = _tiles(kv_lens_ptr, cu_q_ptr, start + lanes, batch, room, window, QUERIES, HAS_WINDOW, BLOCK_N)[3]
            ends = counted + tl.cumsum(counts, 0)
            passed = (ends * G <= at) & (start + lanes < batch)
            b += tl.sum(passed.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
            counted += tl.sum(counts, 0)
    return b, before


@triton.jit
def _place(first, i):
    """Where the i-th part of a pair is stored.

    The first part is at the end of its range (index 1), the others are at the beginning of theirs (index 0).
    """
    return (first + i) * 2 + tl.where(i == 0, 1, 0)


@triton.jit
def _leave(acc, m, l, part_ptr, sums_ptr, place, ticket_ptr, ROWS: tl.constexpr):
    """Store one part of a pair at index `place`. Returns how many programs have already stored a part of the pair."""
    rows = tl.arange(0, acc.shape[0])
    dims = tl.arange(0, acc.shape[1])
    held = rows < ROWS
    tl.store(part_ptr + (place * ROWS + rows)[:, None] * acc.shape[1] + dims[None, :], acc, mask=held[:, None])
    tl.store(sums_ptr + place * (2 * ROWS) + rows, m, mask=held)
    tl.store(sums_ptr + place * (2 * ROWS) + ROWS + rows, l, mask=held)
    tl.debug_barrier()
    return tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _combine(
    part_ptr, sums_ptr, o_ptr, sink_ptr, first, parts, g, q_begin, q_len, tokens,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Combine the parts first .. first + parts of a pair, AT_ONCE at a time, and write the result."""
    rows = tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    held = rows < ROWS
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(0, parts, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        there = (i < parts)[:, None] & held[None, :]
        place = _place(first, i)
        sums = sums_ptr + place[:, None] * (2 * ROWS) + rows[None, :]
        at = (place[:, None] * ROWS + rows[None, :])[:, :, None] * BLOCK_D + dims[None, None, :]
        # .cg skips this SM's L1, which may be stale: other SMs wrote these. All loads are issued before any result is used.
        acc_i = tl.load(part_ptr + at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        m_i = tl.load(sums, mask=there, other=float("-inf"), cache_modifier=".cg")
        l_i = tl.load(sums + ROWS, mask=there, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(m_i, 0))
        # A row that has seen no key has m = -inf; subtracting 0 keeps its weights 0, not NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        fade = tl.exp2(m - shift)
        share = tl.exp2(m_i - shift[None, :])
        l = l * fade + tl.sum(l_i * share, 0)
        acc = acc * fade[:, None] + tl.sum(acc_i * share[:, :, None], 0)
        m = m_new
    heads = g * GROUP + rows % GROUP
    token = q_begin + rows // GROUP
    live = held & (rows // GROUP < q_len) & (token >= 0) & (token < tokens)
    o = normalise(acc, m, l, sink_ptr, heads, live, HAS_SINKS).to(o_ptr.dtype.element_ty)
    o_ptrs = o_ptr + (token * G * GROUP * D + heads * D)[:, None] + dims[None, :]
    tl.store(o_ptrs, o, mask=live[:, None] & (dims < D)[None, :])


@triton.jit(do_not_specialize=["batch", "tokens", "pages", "room", "q_row_stride", "table_row_stride", "window"])
def _stream_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, sink_ptr, table_ptr, kv_lens_ptr, cu_q_ptr, o_ptr,
    part_ptr, ticket_ptr, batch, tokens, pages, room, q_row_stride, table_row_stride, scale_log2, window,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, QUERIES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CODED: tl.constexpr, HEAD_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, AT_ONCE: tl.constexpr,
    RELEASES: tl.constexpr,
):  # fmt: skip
    if RELEASES:
        release()
    ROWS: tl.constexpr = QUERIES * GROUP
    line, share = _share_of(kv_lens_ptr, cu_q_ptr, batch, room, window, G, QUERIES, HAS_WINDOW, BLOCK_N)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    queries = rows // GROUP
    sums_ptr = part_ptr + 2 * tl.num_programs(0) * ROWS * BLOCK_D
    at = tl.program_id(0) * share
    stop = tl.minimum(at + share, line)
    b, before = _sequence_at(at, kv_lens_ptr, cu_q_ptr, batch, room, window, G, QUERIES, HAS_WINDOW, BLOCK_N)
    while at < stop:
        kv_len, q_len, begin, tiles = _tiles(kv_lens_ptr, cu_q_ptr, b, batch, room, window, QUERIES, HAS_WINDOW, BLOCK_N)
        g = (at - before * G) // tl.maximum(tiles, 1)
        pair_at = before * G + g * tiles
        first = begin + (at - pair_at) * BLOCK_N
        pair_stop = tl.minimum(stop, pair_at + tiles)
        last = tl.minimum(begin + (pair_stop - pair_at) * BLOCK_N, kv_len)
        if QUERIES == 1:
            q_begin = b.to(tl.int64)
        else:
            q_begin = tl.load(cu_q_ptr + b).to(tl.int64)
        token = q_begin + queries
        heads = g * GROUP + rows % GROUP
        live = (rows < ROWS) & (queries < q_len) & (token >= 0) & (token < tokens)
        mask = live[:, None] & (dims < D)[None, :]
        q = tl.load(q_ptr + (row_start(token, q_row_stride, D) + heads * D)[:, None] + dims[None, :], mask=mask, other=0.0)
        acc, m, l = walk(
            q, k_cache_ptr + g * S * D, v_cache_ptr + g * S * D,
            k_scale_ptr + g * HEAD_SCALES, v_scale_ptr + g * HEAD_SCALES,
            table_ptr + b.to(tl.int64) * table_row_stride, pages, first, last, kv_len, kv_len - q_len + queries,
            kv_len - q_len, scale_log2, None, window,
            G * S * D, G * HEAD_SCALES, S, D, BLOCK_M, BLOCK_N, BLOCK_D, HAS_WINDOW, CODED, False,
        )  # fmt: skip
        if (at == pair_at) & (pair_stop == pair_at + tiles):
            o = normalise(acc, m, l, sink_ptr, heads, live, HAS_SINKS).to(o_ptr.dtype.element_ty)
            tl.store(o_ptr + (token * G * GROUP * D + heads * D)[:, None] + dims[None, :], o, mask=mask)
        else:
            place = tl.program_id(0) * 2 + tl.where(at == pair_at, 1, 0)
            ticket = _leave(acc, m, l, part_ptr, sums_ptr, place, ticket_ptr + b * G + g, ROWS)
            owner = pair_at // share
            parts = (pair_at + tiles - 1) // share - owner + 1
            if ticket == parts - 1:
                tl.store(ticket_ptr + b * G + g, 0)
                _combine(
                    part_ptr, sums_ptr, o_ptr, sink_ptr, owner, parts, g, q_begin, q_len, tokens,
                    G, GROUP, D, ROWS, HAS_SINKS, BLOCK_R, BLOCK_D, AT_ONCE,
                )  # fmt: skip
        at = pair_stop
        if at == (before + tiles) * G:
            before, b = before + tiles, b + 1
    if QUERIES == 1:
        _clear(o_ptr, kv_lens_ptr, batch, tokens, room, G * GROUP * D)


def _launch(
    config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    (tokens, heads, dim), (_, kv_heads, page_size, _), batch = q.shape, k_cache.shape, kv_lens.shape[0]
    o = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return o
    group, block_d = heads // kv_heads, max(16, next_pow2(dim))
    rows = group * (1 if max_q_len == 1 else 16)
    block_r = next_pow2(rows)
    device = card_of(q)
    most = batch * kv_heads * ceil_div(block_table.shape[1] * page_size, config["BLOCK_N"])
    grid = max(1, min(config["PER_SM"] * device.sms, most))
    part = torch.empty(2 * grid * rows * (block_d + 2), dtype=torch.float32, device=q.device)
    k_codes, v_codes = codes_of(k_cache), codes_of(v_cache)
    tiles = {name: value for name, value in config.items() if name != "PER_SM"}
    _stream_kernel[(grid,)](
        q, k_codes, v_codes, q if k_scale is None else k_scale, q if v_scale is None else v_scale,
        q if sinks is None else sinks, block_table, kv_lens, cu_q, o, part, tickets(q.device, batch * kv_heads),
        batch, tokens, k_cache.shape[0], room_of(k_cache, block_table), token_stride(q), block_table.stride(0),
        scale * _LOG2_E, window or 0,
        G=kv_heads, GROUP=group, D=dim, S=page_size, QUERIES=rows // group, HAS_WINDOW=window is not None,
        CODED=k_scale is not None, HEAD_SCALES=0 if k_scale is None else k_scale.stride(1), HAS_SINKS=sinks is not None,
        BLOCK_M=max(16, block_r), BLOCK_D=block_d, BLOCK_R=block_r, AT_ONCE=max(1, min(16, 8192 // (block_r * block_d))),
        RELEASES=early(q, tokens), **tiles,
    )  # fmt: skip
    return o


STREAM = Impl(name="stream", launch=_launch, space=STREAM_SPACE, refuse=stream_refusal, work=stream_work)
