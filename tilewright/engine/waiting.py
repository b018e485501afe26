"""Requests that wait for their start: their order, how many may wait, and for how long.

If only the number of waiting requests is limited, no request is answered in time under lasting overload, because each one waits
for the whole queue. So a request may also have a maximum waiting time. It is refused at once if the queue before it is expected
to take longer, according to the last seconds. It ends if this time has passed before it has started.

The speed of the queue is the rate of starts in the last seconds, if at least as many requests have started as are running. With
fewer starts, not every slot has been reused yet, and starts come in bursts. Then the rate is the number of running requests
divided by the average time that requests run (Little, A Proof for the Queuing Formula L = lambda W, 1961).

Pure Python; the behaviour depends only on the calls and the clock.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tilewright.engine.request import QueueFull, Request

__all__ = ["Room", "WaitingQueue"]

RATE_WINDOW_S = 5.0
"""The rate of starts is measured over this time."""
RATE_LEAST_S = 1.0
"""No rate is estimated until requests have been waiting for this time."""
_SMOOTHING = 1 / 16
"""The weight of the newest request in the average time that requests run."""
RETRY_LEAST_S, RETRY_MOST_S = 1.0, 60.0


class Room(NamedTuple):
    """How many more requests of the default priority would be accepted, and the refusal of the next one."""

    left: int
    refusal: QueueFull


def _order(request: Request) -> tuple[int, int]:
    return request.order


class WaitingQueue:
    """Requests by (priority, arrival). At most `most` may wait; preempted requests return to their places regardless."""

    def __init__(self, most: int, clock: Callable[[], float]):
        self.most = most
        self._clock = clock
        self._requests: list[Request] = []
        self._starts: deque[float] = deque()
        self._standing_since_s: float | None = None  # since when there have always been waiting requests
        self._last_start_s = -math.inf
        self._running = 1
        self._run_s: float | None = None  # how long requests run, on average

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """The request that starts next."""
        return self._requests[0]

    def check_room(self, count: int, order: tuple[int, int], max_wait_s: float | None) -> None:
        """Raise QueueFull unless `count` requests at `order` may wait, the first of them at most `max_wait_s` seconds."""
        waiting = len(self._requests)
        if waiting + count > self.most:
            retry_s = self._retry_after_s(self._wait_s(waiting), 0.0)
            got = f"{waiting} requests wait, {count} more asked for, {self.most} may wait"
            raise QueueFull(f"{got}; try again in {retry_s:.0f} s", retry_s)
        if max_wait_s is not None:
            expected_s = self._wait_s(bisect_left(self._requests, order, key=_order))
            if expected_s is not None and expected_s > max_wait_s:
                raise self._too_late(waiting, expected_s, max_wait_s)

    def room(self, max_wait_s: float) -> Room | None:
        """How many more requests with this `max_wait_s` `check_room` would accept now; None: only `most` limits them."""
        ahead = bisect_left(self._requests, (0, math.inf), key=_order)
        each_s = self._wait_s(1)
        if each_s is None:
            return None
        most = int(max_wait_s / each_s) if each_s else self.most
        if most >= self.most:
            return None
        last = max(ahead, most + 1)
        return Room(most + 1 - ahead, self._too_late(len(self._requests) + last - ahead, last * each_s, max_wait_s))

    def _too_late(self, waiting: int, expected_s: float, max_wait_s: float) -> QueueFull:
        retry_s = self._retry_after_s(expected_s, max_wait_s)
        expected = f"some {expected_s:.1f} s" if expected_s < RETRY_MOST_S else "very long"
        got = f"{waiting} requests wait, and this one would wait {expected}, wanted at most {max_wait_s:g} s"
        return QueueFull(f"{got}; try again in {retry_s:.0f} s", retry_s, by_time=True)

    def push(self, request: Request) -> None:
        """Insert a request at its place in the order."""
        insort(self._requests, request, key=_order)

    def pop(self) -> Request:
        """Remove and return the first request, which starts now."""
        request = self._requests.pop(0)
        request.started_s = self._clock()
        if self._standing_since_s is not None:
            self._last_start_s = request.started_s
            self._starts.append(self._last_start_s)
        return request

    def ended(self, run_s: float) -> None:
        """Note that a started request has ended, `run_s` seconds after its start."""
        self._run_s = run_s if self._run_s is None else self._run_s + _SMOOTHING * (run_s - self._run_s)

    def remove(self, request: Request) -> None:
        """Remove a request that will not be started."""
        del self._requests[bisect_left(self._requests, request.order, key=_order)]

    def left_over(self, running: int) -> None:
        """Call this after every scheduled step, with the number of running requests. The requests still here have to wait."""
        self._running = max(1, running)
        if not self._requests:
            self._standing_since_s = None
            self._starts.clear()
        elif self._standing_since_s is None:
            self._standing_since_s = self._clock()

    def overdue(self) -> list[tuple[Request, float]]:
        """(request, after how many seconds to try again) for requests that have never started and have waited too long."""
        if not self._requests:
            return []
        now_s = self._clock()
        late = [
            request
            for request in self._requests
            if request.max_wait_s is not None and not request.preemptions and now_s - request.arrival_s > request.max_wait_s
        ]
        if not late:
            return []
        retry_s = self._retry_after_s(self._wait_s(len(self._requests)), 0.0)
        return [(request, retry_s) for request in late]

    def _wait_s(self, ahead: int) -> float | None:
        """How long it will take until `ahead` requests have started; None while too little is known."""
        if ahead == 0 or self._standing_since_s is None:
            return None
        now_s = self._clock()
        known_s = min(now_s - self._standing_since_s, RATE_WINDOW_S)
        while self._starts and self._starts[0] < now_s - RATE_WINDOW_S:
            self._starts.popleft()
        if known_s < RATE_LEAST_S:
            return None
        if len(self._starts) >= self._running:
            return ahead * known_s / len(self._starts)
        # If no request has started for some time, requests run for at least this time.
        run_s = max(self._run_s or 0.0, now_s - max(self._standing_since_s, self._last_start_s))
        return ahead * run_s / self._running

    def _retry_after_s(self, expected_s: float | None, allowed_s: float) -> float:
        """After how many seconds the queue will be short enough, if no other request arrives."""
        if expected_s is None:
            return RETRY_LEAST_S
        return min(RETRY_MOST_S, max(RETRY_LEAST_S, expected_s - allowed_s))
