"""Turns files into micro-batches. The order depends only on a seed, and reading can be resumed at the exact token.

All data are read from token shards (`tilewright.data.shards`). A folder of shards is used as it is. Texts and conversations are
converted to shards once, in the folder of the run. In each epoch, all documents of a source are read in a new order, which is
drawn from (seed, epoch); without a seed, they are read in the order of the shards. So the rows of a source depend only on the
position at which they are read, and a checkpoint only has to store positions.

    Texts            One endless stream of tokens, cut into rows of L tokens. A document that does not fit continues in the
                     next row, where positions and attention start anew. Documents may be cut into pieces before they are
                     shuffled, so that successive rows come from different documents even if documents are long.
                     Position: number of tokens read.
    Conversations    Whole conversations, as many as fit into L tokens. Only answers have a loss.
                     Position: number of conversations read.
    Mixture          Chooses the source of each row: the source from which the fewest tokens have been read so far, in
                     proportion to its weight.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.data.compressed import Limits
from tilewright.data.read import documents, format_of
from tilewright.data.shards import TokenShards, write
from tilewright.train.batch import IGNORED, Piece

__all__ = [
    "Conversations",
    "Marked",
    "Mixture",
    "Source",
    "Texts",
    "conversation_shards",
    "is_message",
    "marked_shards",
    "text_shards",
]

_SHARD_TOKENS = 1 << 27

Marked = list[tuple[list[int], bool]]
"""A conversation as a list of (token ids, whether they are an answer). Only answers have a loss."""


class Source(Protocol):
    """Provides rows in a fixed order."""

    def row(self, position: int, length: int) -> tuple[list[Piece], int]:
        """(pieces with at most `length` tokens together, the position after these pieces)."""
        ...


class _Order:
    """The order of the documents of shards, for each epoch. If `piece` is not 0, documents are cut into pieces of at most this
    many tokens."""

    def __init__(self, shards: TokenShards, seed: int | None, name: str, piece: int = 0):
        if not len(shards):
            raise ValueError(f"{name} has no tokens: give another source, or leave it out")
        ends = shards.ends(0, len(shards))
        # Documents without tokens are dropped. Tokens after the last end marker are one more document.
        ends = np.unique(np.append(ends[ends > 0], len(shards)))
        if piece:
            ends = _cut(ends, piece)
        self.starts = np.concatenate(([0], ends[:-1]))
        self.lengths = ends - self.starts
        self._seed = seed
        self._held: tuple[int, NDArray[np.int64]] | None = None

    def of(self, epoch: int) -> NDArray[np.int64]:
        """The document indices of an epoch in their order. Without a seed, this is the order of the shards."""
        if self._held is None or self._held[0] != epoch:
            count = len(self.starts)
            key = None if self._seed is None else np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
            self._held = (epoch, np.arange(count) if key is None else key.permutation(count))
        return self._held[1]


def _cut(ends: NDArray[np.int64], piece: int) -> NDArray[np.int64]:
    """Cut documents that end at `ends` into pieces of at most `piece` tokens, counted from the start of each document. Returns
    the ends of the pieces."""
    starts = np.concatenate(([0], ends[:-1]))
    counts = -(-(ends - starts) // piece)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    number = np.arange(1, int(counts.sum()) + 1) - first
    return np.minimum(np.repeat(starts, counts) + number * piece, np.repeat(ends, counts))


class Texts:
    """Rows of exactly `length` tokens. In each epoch, every token is predicted once, except the first of a document or piece.

    Args:
        shards: token shards of documents, each with its end-of-text token.
        seed: for the order of the documents; None: the order of the shards.
        name: name of the source in messages.
        piece: cut documents into pieces of at most this many tokens, and shuffle the pieces; 0: do not cut.

    Raises:
        ValueError: there are no tokens.
    """

    def __init__(self, shards: TokenShards, seed: int | None, name: str = "the data", piece: int = 0):
        self._shards, self._order = shards, _Order(shards, seed, name, piece)
        self._running: tuple[int, NDArray[np.int64]] | None = None

    @property
    def piece_tokens(self) -> float:
        """The average number of tokens of a document, or of a piece."""
        return len(self._shards) / len(self._order.starts)

    def row(self, position: int, length: int) -> tuple[list[Piece], int]:
        """The next `length` tokens. If the last document continues in the next row, its next token is the last target."""
        pieces: list[Piece] = []
        left = length
        while left:
            epoch, at = divmod(position, len(self._shards))
            order, running = self._order.of(epoch), self._ends(epoch)
            index = int(np.searchsorted(running, at, side="right"))
            document = order[index]
            remaining = int(running[index]) - at
            start = int(self._order.starts[document] + self._order.lengths[document]) - remaining
            count = min(left, remaining)
            tokens = self._shards.tokens(start, start + min(count + 1, remaining)).astype(np.int64)
            targets = tokens[1:] if len(tokens) > count else np.append(tokens[1:], IGNORED)
            pieces.append((tokens[:count], targets))
            left, position = left - count, position + count
        return pieces, position

    def _ends(self, epoch: int) -> NDArray[np.int64]:
        """The positions within an epoch at which the documents end, in the order of the epoch."""
        if self._running is None or self._running[0] != epoch:
            self._running = (epoch, np.cumsum(self._order.lengths[self._order.of(epoch)]))
        return self._running[1]


class Conversations:
    """Rows of whole conversations. A conversation that is longer than a row is cut off at the end of the row.

    Args:
        shards: token shards of conversations.
        answers: shards of the same sizes, with 1 for each token of an answer, which is predicted, and 0 for other tokens.
        seed, name: as in `Texts`.
    """

    def __init__(self, shards: TokenShards, answers: TokenShards, seed: int | None, name: str = "the data"):
        if len(shards) != len(answers):
            raise ValueError(
                f"{name}: there are {len(shards)} tokens but {len(answers)} marks of answers; make the shards again"
            )
        self._shards, self._answers, self._order = shards, answers, _Order(shards, seed, name)

    def row(self, position: int, length: int) -> tuple[list[Piece], int]:
        """As many conversations as fit, but at least one."""
        pieces: list[Piece] = []
        left = length
        while True:
            epoch, index = divmod(position, len(self._order.starts))
            document = self._order.of(epoch)[index]
            start, size = int(self._order.starts[document]), int(self._order.lengths[document])
            if pieces and size > left:
                return pieces, position
            stop = start + min(size, left)
            tokens = self._shards.tokens(start, stop).astype(np.int64)
            answers = self._answers.tokens(start, stop).astype(bool)
            targets = np.append(np.where(answers[1:], tokens[1:], IGNORED), IGNORED)
            pieces.append((tokens, targets))
            left, position = left - len(tokens), position + 1
            if not left:
                return pieces, position


class Mixture:
    """Rows from several sources, in proportion to their weights.

    The order of the sources depends only on the numbers of tokens read so far, so a checkpoint only needs `state`.

    Raises:
        ValueError: there is no source, or not exactly one positive weight for each source.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float] | None = None):
        weights = [1.0] * len(sources) if weights is None else list(weights)
        if not sources or len(weights) != len(sources) or not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(
                f"{len(sources)} data sources have the weights {weights}; give one finite weight above 0 for each source"
            )
        self._sources, self._weights = list(sources), weights
        self._positions, self._tokens = [0] * len(sources), [0] * len(sources)

    def row(self, length: int) -> list[Piece]:
        """The next row."""
        behind = [tokens / weight for tokens, weight in zip(self._tokens, self._weights)]
        chosen = behind.index(min(behind))
        pieces, self._positions[chosen] = self._sources[chosen].row(self._positions[chosen], length)
        self._tokens[chosen] += sum(len(ids) for ids, _ in pieces)
        return pieces

    def state(self) -> dict[str, list[int]]:
        """The position and the number of tokens read, for each source."""
        return {"positions": list(self._positions), "tokens": list(self._tokens)}

    def load_state(self, state: Mapping[str, Sequence[int]]) -> None:
        """Return to an earlier `state`. Raises ValueError if it is for other sources."""
        positions, tokens = list(state["positions"]), list(state["tokens"])
        if len(positions) != len(self._sources) or len(tokens) != len(positions):
            raise ValueError(f"the saved data position is for {len(positions)} sources, but this run has {len(self._sources)}")
        self._positions, self._tokens = positions, tokens


# ---- files -> shards


def text_shards(
    paths: Sequence[Path], encode: Callable[[Sequence[str]], Iterable[Sequence[int]]], vocab_size: int, home: Path, *,
    identity: str, text_field: str = "text", progress: Callable[[str], None] = lambda words: None,
) -> TokenShards:  # fmt: skip
    """Token shards of the texts in JSON lines, parquet or text files, which may be compressed. Shards that were made earlier
    from the same files are reused.

    Args:
        encode: texts -> the tokens of each text, including those that begin and end a document.
        vocab_size: all token ids are less than this.
        home: folder for the shards.
        identity: identifies the tokenizer. Shards are reused only for the same tokenizer.

    Raises:
        ValueError: the format of a file is unknown, a file cannot be read, or no document has the field `text_field`.
    """

    def made() -> Iterator[NDArray[np.int64]]:
        damage: Counter[str] = Counter()
        count = 0
        for path in paths:
            found = (document.text for document in documents(path, format_of(path), Limits(), damage, text_field=text_field))
            for texts in _groups(found, 128):
                count += len(texts)
                progress(f"tokenising {path.name}: documents {count:,}")
                yield from (np.asarray(ids, dtype=np.int64) for ids in encode(texts))
        if damage:
            progress(f"not read: {', '.join(f'{reason} ({times})' for reason, times in damage.items())}\n")
        if not count:
            names = ", ".join(map(str, paths))
            raise ValueError(
                f"{names}: no document has text in the field {text_field!r}; set text_field to the name of the field "
                "that has it"
            )

    return _kept(
        home, paths, f"{identity} text {text_field}", lambda at: write(at, made(), _dtype(vocab_size), _SHARD_TOKENS, {})
    )


def conversation_shards(
    paths: Sequence[Path], render: Callable[[list[dict[str, Any]]], Marked], vocab_size: int, home: Path, *, identity: str
) -> tuple[TokenShards, TokenShards]:
    """(tokens, answer marks) of conversations in JSON lines: {"messages": [{"role": ..., "content": ...}, ...]}.

    Args:
        render: messages -> tokens according to the chat template, with the answers marked.

    Raises:
        ValueError: a line is not a conversation (the message states file and line number), or no conversation has an answer.
    """

    def rows() -> list[Marked]:
        found = [render(messages) for path in paths for messages in _conversations(path)]
        if not any(answer for runs in found for _, answer in runs):
            raise ValueError(
                f"{', '.join(map(str, paths))}: no conversation has a message of the assistant, so there is nothing to learn"
            )
        return found

    return marked_shards(paths, rows, vocab_size, home, kind=f"{identity} chat")


def marked_shards(
    paths: Sequence[Path], rows: Callable[[], list[Marked]], vocab_size: int, home: Path, *, kind: str
) -> tuple[TokenShards, TokenShards]:
    """(tokens, answer marks) of the documents that `rows` reads from files. Shards that were made earlier from the same files
    are reused.

    Args:
        kind: identifies the kind of data and the tokenizer. Shards are reused only for the same value.
    """
    held: list[Marked] = []

    def documents_of() -> list[Marked]:
        if not held:
            held.extend(rows())
        return held

    def tokens() -> Iterator[NDArray[np.int64]]:
        yield from (np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in runs]) for runs in documents_of())

    def marks() -> Iterator[NDArray[np.int64]]:
        for runs in documents_of():
            yield np.concatenate([np.full(len(ids), answer, dtype=np.int64) for ids, answer in runs])

    return (
        _kept(home, paths, kind, lambda at: write(at, tokens(), _dtype(vocab_size), _SHARD_TOKENS, {})),
        _kept(home, paths, f"{kind} answers", lambda at: write(at, marks(), "uint8", _SHARD_TOKENS, {})),
    )


def _conversations(path: Path) -> Iterator[list[dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                messages = json.loads(line).get("messages")
            except (ValueError, AttributeError):
                messages = None
            if not isinstance(messages, list) or not messages or not all(is_message(one) for one in messages):
                raise ValueError(f'{path}, line {number}: wanted {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
            yield messages


def is_message(value: Any) -> bool:
    """Whether a value is a message of a conversation: it must have a role and a content, both text."""
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _groups(items: Iterable[str], size: int) -> Iterator[list[str]]:
    held: list[str] = []
    for item in items:
        held.append(item)
        if len(held) == size:
            yield held
            held = []
    if held:
        yield held


def _kept(home: Path, paths: Sequence[Path], kind: str, make: Callable[[Path], object]) -> TokenShards:
    """The shards in `home` that were made from these files, if the files have not changed since; otherwise new ones. Incomplete
    folders are not used."""
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    folder = home / hashlib.sha256(json.dumps([kind, facts]).encode()).hexdigest()[:16]
    if not folder.exists():
        unfinished = folder.with_suffix(".partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        unfinished.rename(folder)
    return TokenShards(folder)
