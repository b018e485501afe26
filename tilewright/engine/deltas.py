"""The results of one step as arrays: the token ids of each row, and notes for the few rows with further information.

A sample is identified by its stream, a number that it keeps from `Engine.submit` to its end. A row contains what a step added
to one stream: several tokens, one, or none. The engine returns this to a reader in the same process or behind a socket.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilewright.engine.columns import LogprobColumns
from tilewright.engine.request import Request, TokenLogprobs

__all__ = ["Note", "OutputState", "StepDeltas", "StepRows"]


class Note(NamedTuple):
    """Information about a row besides its tokens; most rows have no note."""

    row: int
    finish_reason: str | None = None
    """stop, length, abort, error or expired: the row is the last of its stream."""
    stop_reason: int | None = None
    """The stop token that ended the text; None for the end-of-text token."""
    error: str | None = None
    retry_after_s: float | None = None
    cached_tokens: int | None = None
    """Number of prompt tokens that were in the prefix cache; in the first row of a stream."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token of the row, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """In the first row of a stream, if requested."""


@dataclass(frozen=True, slots=True, eq=False)
class StepDeltas:
    """The results of one step. The rows of a stream are in order; the notes are in the order of their rows."""

    streams: np.ndarray
    """int64 [rows]."""
    counts: np.ndarray
    """int32 [rows]: number of tokens of each row."""
    tokens: np.ndarray
    """int32 [sum of counts]."""
    notes: tuple[Note, ...] = ()
    columns: LogprobColumns | None = None
    """Log-probabilities with one entry per token, if the runner returns columns (`ModelRunner`). Notes then have none."""

    def __len__(self) -> int:
        return len(self.streams)

    def of(self, rows: np.ndarray) -> "StepDeltas":
        """The rows with these ascending indices; the notes are renumbered."""
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
    """Collects the rows of a step."""

    def __init__(self) -> None:
        self._rows = 0
        self._blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._notes: list[Note] = []
        self._columns: list[LogprobColumns] = []

    def __len__(self) -> int:
        return self._rows

    def add(self, stream: int, *tokens: int) -> int:
        """Add a row; returns its index, for a note."""
        return self.extend(np.array([stream], np.int64), np.array([len(tokens)], np.int64), np.array(tokens, np.int64))

    def extend(self, streams: np.ndarray, counts: np.ndarray, tokens: np.ndarray, columns: LogprobColumns | None = None) -> int:
        """Add rows, as in `StepDeltas`; the caller may change the arrays until `take`. Returns the index of the first row."""
        first, self._rows = self._rows, self._rows + streams.size
        if columns is not None:
            self._columns.append(columns)
        self._blocks.append((streams, counts, tokens))
        return first

    def note(self, note: Note) -> None:
        """Add a note. Its row must come after the rows of all earlier notes."""
        self._notes.append(note)

    def clear(self) -> None:
        """Remove all rows."""
        self._rows = 0
        self._blocks, self._notes, self._columns = [], [], []

    def take(self) -> StepDeltas:
        """Return all rows and remove them here."""
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
    """The engine's state of a request besides its tokens."""

    __slots__ = ("prompt_logprobs", "published", "stream")

    def __init__(self, stream: int):
        self.stream = stream
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.published = False

    def note(
        self, row: int, request: Request, logprobs: tuple[TokenLogprobs, ...] = (), retry_after_s: float | None = None
    ) -> Note:
        """The note for a row of a request."""
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
