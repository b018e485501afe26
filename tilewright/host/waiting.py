"""The data of a waiting request (its inputs, the receiver of its answer, facts about its kind), and of a running batch."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewright.host.batcher import Batch, Item
from tilewright.host.errors import Failed, HostError, Refused
from tilewright.host.instance import Reply
from tilewright.host.stats import Duration
from tilewright.host.tensors import Signature, Wire, byte_size, checked

__all__ = ["Ask", "CallbackAnswer", "Cut", "Plan", "Plans", "Run", "Waiting", "fail"]

MAX_PLANS = 1024
"""Number of kinds of requests that are remembered."""


@dataclass(slots=True)
class Ask:
    """The options of a request, in addition to its tensors."""

    priority: int = 0
    """Smaller is more urgent."""
    timeout_s: float | None = None
    """Longest time in seconds that the request may wait for its start."""
    sequence: int | str | None = None
    note: Callable[..., None] | None = None
    """Called for each period of the request: (name, begin, end by `time.monotonic`, numbers by name)."""
    starts: bool = False
    ends: bool = False
    kind: int | None = None
    """Requests with the same number have inputs with the same names, datatypes, shapes and sizes, so only one is checked."""


@dataclass(slots=True)
class Waiting:
    """The request of an item."""

    inputs: list[Wire]
    answer: "asyncio.Future[tuple[Wire, ...]] | CallbackAnswer"
    tried: bool = False
    times: tuple[float, float, int, float] | None = None
    """(begin, end, rows, the model's seconds) of its batch."""

    def note(self, tell: Callable[..., None], arrival_s: float, **about: Any) -> None:
        """Call `tell` for the periods of the request, if it was computed."""
        if self.times is not None:
            began_s, ended_s, rows, model_s = self.times
            tell("queue", arrival_s, began_s, **about)
            tell("compute", began_s, ended_s, **about, rows=rows, model_s=model_s)


@dataclass(slots=True, eq=False)
class Run:
    """A batch that was handed to an instance."""

    batch: Batch
    began_s: float
    """The time at which it was handed over; for a batch sent ahead, the time at which the batch before it was answered."""
    late: asyncio.TimerHandle | None = None
    """The timer that ends the batch if it hangs; None: another batch is before it."""

    def unwanted(self) -> bool:
        """Whether nobody waits for any of its requests."""
        return all(item.payload.answer.done() for item in self.batch.items)

    def tell(self, reply: Reply, ended_s: float, label: str, signature: Signature) -> tuple[int, int, float]:
        """Give each request its answer or its error; return (requests answered, their rows, their queueing seconds, summed)."""
        at, answered, answered_rows, queued_s = 0, 0, 0, 0.0
        cuts = [Cut(wire, signature.batched) for wire in reply.outputs]
        for number, item in enumerate(self.batch.items):
            rows, answer = item.rows, item.payload.answer
            item.payload.times = self.began_s, ended_s, self.batch.rows, reply.seconds
            if number in reply.unread:
                fail(item, Refused(f"{label}: {reply.unread[number]}"))
            elif number in reply.errors:
                fail(item, Failed(f"{label}: {reply.errors[number]}"))
            elif not answer.done():
                answer.set_result(tuple([cut.rows(at, rows) for cut in cuts]))
                answered, answered_rows, queued_s = answered + 1, answered_rows + rows, queued_s + self.began_s - item.arrival_s
            at += rows
        return answered, answered_rows, queued_s


def fail(item: Item, error: HostError) -> None:
    """Answer a request with an error, unless it has an answer already or nobody waits for one."""
    if not item.payload.answer.done():
        item.payload.answer.set_exception(error)


class CallbackAnswer:
    """Receives an answer and passes it to a function immediately. It has those methods of a future that are used here."""

    __slots__ = ("_callback", "_started_s", "_times", "over")

    def __init__(self, callback: Callable[[tuple[Wire, ...] | HostError], object], times: Mapping[str, Duration], now_s: float):
        self._callback, self._times, self._started_s = callback, times, now_s
        self.over = False

    def done(self) -> bool:
        """Whether there is an answer, or nobody waits for one."""
        return self.over

    def set_result(self, outputs: tuple[Wire, ...]) -> None:
        """The outputs."""
        self.over = True
        self._times["success"].add(time.monotonic() - self._started_s)
        self._callback(outputs)

    def set_exception(self, error: HostError) -> None:
        """Pass on the error, because there are no outputs."""
        self.over = True
        self._times["fail"].add(time.monotonic() - self._started_s)
        self._callback(error)


class Plan(NamedTuple):
    """Facts about a kind of requests."""

    rows: int
    size: int
    """Size of the inputs in bytes."""
    key: tuple[tuple[int, ...], ...]
    """Shapes of its rows."""


class Plans:
    """Plans of the latest kinds of requests."""

    def __init__(self, name: str, signature: Signature, max_rows: int):
        self._name, self._signature, self._max_rows = name, signature, max_rows
        self.kept = dict[int | None, Plan]()
        """Number of the kind -> its plan."""

    def made(self, inputs: Mapping[str, Wire], ask: Ask) -> Plan:
        """The plan of a request, which is kept for others of its kind. Raises Refused if the inputs are wrong."""
        rows = checked(self._name, self._signature, inputs, self._max_rows)
        wires = [inputs[spec.name] for spec in self._signature.inputs]
        plan = Plan(rows, sum(len(wire.data) for wire in wires), tuple(wire.shape[1:] for wire in wires))
        if ask.kind is not None:
            self.kept[ask.kind] = plan
            if len(self.kept) > MAX_PLANS:
                del self.kept[next(iter(self.kept))]
        return plan


class Cut:
    """Copies the shares of requests in an output out of the shared memory."""

    def __init__(self, wire: Wire, batched: bool):
        self._wire, self._batched = wire, batched
        self._row_bytes = byte_size(wire.datatype, wire.shape[1:])

    def rows(self, at: int, rows: int) -> Wire:
        """The share with `rows` rows from row `at` on."""
        datatype, shape, data = self._wire.datatype, self._wire.shape, self._wire.raw
        if not self._batched:
            return Wire(datatype, shape, bytes(data))
        return Wire(datatype, (rows, *shape[1:]), bytes(data[at * self._row_bytes : (at + rows) * self._row_bytes]))
