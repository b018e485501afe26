"""Exact duplicates: whole texts, lines, runs of words, against plain Python over all documents at once."""

import itertools
import random

import numpy as np
import pytest

from tests.data.sets import prose
from tilewright.data.document import Document, Removed
from tilewright.data.exact import ExactDocuments, ExactLines, ExactSubstrings, GlobalStep, seen_before
from tilewright.data.hashing import hashed, windows


def documents(texts: list[str]) -> list[Document]:
    return [Document(text, {"file": "x", "record": i}) for i, text in enumerate(texts)]


def applied(step: GlobalStep, texts: list[str], cuts: list[int], memory_bytes: int = 1 << 20) -> list[str | None]:
    """The texts behind the step; None where a document went."""
    rows = documents(texts)
    edges = [0, *sorted(cuts), len(rows)]
    chunks = [rows[a:b] for a, b in itertools.pairwise(edges)]
    found, _ = step.join([step.index(chunk) for chunk in chunks], memory_bytes)
    answers = [step.apply(d, row, part) for chunk, part in zip(chunks, found) for row, d in enumerate(chunk)]
    return [None if isinstance(answer, Removed) else answer.text for answer in answers]


@pytest.mark.parametrize("memory_bytes", [1, 1000, 1 << 20])
def test_seen_before(memory_bytes: int) -> None:
    draw = np.random.default_rng(0)
    chunks = [draw.integers(0, 50, size).astype(np.uint64) * np.uint64(2**58) for size in (30, 0, 1, 80)]
    if memory_bytes == 1:
        chunks = [chunk[:3] for chunk in chunks]
    found, seen = seen_before(chunks, memory_bytes), set()
    for chunk, mask in zip(chunks, found):
        for value, before in zip(chunk.tolist(), mask.tolist()):
            assert before == (value in seen)
            seen.add(value)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 50])
def test_windows_are_equal_where_their_words_are(size: int) -> None:
    draw = random.Random(size)
    words = [draw.choice("abc") for _ in range(400)]
    found = windows([hashed(word) for word in words], size).tolist()
    parts = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    assert len(found) == len(parts)
    assert len(set(found)) == len(set(parts)) == len(set(zip(found, parts)))
    assert len(windows([1] * (size - 1), size)) == 0


def test_documents() -> None:
    texts = ["A text.", "another", "a  TEXT.\n", "", "another", " ", "A text!"]
    for cuts in ([], [1, 3], [2, 2, 5]):
        assert applied(ExactDocuments(), texts, cuts) == ["A text.", "another", None, "", None, None, "A text!"]


@pytest.mark.parametrize("cuts", [[], [1], [1, 2]])
def test_lines(cuts: list[int]) -> None:
    texts = [
        "A menu line that is long\nfirst text of its own here\nshort",
        "a MENU line  that is long\nshort\nsecond own text, longer",
        "A menu line that is long",
    ]
    want = [texts[0], "short\nsecond own text, longer", None]
    assert applied(ExactLines(), texts, cuts) == want


@pytest.mark.parametrize("seed", range(6))
def test_substrings(seed: int) -> None:
    """Plain Python: a word goes if it stands in a window of n words that occurred before."""
    draw = random.Random(seed)
    n = draw.choice([3, 5, 12])
    texts = [prose(draw, draw.randint(0, 80)) for _ in range(30)]
    for i in range(1, 30):
        words = texts[draw.randrange(i)].split(" ")
        at = draw.randrange(len(words))
        texts[i] += " " + " ".join(words[at : at + draw.randint(1, 30)])
    seen: set[tuple[str, ...]] = set()
    want: list[list[str]] = []
    for text in texts:
        words = text.split()
        gone = [False] * len(words)
        for i in range(len(words) - n + 1):
            gram = tuple(words[i : i + n])
            if gram in seen:
                gone[i : i + n] = [True] * n
            seen.add(gram)
        want.append([word for word, out in zip(words, gone) if not out])
    found = applied(ExactSubstrings(words=n), texts, [draw.randrange(30) for _ in range(seed)])
    assert [(text or "").split() for text in found] == want
    assert any(len(w) < len(t.split()) for w, t in zip(want, texts))
    kept = [text for text, out, words in zip(texts, found, want) if len(words) == len(text.split()) and out is not None]
    assert all(text in found for text in kept), "an untouched document changed"
