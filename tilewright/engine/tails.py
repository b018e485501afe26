"""The newest tokens of the decoding requests in one array by slot: a step with 512 requests needs one numpy write.

A request gets its tokens when they are read (`Request.output_ids`), when its line is full, and when it leaves its slot. Each
line begins at a page boundary, so that the tokens of a page that has become full are contiguous and can be hashed directly.
"""

import numpy as np

from tilewright.engine.request import Request

__all__ = ["Tails"]

_ROOM = 512
"""Tokens that a line holds in addition to a page before it is emptied; a row of a step always brings fewer."""
_SPREAD = 32
"""Additional tokens, so that lines that become full at the same time are not all emptied in the same step."""


class Tails:
    """A line of tokens for each slot: those at positions [`first`, `known`) of its request; `known` is `Decoders.known`."""

    def __init__(self, known: np.ndarray, page_size: int):
        self._known, self._page = known, page_size
        self._width = (1 + -(-(_ROOM + _SPREAD) // page_size)) * page_size
        self._tokens = np.zeros((known.size, self._width), np.int64)
        self._flat, self._pages = self._tokens.reshape(-1), self._tokens.reshape(-1, page_size)
        self._begins = np.arange(known.size) * self._width
        self.first = np.zeros(known.size, np.int64)  # multiples of the page size
        self._flushed = np.zeros(known.size, np.int64)  # number of tokens, with the prompt, that the request itself has
        self._requests: list[Request | None] = [None] * known.size
        self._left = 0  # every line can take at least this many tokens before any must be emptied

    def begin(self, slot: int, request: Request) -> None:
        """Begin the line of a request with `known` tokens; the known tokens of its last page are copied into the line."""
        known = int(self._known[slot])
        first = request.computed // self._page * self._page
        self._requests[slot], self._flushed[slot], self.first[slot] = request, known, first
        self._tokens[slot, : known - first] = request.tokens(first, known)
        self._left = min(self._left, self._width - _SPREAD - (known - first))

    def end(self, slot: int) -> None:
        """The request leaves its slot; it gets all its tokens."""
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
        """The place of the next token of each of these slots, for `put`."""
        return (self._begins - self.first + self._known).take(slots)

    def has_newest(self, slots: np.ndarray) -> np.ndarray:
        """bool: whether the line of each of these slots contains the last known token."""
        return self._known.take(slots) > self.first.take(slots)

    def newest(self, slots: np.ndarray) -> np.ndarray:
        """The last known token of each of these slots; any number where `has_newest` is False."""
        return self._flat.take(self.places(slots) - 1)

    def put(self, places: np.ndarray, tokens: np.ndarray) -> None:
        """Write tokens to their places; there must be room for them."""
        self._flat[places] = tokens

    def make_room(self, most: int) -> bool:
        """Make room for up to `most` more tokens in every line. Returns whether a line was moved; then call `places` again."""
        self._left -= most
        if self._left >= 0:
            return False
        used = self._known - self.first
        full = (used > self._width - _SPREAD - most).nonzero()[0]
        if full.size:
            room = self._width - used[full]
            # Empty all lines without room now, and otherwise as many per step as are needed until the next line is full.
            count = max(int(np.count_nonzero(room < most)), -(-full.size * most // max(most, int(room.min()))))
            full = full[room.argsort(kind="stable")[:count]]
            self._empty(full, used[full])
            used = self._known - self.first
        self._left = self._width - _SPREAD - most - int(used.max())
        return bool(full.size)

    def _empty(self, slots: np.ndarray, used: np.ndarray) -> None:
        """Give the requests of these lines their tokens, and keep only the tokens of the last page here."""
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
        """The tokens of one whole page per slot, from these positions on, as native int64; None: not all of them are here."""
        begins = self.first[slots]
        if np.count_nonzero(firsts < begins):
            return None
        return self._pages.take((self._begins[slots] + (firsts - begins)) // self._page, axis=0).tobytes()
