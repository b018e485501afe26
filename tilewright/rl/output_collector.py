"""Collects the results of many engine steps and assembles them at the end, so that single tokens need no work in between."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewright.engine.columns import LogprobColumns
from tilewright.engine.deltas import StepDeltas

__all__ = ["Output", "OutputCollector"]


class Output(NamedTuple):
    """One sample. Each list has one entry per token."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities in the model's own distribution."""
    drawn: list[float]
    """Log-probabilities in the distribution from which the tokens were drawn; [] if the engine does not report them."""
    kept: list[int]
    """For each token, the number of tokens that the filters left to draw from; [] if the engine does not report it."""
    finish_reason: str | None
    error: str | None


class OutputCollector:
    """Collects the steps of an engine whose runner returns log-probabilities as columns."""

    def __init__(self) -> None:
        self._streams: list[np.ndarray] = []  # the stream of each token
        self._tokens: list[np.ndarray] = []
        self._columns: list[LogprobColumns] = []
        self._ends: dict[int, tuple[str, str | None]] = {}

    def add(self, step: StepDeltas) -> None:
        """Add the results of a step."""
        if step.columns is not None:
            self._streams.append(np.repeat(step.streams, step.counts))
            self._tokens.append(step.tokens)
            self._columns.append(step.columns)
        for note in step.notes:
            if note.finish_reason is not None:
                self._ends[int(step.streams[note.row])] = note.finish_reason, note.error

    def outputs(self, streams: int) -> list[Output]:
        """The samples of the streams 0, 1, ... `streams` - 1."""
        ends = [self._ends.get(stream, (None, None)) for stream in range(streams)]
        if not self._tokens:
            return [Output([], [], [], [], reason, error) for reason, error in ends]
        owners, columns = np.concatenate(self._streams), LogprobColumns.joined(self._columns)
        order = owners.argsort(kind="stable")  # stable: keeps the order of the tokens within a stream
        bounds = np.searchsorted(owners[order], np.arange(streams + 1)).tolist()
        sorted_columns = [np.concatenate(self._tokens)[order], *columns.take(order)]
        tokens, logprobs, drawn, kept = [[] if column is None else column.tolist() for column in sorted_columns]
        return [
            Output(tokens[begin:end], logprobs[begin:end], drawn[begin:end], kept[begin:end], reason, error)
            for (begin, end), (reason, error) in zip(pairwise(bounds), ends)
        ]
