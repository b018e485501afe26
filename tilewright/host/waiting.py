"""What a version keeps of a request while it waits: its inputs, where its answer goes, and what is known of its kind."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tilewright.host.errors import HostError
from tilewright.host.stats import Duration
from tilewright.host.tensors import Wire, byte_size

__all__ = ["Cut", "Plan", "Told", "Waiting"]


@dataclass(slots=True)
class Waiting:
    """An item's request."""

    inputs: list[Wire]
    answer: "asyncio.Future[tuple[Wire, ...]] | Told"
    tried: bool = False
    times: tuple[float, float, int, float] | None = None
    """(begin, end, rows, the model's seconds) of its batch."""


class Told:
    """Where an answer goes that nobody awaits: to a function, at once. It is as much of a future as is used here."""

    __slots__ = ("_started_s", "_tell", "_times", "over")

    def __init__(self, tell: Callable[[tuple[Wire, ...] | HostError], object], times: Mapping[str, Duration], now_s: float):
        self._tell, self._times, self._started_s = tell, times, now_s
        self.over = False

    def done(self) -> bool:
        """Whether there is an answer, or nobody wants one."""
        return self.over

    def set_result(self, outputs: tuple[Wire, ...]) -> None:
        """The outputs."""
        self.over = True
        self._times["success"].add(time.monotonic() - self._started_s)
        self._tell(outputs)

    def set_exception(self, error: HostError) -> None:
        """Why there are none."""
        self.over = True
        self._times["fail"].add(time.monotonic() - self._started_s)
        self._tell(error)


class Plan(NamedTuple):
    """What was found out of a kind of requests."""

    rows: int
    size: int
    """Bytes of the inputs."""
    key: tuple[tuple[int, ...], ...]
    """Shapes of its rows."""


class Cut:
    """Requests' shares of an output, copied out of the shared memory."""

    def __init__(self, wire: Wire, batched: bool):
        self._wire, self._batched = wire, batched
        self._row_bytes = byte_size(wire.datatype, wire.shape[1:])

    def rows(self, at: int, rows: int) -> Wire:
        """The share of `rows` rows from `at` on."""
        datatype, shape, data = self._wire.datatype, self._wire.shape, self._wire.raw
        if not self._batched:
            return Wire(datatype, shape, bytes(data))
        return Wire(datatype, (rows, *shape[1:]), bytes(data[at * self._row_bytes : (at + rows) * self._row_bytes]))
