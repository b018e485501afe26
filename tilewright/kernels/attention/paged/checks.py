"""Checks of the lengths, block tables and slots of a paged call. They use plain numbers; no kernels.

Kernels over a paged cache never read or write outside it, whatever their inputs. A length counts only as far as its row of the
block table has pages. A page number outside the cache is replaced by the nearest valid one (TMA reads zeros instead). A slot
outside the cache is not written, and a query after the end of `q` is neither read nor computed. On a GPU the values cannot be
checked without waiting for the device. So a wrong call there returns wrong numbers, but touches no memory outside the cache. On
a CPU the values can be read at once, and the public functions raise. `check_paged` does the same check for tensors on a GPU,
for callers that can wait.
"""

import math

import numpy as np
import torch
from torch import Tensor

from tilewright.kernels.attention.problem import DTYPES

__all__ = ["at_hand", "check_lengths", "check_numbers", "check_paged", "check_slots", "check_tables"]


def at_hand(t: Tensor) -> bool:
    """Whether the values of a tensor can be read without waiting: it is on a CPU, and no tracing is active."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return type(t) is Tensor and t.device.type == "cpu" and not traced


def _array(t: Tensor) -> np.ndarray:
    return t.detach().cpu().numpy()


def check_numbers(op: str, q: Tensor, max_q_len: int, scale: float) -> None:
    """Check the queries' dtype, the largest number of queries and the scale. Raises ValueError."""
    if q.dtype not in DTYPES:
        raise ValueError(f"{op}: q is {q.dtype}, wanted bfloat16, float16 or float32")
    if max_q_len < min(1, q.shape[0]):
        raise ValueError(f"{op}: max_q_len is {max_q_len} for {q.shape[0]} queries, wanted the largest number in one sequence")
    if not 0.0 < scale < math.inf:
        raise ValueError(f"{op}: scale is {scale}, wanted a finite number above 0 (for a negative one negate q)")


def check_tables(op: str, q: Tensor, block_table: Tensor, kv_lens: Tensor, cu_q: Tensor, max_q_len: int) -> None:
    """Check the layout, not the values, of block_table [B, max_pages], kv_lens [B] and cu_q [B + 1] for q [T, ..].

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    batch = kv_lens.shape[0] if kv_lens.dim() == 1 else -1
    if cu_q.shape != (batch + 1,) or block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"{op}: for kv_lens {list(kv_lens.shape)}, cu_q must be one longer, and block_table must have as many rows; "
            f"got {tuple(cu_q.shape)} and {tuple(block_table.shape)}"
        )
    if not (q.device == block_table.device == kv_lens.device == cu_q.device):
        raise ValueError(
            f"{op}: all tensors must be on one device; got q on {q.device}, block_table on {block_table.device}, "
            f"kv_lens on {kv_lens.device}, cu_q on {cu_q.device}"
        )
    if not (block_table.dtype == kv_lens.dtype == cu_q.dtype == torch.int32):
        raise ValueError(
            f"{op}: block_table, kv_lens and cu_q must be int32; got {block_table.dtype}, {kv_lens.dtype}, {cu_q.dtype}: "
            "call .int() once, where they are made"
        )
    if (block_table.stride(1) != 1 and block_table.shape[1] > 1) or not (kv_lens.is_contiguous() and cu_q.is_contiguous()):
        raise ValueError(
            f"{op}: needs dense rows in block_table, and contiguous kv_lens and cu_q; got strides "
            f"{block_table.stride()}, {kv_lens.stride()}, {cu_q.stride()}: call .contiguous()"
        )
    if max_q_len == 1 and q.shape[0] != batch:
        raise ValueError(f"{op}: max_q_len 1 needs one query per sequence; got {q.shape[0]} queries for {batch} sequences")


def _check_queries(op: str, lengths: np.ndarray, cu_q: np.ndarray, tokens: int | None, longest: int | None) -> None:
    counts = np.diff(cu_q)
    tokens = int(cu_q[-1]) if tokens is None else tokens
    if cu_q[0] != 0 or (counts < 0).any() or cu_q[-1] != tokens:
        raise ValueError(f"{op}: cu_q must rise from 0 to {tokens}, the queries of all sequences; got {cu_q.tolist()}")
    short = np.flatnonzero((counts > lengths) & (lengths > 0))
    if short.size:
        b = int(short[0])
        raise ValueError(
            f"{op}: sequence {b} has {counts[b]} queries but only {lengths[b]} tokens; wanted no more queries than tokens, "
            "because the queries are its last tokens"
        )
    if longest is not None and (counts > longest).any():
        b = int(counts.argmax())
        raise ValueError(f"{op}: max_q_len is {longest}, but sequence {b} has {counts[b]} queries: wanted the largest number")


def check_lengths(
    op: str, block_table: Tensor, kv_lens: Tensor, page_size: int, pages: int, cu_q: Tensor | None, tokens: int | None,
    longest: int | None = None,
) -> None:  # fmt: skip
    """Check that block_table [B, max_pages] lists the pages that kv_lens [B] and cu_q [B + 1] need, in a cache of `pages`
    pages.

    Waits for the device if the tensors are on one. `tokens`: the total number of queries, if known. `longest`: the most queries
    that one sequence may have, if known.

    Raises:
        ValueError: a length is below 0 or beyond the pages of its table row; a page is not in the cache; a sequence has more
            queries than tokens or than `longest`; or cu_q does not rise from 0 to `tokens`.
    """
    table, lengths = _array(block_table), _array(kv_lens)
    width = table.shape[1]
    wrong = np.flatnonzero((lengths < 0) | (lengths > width * page_size))
    if wrong.size:
        b = int(wrong[0])
        raise ValueError(
            f"{op}: sequence {b} has {lengths[b]} tokens, but its block_table row {width} pages for {width * page_size}, "
            f"and the cache {pages} pages of {page_size}: give the table more columns, or the sequence fewer tokens"
        )
    needed = -(-lengths // page_size)
    outside = (np.arange(width) < needed[:, None]) & ((table < 0) | (table >= pages))
    if outside.any():
        b, i = (int(places[0]) for places in np.nonzero(outside))
        raise ValueError(
            f"{op}: sequence {b} of {lengths[b]} tokens needs the pages block_table[{b}, :{needed[b]}]; entry {i} is "
            f"{table[b, i]}, but the cache has pages 0 to {pages - 1}"
        )
    if cu_q is not None:
        _check_queries(op, lengths, _array(cu_q), tokens, longest)


def check_slots(op: str, slots: Tensor, room: int) -> None:
    """Check that slots [T] are below `room`, the slots of the cache. Negative slots are skipped.

    If the values cannot be read without waiting, nothing is checked.

    Raises:
        ValueError: a slot beyond the cache.
    """
    if slots.numel() and at_hand(slots):
        places = slots.numpy()
        if (most := int(places.max())) >= room:
            raise ValueError(f"{op}: token {int(places.argmax())} has slot {most}, but the cache has slots 0 to {room - 1}")


def check_paged(
    block_table: Tensor, kv_lens: Tensor, *, page_size: int, pages: int, cu_q: Tensor | None = None, tokens: int | None = None,
    slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Check that the lengths, pages and slots of a paged call fit its cache. Waits for the device: for tests and debugging.

    Args:
        block_table: [B, max_pages] int32.
        kv_lens: [B] int32, tokens of each sequence.
        page_size: tokens per page.
        pages: number of pages in the cache.
        cu_q: [B + 1] int32, where each sequence's queries start; None: not checked.
        tokens: the total number of queries, which must be the last element of cu_q; None: not checked.
        slots: [T] int64, where tokens are to be written, negative for none; None: not checked.

    Raises:
        ValueError: the message gives the sequence, its length and the room in its table row, or the wrong page, query or slot.
    """
    check_lengths("check_paged", block_table, kv_lens, page_size, pages, cu_q, tokens)
    if slots is not None:
        check_slots("check_paged", slots.cpu(), pages * page_size)
