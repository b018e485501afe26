"""What an engine has told of its samples, step after step, put together at the end: no value a token on the way."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewright.engine.columns import LogprobColumns
from tilewright.engine.deltas import StepDeltas

__all__ = ["Output", "Told"]


class Output(NamedTuple):
    """One sample, with an entry a token in each list."""

    tokens: list[int]
    logprobs: list[float]
    """In the model's own distribution."""
    drawn: list[float]
    """In the distribution that it was drawn from; [] where the engine does not say."""
    kept: list[int]
    """Tokens that its filters left; [] likewise."""
    finish_reason: str | None
    error: str | None


class Told:
    """Steps of an engine whose runner gives log-probabilities as columns."""

    def __init__(self) -> None:
        self._streams: list[np.ndarray] = []  # by token
        self._tokens: list[np.ndarray] = []
        self._columns: list[LogprobColumns] = []
        self._ends: dict[int, tuple[str, str | None]] = {}

    def add(self, step: StepDeltas) -> None:
        """What a step has brought."""
        if step.columns is not None:
            self._streams.append(np.repeat(step.streams, step.counts))
            self._tokens.append(step.tokens)
            self._columns.append(step.columns)
        for note in step.notes:
            if note.finish_reason is not None:
                self._ends[int(step.streams[note.row])] = note.finish_reason, note.error

    def outputs(self, streams: int) -> list[Output]:
        """The samples whose streams are 0, 1, ... `streams` - 1."""
        ends = [self._ends.get(stream, (None, None)) for stream in range(streams)]
        if not self._tokens:
            return [Output([], [], [], [], reason, error) for reason, error in ends]
        owners, columns = np.concatenate(self._streams), LogprobColumns.joined(self._columns)
        order = owners.argsort(kind="stable")  # tokens of a stream stay in their order
        bounds = np.searchsorted(owners[order], np.arange(streams + 1)).tolist()
        sorted_columns = [np.concatenate(self._tokens)[order], *columns.take(order)]
        tokens, logprobs, drawn, kept = [[] if column is None else column.tolist() for column in sorted_columns]
        return [
            Output(tokens[begin:end], logprobs[begin:end], drawn[begin:end], kept[begin:end], reason, error)
            for (begin, end), (reason, error) in zip(pairwise(bounds), ends)
        ]
