"""Finds the stop strings that end a text, also across token boundaries, and holds back text that may begin a stop string.

A stop string takes effect as soon as the text completes it, so the result does not depend on token boundaries. The text is cut
before the stop string that ends first; if several end at the same place, before the longest of them. The scheduler handles
tokens that end a text (`Request.stop_ids`).
"""

from collections.abc import Callable, Iterable, Sequence

from tilewright.engine.tokenizer import Detokenizer

__all__ = ["OutputText", "StopStrings"]


class StopStrings:
    """Cuts a text, which arrives in pieces, before the first of `stops`. Holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = sorted(stops, key=len, reverse=True)
        self._firsts = {stop[0] for stop in stops}
        self._held = ""

    def push(self, piece: str, *, exempt: int = 0) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that ends it or None).

        Stop strings that end within the first `exempt` characters of the piece are ignored.
        """
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = self._find(text, len(self._held) + exempt)
        if found is not None:
            self._held = ""
            return text[: found[0]], found[1]
        safe = len(text) - self._hold(text)
        self._held = text[safe:]
        return text[:safe], None

    def would_stop(self, piece: str, *, exempt: int = 0) -> bool:
        """Whether pushing `piece` now would complete a stop string."""
        return self._find(self._held + piece, len(self._held) + exempt) is not None

    def flush(self) -> str:
        """The text that is held back, for a text that ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, seen: int) -> tuple[int, str] | None:
        """(start, stop string) of the stop string that ends first in `text` after the first `seen` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), start, stop)
        return best and best[1:]

    def _hold(self, text: str) -> int:
        for start in range(max(0, len(text) - len(self._stops[0]) + 1), len(text)):
            if text[start] in self._firsts and any(stop.startswith(text[start:]) for stop in self._stops):
                return len(text) - start
        return 0


class OutputText:
    """The text of one sample as its tokens arrive. Stop strings that end before token number `min_tokens` are ignored."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0):
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self._tokens = 0
        self._exempt = 0  # characters of tokens before `min_tokens` that the detokenizer still holds back

    @property
    def plain(self) -> Callable[[Iterable[int]], str] | None:
        """Converts tokens to text if there are no stop strings, otherwise None; the same as `push` for each token."""
        return self._detokenizer.push if self._stops is None else None

    @property
    def plain_one(self) -> Callable[[int], str] | None:
        """`plain` for one token."""
        return self._detokenizer.push_one if self._stops is None else None

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that ends it or None)."""
        text = self._detokenizer.push((token_id,))
        stops = self._stops
        if stops is None:
            return text, None
        self._tokens += 1
        if self._tokens < self._min_tokens:
            self._exempt = len(self._detokenizer.peek())
            return stops.push(text, exempt=len(text))
        text, stop = self._search(text, stops)
        if stop is None and self._detokenizer.open:
            # A newline may be held back because bytes could follow it. If it completes a stop string, the text ends here.
            tail = self._detokenizer.peek()
            if stops.would_stop(tail, exempt=self._exempt):
                rest, stop = self._search(tail, stops)
                text += rest
        return text, stop

    def finish(self) -> str:
        """The rest of a text that ended without a stop string."""
        tail = self._detokenizer.flush()
        if self._stops is None:
            return tail
        text, _ = self._stops.push(tail, exempt=len(tail))
        return text + self._stops.flush()

    def _search(self, text: str, stops: StopStrings) -> tuple[str, str | None]:
        exempt, self._exempt = self._exempt, max(0, self._exempt - len(text))
        return stops.push(text, exempt=exempt)
