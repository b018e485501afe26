"""An event loop on simulated time, and an executor without a thread: asyncio code and the code beside it, in one thread.

The loop asks its selector for events when it has nothing to run. The selector here runs one item of the executor instead, or
moves the clock to the next timer. Which of the two, and how often an item runs between two callbacks, is drawn from a seed, so
every interleaving that a thread beside an event loop could have is possible, and each can be had again.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["SimulatedExecutor", "SimulatedLoop", "Stuck"]


class Stuck(AssertionError):
    """Nothing is left to run, no timer is set, and somebody still waits."""


class SimulatedExecutor:
    """A `ThreadPoolExecutor(1)` whose items run when `run_one` is called."""

    def __init__(self) -> None:
        self._items: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()
        self._items.append((future, call, args))
        return future

    def run_one(self) -> None:
        """Run the oldest call; what it raises is its future's, but for failed checks, which end the simulation."""
        future, call, args = self._items.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call(*args)
        except (ArithmeticError, LookupError, OSError, RuntimeError, SystemError, TypeError, ValueError) as error:
            future.set_exception(error)
        else:
            future.set_result(result)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs coroutines on a clock of its own, and an executor's items between them.

    Args:
        executor: whose items run.
        seed: of the interleaving.
        item_s: simulated seconds that an item takes at most.
    """

    def __init__(self, executor: SimulatedExecutor, seed: int, item_s: float = 1.0):
        super().__init__()
        self.now_s = 0.0
        self._executor_items, self._rng, self._item_s = executor, random.Random(seed), item_s
        self._selector = self
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Simulated seconds."""
        return self.now_s

    def select(self, timeout: float | None) -> list[Any]:
        """What the base class calls between two rounds of callbacks. Raises Stuck."""
        idle = timeout is None or timeout > 0
        if len(self._executor_items):
            if idle or self._rng.random() < 0.4:
                self._executor_items.run_one()
                self.now_s += self._rng.random() * self._item_s
        elif timeout is None:
            raise Stuck("nothing is left to run, and a client still waits")
        else:
            self.now_s += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""
