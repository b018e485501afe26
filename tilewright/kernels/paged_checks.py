"""What a paged call asks of lengths, block tables and slots; plain numbers, no kernels.

Kernels over a paged cache never leave it, whatever they are told: a length counts no further than its row of the block table
has pages for, a page number outside the cache is read as the nearest one (by the copy engine as zeros), a slot outside it is
not written, and a query past the end of `q` is neither read nor answered. On a GPU nobody can look at the values without
waiting for the device, so such a call gives wrong numbers, but reads and writes nothing that is not the cache's. On a CPU the
values are at hand, and the public functions raise; `check_paged` is the same check of tensors on a GPU, for whoever can wait.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["at_hand", "check_lengths", "check_paged", "check_slots"]


def at_hand(t: Tensor) -> bool:
    """Whether a tensor's values can be looked at without waiting: a CPU's, where nothing traces what torch is asked to do."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return type(t) is Tensor and t.device.type == "cpu" and not traced


def _array(t: Tensor) -> np.ndarray:
    return t.detach().cpu().numpy()


def _check_queries(op: str, lengths: np.ndarray, cu_q: np.ndarray, tokens: int | None) -> None:
    counts = np.diff(cu_q)
    tokens = int(cu_q[-1]) if tokens is None else tokens
    if cu_q[0] != 0 or (counts < 0).any() or cu_q[-1] != tokens:
        raise ValueError(f"{op}: cu_q must rise from 0 to {tokens}, the queries of all sequences; got {cu_q.tolist()}")
    short = np.flatnonzero((counts > lengths) & (lengths > 0))
    if short.size:
        b = int(short[0])
        raise ValueError(
            f"{op}: sequence {b} brings {counts[b]} queries and has {lengths[b]} tokens; wanted no more queries than tokens, "
            "of which they are the last"
        )


def check_lengths(
    op: str, block_table: Tensor, kv_lens: Tensor, page_size: int, pages: int, cu_q: Tensor | None, tokens: int | None
) -> None:
    """Whether block_table [B, max_pages] holds what kv_lens [B] and cu_q [B + 1] need of a cache of `pages` pages.

    Waits for the device where the tensors are on one. `tokens`: how many queries there are, if known.

    Raises:
        ValueError: a length below 0 or beyond its table row's pages, a page that the cache does not have, queries that are
            more than their sequence's tokens, or cu_q that does not rise from 0 to `tokens`.
    """
    table, lengths = _array(block_table), _array(kv_lens)
    width = table.shape[1]
    wrong = np.flatnonzero((lengths < 0) | (lengths > width * page_size))
    if wrong.size:
        b = int(wrong[0])
        raise ValueError(
            f"{op}: sequence {b} has {lengths[b]} tokens, its row of the block table {width} pages for {width * page_size}, "
            f"and the cache {pages} pages of {page_size}: give the table more columns, or the sequence fewer tokens"
        )
    needed = -(-lengths // page_size)
    outside = (np.arange(width) < needed[:, None]) & ((table < 0) | (table >= pages))
    if outside.any():
        b, i = (int(places[0]) for places in np.nonzero(outside))
        raise ValueError(
            f"{op}: sequence {b} of {lengths[b]} tokens needs the pages block_table[{b}, :{needed[b]}]; entry {i} is "
            f"{table[b, i]}, and the cache has pages 0 to {pages - 1}"
        )
    if cu_q is not None:
        _check_queries(op, lengths, _array(cu_q), tokens)


def check_slots(op: str, slots: Tensor, room: int) -> None:
    """Whether slots [T], where their values are at hand, are among the cache's `room`; negative ones are skipped.

    Raises:
        ValueError: a slot beyond the cache.
    """
    if slots.numel() and at_hand(slots):
        places = slots.numpy()
        if (most := int(places.max())) >= room:
            raise ValueError(f"{op}: token {int(places.argmax())} has slot {most}, and the cache slots 0 to {room - 1}")


def check_paged(
    block_table: Tensor, kv_lens: Tensor, *, page_size: int, pages: int, cu_q: Tensor | None = None, tokens: int | None = None,
    slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Whether a paged call's lengths, pages and slots fit its cache. Waits for the device: for tests, and to find a fault.

    Args:
        block_table: [B, max_pages] int32.
        kv_lens: [B] int32, tokens of each sequence.
        page_size: tokens of a page.
        pages: of the cache.
        cu_q: [B + 1] int32, where each sequence's queries start; None: not checked.
        tokens: how many queries there are, what cu_q must end with; None: not checked.
        slots: [T] int64, where tokens are to be written, negative for none; None: not checked.

    Raises:
        ValueError: says which sequence, its length, and what its row of the table has room for; or which page, query or slot.
    """
    check_lengths("check_paged", block_table, kv_lens, page_size, pages, cu_q, tokens)
    if slots is not None:
        check_slots("check_paged", slots.cpu(), pages * page_size)
