"""Splits text in chat messages that would spell control tokens, so that it is not encoded as these tokens."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Cut", "starts"]


class Cut:
    """Inserts a mark after the first character of texts to split. The mark is a character that does not occur in `texts`."""

    def __init__(self, texts: str):
        self.mark = next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in texts)

    def apart(self, value: Any, wanted: re.Pattern[str] | None) -> Any:
        """A copy of a value with marks in all its strings, also in nested lists and mappings. `wanted`: see `starts`."""
        if isinstance(value, str):
            return value if wanted is None else wanted.sub(lambda found: found[0] + self.mark, value)
        if isinstance(value, Mapping):
            return {self.apart(key, wanted): self.apart(item, wanted) for key, item in value.items()}
        return [self.apart(item, wanted) for item in value] if isinstance(value, (list, tuple)) else value


def starts(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the first character of each occurrence of the texts, including overlapping occurrences."""
    longer = sorted({text for text in texts if len(text) > 1})
    return re.compile(f"(?=(?:{'|'.join(map(re.escape, longer))})).", re.DOTALL) if longer else None
