"""An index of one text that finds earlier occurrences of the text's last tokens, and returns the tokens that followed them.

A hash chain, as in LZ77: for every run of three tokens the latest place is stored, and for every place the previous place of
the same run. The continuation is read after the place with the longest match to the end of the text. A token costs one
dictionary entry; a lookup visits at most `CANDIDATES` places. Of a long text, only the last `WINDOW` tokens are used.
"""

from collections.abc import Sequence

__all__ = ["CANDIDATES", "GRAM", "WINDOW", "Lookup"]

GRAM = 3
CANDIDATES = 8
WINDOW = 1 << 14
LONGEST = 32
"""Matches are compared up to this many tokens."""


class Lookup:
    """An index of a text, from token `first` on, which `extend` makes longer. It takes at most 6 MB."""

    def __init__(self, first: int = 0) -> None:
        self.seen = first
        """Length of the text: the tokens before `first` and all tokens added since, also those that have left the window."""
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
        """Up to `most` guesses of the next tokens; none if the last three tokens have not occurred together before.

        If the continuation reaches the end of the text, it starts again: the text is assumed to repeat.
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
