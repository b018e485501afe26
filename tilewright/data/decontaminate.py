"""Decontamination: removes documents that contain a run of words from an evaluation set.

Words are lower-case letters and digits. A document is removed if it contains any run of `words` successive words of an
evaluation text (Brown et al. 2020, appendix C, with 13 words). The default is 10: it finds 98 % of GSM8K's questions after 5 %
of their words were changed, and nothing in books; 13 finds 95 % (docs/data.md). An evaluation text shorter than `words` is
searched for as a whole if it has at least `min_words` words.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tilewright.data.document import Document, Removed
from tilewright.data.hashing import hashed, windows

__all__ = ["Decontaminate"]

_WORD = re.compile(r"\w+")


class Decontaminate:
    """The step. evaluation: JSON lines files. fields: the fields with evaluation texts; each field is a separate text."""

    def __init__(
        self,
        *,
        evaluation: Sequence[str] | str,
        fields: Sequence[str] = ("question", "text"),
        words: int = 10,
        min_words: int = 7,
    ) -> None:
        if words < 1 or min_words < 1:
            raise ValueError(f"decontaminate: words is {words} and min_words is {min_words}; both must be at least 1")
        self.words = words
        self.grams: dict[int, dict[int, str]] = {}
        for path in [evaluation] if isinstance(evaluation, str) else evaluation:
            found = 0
            for number, text in _texts(Path(path), tuple(fields)):
                found += 1
                tokens = _WORD.findall(text.lower())
                size = min(words, len(tokens))
                if size >= min(min_words, words):
                    grams = self.grams.setdefault(size, {})
                    for gram in windows([hashed(token) for token in tokens], size).tolist():
                        grams.setdefault(gram, f"{Path(path).name} line {number + 1}")
            if not found:
                raise ValueError(
                    f"decontaminate: no line of {path} has a text field named {' or '.join(map(repr, fields))}; set "
                    "fields to the names of its text fields"
                )
        self.sorted = {size: np.sort(np.fromiter(grams, np.uint64, len(grams))) for size, grams in self.grams.items()}

    def __call__(self, document: Document) -> Document | Removed:
        """Removed if a run of words is found; the detail names the line of the evaluation file."""
        tokens = [hashed(token) for token in _WORD.findall(document.text.lower())]
        for size, known in self.sorted.items():
            found = windows(tokens, size)
            hits = found[known[np.minimum(np.searchsorted(known, found), len(known) - 1)] == found]
            if len(hits):
                return Removed("in an evaluation set", self.grams[size][int(hits[0])])
        return document


def _texts(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError:
                raise ValueError(f"decontaminate: {path}, line {number + 1} is not JSON") from None
            for field in fields:
                if isinstance(row, dict) and isinstance(row.get(field), str):
                    yield number, row[field]
