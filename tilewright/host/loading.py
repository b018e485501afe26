"""How far a server is with what it loads, in words: for its log, for its readiness, and for requests that come too early."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["READY", "RETRY_S", "Lines", "Loading", "state_of"]

RETRY_S = 2.0
"""After how many seconds a client should ask again for what is still being loaded."""
READY = {"status": "ready"}
"""What a server that takes requests says of itself."""
SAY_AGAIN_S = 10.0
"""Longest time without a line while something is loaded."""
SAY_NEXT_S = 1.0
"""Shortest time between two lines, whatever changes: a folder may hold a thousand small models."""
_COUNTED = re.compile(r"[\d,./% ]+$")
"""What a stage ends with that counts up, as in "loading weights 12/310": no line for each number."""


@dataclass
class Loading:
    """Something that is being loaded."""

    what: str
    """Such as "resnet50 version 1"."""
    stage: str = ""
    """What is done for it now, such as "optimising for batch 8 (2 of 5)"."""
    began_s: float = field(default_factory=time.monotonic)

    def note(self, stage: str) -> None:
        """It has come to another stage."""
        self.stage = stage

    @property
    def words(self) -> str:
        """What and where, without the time."""
        return f"{self.what}: {self.stage}" if self.stage else self.what

    @property
    def sentence(self) -> str:
        """For whoever asks for it too early."""
        seconds = f"{time.monotonic() - self.began_s:.0f} s"
        return f"{self.what} is being loaded: {f'{self.stage}, ' if self.stage else ''}{seconds}"

    def __str__(self) -> str:
        return f"{self.words}, {time.monotonic() - self.began_s:.0f} s"


def state_of(loading: Loading | None) -> dict[str, str]:
    """What a server says of itself on /ready and /health."""
    return READY if loading is None else {"status": "loading", "loading": str(loading)}


class Lines:
    """Says in lines what is being loaded: at the start, when that changes, and every ten seconds.

    Args:
        say: told each line.
        clock: seconds; for tests.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._said: tuple[str, float] | None = None
        """The words of the last line without a count at their end, and when it was said."""

    def look(self, loading: Loading) -> None:
        """Say a line if it is time for one; called several times a second."""
        now_s, words = self._clock(), _COUNTED.sub("", loading.words)
        if self._said is not None:
            before, then_s = self._said
            if now_s - then_s < (SAY_AGAIN_S if words == before else SAY_NEXT_S):
                return
        self._said = words, now_s
        self._say(f"loading {loading}")
