"""Sampling features beyond `ops.sample`: penalties, biases, banned and allowed tokens, and log-probabilities.

Most requests use none of these, and steps with only such requests do not use this module. If one request uses a feature, the
whole step goes through all of them; the other rows have neutral tables. So every such step makes the same launches, which a
graph can capture. The order is that of OpenAI's API and compatible servers: log-probabilities are computed from the model's own
logits; then come the edits of `ops.edit_logits`, then temperature and the filters of `ops.sample`.

The tables of the edits are on the device, with one row per slot, and are written when a request gets its slot. Each step
updates the counts of generated tokens on the device, so nothing waits until the host knows a sample.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright import ops
from tilewright.engine.columns import LogprobColumns
from tilewright.engine.logit_edits import MAX_LOGIT_ENTRIES
from tilewright.engine.request import RANGES, Request, TokenLogprobs
from tilewright.engine.step import FillMasks

__all__ = ["MOST_ALTERNATIVES", "LogitTables", "LogprobTensors", "Mask", "Masks", "likelihoods"]

MOST_ALTERNATIVES = int(RANGES["logprobs"][1])
_MOST_COUNTED = (1 << 14) - 1
"""Largest count of a token: the count and one bit for the prompt fit an int16. Larger counts would not change a sample."""


class LogitTables:
    """The tables of `ops.edit_logits` for `max_seqs` slots, and for one more slot of padding rows, which is never edited.

    They take 2 bytes per slot and token of the vocabulary, and little else.
    """

    def __init__(self, *, max_seqs: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        slots, words = max_seqs + 1, -(-vocab_size // 32)
        self._counts = torch.zeros(slots, vocab_size, dtype=torch.int16, device=device)
        self._penalties = torch.tensor([1.0, 0.0, 0.0], device=device).repeat(slots, 1)
        self._ids = torch.full((slots, MAX_LOGIT_ENTRIES), -1, dtype=torch.int32, device=device)
        self._before = torch.zeros(slots, MAX_LOGIT_ENTRIES, device=device)
        self._after = torch.zeros(slots, MAX_LOGIT_ENTRIES, device=device)
        self._until = torch.zeros(slots, dtype=torch.int64, device=device)
        self._allowed = torch.full((slots, words), -1, dtype=torch.int32, device=device)
        self.edited = np.zeros(max_seqs, bool)
        """By slot: whether the request in it edits its logits."""

    def place(self, request: Request) -> None:
        """Write the rows of the slot of a request that has just got this slot. All tokens of the request must be known."""
        slot, edits = request.slot, request.edits
        assert slot is not None
        if edits is None:
            if self.edited[slot]:
                self._write(slot, (1.0, 0.0, 0.0), (), 0, None)
                self.edited[slot] = False
            return
        self._write(slot, (edits.repetition, edits.presence, edits.frequency), edits.entries, edits.until, edits.allowed)
        if edits.counts:
            self._counts[slot].copy_(torch.from_numpy(self._counted(request)), non_blocking=True)
        self.edited[slot] = True

    def _counted(self, request: Request) -> np.ndarray:
        counts = np.bincount(np.asarray(request.output_ids, np.int64), minlength=self.vocab_size)
        counts = (2 * np.minimum(counts, _MOST_COUNTED)).astype(np.int16)
        if request.edits is not None and request.edits.repetition != 1:
            counts[request.prompt_ids] |= 1
        return counts

    def _write(
        self,
        slot: int,
        penalties: tuple[float, float, float],
        entries: Sequence[tuple[int, float, float]],
        until: int,
        allowed: Sequence[int] | None,
    ) -> None:
        ids = np.full(MAX_LOGIT_ENTRIES, -1, np.int32)
        values = np.zeros((2, MAX_LOGIT_ENTRIES), np.float32)
        for i, (token, before, after) in enumerate(entries):
            ids[i], values[0, i], values[1, i] = token, before, after
        bits = np.full(self._allowed.shape[1] * 4, 0xFF, np.uint8)
        if allowed is not None:
            flags = np.zeros(self._allowed.shape[1] * 32, bool)
            flags[np.asarray(allowed, np.int64)] = True
            bits = np.packbits(flags, bitorder="little")
        rows = (
            (self._penalties, np.asarray(penalties, np.float32)),
            (self._ids, ids),
            (self._before, values[0]),
            (self._after, values[1]),
            (self._until, np.asarray(until, np.int64)),
            (self._allowed, bits.view(np.int32)),
        )
        for table, row in rows:
            table[slot].copy_(torch.from_numpy(row), non_blocking=True)

    def edit(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """The edited logits [R, V] float32 of rows in `slots` [R]. `positions` [R]: positions of the tokens to be drawn."""
        return ops.edit_logits(
            logits,
            slots,
            positions,
            counts=self._counts,
            penalties=self._penalties,
            ids=self._ids,
            before=self._before,
            after=self._after,
            until=self._until,
            allowed=self._allowed,
        )

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """Count the token of each row, which has just been drawn. Several padding rows may share a slot."""
        had = self._counts[slots, tokens]
        self._counts[slots, tokens] = torch.add(had, had < 2 * _MOST_COUNTED, alpha=2)


class Mask(NamedTuple):
    """Arguments of `ops.mask_logits`, on the device."""

    rows: Tensor
    """[M] int64: rows of the logits; -1 where there is no mask."""
    bits: Tensor
    """[M, words] int32"""

    def first(self, count: int) -> "Mask":
        """The first `count` masks."""
        return Mask(self.rows[:count], self.bits[:count])


class Masks:
    """Copies the masks of a step to the device on a separate stream, while the model's pass runs.

    They always arrive in the same memory, which captured graphs read. One buffer is enough, because every earlier step has been
    collected when the masks of a step are written.

    Args:
        most: largest number of masks in a step.
        vocab_size: number of logits in a row.
    """

    def __init__(self, *, most: int, vocab_size: int, device: torch.device):
        self._device = device
        words = -(-vocab_size // 32)
        # Columns beyond those of the tokenizer's tokens stay 0: these tokens are forbidden.
        self._there = Mask(
            torch.full((most,), -1, dtype=torch.int64, device=device),
            torch.zeros(most, words, dtype=torch.int32, device=device),
        )
        self._host: Mask | None = None
        self._stream: torch.cuda.Stream | None = None
        self._passed: torch.cuda.Event | None = None
        self.late = 0
        """Number of steps whose pass had ended on the device before their masks were filled."""

    def of_graph(self, rows: int) -> Mask:
        """The arguments of a captured graph with `rows` rows of logits; `sent` writes there."""
        return self._there.first(rows)

    def wanted(self) -> None:
        """The pass of a step has been enqueued, and `sent` follows."""
        if self._device.type == "cuda":
            self._passed = torch.cuda.Event()
            self._passed.record()

    def sent(self, rows: Sequence[int], words: int, fill: FillMasks) -> Mask:
        """The masks that `fill` writes for these rows of the logits. Later launches on the current stream may use them, and the
        masks `of_graph` then are these and unused ones."""
        if self._host is None or self._host.bits.shape[1] != words:  # first used now, because most servers need none
            most, pinned = self._there.rows.numel(), self._device.type == "cuda"
            self._host = Mask(
                torch.zeros(most, dtype=torch.int64, pin_memory=pinned),
                torch.zeros(most, words, dtype=torch.int32, pin_memory=pinned),
            )
        self._host.rows.fill_(-1)[: len(rows)] = torch.as_tensor(rows)
        host, there = self._host.first(len(rows)), self._there.first(len(rows))
        fill(host.bits.numpy())
        self.late += self._passed is not None and self._passed.query()
        shared = min(words, there.bits.shape[1])
        with self._aside():
            self._there.rows.copy_(self._host.rows, non_blocking=True)
            there.bits[:, :shared].copy_(host.bits[:, :shared], non_blocking=True)
        return there

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Launches go to a stream of their own, for which later launches on the current stream wait."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class LogprobTensors(NamedTuple):
    """Log-probabilities of N tokens and of the K likeliest tokens at each position, as `ops.top_logprobs` returns them, in one
    tensor, so that a step copies them to the host at once."""

    words: Tensor
    """[N, 5 + 3 K] int32: token id, rank, top ids (two words each), log-probability, top log-probabilities (float32)."""
    drawn: Tensor | None = None
    """[N] float32, the first result of `draws.drawn_logprobs`; None if the runner does not explain draws."""
    kept: Tensor | None = None
    """[N] int64, the second result of `draws.drawn_logprobs`, or None."""

    @classmethod
    def of(cls, ids: Tensor, logprob: Tensor, rank: Tensor, top_ids: Tensor, top: Tensor) -> "LogprobTensors":
        """From the results of `ops.top_logprobs` for `ids`."""
        wide = torch.stack([ids, rank], 1).view(torch.int32)
        numbers = torch.cat([logprob[:, None].float(), top.float()], 1).view(torch.int32)
        return cls(torch.cat([wide, top_ids.view(torch.int32), numbers], 1))

    @classmethod
    def on_host(cls, rows: int, *, pinned: bool) -> "LogprobTensors":
        """Buffers on the host for `rows` tokens. If they are not pinned, the copy waits for the device."""
        words = torch.empty(rows, 5 + 3 * MOST_ALTERNATIVES, dtype=torch.int32, pin_memory=pinned)
        return cls(words, torch.empty(rows, pin_memory=pinned), torch.empty(rows, dtype=torch.int64, pin_memory=pinned))

    def sent(self, rows: int, room: "LogprobTensors | None" = None) -> "LogprobTensors":
        """Enqueue a copy of the first `rows` entries to the host, into `room` or new memory."""
        pinned = self.words.device.type == "cuda"
        if room is None and not pinned:
            return self
        room = room or LogprobTensors.on_host(rows, pinned=pinned)
        both = zip(room, self)
        sent = (None if host is None or t is None else host[:rows].copy_(t[:rows], non_blocking=True) for host, t in both)
        return LogprobTensors(*sent)  # pyright: ignore[reportArgumentType]

    def columns(self, rows: int) -> LogprobColumns:
        """A copy of the first `rows` entries, without the likeliest tokens. The tensors must have arrived on the host."""
        numbers = np.ascontiguousarray(self.words[:rows, 4 + 2 * MOST_ALTERNATIVES].numpy()).view(np.float32)
        drawn, kept = (None if t is None else t[:rows].numpy().copy() for t in (self.drawn, self.kept))
        return LogprobColumns(numbers, drawn, kept)

    def read(self, wanted: Sequence[int | None]) -> list[TokenLogprobs | None]:
        """As values, with `wanted[i]` likeliest tokens for token i (None: not requested). The tensors must have arrived."""
        found: list[TokenLogprobs | None] = [None] * len(wanted)
        rows = [i for i, n in enumerate(wanted) if n is not None]
        if not rows:
            return found
        most, words = max(n or 0 for n in wanted), np.ascontiguousarray(self.words.numpy()[rows])
        split = 4 + 2 * MOST_ALTERNATIVES
        wide, numbers = words[:, :split].copy().view(np.int64), words[:, split:].copy().view(np.float32)
        ids = wide[:, : 2 + most].tolist()
        drawn = [None] * len(rows) if self.drawn is None else self.drawn[rows].tolist()
        kept = [0] * len(rows) if self.kept is None else self.kept[rows].tolist()
        each = zip(rows, ids, numbers[:, : 1 + most].tolist(), drawn, kept)
        for i, (token, rank, *top_ids), (logprob, *top), draw, keep in each:
            n = wanted[i] or 0
            found[i] = TokenLogprobs(token, logprob, rank, tuple(zip(top_ids[:n], top[:n])), draw, keep)
        return found


def likelihoods(logits: Tensor, token_ids: Tensor, alternatives: Tensor) -> LogprobTensors:
    """Log-probabilities of one token per row of logits [N, V], and of the likeliest tokens; see `Inputs.alternatives`."""
    return LogprobTensors.of(token_ids, *ops.top_logprobs(logits, token_ids, alternatives, MOST_ALTERNATIVES))
