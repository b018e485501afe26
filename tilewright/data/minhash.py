"""MinHash signatures of texts (Broder 1997).

The share of places in which two signatures agree is an estimate of the Jaccard similarity of the texts.

A text is represented by its set of shingles: runs of `words` successive words, in lower case, without punctuation and accents,
and with all numbers treated as equal. A shingle is hashed to 32 bits. Place p of a signature is the minimum of (a_p x + b_p mod
2**64) >> 33 over the shingles x, with a_p odd: multiply-shift hashing (Dietzfelbinger et al. 1997) to 31 bits. Only integers
are used, so that a GPU gives the same bits (kernels/dedup/minhash.py; a test compares both definitions).
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilewright.data.hashing import hashed, windows

__all__ = ["EMPTY", "normal_words", "parameters", "shingles", "signatures"]

EMPTY = np.int32(2**31 - 1)
"""Every place in the signature of a text without shingles."""

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_BLOCK = 1 << 14  # shingles per block: 128 KiB of 64-bit numbers, which fit in the level-2 cache


def normal_words(text: str) -> list[str]:
    """The words of a text for shingles: lower case, no accents, every number replaced by "0"."""
    text = text.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFD", text)
        if marks := [ord(c) for c in set(text) if unicodedata.combining(c)]:
            text = text.translate(dict.fromkeys(marks))
    return _WORD.findall(_NUMBER.sub("0", text))


def shingles(text: str, words: int = 5) -> NDArray[np.uint32]:
    """The distinct shingles of a text, sorted: 32-bit hashes. A shorter text is one shingle, an empty one has none."""
    hashes = [hashed(word) for word in normal_words(text)]
    return np.unique((windows(hashes, min(words, max(1, len(hashes)))) >> np.uint64(32)).astype(np.uint32))


def parameters(places: int, seed: int = 1) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(the odd factors a_p, the summands b_p) of `places` hash functions."""
    random = np.random.Generator(np.random.PCG64(seed))
    a, b = random.integers(0, 2**64, (2, places), np.uint64)
    return a | np.uint64(1), b


def signatures(sets: Sequence[NDArray[np.uint32]], a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The signature of each set of shingles: int32 [D sets, P places], EMPTY if a set is empty."""
    found = np.full((len(sets), len(a)), EMPTY, np.int32)
    starts = np.cumsum([0, *map(len, sets)])
    flat = np.concatenate([*sets, np.zeros(0, np.uint32)])
    for at in range(0, len(flat), _BLOCK):
        x = flat[at : at + _BLOCK].astype(np.uint64)
        first = int(np.searchsorted(starts, at, side="right")) - 1
        last = int(np.searchsorted(starts, at + len(x), side="left"))
        rows = np.array([row for row in range(first, last) if starts[row + 1] > starts[row]])
        edges = np.maximum(starts[rows] - at, 0)
        work = np.empty_like(x)
        for place in range(len(a)):
            np.multiply(x, a[place], out=work)
            np.add(work, b[place], out=work)
            # The shift preserves the order, so it may come after the minimum.
            least = (np.minimum.reduceat(work, edges) >> np.uint64(33)).astype(np.int32)
            found[rows, place] = np.minimum(found[rows, place], least)
    return found
