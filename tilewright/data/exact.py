"""Exact duplicates over all documents: whole texts, lines, and runs of words. The first occurrence is kept.

Each step has three parts, so that the documents are never all in memory at once: `index` hashes one chunk of documents, `join`
compares the hashes of all chunks, and `apply` edits one document with the result. Which occurrence is first depends only on the
order of the input, so the result does not depend on how documents are divided into chunks.

For runs of words, every run of at least `words` words that occurred before is removed, as in Lee et al. 2022 (arXiv
2107.06499). They find the runs with a suffix array over tokens. Here each window of `words` words has a hash, and windows that
were seen before are merged into runs: this gives the same runs, in a bounded amount of memory.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.data.document import Document, Removed
from tilewright.data.hashing import hashed, windows

__all__ = ["Arrays", "ExactDocuments", "ExactLines", "ExactSubstrings", "GlobalStep", "seen_before"]

Arrays = dict[str, NDArray[Any]]


class GlobalStep(Protocol):
    """A step that needs all documents before it can decide about a single one."""

    def index(self, documents: Sequence[Document]) -> Arrays:
        """The data that `join` needs from a chunk."""
        ...

    def join(self, chunks: Sequence[Arrays], memory_bytes: int) -> tuple[list[Arrays], dict[str, Any]]:
        """(the data that `apply` needs, one item for each chunk; facts for the report)."""
        ...

    def apply(self, document: Document, row: int, found: Arrays) -> Document | Removed:
        """Edit the document with index `row` in its chunk, or remove it."""
        ...


def seen_before(chunks: Sequence[NDArray[np.uint64]], memory_bytes: int) -> list[NDArray[np.bool_]]:
    """For each hash, whether an equal one comes before it, in the same chunk or an earlier one.

    Hash values are processed in ranges, so that the hashes of one range and their positions fit into `memory_bytes`.
    """
    total = sum(map(len, chunks))
    ranges = max(1, -(-total * 40 // max(memory_bytes, 1)))  # 8 bytes per hash, 8 per position, the rest for sorting
    found = [np.zeros(len(chunk), np.bool_) for chunk in chunks]
    flat = np.zeros(total, np.bool_)
    for part in range(ranges):
        low, high = part * 2**64 // ranges, (part + 1) * 2**64 // ranges - 1
        hashes, places, base = [], [], 0
        for chunk in chunks:
            at = np.flatnonzero((chunk >= np.uint64(low)) & (chunk <= np.uint64(high)))
            hashes.append(np.asarray(chunk)[at])
            places.append(at + base)
            base += len(chunk)
        value, place = np.concatenate(hashes or [np.zeros(0, np.uint64)]), np.concatenate(places or [np.zeros(0, np.int64)])
        order = np.argsort(value, kind="stable")
        value = value[order]
        again = np.concatenate([[False], value[1:] == value[:-1]])[: len(value)]
        flat[place[order[again]]] = True
    base = 0
    for mask in found:
        mask[:] = flat[base : base + len(mask)]
        base += len(mask)
    return found


def ids_of(documents: Sequence[Document]) -> NDArray[Any]:
    """The ids of documents as an array of 24 ASCII characters each."""
    return np.array([document.id.encode() for document in documents], "S24")


class ExactDocuments:
    """Removes documents whose text occurred before, ignoring white space and case. 128-bit hashes."""

    def index(self, documents: Sequence[Document]) -> Arrays:
        """The hash of every text."""
        digests = [hashlib.blake2b(_plain(d.text).encode("utf-8", "replace"), digest_size=16).digest() for d in documents]
        return {"digest": np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2), "id": ids_of(documents)}

    def join(self, chunks: Sequence[Arrays], memory_bytes: int) -> tuple[list[Arrays], dict[str, Any]]:
        """For each document the id of the first document with the same text; "" for the first document itself."""
        digests = np.concatenate([chunk["digest"] for chunk in chunks])
        ids = np.concatenate([chunk["id"] for chunk in chunks])
        rows = np.ascontiguousarray(digests).view([("a", np.uint64), ("b", np.uint64)])[:, 0]
        _, first, which = np.unique(rows, return_index=True, return_inverse=True)
        original = first[which]
        like = np.where(original == np.arange(len(rows)), b"", ids[original])
        ends = np.cumsum([len(chunk["id"]) for chunk in chunks])[:-1]
        facts = {"different texts": len(first), "copies": len(rows) - len(first)}
        return [{"like": part} for part in np.split(like, ends)], facts

    def apply(self, document: Document, row: int, found: Arrays) -> Document | Removed:
        """Removed if the text occurred before."""
        like = bytes(found["like"][row]).decode()
        return Removed("same text", f"as {like}") if like else document


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


class ExactLines:
    """Removes lines of at least `min_chars` that occurred before, in this document or an earlier one; 64-bit hashes."""

    def __init__(self, *, min_chars: int = 20) -> None:
        self.min_chars = min_chars

    def _lines(self, text: str) -> list[str]:
        return [line for line in (_plain(raw) for raw in text.split("\n")) if len(line) >= self.min_chars]

    def index(self, documents: Sequence[Document]) -> Arrays:
        """The hashes of all lines, and the number of lines of each document."""
        lines = [self._lines(document.text) for document in documents]
        flat = np.array([hashed(line) for part in lines for line in part], np.uint64)
        return {"hash": flat, "end": np.cumsum([len(part) for part in lines], dtype=np.int64)}

    def join(self, chunks: Sequence[Arrays], memory_bytes: int) -> tuple[list[Arrays], dict[str, Any]]:
        """For each line, whether it occurred before."""
        seen = seen_before([chunk["hash"] for chunk in chunks], memory_bytes)
        found = [{"seen": mask, "end": np.asarray(chunk["end"])} for mask, chunk in zip(seen, chunks)]
        return found, {"lines": sum(map(len, seen)), "lines removed": int(sum(mask.sum() for mask in seen))}

    def apply(self, document: Document, row: int, found: Arrays) -> Document | Removed:
        """The document without those lines; removed if nothing is left."""
        start = int(found["end"][row - 1]) if row else 0
        seen = found["seen"][start : int(found["end"][row])].tolist()
        if not any(seen):
            return document
        document.notes["lines"] = sum(seen)
        goes = iter(seen)
        kept = [raw for raw in document.text.split("\n") if len(_plain(raw)) < self.min_chars or not next(goes)]
        document.text = "\n".join(kept).strip()
        return document if document.text else Removed("no line left")


class ExactSubstrings:
    """Removes every run of at least `words` words that occurred before, in this document or an earlier one; 64-bit hashes."""

    def __init__(self, *, words: int = 50) -> None:
        if words < 2:
            raise ValueError(f"exact-substrings: words is {words}, wanted at least 2")
        self.words = words

    def index(self, documents: Sequence[Document]) -> Arrays:
        """The hashes of all windows of `words` words, and the number of windows of each document."""
        parts = [windows([hashed(w) for w in document.text.split()], self.words) for document in documents]
        flat = np.concatenate([*parts, np.zeros(0, np.uint64)])
        return {"hash": flat, "end": np.cumsum([len(part) for part in parts], dtype=np.int64)}

    def join(self, chunks: Sequence[Arrays], memory_bytes: int) -> tuple[list[Arrays], dict[str, Any]]:
        """For each window, whether it occurred before."""
        seen = seen_before([chunk["hash"] for chunk in chunks], memory_bytes)
        found = [{"seen": mask, "end": np.asarray(chunk["end"])} for mask, chunk in zip(seen, chunks)]
        return found, {"windows": sum(map(len, seen)), "windows seen before": int(sum(mask.sum() for mask in seen))}

    def apply(self, document: Document, row: int, found: Arrays) -> Document | Removed:
        """The document without those runs; removed if nothing is left."""
        start = int(found["end"][row - 1]) if row else 0
        seen = np.flatnonzero(found["seen"][start : int(found["end"][row])])
        if not len(seen):
            return document
        spans = [match.span() for match in re.finditer(r"\S+", document.text)]
        covered = np.zeros(len(spans) + 1, np.int64)
        np.add.at(covered, seen, 1)
        np.add.at(covered, seen + self.words, -1)
        gone = np.cumsum(covered[:-1]) > 0
        parts, at, i = [], 0, 0
        while i < len(spans):
            if gone[i]:
                parts.append(document.text[at : spans[i][0]])
                while i < len(spans) and gone[i]:
                    i += 1
                at = spans[i][0] if i < len(spans) else len(document.text)
            else:
                i += 1
        document.notes["words"] = int(gone.sum())
        document.text = ("".join(parts) + document.text[at:]).strip()
        return document if document.text else Removed("nothing left")
