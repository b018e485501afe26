"""What a request asks of the sampler, in the widths that a device has: plain values, decided when the request is made."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["MAX_LOGIT_ENTRIES", "LogitEdits", "Settings"]

MAX_LOGIT_ENTRIES = 1024
"""Tokens that one request may bias or ban by their ids: entries of `logit_bias`, and the tokens that `min_tokens` bans."""


class Settings(NamedTuple):
    """What `ops.sample` takes of a request, in its widths: top_k 0 is off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class LogitEdits(NamedTuple):
    """What a request does to its logits before they are sampled; `ops.edit_logits` says in which order."""

    repetition: float
    presence: float
    frequency: float
    entries: tuple[tuple[int, float, float], ...]
    """(token id, what is added to its logit at positions below `until`, what is added from there on), each id once."""
    until: int
    allowed: tuple[int, ...] | None

    @property
    def counts(self) -> bool:
        """Whether the tokens before matter."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @classmethod
    def of(
        cls, *, repetition: float, presence: float, frequency: float, biases: Mapping[int, float], banned: Iterable[int],
        until: int, allowed: tuple[int, ...] | None,
    ) -> "LogitEdits | None":  # fmt: skip
        """The edits of a request; None where it has none. `banned`: tokens that no position below `until` may have.

        Raises:
            ValueError: more tokens are named than `MAX_LOGIT_ENTRIES`.
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
