"""Where a text ends: stop strings, found however the tokens cut them, and what must be held back to find them.

A stop string counts as soon as the text completes it, so what comes out does not depend on token boundaries: the text is cut
before the stop string that ends first (of those that end together: the longest). Tokens that end a text (`Request.stop_ids`)
are the scheduler's.
"""

from collections.abc import Callable, Iterable, Sequence

from tilewright.engine.tokenizer import Detokenizer

__all__ = ["OutputText", "StopStrings"]


class StopStrings:
    """Cuts a text that comes in pieces before the first of `stops`, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = sorted(stops, key=len, reverse=True)
        self._firsts = {stop[0] for stop in stops}
        self._held = ""

    def push(self, piece: str, *, exempt: int = 0) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that ends it or None).

        No stop string counts that ends within the first `exempt` characters of the piece.
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
        """True if `piece`, were it pushed now, would complete a stop string."""
        return self._find(self._held + piece, len(self._held) + exempt) is not None

    def flush(self) -> str:
        """What is held back, when the text ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, seen: int) -> tuple[int, str] | None:
        """(start, stop string) of the first to end in `text` after its first `seen` characters."""
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
    """The text of one sample as its tokens come; no stop string counts before `min_tokens` of them have."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0):
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self._tokens = 0
        self._exempt = 0  # characters, still held by the detokenizer, of tokens before `min_tokens`

    @property
    def plain(self) -> Callable[[Iterable[int]], str] | None:
        """From tokens to their text, where there are no stop strings to look for; the same as `push`, token by token."""
        return self._detokenizer.push if self._stops is None else None

    @property
    def plain_one(self) -> Callable[[int], str] | None:
        """`plain` of one token."""
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
            # A newline may be held back because bytes could follow it. A text that ends here has it, and ends here.
            tail = self._detokenizer.peek()
            if stops.would_stop(tail, exempt=self._exempt):
                rest, stop = self._search(tail, stops)
                text += rest
        return text, stop

    def finish(self) -> str:
        """The rest of the text, when it did not end with a stop string."""
        tail = self._detokenizer.flush()
        if self._stops is None:
            return tail
        text, _ = self._stops.push(tail, exempt=len(tail))
        return text + self._stops.flush()

    def _search(self, text: str, stops: StopStrings) -> tuple[str, str | None]:
        exempt, self._exempt = self._exempt, max(0, self._exempt - len(text))
        return stops.push(text, exempt=exempt)
