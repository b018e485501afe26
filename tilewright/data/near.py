"""Near duplicates by MinHash and locality-sensitive hashing: of each cluster of similar texts, the first one is kept.

Signatures are divided into `bands` bands of `rows` places. Two texts that agree in a whole band are candidates; for texts with
Jaccard similarity s the probability is 1 - (1 - s**rows)**bands (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets,
3.4). A pair of candidates counts as similar if at least the share `min_agreement` of all places agrees. This excludes pairs
that agree in a band by chance; a share of 0.4 misses one pair in a thousand at a similarity of 0.5. The defaults of 14 bands
and 8 rows are FineWeb's. Clusters are the connected components of the graph of similar pairs.

The result depends only on the order of the documents, not on how they are divided into chunks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.data.document import Document, Removed
from tilewright.data.exact import Arrays, ids_of
from tilewright.data.hashing import mixed
from tilewright.data.minhash import EMPTY, parameters, shingles, signatures

__all__ = ["NearDuplicates", "Sorted", "band_keys", "clusters"]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 64


def band_keys(signature_DP: NDArray[np.int32], bands: int) -> NDArray[np.uint64]:
    """A 64-bit number for every band of every signature, [D, bands]; equal for two texts that agree in the whole band."""
    rows = signature_DP.shape[1] // bands
    keys = np.zeros((len(signature_DP), bands), np.uint64)
    parts = signature_DP[:, : rows * bands].reshape(len(signature_DP), bands, rows).astype(np.uint64)
    for row in range(rows):
        keys = mixed((keys + parts[:, :, row]) * _ODD)
    return keys


Sorted = tuple[NDArray[np.int64], NDArray[np.uint64]]


def sorted_here(part: NDArray[np.int32]) -> Sorted:
    """(document indices, stably sorted by the key of a band; the keys in that order), with numpy."""
    keys = band_keys(part, 1)[:, 0]
    order = np.argsort(keys, kind="stable")
    return order, keys[order]


def clusters(
    signature_DP: NDArray[np.int32],
    bands: int,
    min_agreement: float,
    sort: Callable[[NDArray[np.int32]], Sorted] = sorted_here,
) -> NDArray[np.int64]:
    """For each document the index of the first document of its cluster, or its own if it is alone. [D]."""
    count, places = signature_DP.shape
    rows = places // bands
    parent = np.arange(count)
    useful = np.flatnonzero(signature_DP[:, 0] != EMPTY)
    for band in range(bands if len(useful) else 0):
        part = np.ascontiguousarray(signature_DP[useful, band * rows : (band + 1) * rows])
        order, keys = sort(part)
        members = useful[order]
        for _ in range(_ROUNDS):
            members, keys = _merge_with_first(signature_DP, members, keys, min_agreement, parent)
            if not len(members):
                break
    return _roots(parent)


def _merge_with_first(
    signature_DP: NDArray[np.int32],
    members: NDArray[np.int64],
    keys: NDArray[np.uint64],
    min_agreement: float,
    parent: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Merge the members of each bucket with its first member. Returns those that agree too little with it, for a next round."""
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    sizes = np.diff(np.append(starts, len(keys)))
    first = np.repeat(members[starts], sizes)
    others = np.ones(len(members), np.bool_)
    others[starts] = False
    members, keys, first = members[others], keys[others], first[others]
    agree = np.zeros(len(members), np.bool_)
    for at in range(0, len(members), 1 << 14):
        part = slice(at, at + (1 << 14))
        same = signature_DP[members[part]] == signature_DP[first[part]]
        agree[part] = same.mean(1) >= min_agreement
    _union(parent, first[agree], members[agree])
    return members[~agree], keys[~agree]


def _union(parent: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64]) -> None:
    for a, b in zip(left.tolist(), right.tolist()):
        a, b = _root(parent, a), _root(parent, b)
        parent[max(a, b)] = min(a, b)


def _root(parent: NDArray[np.int64], at: int) -> int:
    while parent[at] != at:
        parent[at] = parent[parent[at]]
        at = int(parent[at])
    return at


def _roots(parent: NDArray[np.int64]) -> NDArray[np.int64]:
    while True:
        above = parent[parent]
        if np.array_equal(above, parent):
            return parent
        parent = above


class NearDuplicates:
    """Removes documents that are nearly equal to an earlier one of their cluster."""

    def __init__(
        self, *, words: int = 5, bands: int = 14, rows: int = 8, min_agreement: float = 0.4, seed: int = 1, device: str = "cpu"
    ) -> None:
        if not (1 <= words <= 100 and bands >= 1 and rows >= 1 and bands * rows <= 4096 and 0 <= min_agreement <= 1):
            raise ValueError(
                f"near-duplicates: words is {words}, bands is {bands}, rows is {rows} and min_agreement is "
                f"{min_agreement}; wanted words from 1 to 100, bands and rows of at least 1 with bands x rows at "
                "most 4096, and min_agreement from 0 to 1"
            )
        self.sign, self.sort = signatures, sorted_here
        if device != "cpu":
            # Imported here, because torch and the kernels take seconds to import in every worker process.
            from tilewright.data.on_gpu import signatures_on, sorted_on

            self.sign, self.sort = signatures_on(device), sorted_on(device)
        self.words, self.bands, self.min_agreement = words, bands, min_agreement
        self.a, self.b = parameters(bands * rows, seed)

    def index(self, documents: Sequence[Document]) -> Arrays:
        """The signatures and ids of a chunk."""
        sets = [shingles(document.text, self.words) for document in documents]
        return {"signature": self.sign(sets, self.a, self.b), "id": ids_of(documents)}

    def join(self, chunks: Sequence[Arrays], memory_bytes: int) -> tuple[list[Arrays], dict[str, Any]]:
        """For each document the id of the first document of its cluster; "" for the first document itself."""
        places, count = len(self.a), sum(len(chunk["id"]) for chunk in chunks)
        if 4 * places * count > memory_bytes:
            raise ValueError(
                f"near-duplicates: the signatures of {count} documents need {4 * places * count >> 20} MB, but only "
                f"{memory_bytes >> 20} MB, half of the memory allowed, is available for them; run again with more "
                "memory, or with fewer bands"
            )
        signature_DP = np.concatenate([chunk["signature"] for chunk in chunks])
        ids = np.concatenate([chunk["id"] for chunk in chunks])
        first = clusters(signature_DP, self.bands, self.min_agreement, self.sort)
        alone = first == np.arange(len(first))
        names: list[str] = ids.astype(str).tolist()
        sizes = np.bincount(first, minlength=len(first))[alone]
        largest = np.flatnonzero(alone)[np.argsort(-sizes, kind="stable")[:12]]
        facts = {
            "clusters": int((sizes > 1).sum()),
            "documents in clusters": int(sizes[sizes > 1].sum()),
            "sizes": {str(size): int(times) for size, times in zip(*np.unique(sizes[sizes > 1], return_counts=True))},
            "largest": {
                names[at]: [names[i] for i in np.flatnonzero(first == at)[:6]] for at in largest if (first == at).sum() > 1
            },
        }
        ends = np.cumsum([len(chunk["id"]) for chunk in chunks])[:-1]
        return [{"like": part} for part in np.split(np.where(alone, b"", ids[first]), ends)], facts

    def apply(self, document: Document, row: int, found: Arrays) -> Document | Removed:
        """Removed if an earlier document is nearly equal."""
        like = bytes(found["like"][row]).decode()
        return Removed("near duplicate", f"of {like}") if like else document
