"""The newest tokens of the requests that decode, as one array by slot: a step of 512 of them is one write of numpy.

A request gets its tokens when somebody asks for them (`Request.output_ids`), when its line is full, and when it leaves its
slot. Lines begin with a page, so that the tokens of a page that has become full lie side by side, ready to be hashed.
"""

import numpy as np

from tilewright.engine.request import Request

__all__ = ["Tails"]

_ROOM = 512
"""Tokens that a line takes beside a page before it is emptied; no row of a step brings as many."""
_SPREAD = 32
"""Tokens more, so that lines that are full at the same time are not all emptied in the same step."""


class Tails:
    """A line of tokens for each slot: those at positions [`first`, `known`) of its request, `known` being `Decoders.known`."""

    def __init__(self, known: np.ndarray, page_size: int):
        self._known, self._page = known, page_size
        self._width = (1 + -(-(_ROOM + _SPREAD) // page_size)) * page_size
        self._tokens = np.zeros((known.size, self._width), np.int64)
        self._flat, self._pages = self._tokens.reshape(-1), self._tokens.reshape(-1, page_size)
        self._begins = np.arange(known.size) * self._width
        self.first = np.zeros(known.size, np.int64)  # multiples of the page size
        self._flushed = np.zeros(known.size, np.int64)  # tokens, the prompt's too, that the request has itself
        self._requests: list[Request | None] = [None] * known.size
        self._left = 0  # tokens that every line takes before any has to be emptied, at least

    def begin(self, slot: int, request: Request) -> None:
        """A request with this many tokens known comes to its slot; of its last page those that are known come along."""
        known = int(self._known[slot])
        first = request.computed // self._page * self._page
        self._requests[slot], self._flushed[slot], self.first[slot] = request, known, first
        self._tokens[slot, : known - first] = request.tokens(first, known)
        self._left = min(self._left, self._width - _SPREAD - (known - first))

    def end(self, slot: int) -> None:
        """The request leaves its slot, with all its tokens."""
        request = self._requests[slot]
        if request is not None:
            self.flush(slot, request)
            self._requests[slot], self.first[slot] = None, self._known[slot]

    def flush(self, slot: int, request: Request) -> None:
        """Give a request the tokens that it does not have yet."""
        flushed, known, first = int(self._flushed[slot]), int(self._known[slot]), int(self.first[slot])
        if flushed < known:
            request.append_tokens(self._tokens[slot, flushed - first : known - first].tobytes())
            self._flushed[slot] = known

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Where the next token of each of these slots goes, for `put`."""
        return (self._begins - self.first + self._known).take(slots)

    def put(self, places: np.ndarray, tokens: np.ndarray) -> None:
        """Write tokens, of which no slot has more than there is room for."""
        self._flat[places] = tokens

    def make_room(self, most: int) -> bool:
        """Before every line gets up to so many tokens. Returns whether any of them has moved: then other `places` count."""
        self._left -= most
        if self._left >= 0:
            return False
        used = self._known - self.first
        full = (used > self._width - _SPREAD - most).nonzero()[0]
        if full.size:
            room = self._width - used[full]
            # As many as must be emptied in each step until the first is full; it and all others that are, in any case.
            count = max(int(np.count_nonzero(room < most)), -(-full.size * most // max(most, int(room.min()))))
            full = full[room.argsort(kind="stable")[:count]]
            self._empty(full, used[full])
            used = self._known - self.first
        self._left = self._width - _SPREAD - most - int(used.max())
        return bool(full.size)

    def _empty(self, slots: np.ndarray, used: np.ndarray) -> None:
        """Give the requests of these lines their tokens, and keep those of the last page."""
        begins = (used - 1) // self._page * self._page
        lines = zip(slots.tolist(), (self._flushed[slots] - self.first[slots]).tolist(), used.tolist(), begins.tolist())
        for slot, flushed, end, begin in lines:
            request, line = self._requests[slot], self._tokens[slot]
            assert request is not None, "the lines of nobody are empty"
            request.append_tokens(line[flushed:end].tobytes())
            line[: end - begin] = line[begin:end]
        self._flushed[slots] = self._known[slots]
        self.first[slots] += begins

    def pages(self, slots: np.ndarray, firsts: np.ndarray) -> bytes | None:
        """The tokens of a whole page each, from these positions on, as int64 of the machine; None: not all of them are here."""
        begins = self.first[slots]
        if np.count_nonzero(firsts < begins):
            return None
        return self._pages.take((self._begins[slots] + (firsts - begins)) // self._page, axis=0).tobytes()
