"""Requests that decode, a token each in every step, as arrays by slot: a step of 512 of them is a few calls of numpy.

While a request is here its `computed` and `pending` live in these arrays, and it reads through to them. Python looks at a
single one only when something happens to it: it crosses into a new page, gets its first token, fills a page that the prefix
cache wants to know, or ends.
"""

from collections.abc import Mapping, Sequence
from itertools import compress, takewhile
from typing import NamedTuple

import numpy as np

from tilewright.engine.accepting import Accepted
from tilewright.engine.request import Request
from tilewright.engine.step import Step

__all__ = ["Decoders", "Turn"]

_STOPS = 8
"""Stop tokens of a request that are compared in numpy; one with more is looked at in each step."""
_NEVER = 1 << 62


class Turn(NamedTuple):
    """The rows of a step that decode, with an entry a row."""

    requests: list[Request]
    slots: np.ndarray
    starts: np.ndarray
    fed: np.ndarray
    drafts: dict[int, tuple[int, ...]]


class Decoders:
    """Arrays by slot of `max_seqs` slots, and the requests that decode, by `Request.order`.

    Attributes, all [max_seqs] int64 where nothing else is said:
        lease      `Request.lease` of who runs in the slot, whether it decodes or not; -1: nobody
        computed, pending   as in `Request`
        known      tokens whose values are known, prompt and output
        left       samples that may still be asked for
        cells      tokens that the pages of the block table hold
        due        `computed` from which on the prefix cache wants to know of a full page
        prompt     tokens of the prompt
        stops      [8, max_seqs]: tokens that end the text, else -1
        many       bool: there are more of these
        held       bool: it speculates: it waits for the samples of its last row before it has another
    """

    def __init__(self, max_seqs: int, page_size: int, *, registers: bool):
        self._size, self._registers = page_size, registers
        self.lease = np.full(max_seqs, -1, np.int64)
        self.computed, self.pending, self.known, self.left, self.cells, self.due, self.prompt = np.zeros(
            (7, max_seqs), np.int64
        )
        self.stops = np.full((_STOPS, max_seqs), -1, np.int64)
        self._most_stops = 0
        self.many, self.held = np.zeros((2, max_seqs), bool)
        self.together = False
        """Those that are held wait in the next step, for the samples that some of them have in flight."""
        self._requests: list[Request] = []
        self._slots = self._leases = np.zeros(0, np.int64)
        self._joining: list[Request] = []
        self._stale = False

    # Who is here -----------------------------------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """A request whose tokens are all computed or booked, but for the last, known or pending."""
        slot = request.slot
        assert slot is not None
        self.computed[slot], self.pending[slot] = request.computed, request.pending
        self.known[slot], self.prompt[slot] = len(request), len(request.prompt_ids)
        self.left[slot] = request.max_tokens - len(request.output_ids) - request.pending
        self.held[slot] = False
        stops = list(request.stop_ids)
        self.many[slot] = len(stops) > _STOPS
        self._most_stops = max(self._most_stops, min(len(stops), _STOPS))
        self.stops[:, slot] = -1
        self.stops[: len(stops), slot] = stops[:_STOPS]
        self.grown(request)
        self.registered(request)
        request.decoders = self
        self._joining.append(request)

    def leave(self, request: Request) -> None:
        """A request gives up its slot; it may not be here."""
        self.lease[request.slot] = -1
        if request.decoders is not None:
            computed, pending = request.computed, request.pending
            request.decoders = None
            request.computed, request.pending = computed, pending
            self._stale = True

    def grown(self, request: Request) -> None:
        """A request has more pages than before."""
        self.cells[request.slot] = len(request.pages) * self._size

    def registered(self, request: Request) -> None:
        """The prefix cache knows of more pages of a request than before."""
        self.due[request.slot] = (request.registered + 1) * self._size if self._registers else _NEVER

    def _tidy(self) -> None:
        if self._stale:
            stays = self.lease[self._slots] == self._leases
            self._requests = list(compress(self._requests, stays.tolist()))
            self._slots, self._leases = self._slots[stays], self._leases[stays]
            self._stale = False
        if self._joining:
            new = [
                request for request in self._joining if request.decoders is self and self.lease[request.slot] == request.lease
            ]
            # Never in place: a step may hold the list. Seldom out of order: a short prompt may overtake a long one.
            self._requests = sorted(self._requests + new, key=lambda request: request.order)
            self._slots = np.array([request.slot for request in self._requests], np.int64)
            self._leases = self.lease[self._slots]
            self._joining = []

    # A step ----------------------------------------------------------------------------------------------------------

    def members(self) -> tuple[list[Request], np.ndarray]:
        """(the requests that decode, their slots)"""
        if self._stale or self._joining:
            self._tidy()
        return self._requests, self._slots

    def turn(self) -> tuple[Turn, np.ndarray]:
        """Who decodes in the next step, and which of the rows, by their indices, need one more page."""
        requests, slots = self.members()
        goes = self.left[slots] > 0
        if self.together:
            goes &= ~self.held[slots]
        if not goes.all():
            requests, slots = list(compress(requests, goes.tolist())), slots[goes]
        starts = self.computed[slots]
        turn = Turn(requests, slots, starts, self.pending[slots] > 0, {})
        return turn, np.flatnonzero(starts >= self.cells[slots])

    def book(self, turn: Turn) -> None:
        """The rows of a turn are launched."""
        self.computed[turn.slots] += 1
        self.pending[turn.slots] += 1
        self.left[turn.slots] -= 1

    def booked(self, requests: list[Request]) -> Turn:
        """The turn of these requests, launched."""
        slots = np.array([request.slot for request in requests], np.int64)
        turn = Turn(requests, slots, self.computed[slots], self.pending[slots] > 0, {})
        self.book(turn)
        return turn

    def add_drafts(self, turn: Turn, drafts: Mapping[Request, Sequence[int]], room: int) -> int:
        """Put drafts into a turn that is booked, as far as `room` goes, and for each request its pages and `max_tokens`;
        returns how many. There is none behind a stop token. Those of a request that has no row, or is fed, are dropped."""
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
        """A step of a turn alone."""
        slots = turn.slots
        counts = np.ones(slots.size, np.int64)
        for i, drafts in turn.drafts.items():
            counts[i] += len(drafts)
        return Step(
            turn.requests, slots, turn.starts, counts, counts, turn.fed, self.lease[slots], self.cells[slots] // self._size,
            turn.drafts,
        )  # fmt: skip

    def goes(self, request: Request) -> bool:
        """Whether a request has a row in the next step, as far as it is up to it."""
        return bool(self.left[request.slot] > 0 and not (self.held[request.slot] and self.together))

    def take(self, step: Step, counts: np.ndarray) -> np.ndarray:
        """Which rows of a step brought samples to a request that is still here. These rows are pending no more."""
        here = (self.lease[step.slots] == step.leases) & (step.samples > 0)
        slots, more = (step.slots, counts - 1) if here.all() else (step.slots[here], counts[here] - 1)
        self.pending[slots] -= 1
        self.known[slots] += more + 1
        self.computed[slots] += more
        self.left[slots] -= more
        return here

    def eventful(self, accepted: Accepted) -> tuple[list[int], list[int]]:
        """Indices of the requests at which somebody has to look, and of those that have filled a page and nothing else."""
        slots = accepted.slots
        single = accepted.ids.size == slots.size
        last = accepted.ids if single else accepted.ids[np.cumsum(accepted.counts) - 1]
        found = self.known[slots] == self.prompt[slots] + 1
        if not single:
            found |= accepted.counts > 1
        for stops in self.stops[: self._most_stops]:
            found |= stops[slots] == last
        found |= self.many[slots]
        found |= (self.left[slots] <= 0) & (self.pending[slots] == 0)
        found |= ~accepted.here  # their slots are others' now
        full = (self.computed[slots] >= self.due[slots]) & ~found
        return np.flatnonzero(found).tolist(), np.flatnonzero(full).tolist()
