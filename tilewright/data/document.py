"""A document on its way through the steps, and the results of a step for it."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Document", "Removed", "from_line", "to_line"]


@dataclass
class Document:
    """One text and its origin.

    origin: the input file, the number of the record in it, and the byte offset of that record (in compressed archives: the
    offset of the compressed member that contains it). steps: one entry for each step that processed the document.
    """

    text: str
    origin: dict[str, Any]
    id: str = ""
    url: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    html: bytes | None = None
    """The page as it was read; None after the step that extracts its text."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Results of the current step; they are moved to `steps` when it is done."""

    def __post_init__(self) -> None:
        if not self.id:
            place = f"{self.origin.get('file')}\n{self.origin.get('record')}"
            self.id = hashlib.blake2b(place.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


class Removed(NamedTuple):
    """The result of a step that removes a document: a short constant reason, and details about this document."""

    reason: str
    detail: str = ""


def to_line(document: Document) -> bytes:
    """One line of JSON with sorted keys, so that equal documents give equal bytes."""
    row: dict[str, Any] = {"id": document.id, "text": document.text, "origin": document.origin}
    if document.url:
        row["url"] = document.url
    if document.metadata:
        row["metadata"] = document.metadata
    if document.steps:
        row["steps"] = document.steps
    if document.html is not None:
        row["html"] = document.html.decode("latin-1")
    return json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def from_line(line: bytes) -> Document:
    """The inverse of `to_line`."""
    row = json.loads(line)
    html = row.pop("html", None)
    return Document(**row, html=None if html is None else html.encode("latin-1"))
