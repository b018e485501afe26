"""What a version keeps of a request while it waits: its inputs, where its answer goes, and what is known of its kind; and of a
batch while an instance has it.
"""

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
"""Kinds of requests that are remembered."""


@dataclass(slots=True)
class Ask:
    """What a request may say beside its tensors."""

    priority: int = 0
    """Smaller is more urgent."""
    timeout_s: float | None = None
    """How long it may wait for its start."""
    sequence: int | str | None = None
    note: Callable[..., None] | None = None
    """Called with what the request waited for: (name, begin, end by `time.monotonic`, numbers by name)."""
    starts: bool = False
    ends: bool = False
    kind: int | None = None
    """Requests with the same number have the same names, datatypes, shapes and sizes of inputs: one of them is checked."""


@dataclass(slots=True)
class Waiting:
    """An item's request."""

    inputs: list[Wire]
    answer: "asyncio.Future[tuple[Wire, ...]] | CallbackAnswer"
    tried: bool = False
    times: tuple[float, float, int, float] | None = None
    """(begin, end, rows, the model's seconds) of its batch."""

    def note(self, tell: Callable[..., None], arrival_s: float, **about: Any) -> None:
        """Tell what the request waited for, where it was computed."""
        if self.times is not None:
            began_s, ended_s, rows, model_s = self.times
            tell("queue", arrival_s, began_s, **about)
            tell("compute", began_s, ended_s, **about, rows=rows, model_s=model_s)


@dataclass(slots=True, eq=False)
class Run:
    """A batch that an instance has."""

    batch: Batch
    began_s: float
    """When it was handed over; of one that was handed over ahead, when the batch before it was answered."""
    late: asyncio.TimerHandle | None = None
    """What ends it when it hangs; None: another one is before it."""

    def unwanted(self) -> bool:
        """Whether nobody waits for any of it."""
        return all(item.payload.answer.done() for item in self.batch.items)

    def tell(self, reply: Reply, ended_s: float, label: str, signature: Signature) -> tuple[int, int, float]:
        """Give each request its answer or its error; (requests answered, their rows, how long they were queued together)."""
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
    """Give a request an error, unless it has an answer or nobody waits for one."""
    if not item.payload.answer.done():
        item.payload.answer.set_exception(error)


class CallbackAnswer:
    """Where an answer goes that nobody awaits: to a function, at once. It is as much of a future as is used here."""

    __slots__ = ("_callback", "_started_s", "_times", "over")

    def __init__(self, callback: Callable[[tuple[Wire, ...] | HostError], object], times: Mapping[str, Duration], now_s: float):
        self._callback, self._times, self._started_s = callback, times, now_s
        self.over = False

    def done(self) -> bool:
        """Whether there is an answer, or nobody wants one."""
        return self.over

    def set_result(self, outputs: tuple[Wire, ...]) -> None:
        """The outputs."""
        self.over = True
        self._times["success"].add(time.monotonic() - self._started_s)
        self._callback(outputs)

    def set_exception(self, error: HostError) -> None:
        """Why there are none."""
        self.over = True
        self._times["fail"].add(time.monotonic() - self._started_s)
        self._callback(error)


class Plan(NamedTuple):
    """What was found out of a kind of requests."""

    rows: int
    size: int
    """Bytes of the inputs."""
    key: tuple[tuple[int, ...], ...]
    """Shapes of its rows."""


class Plans:
    """Plans of the kinds of requests that came last."""

    def __init__(self, name: str, signature: Signature, max_rows: int):
        self._name, self._signature, self._max_rows = name, signature, max_rows
        self.kept = dict[int | None, Plan]()
        """By the kind's number."""

    def made(self, inputs: Mapping[str, Wire], ask: Ask) -> Plan:
        """What there is to know of a request's inputs, kept for others of its kind. Raises Refused."""
        rows = checked(self._name, self._signature, inputs, self._max_rows)
        wires = [inputs[spec.name] for spec in self._signature.inputs]
        plan = Plan(rows, sum(len(wire.data) for wire in wires), tuple(wire.shape[1:] for wire in wires))
        if ask.kind is not None:
            self.kept[ask.kind] = plan
            if len(self.kept) > MAX_PLANS:
                del self.kept[next(iter(self.kept))]
        return plan


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
