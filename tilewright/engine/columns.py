"""Log-probabilities of sampled tokens as arrays, for training, where one Python object per token would be too slow.

They are used only within one process; deltas sent over a socket contain objects instead (`Note.logprobs`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["LogprobColumns"]


class LogprobColumns(NamedTuple):
    """Arrays with one entry per token; see `TokenLogprobs` for their meaning."""

    logprob: np.ndarray
    """float32 [N]."""
    drawn: np.ndarray | None
    """float32 [N]; None: the runner does not explain draws."""
    kept: np.ndarray | None
    """int64 [N], or None likewise."""

    def take(self, where: np.ndarray) -> "LogprobColumns":
        """The entries that `where` selects; bool [N], or indices."""
        return LogprobColumns(*(None if column is None else column[where] for column in self))  # pyright: ignore[reportArgumentType]

    @classmethod
    def joined(cls, parts: Sequence["LogprobColumns"]) -> "LogprobColumns":
        """Concatenates parts, which must have the same columns."""
        return cls(*(None if column[0] is None else np.concatenate(column) for column in zip(*parts)))  # pyright: ignore[reportArgumentType]
