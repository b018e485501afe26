"""MinHash signatures of texts (Broder 1997): of two texts they agree in a share of places that estimates their Jaccard
similarity.

A text is the set of its shingles: `words` neighbouring words after lower-casing, without punctuation, accents and the digits
of numbers. A shingle is 32 bits. Place p of a signature is the least of (a_p x + b_p mod 2**64) >> 33 over the shingles x,
a_p odd: multiply-shift hashing (Dietzfelbinger et al. 1997) of 31 bits, integers alone, so that a GPU gives the same bits
(kernels/dedup/minhash.py, whose definition a test holds against this one).
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilewright.data.hashing import hashed, windows

__all__ = ["EMPTY", "normal_words", "parameters", "shingles", "signatures"]

EMPTY = np.int32(2**31 - 1)
"""Every place in the signature of a text that has no shingle."""

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_BLOCK = 1 << 14  # shingles at a time: 128 KiB of 64-bit numbers, which stay in the second cache


def normal_words(text: str) -> list[str]:
    """The words of a text as shingles see them: lower case, no accents, every number "0"."""
    text = text.lower()
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
    return _WORD.findall(_NUMBER.sub("0", text))


def shingles(text: str, words: int = 5) -> NDArray[np.uint32]:
    """The different shingles of a text, sorted: 32-bit hashes. A text of fewer words is one shingle, an empty one none."""
    hashes = [hashed(word) for word in normal_words(text)]
    return np.unique((windows(hashes, min(words, max(1, len(hashes)))) >> np.uint64(32)).astype(np.uint32))


def parameters(places: int, seed: int = 1) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The factors (odd) and summands of `places` hash functions."""
    random = np.random.Generator(np.random.PCG64(seed))
    a, b = random.integers(0, 2**64, (2, places), np.uint64)
    return a | np.uint64(1), b


def signatures(sets: Sequence[NDArray[np.uint32]], a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The signature of each set of shingles. [D sets, P places] of int32, EMPTY where a set is empty."""
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
            # The shift keeps the order, so it may come after the minimum.
            least = (np.minimum.reduceat(work, edges) >> np.uint64(33)).astype(np.int32)
            found[rows, place] = np.minimum(found[rows, place], least)
    return found
