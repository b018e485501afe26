"""The inputs of a step on the device, and the place of each array in the one buffer that is sent to the device.

# T tokens, B sequences, R sampled rows, W pages in the longest block table
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.nn import Batch

__all__ = ["PLACES", "Inputs", "Layout"]

PLACES = ("slots", "window_slots")
"""Fields with the places of tokens in the KV cache, one for each kind of layers."""


class Inputs(NamedTuple):
    """The inputs of a step on the device."""

    token_ids: Tensor
    """[T] int64; ignored where `feed` is not negative."""
    feed: Tensor | None
    """[T] int64: the slot whose latest sample is this token, or -1. None: all tokens are in `token_ids`."""
    batch: Batch
    sampled_slots: Tensor
    """[R] int64: the slot where the sample of each row is stored; for padding, the index after the last slot."""
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    alternatives: Tensor
    """[R] int32: how many of the likeliest tokens to report with the sample; -1: no log-probabilities at all."""
    sampled_at: Tensor
    """[R] int64: the position of the sample."""
    adapters: Tensor
    """[4 T] int32, as `Batch.adapters`; without meaning if no row has an adapter."""

    def padded(self) -> None:
        """Turn all tokens into padding: they are not written, and attend to nothing."""
        self.batch.slots.fill_(-1)
        if self.batch.window_slots is not None:
            self.batch.window_slots.fill_(-1)
        self.batch.cu_q[1:] = self.batch.positions.numel()
        if self.feed is not None:
            self.feed.fill_(-1)

    def sampled(self, count: int) -> "Inputs":
        """The same inputs with only the first `count` sampled rows."""
        rows = {name: getattr(self, name)[:count] for name in _SAMPLED}
        return self._replace(batch=replace(self.batch, logits_rows=self.batch.logits_rows[:count]), **rows)

    @property
    def adapted(self) -> Batch:
        """The batch for a step in which rows have adapters."""
        return replace(self.batch, adapters=self.adapters.view(4, -1))


_SAMPLED = ("sampled_slots", "temperature", "top_k", "top_p", "min_p", "seed", "alternatives", "sampled_at")
_FIELDS = (
    ("token_ids", "T", np.int64),
    ("feed", "T", np.int64),
    ("positions", "T", np.int64),
    ("slots", "T", np.int64),
    ("window_slots", "WT", np.int64),
    ("logits_rows", "R", np.int64),
    ("sampled_slots", "R", np.int64),
    ("sampled_at", "R", np.int64),
    ("seed", "R", np.int64),
    ("kv_lens", "B", np.int32),
    ("cu_q", "B1", np.int32),
    ("top_k", "R", np.int32),
    ("alternatives", "R", np.int32),
    ("temperature", "R", np.float32),
    ("top_p", "R", np.float32),
    ("min_p", "R", np.float32),
    ("adapters", "4T", np.int32),
)
_SIZED = tuple((name, axis, np.dtype(dtype), np.dtype(dtype).itemsize) for name, axis, dtype in _FIELDS)
_TORCH = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


class Layout:
    """The place of each array of a step in one buffer of `nbytes`. Offsets are multiples of 16 bytes, for aligned loads.

    each: room for tokens in each sequence, whether it is used or not; None: the sequences are packed without gaps.
    kinds: number of kinds of layers, each with a block table: 2 if layers with a window have pages of their own, otherwise 1.
    """

    def __init__(self, tokens: int, seqs: int, sampled: int, each: int | None = None, *, kinds: int = 1):
        self.seqs, self.each, self.kinds = seqs, each, kinds
        self.counts = (tokens, seqs, sampled, each or 0)
        counts = {"T": tokens, "WT": tokens * (kinds - 1), "4T": 4 * tokens, "B": seqs, "B1": seqs + 1, "R": sampled}
        self.fields: list[tuple[str, Any, int, int]] = []
        at = 0
        for name, axis, dtype, each_bytes in _SIZED:
            size = counts[axis] * each_bytes
            self.fields.append((name, dtype, at, size))
            at += size + 15 & -16
        self.nbytes = at

    def host(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Views of a uint8 numpy buffer."""
        return {name: buffer[at : at + size].view(dtype) for name, dtype, at, size in self.fields}

    def device(self, buffer: Tensor, block_table: Tensor, max_q_len: int) -> Inputs:
        """Views of a uint8 tensor; the block tables [kinds, B, W] are a separate tensor."""
        views = {name: buffer[at : at + size].view(_TORCH[dtype]) for name, dtype, at, size in self.fields}
        window_slots, windowed = views.pop("window_slots"), self.kinds > 1
        batch = Batch(
            positions=views.pop("positions"),
            slots=views.pop("slots"),
            block_table=block_table[0],
            window_slots=window_slots if windowed else None,
            window_table=block_table[1] if windowed else None,
            kv_lens=views.pop("kv_lens"),
            cu_q=views.pop("cu_q"),
            max_q_len=max_q_len,
            logits_rows=views.pop("logits_rows"),
        )
        return Inputs(batch=batch, **views)
