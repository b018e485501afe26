"""Token shards: documents as token ids, in the order in which a trainer reads them.

A folder contains `shard-00000.npy` (uint16, or uint32 if the vocabulary needs it: the concatenated tokens of documents),
`shard-00000.idx.npy` (int64: where each document ends, after its end-of-text token if the recipe has one) and `meta.json`. The
documents were shuffled with the recipe's seed before writing. So a trainer reads the shards from front to back, and its
position is one number: the tokens read so far. The trainer cuts this stream into rows; the ends show where documents begin.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FORMAT", "TokenShards", "write"]

FORMAT = {"format": "tilewright-tokens", "version": 1}


def write(
    folder: Path, documents: Iterable[NDArray[Any]], dtype: str, shard_tokens: int, facts: dict[str, Any]
) -> dict[str, Any]:
    """Write documents, in this order, as shards of about `shard_tokens`; returns the content of meta.json, with `facts`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = []
    held: list[NDArray[Any]] = []
    size = 0
    for tokens in documents:
        held.append(tokens)
        size += len(tokens)
        if size >= shard_tokens:
            shards.append(_shard(folder, len(shards), held, dtype))
            held, size = [], 0
    if held or not shards:
        shards.append(_shard(folder, len(shards), held, dtype))
    totals = {key: sum(shard[key] for shard in shards) for key in ("n_tokens", "n_documents")}
    meta = {**FORMAT, "dtype": dtype, **facts, **totals, "shards": shards}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return meta


def _shard(folder: Path, number: int, documents: Sequence[NDArray[Any]], dtype: str) -> dict[str, Any]:
    tokens = np.concatenate([*documents, np.zeros(0, dtype)]).astype(dtype)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    names = f"shard-{number:05d}.npy", f"shard-{number:05d}.idx.npy"
    np.save(folder / names[0], tokens)
    np.save(folder / names[1], ends)
    digest = hashlib.sha256(tokens.tobytes() + ends.tobytes()).hexdigest()
    return {"tokens": names[0], "index": names[1], "n_tokens": len(tokens), "n_documents": len(ends), "sha256": digest}


class TokenShards:
    """A folder of token shards as one sequence of tokens, read from disk as needed.

    Raises ValueError if the folder does not contain token shards, or the size of a shard differs from meta.json.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} is not a folder of token shards: {error}") from None
        if not isinstance(self.meta, dict) or any(self.meta.get(key) != value for key, value in FORMAT.items()):
            raise ValueError(
                f"{folder}/meta.json does not have format {FORMAT['format']!r} and version {FORMAT['version']}; make the "
                "shards again"
            )
        self._tokens = [np.load(folder / Path(shard["tokens"]).name, mmap_mode="r") for shard in self.meta["shards"]]
        self._ends = [np.load(folder / Path(shard["index"]).name, mmap_mode="r") for shard in self.meta["shards"]]
        for shard, tokens, ends in zip(self.meta["shards"], self._tokens, self._ends):
            if len(tokens) != shard["n_tokens"] or len(ends) != shard["n_documents"] or tokens.dtype != self.meta["dtype"]:
                raise ValueError(
                    f"{folder}: {shard['tokens']} does not have the size that meta.json gives; write the shards again"
                )
        self._starts = np.cumsum([0, *map(len, self._tokens)]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens `start` to `stop` (exclusive) of the whole sequence; fewer at its end."""
        stop = min(stop, len(self))
        parts = []
        shard = bisect_right(self._starts, start) - 1
        while start < stop:
            base = self._starts[shard]
            part = self._tokens[shard][start - base : stop - base]
            parts.append(part)
            start += len(part)
            shard += 1
        return np.concatenate([*parts, np.zeros(0, self.meta["dtype"])])

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """The positions in (start, stop] of the whole sequence at which a document ends."""
        found = []
        for base, ends in zip(self._starts, self._ends):
            low, high = np.searchsorted(ends, [start - base, stop - base], side="right")
            found.append(np.asarray(ends[low:high]) + base)
        return np.concatenate([*found, np.zeros(0, np.int64)])
