"""Log-probabilities of sampled tokens as columns, for a reader that learns from them and wants no value a token.

Only within one process: what crosses a socket has them as values (`Note.logprobs`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["LogprobColumns"]


class LogprobColumns(NamedTuple):
    """With an entry a token; what they mean: see `TokenLogprobs`."""

    logprob: np.ndarray
    """float32 [N]."""
    drawn: np.ndarray | None
    """float32 [N]; None: the engine was not told to find them."""
    kept: np.ndarray | None
    """int64 [N], likewise."""

    def take(self, where: np.ndarray) -> "LogprobColumns":
        """Of the tokens that `where` picks: bool [N], or indices."""
        return LogprobColumns(*(None if column is None else column[where] for column in self))  # pyright: ignore[reportArgumentType]

    @classmethod
    def joined(cls, parts: Sequence["LogprobColumns"]) -> "LogprobColumns":
        """One behind the other; all have the same columns."""
        return cls(*(None if column[0] is None else np.concatenate(column) for column in zip(*parts)))  # pyright: ignore[reportArgumentType]
