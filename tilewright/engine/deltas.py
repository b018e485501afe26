"""What one step brought, as arrays: token ids a row, and notes on the few rows of which there is more to say.

A sample is known by its stream, a number that it keeps from `Engine.submit` to its end. A row is what a step added to one
stream: several tokens, one, or none. This is what leaves the engine, for a reader in the same process or behind a socket.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilewright.engine.request import TokenLogprobs

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

    def __len__(self) -> int:
        return len(self.streams)

    def of(self, rows: np.ndarray) -> "StepDeltas":
        """The rows with these indices, which rise; notes are renumbered."""
        keep = np.zeros(len(self), bool)
        keep[rows] = True
        new = np.cumsum(keep) - 1
        notes = tuple(note._replace(row=int(new[note.row])) for note in self.notes if keep[note.row])
        return StepDeltas(self.streams[rows], self.counts[rows], self.tokens[np.repeat(keep, self.counts)], notes)


class StepRows:
    """Rows as they come up during a step."""

    def __init__(self) -> None:
        self._streams: list[int] = []
        self._counts: list[int] = []
        self._tokens: list[int] = []
        self._notes: list[Note] = []

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: int, *tokens: int) -> int:
        """A row; returns its index, for a note."""
        self._streams.append(stream)
        self._counts.append(len(tokens))
        self._tokens += tokens
        return len(self._streams) - 1

    def note(self, note: Note) -> None:
        """Of the row that was added last."""
        self._notes.append(note)

    def clear(self) -> None:
        """Forget all rows."""
        for part in (self._streams, self._counts, self._tokens, self._notes):
            part.clear()

    def take(self) -> StepDeltas:
        """All rows so far, which are then forgotten."""
        made = StepDeltas(
            np.array(self._streams, np.int64),
            np.array(self._counts, np.int32),
            np.array(self._tokens, np.int32),
            tuple(self._notes),
        )
        self.clear()
        return made


class OutputState:
    """What the engine knows of a request beside its tokens."""

    __slots__ = ("prompt_logprobs", "published", "stream")

    def __init__(self, stream: int):
        self.stream = stream
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.published = False
