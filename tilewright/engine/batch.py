"""From a step to what the model reads: one packed buffer on the host, one copy, views of it on the device.

    # T tokens, B sequences, R sampled rows, W pages in the longest block table

Rows of the batch are the step's rows in their order. Whatever the host does not know yet, a sample of the step before, is
named by the slot that will hold it (`feed`), and is filled in on the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.request import Request
from tilewright.engine.step import HOST_ERRORS, Row, RowFault, Step
from tilewright.nn import Batch

__all__ = ["Inputs", "Layout", "Packer"]


class Inputs(NamedTuple):
    """A step on the device."""

    token_ids: Tensor
    """[T] int64; what stands where `feed` is not negative does not count."""
    feed: Tensor
    """[T] int64: the slot whose latest sample is this token, or -1."""
    batch: Batch
    sampled_slots: Tensor
    """[R] int64: where the sample of each row goes; the row past the last slot for padding."""
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    alternatives: Tensor
    """[R] int32: likeliest tokens to report beside the sample; -1: no log-probabilities at all."""
    sampled_at: Tensor
    """[R] int64: position that the sample will have."""
    adapters: Tensor
    """[2 T] int32, as `Batch.adapters`; nothing where no row has an adapter."""

    @property
    def adapted(self) -> Batch:
        """The batch, whose rows have adapters."""
        return replace(self.batch, adapters=self.adapters.view(2, -1))


_FIELDS = (
    ("token_ids", "T", np.int64),
    ("feed", "T", np.int64),
    ("positions", "T", np.int64),
    ("slots", "T", np.int64),
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
    ("adapters", "2T", np.int32),
)
_TORCH = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


class Layout:
    """Where each array of a step lies in one buffer of `nbytes`; starts are multiples of 16, as kernels like pointers."""

    def __init__(self, tokens: int, seqs: int, sampled: int):
        counts = {"T": tokens, "2T": 2 * tokens, "B": seqs, "B1": seqs + 1, "R": sampled}
        self.fields: list[tuple[str, Any, int, int]] = []
        at = 0
        for name, axis, dtype in _FIELDS:
            size = counts[axis] * np.dtype(dtype).itemsize
            self.fields.append((name, dtype, at, size))
            at += -(-size // 16) * 16
        self.nbytes = at

    def host(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Views of a uint8 numpy buffer."""
        return {name: buffer[at : at + size].view(dtype) for name, dtype, at, size in self.fields}

    def device(self, buffer: Tensor, block_table: Tensor, max_q_len: int) -> Inputs:
        """Views of a uint8 tensor, with the block table that lies elsewhere."""
        views = {name: buffer[at : at + size].view(_TORCH[dtype]) for name, dtype, at, size in self.fields}
        batch = Batch(
            positions=views.pop("positions"),
            slots=views.pop("slots"),
            block_table=block_table,
            kv_lens=views.pop("kv_lens"),
            cu_q=views.pop("cu_q"),
            max_q_len=max_q_len,
            logits_rows=views.pop("logits_rows"),
        )
        return Inputs(batch=batch, **views)


class Packer:
    """Fills the host's arrays for a step. Keeps, by slot, what does not change from step to step.

    `place` is called with each request that has come to its slot since the step before; `always_adapted`: every step names
    adapters, even if no row has one. What a request's own numbers raise on
    the way is a `RowFault` that names it: nothing has been sent to the device then.
    """

    def __init__(
        self, *, page_size: int, max_seqs: int, max_pages: int, place: Callable[[Request], None] = lambda request: None,
        always_adapted: bool = False,
    ):  # fmt: skip
        self.page_size = page_size
        self._place, self._always_adapted = place, always_adapted
        self.padding_slot = max_seqs
        self.tables = np.zeros((max_seqs, max_pages), np.int32)
        self._known: list[tuple[Request | None, int, int]] = [(None, 0, 0)] * max_seqs
        # One line a slot, plus one for padding: greedy, everything off.
        self._temperature = np.zeros(max_seqs + 1, np.float32)
        self._top_k = np.zeros(max_seqs + 1, np.int32)
        self._top_p = np.ones(max_seqs + 1, np.float32)
        self._min_p = np.zeros(max_seqs + 1, np.float32)
        self._seed = np.zeros(max_seqs + 1, np.int64)
        self._alternatives = np.full(max_seqs + 1, -1, np.int32)
        self._adapter = np.zeros(max_seqs + 1, np.int32)

    def refresh(self, step: Step) -> int:
        """Bring tables and parameters of the step's slots up to date; returns the pages of the longest table.

        Raises:
            RowFault: those of one request cannot be written.
        """
        longest = 1
        for request, *_ in step.rows:
            slot, pages = request.slot, request.pages
            assert slot is not None
            count = len(pages)
            longest = max(longest, count)
            owner, preemptions, held = self._known[slot]
            moved = owner is not request or preemptions != request.preemptions
            if held == count and not moved:
                continue
            try:
                if moved:
                    self._arrive(slot, request)
                    held = 0
                self.tables[slot, held:count] = pages[held:]
            except HOST_ERRORS as error:
                raise RowFault(request, error) from error
            self._known[slot] = (request, request.preemptions, count)
        return longest

    def _arrive(self, slot: int, request: Request) -> None:
        s = request.settings
        self._temperature[slot], self._top_k[slot], self._top_p[slot] = s.temperature, s.top_k, s.top_p
        self._min_p[slot], self._seed[slot] = s.min_p, request.seed
        self._alternatives[slot] = -1 if request.params.logprobs is None else request.params.logprobs
        self._adapter[slot] = request.adapter
        self._place(request)

    def adapted(self, step: Step) -> bool:
        """Whether the model is to be told adapters: any of the step's rows has one. After `refresh`."""
        return self._always_adapted or bool(self._adapter[[row.request.slot or 0 for row in step.rows]].any())

    def fill(self, out: dict[str, np.ndarray], step: Step) -> None:
        """Write a step into host arrays, which may be longer than the step: the rest becomes padding rows of one token."""
        rows = step.rows
        requests, starts, counts, samples = zip(*rows, strict=True)
        count, start = np.array(counts, np.int64), np.array(starts, np.int64)
        slot = np.array([request.slot for request in requests], np.int64)
        ends = np.cumsum(count)
        tokens, seqs = int(ends[-1]), len(rows)
        out["cu_q"][0] = 0
        out["cu_q"][1 : seqs + 1] = ends
        out["cu_q"][seqs + 1 :] = np.arange(tokens + 1, tokens + 1 + out["kv_lens"].size - seqs)
        out["kv_lens"][:seqs] = start + count
        out["kv_lens"][seqs:] = 0
        position = np.arange(tokens) + np.repeat(start - (ends - count), count)
        out["positions"][:tokens] = position
        out["positions"][tokens:] = 0
        pages = self.tables[np.repeat(slot, count), position // self.page_size]
        out["slots"][:tokens] = pages.astype(np.int64) * self.page_size + position % self.page_size
        out["slots"][tokens:] = -1
        if self._always_adapted or self._adapter.any():
            self._fill_adapters(out["adapters"], np.repeat(slot, count))
        self._fill_tokens(out, rows, ends, slot)
        self._fill_sampled(out, np.flatnonzero(samples), ends, slot)

    def _fill_adapters(self, out: np.ndarray, owner: np.ndarray) -> None:
        """Tokens in the order of their adapters, and these; padding has none."""
        ids = np.zeros(out.size // 2, np.int32)
        ids[: owner.size] = self._adapter[owner]
        order = np.argsort(ids, kind="stable")
        out[: ids.size], out[ids.size :] = order, ids[order]

    def _fill_tokens(self, out: dict[str, np.ndarray], rows: Sequence[Row], ends: np.ndarray, slot: np.ndarray) -> None:
        ids, feed = out["token_ids"], out["feed"]
        ids.fill(0)
        feed.fill(-1)
        fed: list[int] = []
        for i, (request, start, count, _) in enumerate(rows):
            known = min(start + count, len(request.prompt_ids) + len(request.output_ids))
            if known > start:
                begin = int(ends[i]) - count
                try:
                    ids[begin : begin + known - start] = request.tokens(start, known)
                except HOST_ERRORS as error:
                    raise RowFault(request, error) from error
            if known < start + count:
                fed.append(i)
        feed[ends[fed] - 1] = slot[fed]

    def _fill_sampled(self, out: dict[str, np.ndarray], chosen: np.ndarray, ends: np.ndarray, slot: np.ndarray) -> None:
        n = chosen.size
        lines = np.full(out["sampled_slots"].size, self.padding_slot, np.int64)
        lines[:n] = slot[chosen]
        out["sampled_slots"][:] = lines
        out["logits_rows"][:n] = ends[chosen] - 1
        out["logits_rows"][n:] = 0
        out["sampled_at"][:n] = out["kv_lens"][chosen]
        out["sampled_at"][n:] = 0
        out["temperature"][:] = self._temperature[lines]
        out["top_k"][:], out["top_p"][:] = self._top_k[lines], self._top_p[lines]
        out["min_p"][:], out["seed"][:] = self._min_p[lines], self._seed[lines]
        out["alternatives"][:] = self._alternatives[lines]
