"""Keeping apart what is written in chat messages from the control tokens that it would spell."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Cut", "starts"]


class Cut:
    """Puts a mark, a character that is nowhere in `texts`, behind the first character of what is to be kept apart."""

    def __init__(self, texts: str):
        self.mark = next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in texts)

    def apart(self, value: Any, wanted: re.Pattern[str] | None) -> Any:
        """A value of messages with marks in all its texts, however deep."""
        if isinstance(value, str):
            return value if wanted is None else wanted.sub(lambda found: found[0] + self.mark, value)
        if isinstance(value, Mapping):
            return {self.apart(key, wanted): self.apart(item, wanted) for key, item in value.items()}
        return [self.apart(item, wanted) for item in value] if isinstance(value, (list, tuple)) else value


def starts(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the first character of each occurrence of the texts, also of those inside one another."""
    longer = sorted({text for text in texts if len(text) > 1})
    return re.compile(f"(?=(?:{'|'.join(map(re.escape, longer))})).", re.DOTALL) if longer else None
