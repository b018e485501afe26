"""A clock for the deadlines of tests, which stands still while the machine does, and waiting by it.

A machine that halts for a second, or a process that is stopped, is no fault of what is tested.
"""

import threading
import time
from collections.abc import Callable

__all__ = ["awake_s", "until"]

TICK_S, MOST_S = 0.01, 0.1


class _Clock(threading.Thread):
    """Wakes every hundredth of a second. If it was not woken for longer than `MOST_S`, no more than that is counted."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="awake")
        self.now_s = 0.0
        self.start()

    def run(self) -> None:
        last_s = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now_s = time.monotonic()
            self.now_s += min(now_s - last_s, MOST_S)
            last_s = now_s


_clock = _Clock()


def awake_s() -> float:
    """Seconds since this was imported in which this process could run, to a hundredth of a second."""
    return _clock.now_s


def until(true: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait until it is true. Raises AssertionError: it was not, for so long."""
    end_s = awake_s() + timeout_s
    while not true():
        assert awake_s() < end_s, f"not so after {timeout_s} s"
        time.sleep(0.002)
