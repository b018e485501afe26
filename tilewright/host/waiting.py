"""The data of a waiting request (its inputs, the receiver of its answer, facts about its kind), and of a running batch."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewright.host.batcher import Batch, Item
from tilewright.host.errors import Failed, HostError, Refused
from tilewright.host.instance import Reply
from tilewright.host.stats import Stats
from tilewright.host.tensors import Signature, Wire, byte_size, checked

__all__ = ["Ask", "Awaited", "Cut", "Plan", "Plans", "Run", "Waiting", "WithCallback", "fail", "kept", "may_be_kept"]

MAX_KEPT_BYTES = 1 << 20
"""Most bytes of outputs that are copied so that the next batch can begin before the answers are made."""
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


class Waiting:
    """The request of an item, and who receives its answer: `Awaited` or `WithCallback`."""

    __slots__ = ("inputs", "item", "times", "tried")
    has_callback = False
    """Whether it is a `WithCallback`, whose times are noted for it."""

    def __init__(self) -> None:
        self.inputs: tuple[Wire, ...] = ()
        self.item: Item | None = None
        """Its place in the queue, while somebody waits for the answer; the two form a cycle, which has to be broken."""
        self.tried = False
        self.times: tuple[float, float, int, float] | None = None
        """(begin, end, rows, the model's seconds) of its batch."""

    def done(self) -> bool:
        """Whether there is an answer, or nobody waits for one."""
        raise NotImplementedError

    def set_result(self, outputs: tuple[Wire, ...]) -> None:
        """Pass on the outputs."""
        raise NotImplementedError

    def set_exception(self, error: HostError) -> None:
        """Pass on the error, because there are no outputs."""
        raise NotImplementedError

    def note(self, tell: Callable[..., None], arrival_s: float, **about: Any) -> None:
        """Call `tell` for the periods of the request, if it was computed."""
        if self.times is not None:
            began_s, ended_s, rows, model_s = self.times
            tell("queue", arrival_s, began_s, **about)
            tell("compute", began_s, ended_s, **about, rows=rows, model_s=model_s)


class Awaited(Waiting):
    """A request whose answer is a future."""

    __slots__ = ("answer",)

    def __init__(self, answer: "asyncio.Future[tuple[Wire, ...]]"):
        super().__init__()
        self.answer = answer

    def done(self) -> bool:
        """See `Waiting`."""
        return self.answer.done()

    def set_result(self, outputs: tuple[Wire, ...]) -> None:
        """See `Waiting`."""
        self.answer.set_result(outputs)

    def set_exception(self, error: HostError) -> None:
        """See `Waiting`."""
        self.answer.set_exception(error)


class WithCallback(Waiting):
    """A request whose answer is passed to a callback, without a task or a future: `deliver` is called once."""

    __slots__ = ("over", "withdraw")
    has_callback = True

    def __init__(self) -> None:
        # As in the base class: there is one of these for each request, and a call would cost more than the rest.
        self.inputs: tuple[Wire, ...] = ()
        self.tried = self.over = False
        self.times: tuple[float, float, int, float] | None = None
        self.item: Item | None = None
        self.withdraw: Callable[[Item], object] | None = None
        """Removes the item from the queue."""

    def deliver(self, found: tuple[Wire, ...] | HostError) -> None:
        """The outputs are there, or the reason why there are none."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        self.over = True
        item, self.item = self.item, None
        if item is not None and self.withdraw is not None:
            self.withdraw(item)

    def done(self) -> bool:
        """See `Waiting`."""
        return self.over

    def set_result(self, outputs: tuple[Wire, ...]) -> None:
        """See `Waiting`."""
        self.over, self.item = True, None
        self.deliver(outputs)

    def set_exception(self, error: HostError) -> None:
        """See `Waiting`."""
        self.over, self.item = True, None
        self.deliver(error)


@dataclass(slots=True, eq=False)
class Run:
    """A batch that was handed to an instance."""

    batch: Batch
    began_s: float
    """The time at which it was handed over; for a batch sent ahead, the time at which the batch before it was answered."""
    late: asyncio.TimerHandle | None = None
    """The timer that ends the batch if it hangs; None: another batch is before it."""
    over: bool = False
    """Whether there is a reply, or the instance has ended."""

    def unwanted(self) -> bool:
        """Whether nobody waits for any of its requests."""
        return all(item.payload.done() for item in self.batch.items)

    def tell(self, reply: Reply, ended_s: float, label: str, signature: Signature, stats: Stats) -> None:
        """Give each request its answer or its error, and note how many were answered and how long they waited."""
        at, answered, answered_rows, queued_s, delivered, delivered_s = 0, 0, 0, 0.0, 0, 0.0
        cuts = [Cut(wire, signature.batched) for wire in reply.outputs]
        only = cuts[0].rows if len(cuts) == 1 else None
        errors, unread = reply.errors, reply.unread
        times = self.began_s, ended_s, self.batch.rows, reply.seconds
        try:
            for number, item in enumerate(self.batch.items):
                rows, waiting = item.rows, item.payload
                waiting.times = times
                if unread and number in unread:
                    fail(item, Refused(f"{label}: {unread[number]}"), stats)
                elif errors and number in errors:
                    fail(item, Failed(f"{label}: {errors[number]}"), stats)
                elif not waiting.done():
                    arrival_s = item.arrival_s
                    answered, answered_rows, queued_s = answered + 1, answered_rows + rows, queued_s + self.began_s - arrival_s
                    if waiting.has_callback:
                        delivered, delivered_s = delivered + 1, delivered_s + ended_s - arrival_s
                    outputs = (only(at, rows),) if only is not None else tuple([cut.rows(at, rows) for cut in cuts])
                    waiting.set_result(outputs)
                at += rows
        finally:
            if delivered:
                stats.times["success"].add(delivered_s + delivered * (time.monotonic() - ended_s), delivered)
            stats.inferences += answered_rows
            stats.answered(answered, queued_s, self.began_s, ended_s, reply.seconds)


def fail(item: Item, error: HostError, stats: Stats) -> None:
    """Answer a request with an error, unless it has an answer already or nobody waits for one."""
    waiting: Waiting = item.payload
    if not waiting.done():
        if waiting.has_callback:
            stats.times["fail"].add(time.monotonic() - item.arrival_s)
        waiting.set_exception(error)


def may_be_kept(reply: Reply) -> bool:
    """Whether the outputs are few enough for `kept`."""
    return sum([len(wire.raw) for wire in reply.outputs]) <= MAX_KEPT_BYTES


def kept(reply: Reply) -> Reply:
    """A reply with outputs of its own: those in shared memory are overwritten by the instance's next batch."""
    return reply._replace(outputs=tuple([wire._replace(data=bytes(wire.raw)) for wire in reply.outputs]))


class Plan(NamedTuple):
    """Facts about a kind of requests."""

    rows: int
    size: int
    """Size of the inputs in bytes."""
    key: tuple[tuple[int, ...], ...]
    """Shapes of its rows."""
    most: int
    """Most rows of a batch, by the size of its inputs."""


class Plans:
    """Plans of the latest kinds of requests."""

    def __init__(self, name: str, signature: Signature, max_rows: int, capacity: int):
        self._name, self._signature, self._max_rows, self._capacity = name, signature, max_rows, capacity
        self._keys = dict[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]()
        """Equal keys are one object, so that comparing them takes no time."""
        self.kept = dict[int | None, Plan]()
        """Number of the kind -> its plan."""

    def made(self, inputs: Mapping[str, Wire], ask: Ask) -> Plan:
        """The plan of a request, which is kept for others of its kind. Raises Refused if the inputs are wrong."""
        rows = checked(self._name, self._signature, inputs, self._max_rows)
        wires = [inputs[spec.name] for spec in self._signature.inputs]
        size, key = sum(len(wire.data) for wire in wires), tuple(wire.shape[1:] for wire in wires)
        if len(self._keys) >= MAX_PLANS:
            self._keys.clear()
        plan = Plan(rows, size, self._keys.setdefault(key, key), max(rows, self._capacity // max(1, size // rows)))
        if ask.kind is not None:
            self.kept[ask.kind] = plan
            if len(self.kept) > MAX_PLANS:
                del self.kept[next(iter(self.kept))]
        return plan


class Cut:
    """Copies the shares of requests in an output out of the shared memory."""

    def __init__(self, wire: Wire, batched: bool):
        self._wire, self._batched = wire, batched
        self._datatype, self._data = wire.datatype, wire.raw
        self._row_bytes = byte_size(wire.datatype, wire.shape[1:])
        self._rows, self._shape = 1, (1, *wire.shape[1:])
        """The rows of the last share, and its shape."""

    def rows(self, at: int, rows: int) -> Wire:
        """The share with `rows` rows from row `at` on."""
        if not self._batched:
            return Wire(self._datatype, self._wire.shape, bytes(self._data))
        if rows != self._rows:
            self._rows, self._shape = rows, (rows, *self._wire.shape[1:])
        begin, size = at * self._row_bytes, rows * self._row_bytes
        return Wire(self._datatype, self._shape, bytes(self._data[begin : begin + size]))
