"""From a step to the model's inputs: one packed buffer on the host (layout.py), one copy, and views of it on the device.

A step in which each row has one token is not packed: `Packer.changes` returns only what the device does not know yet.

    # T tokens, B sequences, R sampled rows, W pages in the longest block table

The rows of the batch are the step's rows in the same order. If the host does not know a token yet, because it is a sample of
the step before, `feed` contains the slot that will hold it, and the device fills it in.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tilewright.engine.layout import PLACES
from tilewright.engine.request import Request
from tilewright.engine.step import HOST_ERRORS, RowFault, Step

__all__ = ["LINE_WORDS", "Changes", "Packer"]


LINE_WORDS = 5
"""int64 words of a slot's line; see `ops.decode_inputs`."""
TILE_TOKENS = 16
"""The most tokens of a tile of `Batch.adapters`, as in `ops.adapter_order`."""


class Changes(NamedTuple):
    """What the device does not know yet about the slots of a step; every part may be empty."""

    line_slots: np.ndarray
    lines: np.ndarray
    """[N] and [N, 5] int64: changed lines of `ops.decode_inputs`."""
    fed_slots: np.ndarray
    fed: np.ndarray
    """[M] int64: slots, and their newest tokens, which the device has not sampled in the step before."""
    cells: np.ndarray
    """[1 + kinds, L] int32: indices into the flattened block table of all slots, then the new pages there for each kind."""


_NONE = np.zeros(0, np.int64)


class Packer:
    """Fills the host's arrays for a step. Stores, by slot, the values that do not change from step to step.

    `always_adapted`: every step uses adapters, even if no row has one. `kinds`: see `Layout`. `place` is called with each
    request that is new in its slot since the step before. If the numbers of a request cause an error, `RowFault` names the
    request, and nothing has been sent to the device.
    """

    def __init__(
        self, *, page_size: int, max_seqs: int, max_pages: int, place: Callable[[Request], None] = lambda request: None,
        always_adapted: bool = False, kinds: int = 1,
    ):  # fmt: skip
        self.page_size, self.kinds = page_size, kinds
        self._place, self._always_adapted = place, always_adapted
        self.padding_slot = max_seqs
        self.tables = np.zeros((kinds, max_seqs, max_pages), np.int32)
        self._leases, self._held = np.full(max_seqs, -2, np.int64), np.zeros(max_seqs, np.int64)
        self._seen = self._seen_pages = np.zeros(0, np.int64)  # `leases` and `pages` of the step before
        # One line per slot, plus one for padding (greedy, everything off), in the format of `ops.decode_inputs`.
        self.lines = np.zeros((max_seqs + 1, LINE_WORDS), np.int64)
        halves = self.lines.view(np.int32)
        floats = halves.view(np.float32)
        self._computed, self._seed = self.lines[:, 0], self.lines[:, 1]
        self._temperature, self._top_k, self._top_p, self._min_p = floats[:, 4], halves[:, 5], floats[:, 6], floats[:, 7]
        self._alternatives = halves[:, 8]
        self._top_p[:], self._alternatives[:] = 1, -1
        # What the device has: whether a slot's line is still unsent, and how many pages of each table were sent.
        self._unsent, self._sent = np.zeros(max_seqs, bool), np.zeros(max_seqs, np.int64)
        self._news: list[tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None
        """Unsent changes: slots that have got one page each, the index in their tables, and the pages [kinds, slots]. None:
        there are other changes."""
        self._no_cells = np.zeros((1 + kinds, 0), np.int32)
        self._any_unsent = self._any_explained = False
        self._row_starts: np.ndarray | None = None  # of the step before; the same for the following
        self._row_slots, self._moves = _NONE, np.zeros(max_seqs + 1, np.int64)  # slots; 1 for each slot with a row
        self._explains = np.zeros(max_seqs, bool)
        self._adapter = np.zeros(max_seqs + 1, np.int32)

    def refresh(self, step: Step) -> None:
        """Update the tables and parameters of the step's slots.

        Raises:
            RowFault: those of one request cannot be written.
        """
        same = step.leases is self._seen  # the same requests in the same slots
        if same and (step.pages is self._seen_pages or self._grow_as_listed(step)):
            self._seen_pages = step.pages
            return
        held = self._held.take(step.slots)
        others = step.pages != held
        moved = None
        if not same:
            moved = self._leases.take(step.slots) != step.leases
            others |= moved
        rows = others.nonzero()[0]
        if rows.size:
            new = np.zeros(rows.size, bool) if moved is None else moved[rows]
            grown = step.pages[rows] == held[rows] + 1
            if moved is not None:
                grown &= ~new
            whole = bool(grown.all())
            if self._grow(step, rows if whole else rows[grown]):
                rows, new = (_NONE, _NONE) if whole else (rows[~grown], new[~grown])
            if rows.size:
                self._refresh(step, rows, held[rows], new)
        self._seen, self._seen_pages = step.leases, step.pages

    def _grow_as_listed(self, step: Step) -> bool:
        """Write the new pages that the step lists in `grown`. Returns whether this was possible."""
        grown = step.grown
        if grown is None or grown.before is not self._seen_pages or grown.pages.shape[0] != self.kinds:
            return False
        return self._write_pages(step.slots[grown.rows], grown.pages)

    def _grow(self, step: Step, rows: np.ndarray) -> bool:
        """Write the new pages of requests that have got one page each, the usual case. Returns whether this was possible."""
        if not rows.size:
            return True
        requests = [step.requests[i] for i in rows.tolist()]
        try:
            pages = [[request.pages[-1] for request in requests]]
            if self.kinds > 1:
                pages.append([request.window_pages[-1] for request in requests])
            numbers = np.array(pages, np.int32)
        except HOST_ERRORS:
            return False  # then the requests are handled one by one, to find the wrong one
        return self._write_pages(step.slots[rows], numbers)

    def _write_pages(self, slots: np.ndarray, pages: np.ndarray) -> bool:
        place = self._held[slots]
        try:
            self.tables[:, slots, place] = pages
        except HOST_ERRORS:
            return False  # as above
        if self._news is not None:
            self._news.append((slots, place, pages))
        self._held[slots] = place + 1
        return True

    def _refresh(self, step: Step, rows: np.ndarray, held: np.ndarray, moved: np.ndarray) -> None:
        self._news = None
        slots = step.slots[rows].tolist()
        for i, slot, had, new in zip(rows.tolist(), slots, held.tolist(), moved.tolist()):
            request, first = step.requests[i], 0 if new else had
            pages = request.pages
            try:
                if new:
                    self._arrive(slot, request)
                self.tables[0, slot, first : len(pages)] = pages[first:]
                if self.kinds > 1:
                    self.tables[1, slot, first : len(pages)] = request.window_pages[first:]
            except HOST_ERRORS as error:
                raise RowFault(request, error) from error
            self._leases[slot], self._held[slot] = step.leases[i], len(pages)

    def _arrive(self, slot: int, request: Request) -> None:
        s = request.settings
        self._temperature[slot], self._top_k[slot], self._top_p[slot] = s.temperature, s.top_k, s.top_p
        self._min_p[slot], self._seed[slot] = s.min_p, request.seed
        self._alternatives[slot] = -1 if request.params.logprobs is None else request.params.logprobs
        self._explains[slot] = request.params.prompt_logprobs is not None
        self._any_explained |= bool(self._alternatives[slot] >= 0)
        self._adapter[slot] = request.adapter
        self._unsent[slot], self._any_unsent, self._sent[slot] = True, True, 0
        self._place(request)

    def longest(self, step: Step) -> int:
        """Number of pages of the longest block table of a step."""
        return max(1, int(step.pages.max(initial=1)))

    def changes(self, step: Step) -> Changes:
        """What the device must receive before it derives a step with one token per row. Call it once per step, after `refresh`.
        Afterwards the changes count as sent.

        Raises:
            RowFault: the newest token of a request is not valid.
        """
        slots = step.slots
        unfed = _NONE if np.count_nonzero(step.fed) == slots.size else (~step.fed).nonzero()[0]
        fed = self._newest(step, unfed) if unfed.size else _NONE
        at, lines, cells = _NONE, _NONE, self._cells()
        if self._any_unsent or step.after is None or step.after is not self._row_starts:
            wrong = self._computed.take(slots) != step.starts
            if self._any_unsent:
                wrong |= self._unsent.take(slots)
            if np.count_nonzero(wrong):
                at = slots[wrong]
                self._computed[at], self._unsent[at] = step.starts[wrong], False
                self._any_unsent = bool(self._unsent.any())
                lines = self.lines[at]
        self._row_starts = step.starts
        if slots is not self._row_slots:
            self._row_slots, self._moves = slots, np.zeros(self.lines.shape[0], np.int64)
            self._moves[slots] = 1
        self._computed += self._moves
        return Changes(at, lines, slots[unfed] if unfed.size else _NONE, fed, cells)

    def _cells(self) -> np.ndarray:
        """The unsent pages of all slots, as `Changes.cells`."""
        news, self._news = self._news, []
        if news is not None and not news:
            return self._no_cells
        if news is not None and len(news) == 1:  # the usual case: one more page for each of some slots
            ((slots, place, pages),) = news
            self._sent[slots] = place + 1
            cells = np.empty((1 + self.kinds, slots.size), np.int32)
            cells[0], cells[1:] = slots * self.tables.shape[2] + place, pages
            return cells
        slots = (self._held > self._sent).nonzero()[0]
        place, more = self._sent[slots], self._held[slots] - self._sent[slots]
        owner = slots
        if slots.size and more.max() > 1:
            owner = np.repeat(slots, more)
            place = np.repeat(place - np.cumsum(more) + more, more) + np.arange(owner.size)
        cells = np.empty((1 + self.kinds, owner.size), np.int32)
        cells[0], cells[1:] = owner * self.tables.shape[2] + place, self.tables[:, owner, place]
        self._sent[slots] += more
        return cells

    def _newest(self, step: Step, rows: np.ndarray) -> np.ndarray:
        tokens = np.zeros(rows.size, np.int64)
        for at, i in enumerate(rows.tolist()):
            request = step.requests[i]
            try:
                (tokens[at],) = request.tokens(int(step.starts[i]), int(step.starts[i]) + 1)
            except HOST_ERRORS as error:
                raise RowFault(request, error) from error
        return tokens

    def adapters(self, slots: np.ndarray) -> np.ndarray:
        """int32 [4 rows], as `Batch.adapters`, for rows of one token in these slots."""
        out = np.zeros(4 * slots.size, np.int32)
        self._fill_adapters(out, slice(slots.size), slots)
        return out

    def adapted(self, step: Step) -> bool:
        """Whether the step uses adapters, because a row has one. Call it after `refresh`."""
        return self._always_adapted or bool(self._adapter[step.slots].any())

    def explained(self, step: Step) -> bool:
        """Whether any row of a step requests log-probabilities of its samples."""
        return self._any_explained and bool((self._alternatives[step.slots[step.samples > 0]] >= 0).any())

    def prompts_explained(self, step: Step) -> bool:
        """Whether any row of a step requests log-probabilities of its prompt."""
        return bool(self._explains[step.slots].any())

    def fill(self, out: dict[str, np.ndarray], step: Step, each: int | None = None) -> None:
        """Write a step into host arrays. These may be longer than the step; the rest becomes padding rows with one token each.
        With `each` (see `Layout`), each row has room for `each` tokens, and padding also follows the tokens of each row."""
        if each is not None:
            self._fill_apart(out, step, each)
            return
        slot, start, count = step.slots, step.starts, step.counts
        ends, seqs = np.cumsum(count), slot.size
        tokens = int(ends[-1])
        out["cu_q"][0] = 0
        out["cu_q"][1 : seqs + 1] = ends
        if seqs < out["kv_lens"].size:  # in a captured step with prompts, the last row contains the rest of the padding
            room = out["positions"].size
            out["cu_q"][seqs + 1 :] = np.minimum(np.arange(tokens + 1, tokens + 1 + out["kv_lens"].size - seqs), room)
            out["cu_q"][-1] = room
        out["kv_lens"][:seqs] = start + count
        out["kv_lens"][seqs:] = 0
        if tokens == seqs:
            position, owner = start, slot
        else:
            position = np.arange(tokens) + np.repeat(start - (ends - count), count)
            owner = np.repeat(slot, count)
        out["positions"][:tokens] = position
        out["positions"][tokens:] = 0
        page, offset = self._place_of(position)
        for kind, name in enumerate(PLACES[: self.kinds]):
            out[name][:tokens] = self.tables[kind, owner, page].astype(np.int64) * self.page_size + offset
            out[name][tokens:] = -1
        self._fill_adapters(out["adapters"], slice(tokens), owner)
        self._fill_tokens(out, step, ends)
        self._fill_sampled(out, step, ends)

    def _place_of(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index in a block table, offset in the page). Bit operations, for page sizes that are powers of two, take a third of
        the time."""
        size = self.page_size
        if size & (size - 1):
            return np.divmod(position, size)
        return position >> (size.bit_length() - 1), position & (size - 1)

    def _fill_apart(self, out: dict[str, np.ndarray], step: Step, each: int) -> None:
        """`fill` with `each`. The last tokens of a row may be padding: they are not written, and no other token sees them."""
        slot, start, count = step.slots, step.starts, step.counts
        seqs, begins = slot.size, np.arange(slot.size) * each
        out["cu_q"][:] = np.arange(out["cu_q"].size) * each
        out["kv_lens"][:seqs] = start + each
        out["kv_lens"][seqs:] = 0
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        where, position = np.repeat(begins, count) + offset, np.repeat(start, count) + offset
        page, cell = self._place_of(position)
        out["positions"].fill(0)
        out["positions"][where] = position
        for kind, name in enumerate(PLACES[: self.kinds]):
            out[name].fill(-1)
            out[name][where] = self.tables[kind, np.repeat(slot, count), page].astype(np.int64) * self.page_size + cell
        self._fill_adapters(out["adapters"], where, np.repeat(slot, count))
        self._fill_tokens(out, step, begins + count)
        self._fill_sampled(out, step, begins + count)

    def _fill_adapters(self, out: np.ndarray, where: Any, owner: np.ndarray) -> None:
        """Write `Batch.adapters`; padding has adapter 0. where: indices of the tokens whose slots are `owner`."""
        if not (self._always_adapted or self._adapter.any()):
            return
        ids = np.zeros(out.size // 4, np.int32)
        ids[where] = self._adapter[owner]
        order = np.argsort(ids, kind="stable")
        ids, places = ids[order], np.arange(ids.size)
        first = np.diff(ids, prepend=-1) != 0
        starts = np.flatnonzero((places - np.maximum.accumulate(np.where(first, places, 0))) % TILE_TOKENS == 0)
        tokens, adapters, begins, numbers = out.reshape(4, -1)
        tokens[:], adapters[:] = order, ids
        begins[: starts.size], begins[starts.size :] = starts, ids.size
        numbers[: starts.size], numbers[starts.size :] = ids[starts], 0

    def _fill_tokens(self, out: dict[str, np.ndarray], step: Step, ends: np.ndarray) -> None:
        ids, feed, fed = out["token_ids"], out["feed"], step.fed
        ids.fill(0)
        feed.fill(-1)
        feed[ends[fed] - 1] = step.slots[fed]
        for i in np.flatnonzero(step.counts > fed).tolist():
            request, start, drafts = step.requests[i], int(step.starts[i]), step.drafts.get(i, ())
            first, end = int(ends[i] - step.counts[i]), int(ends[i]) - len(drafts)
            known = end - first - int(fed[i])
            try:
                ids[first : first + known] = request.tokens(start, start + known)
                ids[end : end + len(drafts)] = drafts
            except HOST_ERRORS as error:
                raise RowFault(request, error) from error

    def _fill_sampled(self, out: dict[str, np.ndarray], step: Step, ends: np.ndarray) -> None:
        """Write the arrays of sampled rows. Several samples of one row are consecutive, in the order of its tokens."""
        slot, at, lens = step.slots, ends - 1, step.starts + step.counts
        if step.drafts:
            samples = step.samples
            back = np.repeat(np.cumsum(samples), samples) - 1 - np.arange(samples.sum())
            slot, at, lens = (np.repeat(part, samples) for part in (slot, at, lens))
            at, lens = at - back, lens - back
        elif not step.samples.all():
            chosen = np.flatnonzero(step.samples)
            slot, at, lens = slot[chosen], at[chosen], lens[chosen]
        n = slot.size
        lines = np.full(out["sampled_slots"].size, self.padding_slot, np.int64)
        lines[:n] = slot
        out["sampled_slots"][:] = lines
        out["logits_rows"][:n] = at
        out["logits_rows"][n:] = 0
        out["sampled_at"][:n] = lens
        out["sampled_at"][n:] = 0
        out["temperature"][:] = self._temperature[lines]
        out["top_k"][:], out["top_p"][:] = self._top_k[lines], self._top_p[lines]
        out["min_p"][:], out["seed"][:] = self._min_p[lines], self._seed[lines]
        out["alternatives"][:] = self._alternatives[lines]
