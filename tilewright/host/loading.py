"""The progress of loading, as text: for a server's log, for its readiness, and for requests that arrive too early."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["READY", "RETRY_S", "Lines", "Loading", "state_of"]

RETRY_S = 2.0
"""Seconds after which a client should ask again for a model that is still being loaded."""
READY = {"status": "ready"}
"""The state of a server that accepts requests."""
SAY_AGAIN_S = 10.0
"""Longest time in seconds without a line while something is loaded."""
SAY_NEXT_S = 1.0
"""Shortest time in seconds between two lines: a folder may contain a thousand small models."""
_COUNTED = re.compile(r"[\d,./% ]+$")
"""The end of a stage that counts, as in "loading weights 12/310", for which not every number gets a line."""


@dataclass
class Loading:
    """A model that is being loaded."""

    what: str
    """The model, such as "resnet50 version 1"."""
    stage: str = ""
    """The present stage, such as "optimising for batch 8 (2 of 5)"."""
    began_s: float = field(default_factory=time.monotonic)

    def note(self, stage: str) -> None:
        """Note the next stage."""
        self.stage = stage

    @property
    def words(self) -> str:
        """The model and its stage, without the time."""
        return f"{self.what}: {self.stage}" if self.stage else self.what

    @property
    def sentence(self) -> str:
        """A sentence for a client that asks for the model too early."""
        seconds = f"{time.monotonic() - self.began_s:.0f} s"
        return f"{self.what} is being loaded: {f'{self.stage}, ' if self.stage else ''}{seconds}"

    def __str__(self) -> str:
        return f"{self.words}, {time.monotonic() - self.began_s:.0f} s"


def state_of(loading: Loading | None) -> dict[str, str]:
    """The state that a server reports on /ready and /health."""
    return READY if loading is None else {"status": "loading", "loading": str(loading)}


class Lines:
    """Prints lines about what is being loaded: at the start, when it changes, and every ten seconds.

    Args:
        say: called with each line.
        clock: seconds; for tests.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._said: tuple[str, float] | None = None
        """The text of the last line without a count at its end, and the time of the line."""

    def look(self, loading: Loading) -> None:
        """Print a line if it is time for one. Call this several times a second."""
        now_s, words = self._clock(), _COUNTED.sub("", loading.words)
        if self._said is not None:
            before, then_s = self._said
            if now_s - then_s < (SAY_AGAIN_S if words == before else SAY_NEXT_S):
                return
        self._said = words, now_s
        self._say(f"loading {loading}")
