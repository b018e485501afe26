"""A request's settings for the sampler in the number types of the device: plain values, made together with the request."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["MAX_LOGIT_ENTRIES", "LogitEdits", "Settings"]

MAX_LOGIT_ENTRIES = 1024
"""Most tokens that one request may bias or ban by id: entries of `logit_bias`, and the tokens that `min_tokens` bans."""


class Settings(NamedTuple):
    """Arguments of `ops.sample` for a request; top_k 0 is off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class LogitEdits(NamedTuple):
    """The changes of a request's logits before sampling; `ops.edit_logits` defines their order."""

    repetition: float
    presence: float
    frequency: float
    entries: tuple[tuple[int, float, float], ...]
    """(token id, value added to its logit at positions below `until`, value added from there on); each id occurs once."""
    until: int
    allowed: tuple[int, ...] | None

    @property
    def counts(self) -> bool:
        """Whether the edits depend on the counts of earlier tokens."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @classmethod
    def of(
        cls, *, repetition: float, presence: float, frequency: float, biases: Mapping[int, float], banned: Iterable[int],
        until: int, allowed: tuple[int, ...] | None,
    ) -> "LogitEdits | None":  # fmt: skip
        """The edits of a request; None if it has none. `banned`: tokens that are not allowed at positions below `until`.

        Raises:
            ValueError: more than `MAX_LOGIT_ENTRIES` tokens are biased or banned.
        """
        banned = frozenset(banned)
        entries = [(token, -math.inf, float(biases.get(token, 0.0))) for token in sorted(banned)]
        entries += [(token, float(bias), float(bias)) for token, bias in biases.items() if token not in banned]
        if len(entries) > MAX_LOGIT_ENTRIES:  # a model with very many end-of-text tokens
            raise ValueError(
                f"logit_bias and the tokens that min_tokens bans are {len(entries)}, wanted at most {MAX_LOGIT_ENTRIES}"
            )
        made = cls(repetition, presence, frequency, tuple(entries), until, allowed)
        return made if made.counts or entries or made.allowed is not None else None
