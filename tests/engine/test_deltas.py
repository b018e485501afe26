"""A step's rows by their indices: those of one front of several."""

import numpy as np
import pytest

from tilewright.engine.deltas import Note, StepDeltas


def rows_of(step: StepDeltas) -> list[tuple[int, list[int], str | None]]:
    """(stream, tokens, reason of its end) of each row, the plain way."""
    ends = np.cumsum(step.counts)
    reasons = {note.row: note.finish_reason for note in step.notes}
    parts = zip(step.streams.tolist(), step.counts.tolist(), ends.tolist())
    return [(stream, step.tokens[end - n : end].tolist(), reasons.get(i)) for i, (stream, n, end) in enumerate(parts)]


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("noted", [False, True])
def test_some_rows_are_what_they_were(most: int, noted: bool) -> None:
    rng = np.random.default_rng(most)
    for _ in range(50):
        n = int(rng.integers(1, 12))
        counts = rng.integers(most == 1, most + 1, n).astype(np.int32)
        streams, tokens = rng.permutation(100)[:n], rng.integers(0, 9, counts.sum()).astype(np.int32)
        notes = tuple(Note(i, "stop") for i in np.flatnonzero(rng.integers(0, 2, n)).tolist()) if noted else ()
        step = StepDeltas(streams, counts, tokens, notes)
        rows = np.flatnonzero(rng.integers(0, 2, n))
        all_rows = rows_of(step)
        assert rows_of(step.of(rows)) == [all_rows[i] for i in rows.tolist()]
