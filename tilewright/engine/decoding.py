"""Decoding requests, which get one token in every step, as arrays by slot: a step with 512 requests needs a few numpy calls.

While a request decodes, its `computed`, `pending` and newest tokens are stored in these arrays, and its attributes read from
them. Python code handles a single request only when it crosses into a new page, gets its first token, fills a page that must be
registered in the prefix cache, or ends. As long as the set of decoding requests stays the same, the list of requests and the
arrays of slots and leases are the same objects in every step. From this a runner knows that only the positions have changed.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tilewright.engine.accepting import Accepted, without
from tilewright.engine.request import Request
from tilewright.engine.step import Grown, Step, StepResult
from tilewright.engine.tails import Tails

__all__ = ["Crossing", "Decoders", "Newest", "Turn"]

_STOPS = 8
"""Stop tokens per request that are compared in numpy; a request with more is checked in Python in each step."""
_NEVER = 1 << 62
_order = attrgetter("order")


class Turn(NamedTuple):
    """The decoding rows of a step, with one entry per row."""

    requests: list[Request]
    slots: np.ndarray
    starts: np.ndarray
    fed: np.ndarray
    drafts: dict[int, tuple[int, ...]]


class Crossing(NamedTuple):
    """Rows of a turn that need one more page of each kind."""

    rows: np.ndarray
    slots: np.ndarray
    requests: list[Request]


class Newest(NamedTuple):
    """The newest tokens of some requests, with one entry for each."""

    counts: list[int]
    """Number of known output tokens; below 0 if the token is not stored here, and must be read from the request."""
    tokens: list[int]
    """The last of them."""


class Decoders:
    """The decoding requests in the order of `Request.order`, and their state in arrays with an entry for each slot.

    Attributes, [max_seqs] int64 unless noted otherwise:
        lease      `Request.lease` of the request that runs in the slot, whether it decodes or not; -1: none
        computed, pending   as in `Request`
        known      number of tokens whose values are known, prompt and output
        left       number of samples that may still be scheduled
        cells      number of tokens that the pages of the block table can hold
        due        the value of `computed` from which on another full page must be registered in the prefix cache
        prompt     number of tokens of the prompt
        stops      [8, max_seqs]: tokens that end the text; unused entries are -1
        many       bool: the request has more stop tokens than fit into `stops`
        fresh      bool: no sample has arrived since the request got this slot
        held       bool: the request speculates: it waits for the samples of its last row before it has another row
    """

    def __init__(self, max_seqs: int, page_size: int, *, registers: bool):
        self._size, self._registers = page_size, registers
        self.lease = np.full(max_seqs, -1, np.int64)
        self.computed, self.pending, self.known, self.left, self.cells, self.due, self.prompt = np.zeros(
            (7, max_seqs), np.int64
        )
        self.stops = np.full((_STOPS, max_seqs), -1, np.int64)
        self._most_stops = 0
        self.many, self.held, self.fresh = np.zeros((3, max_seqs), bool)
        self.tails = Tails(self.known, page_size)
        self.together = False
        """In the next step, all held requests wait, because some of them have samples in flight."""
        self._requests: list[Request] = []
        self._joining: list[Request] = []
        self._stale = False
        self._any_fresh = False
        self._phase = 0
        self._settle(np.zeros(0, np.int64))

    # Members ---------------------------------------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """Add a request. All its tokens are computed or scheduled, except the last, which is known or pending."""
        slot = request.slot
        assert slot is not None
        self.computed[slot], self.pending[slot] = request.computed, request.pending
        self.known[slot], self.prompt[slot] = len(request), len(request.prompt_ids)
        self.left[slot] = request.max_tokens - len(request.output_ids) - request.pending
        self.held[slot], self.fresh[slot], self._any_fresh = False, True, True
        stops = list(request.stop_ids)
        self.many[slot] = len(stops) > _STOPS
        self._most_stops = max(self._most_stops, min(len(stops), _STOPS))
        self.stops[:, slot] = -1
        self.stops[: len(stops), slot] = stops[:_STOPS]
        self.grown(request)
        self.registered(request)
        self.tails.begin(slot, request)
        request.decoders = self
        self._joining.append(request)

    def leave(self, request: Request) -> None:
        """A running request gives up its slot, whether it decodes or not."""
        assert request.slot is not None
        self.lease[request.slot] = -1
        if request.decoders is not None:
            computed, pending = request.computed, request.pending
            self.tails.end(request.slot)
            request.decoders = None
            request.computed, request.pending = computed, pending
            self._stale = True

    def flush(self, request: Request) -> None:
        """Give a request its newest tokens."""
        assert request.slot is not None
        self.tails.flush(request.slot, request)

    def newest(self, slots: np.ndarray, leases: np.ndarray) -> Newest:
        """The newest tokens of requests that decode, or have decoded, in `slots` with these leases."""
        here = (self.lease.take(slots) == leases) & self.tails.has_newest(slots)
        counts = np.where(here, self.known.take(slots) - self.prompt.take(slots), -1)
        return Newest(counts.tolist(), self.tails.newest(slots).tolist())

    def grown(self, request: Request) -> None:
        """Note that a request has got more pages."""
        self._quiet = False
        self.cells[request.slot] = len(request.pages) * self._size
        self._cells = self._pages = self._grown = self._crossings = None

    def registered(self, request: Request) -> None:
        """Note that more pages of a request have been registered in the prefix cache."""
        self.due[request.slot] = (request.registered + 1) * self._size if self._registers else _NEVER

    def _tidy(self) -> None:
        requests, slots = self._requests, self._slots
        if self._stale:
            stays = self.lease[slots] == self._leases
            requests, slots = without(requests, stays), slots[stays]
        new = [request for request in self._joining if request.decoders is self and self.lease[request.slot] == request.lease]
        if new:
            new.sort(key=_order)
            later = not requests or requests[-1].order < new[0].order
            requests = requests + new  # never in place: a step may hold the list
            if later:
                slots = np.concatenate((slots, np.array([request.slot for request in new], np.int64)))
            else:  # rare: a short prompt may overtake a long one
                requests.sort(key=_order)
                slots = np.array([request.slot for request in requests], np.int64)
        self._requests, self._stale, self._joining = requests, False, []
        self._settle(slots)

    def _settle(self, slots: np.ndarray) -> None:
        """Set the slots of the decoding requests, in the order of `_requests`, and everything that depends only on them."""
        self._slots, self._leases = slots, self.lease[slots]
        self._ones = np.ones(slots.size, np.int64)
        self._turns = np.zeros(self.lease.size, np.int64)  # 1 in their slots: added to arrays of all slots without indices
        self._turns[slots] = 1
        self._ends = self.stops[: self._most_stops, slots]
        self._many = bool(self.many[slots].any())
        self._sure = 0  # number of next steps in which all of them are known to have a row
        self._all_fed = np.ones(slots.size, bool)
        self._unknown()

    def _unknown(self) -> None:
        """Forget the cached values: the arrays were changed by something other than a step in which all have a row."""
        self._starts: np.ndarray | None = None  # by row, of the next step; the same for the following
        self._last_starts: np.ndarray | None = None  # `starts` of the step before
        self._places: np.ndarray | None = None  # of the next tokens, in `tails`
        self._cells: np.ndarray | None = None
        self._pages: np.ndarray | None = None
        self._grown: Grown | None = None
        self._crossings: list[Crossing] | None = None  # of the next steps, cyclic, beginning at `_phase`
        self._quiet = False  # in the last step all of them had a row
        self._unseen = False  # full pages have not been looked for since that step
        self._ahead = 0  # each of them has at least this many pending samples

    # A step ----------------------------------------------------------------------------------------------------------

    def members(self) -> tuple[list[Request], np.ndarray]:
        """(the requests that decode, their slots)"""
        if self._stale or self._joining:
            self._tidy()
        return self._requests, self._slots

    def turn(self) -> tuple[Turn, Crossing]:
        """The decoding rows of the next step, and those of them that need one more page."""
        requests, slots = self.members()
        if self.together or self._sure <= 0:
            left = self.left.take(slots)
            goes = left > 0
            if self.together:
                goes &= ~self.held.take(slots)
            if not goes.all():
                requests, slots = without(requests, goes), slots[goes]
            elif not self.together and slots.size:
                self._sure = int(left.min())
        if slots is not self._slots:
            starts, fed = self.computed.take(slots), self.pending.take(slots) > 0
            return Turn(requests, slots, starts, fed, {}), self._crossing(requests, slots, starts, self.cells.take(slots))
        if self._starts is None:
            self._starts = self.computed.take(slots)
        if self._ahead:
            fed = self._all_fed
        else:
            pending = self.pending.take(slots)
            fed, self._ahead = pending > 0, int(pending.min(initial=0))
        turn = Turn(requests, slots, self._starts, fed, {})
        if self._crossings is not None:
            return turn, self._crossings[self._phase]
        if self._cells is None:
            self._cells = self.cells.take(slots)
        return turn, self._crossing(requests, slots, self._starts, self._cells)

    def _crossing(self, requests: list[Request], slots: np.ndarray, starts: np.ndarray, cells: np.ndarray) -> Crossing:
        rows = (starts >= cells).nonzero()[0]
        return Crossing(rows, slots[rows], [requests[i] for i in rows.tolist()])

    def crossed(self, turn: Turn, crossing: Crossing, pages: Sequence[Sequence[int]]) -> None:
        """Note that the crossing requests have got one more page of each kind."""
        rows = crossing.rows
        self.cells[crossing.slots] += self._size
        if turn.slots is self._slots:
            if self._cells is not None:
                self._cells[rows] += self._size
            if self._pages is not None:
                before, self._pages = self._pages, self._pages.copy()  # a step holds the old array
                self._pages[rows] += 1
                self._grown = Grown(before, rows, np.array(pages, np.int32))

    def book(self, turn: Turn) -> None:
        """Update the counts as if the rows of a turn had run."""
        if turn.slots is self._slots:
            self.computed += self._turns
            self.pending += self._turns
            self.left -= self._turns
            self._sure -= 1
            self._ahead += 1
            self._starts = turn.starts + 1 if turn.starts is self._starts else None
            if self._crossings is not None:
                self._phase = (self._phase + 1) % self._size
            elif self._quiet and self._starts is not None:
                self._foresee(self._starts)
            self._quiet = self._unseen = True
        else:
            self.computed[turn.slots] += 1
            self.pending[turn.slots] += 1
            self.left[turn.slots] -= 1
            self._sure = 0
            self._unknown()

    def _foresee(self, starts: np.ndarray) -> None:
        """Compute in which of the next `page_size` steps each row crosses into a new page. This repeats as long as the set of
        decoding requests stays the same. A row that crosses in the next step has also filled a page for the prefix cache."""
        cells = self.cells.take(self._slots)
        room = cells - starts
        if not room.size or room.max() >= self._size or (self._registers and (self.due.take(self._slots) != cells).any()):
            return
        order = room.argsort(kind="stable")
        bounds = np.searchsorted(room[order], np.arange(self._size + 1))
        parts = [order[begin:end] for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist())]
        self._crossings = [Crossing(rows, self._slots[rows], [self._requests[i] for i in rows.tolist()]) for rows in parts]
        self._phase, self._cells = 0, None

    def booked(self, requests: list[Request]) -> Turn:
        """The turn of these requests, after `book`."""
        slots = np.array([request.slot for request in requests], np.int64)
        turn = Turn(requests, slots, self.computed[slots], self.pending[slots] > 0, {})
        self.book(turn)
        return turn

    def add_drafts(self, turn: Turn, drafts: Mapping[Request, Sequence[int]], room: int) -> int:
        """Add drafts to a booked turn, within `room` in total and within the pages and `max_tokens` of each request. Returns
        their number. Drafts end before a stop token. Drafts of a request that has no row or a fed row are dropped."""
        rows = {request: i for i, request in enumerate(turn.requests) if request in drafts}
        before = room
        for request, i in rows.items():
            slot = request.slot
            count = int(min(room, self.left[slot], self.cells[slot] - self.computed[slot]))
            stops = request.stop_ids
            found = tuple(takewhile(lambda token, stops=stops: token not in stops, drafts[request][: max(0, count)]))
            if found and not turn.fed[i]:
                turn.drafts[i] = found
                room -= len(found)
        return before - room

    def step(self, turn: Turn) -> Step:
        """A step that contains only a turn."""
        slots = turn.slots
        if slots is self._slots and not turn.drafts:
            if self._pages is None:
                self._pages, self._grown = self.cells.take(slots) // self._size, None
            after, self._last_starts = self._last_starts, turn.starts
            return Step(
                turn.requests, slots, turn.starts, self._ones, self._ones, turn.fed, self._leases, self._pages,
                after=after, grown=self._grown,
            )  # fmt: skip
        self._unknown()
        pages = self.cells.take(slots) // self._size
        counts = np.ones(slots.size, np.int64)
        for i, drafts in turn.drafts.items():
            counts[i] += len(drafts)
        return Step(turn.requests, slots, turn.starts, counts, counts, turn.fed, self.lease[slots], pages, turn.drafts)

    def goes(self, request: Request) -> bool:
        """Whether a request wants a row in the next step."""
        return bool(self.left[request.slot] > 0 and not (self.held[request.slot] and self.together))

    def take(self, step: Step, result: StepResult) -> np.ndarray | None:
        """Store the samples of a step, which are then no longer pending. Returns bool [rows]: whether the row has samples and
        its request is still in its slot. None: true for all rows."""
        counts, tokens = result.counts, result.tokens
        if self.tails.make_room(int(counts.max(initial=1)) if step.drafts else 1):
            self._places = None
        if step.slots is self._slots and not step.drafts and not self._stale:
            if self._places is None:
                self._places = self.tails.places(self._slots)
            self.tails.put(self._places, tokens)
            self._places += 1
            self.pending -= self._turns
            self.known += self._turns
            self._ahead = max(0, self._ahead - 1)
            return None
        self._unknown()
        here = (self.lease[step.slots] == step.leases) & (step.samples > 0)
        slots, came = (step.slots, counts) if here.all() else (step.slots[here], counts[here])
        places = self.tails.places(slots)
        if step.drafts:
            places = np.repeat(places - np.cumsum(came) + came, came) + np.arange(came.sum())
            self.computed[slots] += came - 1
            self.left[slots] -= came - 1
            self._sure = 0
        self.tails.put(places, tokens if slots is step.slots else tokens[np.repeat(here, counts)])
        self.pending[slots] -= 1
        self.known[slots] += came
        return here

    def eventful(self, accepted: Accepted) -> tuple[list[int], Crossing | None]:
        """(indices of the requests that need individual handling, the requests that have only filled a page)"""
        slots, ids = accepted.slots, accepted.ids
        same = slots is self._slots and accepted.here is None
        found: np.ndarray | None = None
        last = ids
        if ids.size != slots.size:
            last, found = ids[np.cumsum(accepted.counts) - 1], accepted.counts > 1
        asked = [stops == last for stops in (self._ends if same else self.stops[: self._most_stops, slots])]
        if self._any_fresh:
            asked.append(self.fresh.take(slots))
            self.fresh[slots if accepted.here is None else slots[accepted.here]] = False
            self._any_fresh = bool(np.count_nonzero(self.fresh))
        if self._many or not same:
            asked.append(self.many.take(slots))
        if self._sure <= 0 or not same:
            asked.append((self.left.take(slots) <= 0) & (self.pending.take(slots) == 0))
        if accepted.here is not None:
            asked.append(~accepted.here)  # other requests may have their slots now
        for mask in asked:
            if np.count_nonzero(mask):
                found = mask if found is None else found | mask
        if same and self._crossings is not None and self._unseen:
            full = self._crossings[self._phase] if self._registers else None
        else:
            mask = self.computed.take(slots) >= self.due.take(slots)
            full = self._only(accepted, mask) if np.count_nonzero(mask) else None
        self._unseen = False
        if found is None:
            return [], full
        if full is not None and np.count_nonzero(found[full.rows]):
            mask = np.zeros(slots.size, bool)
            mask[full.rows] = True
            full = self._only(accepted, mask & ~found)
        return found.nonzero()[0].tolist(), full

    def _only(self, accepted: Accepted, mask: np.ndarray) -> Crossing:
        rows = mask.nonzero()[0]
        return Crossing(rows, accepted.slots[rows], [accepted.requests[i] for i in rows.tolist()])

    def filled(self, slots: np.ndarray) -> bytes | None:
        """The tokens of the page that has become full in each of these slots, as native int64; the page counts as registered
        from now on. None: the tokens are not all here, and must be read from the requests."""
        due = self.due.take(slots)
        self.due[slots] = due + self._size
        return self.tails.pages(slots, due - self._size)
