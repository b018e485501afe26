"""A circuit breaker: a broken model gets no requests, and is tried again after a while.

    closed --broken--> open, for 1, 2, 4 ... 60 seconds --then--> half open: one batch --answered--> closed
                                                                            --broken----> open, twice as long

A pure state machine: the clock is an argument.
"""

__all__ = ["Circuit"]

FIRST_S, LONGEST_S = 1.0, 60.0


class Circuit:
    """The circuit breaker of one version of a model."""

    def __init__(self) -> None:
        self.opened = 0
        """How often it has opened."""
        self._wait_s = 0.0
        self._until_s: float | None = None
        self.tripped = False
        """Whether it is not closed: `open_s` says more."""

    def broken(self, now_s: float) -> float:
        """Note that the model broke; return the seconds for which it gets no requests."""
        self._wait_s = min(LONGEST_S, max(FIRST_S, 2 * self._wait_s))
        self._until_s, self.tripped = now_s + self._wait_s, True
        self.opened += 1
        return self._wait_s

    def worked(self) -> None:
        """Note that the model answered."""
        self._wait_s, self._until_s, self.tripped = 0.0, None, False

    def open_s(self, now_s: float) -> float:
        """Seconds for which no request is accepted; 0 if the circuit is closed or half open."""
        return 0.0 if self._until_s is None else max(0.0, self._until_s - now_s)

    @property
    def state(self) -> str:
        """`closed`, or `open` (half open too: nothing has been answered yet)."""
        return "closed" if self._until_s is None else "open"
