"""The tokens that followed the last time: an index of one text that finds where its end has stood before.

A hash chain, as in LZ77: every run of three tokens is known with its latest place, and every place with the one before it. The
continuation is read behind that place whose tokens before agree longest with the end of the text. A token costs one entry of a
dictionary; a look walks `CANDIDATES` places at most. Of a long text the last `WINDOW` tokens count.
"""

from collections.abc import Sequence

__all__ = ["CANDIDATES", "GRAM", "WINDOW", "Lookup"]

GRAM = 3
CANDIDATES = 8
WINDOW = 1 << 16
LONGEST = 32
"""Agreement beyond so many tokens makes no place better."""


class Lookup:
    """An index of the text that `extend` makes longer."""

    def __init__(self) -> None:
        self.seen = 0
        """Tokens that were added, also those that have left the window."""
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the text."""
        self.seen += len(tokens)
        self._tokens += tokens
        if len(self._tokens) > 2 * WINDOW:
            self._tokens = self._tokens[-WINDOW:]
            self._latest.clear()
            self._before.clear()
        text, latest, before = self._tokens, self._latest, self._before
        for end in range(len(before), len(text)):
            gram = tuple(text[max(0, end + 1 - GRAM) : end + 1])
            before.append(latest.get(gram, -1))
            latest[gram] = end

    def continuation(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next; none where the last three have never stood together before.

        Where the place is so near that its continuation is the end of the text itself, the text is taken to repeat.
        """
        text = self._tokens
        if len(text) < GRAM + 1:
            return []
        end = len(text) - 1
        best, longest, place = -1, 0, self._before[end]
        for _ in range(CANDIDATES):
            if place < GRAM - 1:  # the first tokens have no run of three
                break
            agree = GRAM
            while agree < LONGEST and agree <= place and text[place - agree] == text[end - agree]:
                agree += 1
            if agree > longest:
                best, longest = place, agree
            place = self._before[place]
        if best < 0:
            return []
        return [text[best + 1 + i % (end - best)] for i in range(most)]
