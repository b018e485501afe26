"""Statistics of a chunk, a step or a run: plain numbers that can be added."""

import hashlib
from collections import Counter
from typing import Any

from tilewright.data.document import Document, Removed

__all__ = ["StepStats", "merged", "size_of"]

_EXAMPLES = 4
_EXCERPT = 600


def size_of(document: Document) -> int:
    """The bytes of a document's text, or of its page if the text has not been extracted yet."""
    return len(document.text.encode()) if document.html is None else len(document.html)


class StepStats:
    """Counts of one step over some documents, with a few examples of removed documents (by reason) and of kept ones.

    The examples are the documents with the lowest hashes of their ids, so they do not depend on the division into chunks.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.documents_in = self.documents_out = self.bytes_in = self.bytes_out = 0
        self.seconds = 0.0
        self.reasons: Counter[str] = Counter()
        self.removed_bytes: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.languages: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()
        self.examples: dict[str, list[list[str]]] = {}

    def note(self, document: Document, bytes_in: int, answer: Document | Removed, seconds: float) -> None:
        """Count one document and the step's result for it."""
        self.documents_in += 1
        self.bytes_in += bytes_in
        self.seconds += seconds
        if isinstance(answer, Removed):
            self.reasons[answer.reason] += 1
            self.removed_bytes[answer.reason] += bytes_in
            self._example(answer.reason, document, answer.detail)
            return
        size = size_of(answer)
        self.documents_out += 1
        self.bytes_out += size
        self.lengths[str(size.bit_length())] += 1
        if self.name == "language":
            self.languages[answer.metadata["language"]] += 1
        self.notes.update({key: value for key, value in answer.notes.items() if isinstance(value, int)})
        self._example("kept", document, ", ".join(f"{key} {value}" for key, value in answer.notes.items()))

    def _example(self, reason: str, document: Document, detail: str) -> None:
        rank = hashlib.blake2b(document.id.encode(), digest_size=8).hexdigest()
        held = self.examples.setdefault(reason, [])
        if len(held) < _EXAMPLES or rank < held[-1][0]:
            held.append(
                [rank, document.id, document.text[:_EXCERPT], detail, document.url or str(document.origin.get("file", ""))]
            )
            held.sort()
            del held[_EXAMPLES:]

    def value(self) -> dict[str, Any]:
        """The counts and examples as a value for JSON."""
        return {key: dict(value) if isinstance(value, Counter) else value for key, value in vars(self).items()}


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of `StepStats.value` of one step over several chunks."""
    total: dict[str, Any] = {"name": parts[0]["name"]}
    for key, first in parts[0].items():
        if key == "examples":
            total[key] = _examples([part[key] for part in parts])
        elif isinstance(first, dict):
            total[key] = dict(sum((Counter(part[key]) for part in parts), Counter()).most_common())
        elif key != "name":
            total[key] = sum(part[key] for part in parts)
    return total


def _examples(parts: list[dict[str, list[list[str]]]]) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for part in parts:
        for reason, rows in part.items():
            found[reason] = sorted([*found.get(reason, []), *rows])[:_EXAMPLES]
    return found
