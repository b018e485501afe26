"""The data of waiting requests: their inputs, the receivers of their answers, facts about their kind."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewright.host.batcher import Batcher, Item
from tilewright.host.errors import HostError
from tilewright.host.stats import Stats
from tilewright.host.tensors import Signature, Wire, checked

__all__ = ["Ask", "Awaited", "Group", "Plan", "Plans", "Waiting", "WithCallback", "fail", "singly", "wanted"]

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
    """Whether it is a `WithCallback` or a `Group`, whose times are noted for it."""
    is_group = False
    """Whether it is a `Group`."""

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


class Group(Waiting):
    """Requests that arrived together, with the same options, and with tensors of the same datatypes and shapes.

    They are one item of the queue, and are answered together, so that most of the work is done once for all of them. `left` has
    the positions of requests that need no answer: nobody waits for them, or they have an error. A request that leaves while the
    group is in the queue is removed from the group.
    """

    __slots__ = ("left", "tensors", "withdraw")
    has_callback = is_group = True

    def __init__(self, tensors: list[tuple[Wire, ...]]):
        super().__init__()
        self.tensors = tensors
        """The inputs of each request, in the signature's order."""
        self.left = set[int]()
        self.withdraw: Callable[[Item], bool] | None = None
        """Takes a request of the item out of the queue. Returns False if the item is not in the queue."""

    def part(self, begin: int) -> "Group":
        """A group of the requests from `begin` on, which this group loses."""
        raise NotImplementedError

    def drop(self, position: int) -> None:
        """Lose the request at a position."""
        del self.tensors[position]

    def answer(self, outputs: Sequence[Wire]) -> int:
        """Pass on the outputs of all requests together, which are valid during this call, except to those in `left`.

        Returns the number of requests that have an answer now.
        """
        raise NotImplementedError

    def refuse(self, error: HostError, positions: Sequence[int]) -> None:
        """Pass on an error to some requests."""
        raise NotImplementedError

    def waiting(self) -> list[int]:
        """The positions of requests that somebody waits for."""
        return [position for position in range(len(self.tensors)) if position not in self.left]

    def done(self) -> bool:
        """See `Waiting`."""
        return len(self.left) == len(self.tensors)

    def leave(self, position: int) -> None:
        """Nobody waits for a request any more."""
        if self.item is not None and self.withdraw is not None and position not in self.left:
            if not self.item.gone:  # first, because the queue may recall a batch that nobody waits for
                self.drop(position)
            else:
                self.left.add(position)
            self.withdraw(self.item)
            if self.done():
                self.item = None

    def split(self, count: int, rest: Item) -> "Group":
        """See `Parts`."""
        other = self.part(count)
        other.withdraw, other.item, other.tried = self.withdraw, rest, self.tried
        return other

    def prune(self, item: Item) -> bool:
        """Remove the requests for which nobody waits from this group and its item, which is not in the queue.

        Returns whether others remain.
        """
        rows = item.rows // item.count
        for position in sorted(self.left, reverse=True):
            self.drop(position)
        self.left.clear()
        item.count = len(self.tensors)
        item.rows = rows * item.count
        return item.count > 0

    def fail(self, errors: Mapping[int, HostError]) -> None:
        """Pass on an error to each request by its position, if somebody waits for it."""
        for position in [position for position in errors if position not in self.left]:
            self.refuse(errors[position], [position])
            self.left.add(position)


def fail(item: Item, error: HostError, stats: Stats) -> None:
    """Answer a request, or each of a group, with an error, unless it has an answer already or nobody waits for one."""
    waiting: Waiting = item.payload
    if isinstance(waiting, Group):
        positions, waiting.item = waiting.waiting(), None
        if positions:
            stats.times["fail"].add(len(positions) * (time.monotonic() - item.arrival_s), len(positions))
            waiting.refuse(error, positions)
            waiting.left.update(positions)
    elif not waiting.done():
        if waiting.has_callback:
            stats.times["fail"].add(time.monotonic() - item.arrival_s)
        waiting.set_exception(error)


def wanted(item: Item) -> bool:
    """Whether somebody waits for a request of an item that goes back to the queue. Others of a group are removed from it."""
    return item.payload.prune(item) if item.payload.is_group else not item.payload.done()


def singly(item: Item) -> Iterator[Item]:
    """An item for each request of a batch that was not answered; for requests of a group only if somebody waits for them."""
    group = item.payload
    if group.is_group and not group.prune(item):
        return
    while item.count > 1:
        rest = Batcher.divide(item, 1)
        yield item
        item = rest
    yield item


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
