"""What one step brought, as arrays: token ids a row, and notes on the few rows of which there is more to say.

A sample is known by its stream, a number that it keeps from `Engine.submit` to its end. A row is what a step added to one
stream: several tokens, one, or none. This is what leaves the engine, for a reader in the same process or behind a socket.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilewright.engine.columns import LogprobColumns
from tilewright.engine.request import Request, TokenLogprobs

__all__ = ["Note", "OutputState", "StepDeltas", "StepRows"]


class Note(NamedTuple):
    """What there is to say of a row beside its tokens; of most rows there is nothing."""

    row: int
    finish_reason: str | None = None
    """stop, length, abort, error or expired: the row is the last of its stream."""
    stop_reason: int | None = None
    """The stop token that ended the text; None for the end-of-text token."""
    error: str | None = None
    retry_after_s: float | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that the prefix cache had; in the first row of a stream."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token of the row, where asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """In the first row of a stream, where asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class StepDeltas:
    """One value a step. Rows of a stream are in their order; the notes are in the order of their rows."""

    streams: np.ndarray
    """int64 [rows]."""
    counts: np.ndarray
    """int32 [rows]: tokens of each row."""
    tokens: np.ndarray
    """int32 [sum of counts]."""
    notes: tuple[Note, ...] = ()
    columns: LogprobColumns | None = None
    """Log-probabilities, an entry a token, where the runner gives them so (`ModelRunner`); notes have none then."""

    def __len__(self) -> int:
        return len(self.streams)

    def of(self, rows: np.ndarray) -> "StepDeltas":
        """The rows with these indices, which rise; notes are renumbered."""
        streams, counts = self.streams[rows], self.counts[rows]
        if not self.notes and self.columns is None and len(self.tokens) == len(self) and (self.counts == 1).all():
            return StepDeltas(streams, counts, self.tokens[rows])
        keep = np.zeros(len(self), bool)
        keep[rows] = True
        new = np.cumsum(keep) - 1
        notes = tuple(note._replace(row=int(new[note.row])) for note in self.notes if keep[note.row])
        stays = np.repeat(keep, self.counts)
        columns = None if self.columns is None else self.columns.take(stays)
        return StepDeltas(streams, counts, self.tokens[stays], notes, columns)


class StepRows:
    """Rows as they come up during a step."""

    def __init__(self) -> None:
        self._rows = 0
        self._blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._notes: list[Note] = []
        self._columns: list[LogprobColumns] = []

    def __len__(self) -> int:
        return self._rows

    def add(self, stream: int, *tokens: int) -> int:
        """A row; returns its index, for a note."""
        return self.extend(np.array([stream], np.int64), np.array([len(tokens)], np.int64), np.array(tokens, np.int64))

    def extend(self, streams: np.ndarray, counts: np.ndarray, tokens: np.ndarray, columns: LogprobColumns | None = None) -> int:
        """Rows, as in `StepDeltas`; the arrays stay the caller's until `take`. Returns the index of the first."""
        first, self._rows = self._rows, self._rows + streams.size
        if columns is not None:
            self._columns.append(columns)
        self._blocks.append((streams, counts, tokens))
        return first

    def note(self, note: Note) -> None:
        """Of a row behind those of all notes so far."""
        self._notes.append(note)

    def clear(self) -> None:
        """Forget all rows."""
        self._rows = 0
        self._blocks, self._notes, self._columns = [], [], []

    def take(self) -> StepDeltas:
        """All rows so far, which are then forgotten."""
        if not self._blocks:
            return _NOTHING
        blocks = self._blocks
        streams, counts, tokens = blocks[0] if len(blocks) == 1 else map(np.concatenate, zip(*blocks))
        columns = LogprobColumns.joined(self._columns) if self._columns else None
        made = StepDeltas(streams, counts.astype(np.int32), tokens.astype(np.int32), tuple(self._notes), columns)
        self.clear()
        return made


_NOTHING = StepDeltas(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))


class OutputState:
    """What the engine knows of a request beside its tokens."""

    __slots__ = ("prompt_logprobs", "published", "stream")

    def __init__(self, stream: int):
        self.stream = stream
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.published = False

    def note(
        self, row: int, request: Request, logprobs: tuple[TokenLogprobs, ...] = (), retry_after_s: float | None = None
    ) -> Note:
        """What there is to say of a request in a row of it."""
        first, self.published = not self.published, True
        asked = first and request.params.prompt_logprobs is not None
        return Note(
            row=row,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            retry_after_s=retry_after_s,
            cached_tokens=request.cached if first else None,
            logprobs=logprobs,
            prompt_logprobs=tuple(self.prompt_logprobs) if asked else None,
        )
