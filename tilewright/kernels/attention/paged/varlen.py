"""`varlen`: paged attention in portable Triton, for any number of queries per sequence. The kernel and its launcher.

A program processes one key/value head and a tile of queries x shared heads, and goes through the keys from the first one
(tile_mainloop.py). It masks only the tiles that the diagonal or the window cuts. Capped scores are masked in every tile:
without a mask in between, the compiler would fuse the cap with the subtraction that follows, and round less.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.kernels.attention.paged.configs import codes_of, room_of
from tilewright.kernels.attention.paged.tile_mainloop import length_of, normalise, sequence_of, walk
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.shapes import next_pow2, token_stride
from tilewright.tune.space import Config

__all__ = ["launch_varlen"]

_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["batch", "tokens", "pages", "room", "q_row_stride", "table_row_stride", "window"])
def _varlen_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, sink_ptr, table_ptr, kv_lens_ptr, cu_q_ptr, o_ptr,
    batch, tokens, pages, room, q_row_stride, table_row_stride, scale_log2, cap_log2, window,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CODED: tl.constexpr, HEAD_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Late tiles see the most keys. They start first, so that no long tile is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    b, q_begin, q_len = sequence_of(tile, batch, cu_q_ptr, BLOCK_Q)
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
    last = tl.minimum(kv_len, first_at + BLOCK_Q)
    table_ptr += b.to(tl.int64) * table_row_stride
    acc, m, l = walk(
        q, k_cache_ptr + g * S * D, v_cache_ptr + g * S * D, k_scale_ptr + g * HEAD_SCALES, v_scale_ptr + g * HEAD_SCALES,
        table_ptr, pages, first, last, kv_len, at, first_at, scale_log2, cap_log2, window,
        G * S * D, G * HEAD_SCALES, S, D, BLOCK_M, BLOCK_N, BLOCK_D, HAS_WINDOW, CODED, cap_log2 is None,
    )  # fmt: skip
    o = normalise(acc, m, l, sink_ptr, heads, live_rows, HAS_SINKS).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + (token * G * GROUP * D + heads * D)[:, None] + dims[None, :], o, mask=live)


def launch_varlen(
    config: Config, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor,
    max_q_len: int, scale: float, window: int | None, k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """softcap: with caches of q's dtype and without sinks."""
    (tokens, heads, dim), (_, kv_heads, page_size, _), batch = q.shape, k_cache.shape, kv_lens.shape[0]
    o = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    group, block_d = heads // kv_heads, max(16, next_pow2(dim))
    factor, cap = (scale, None) if softcap is None else (2 * scale / softcap, softcap * _LOG2_E)
    tiles = tokens // (config["BLOCK_M"] // group) + batch
    if tokens:
        _varlen_kernel[(tiles, kv_heads)](
            q, codes_of(k_cache), codes_of(v_cache), q if k_scale is None else k_scale, q if v_scale is None else v_scale,
            q if sinks is None else sinks, block_table, kv_lens, cu_q, o,
            batch, tokens, k_cache.shape[0], room_of(k_cache, block_table), token_stride(q), block_table.stride(0),
            factor * _LOG2_E, cap, window or 0, G=kv_heads, GROUP=group, D=dim, S=page_size, HAS_WINDOW=window is not None,
            CODED=k_scale is not None, HEAD_SCALES=0 if k_scale is None else k_scale.stride(1),
            HAS_SINKS=sinks is not None, BLOCK_D=block_d, **config,
        )  # fmt: skip
    return o
