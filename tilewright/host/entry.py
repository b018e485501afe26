"""How requests enter a version of a model: they are checked and put into its queue, or refused."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping

from tilewright.host.batcher import Batcher, Full, Item
from tilewright.host.circuit import Circuit
from tilewright.host.errors import HostError, Overloaded, Unavailable
from tilewright.host.running import Run
from tilewright.host.runs import Runs
from tilewright.host.stats import Stats
from tilewright.host.tensors import Signature, Wire
from tilewright.host.waiting import Ask, Awaited, Group, Plan, Plans, Waiting, WithCallback, fail

__all__ = ["ALONE", "NUMBERS", "Entry"]

MAX_TIMEOUT_S = 86400.0
ALONE = 4
"""After this many batches of one request, the next request is assumed to come from a single client."""

NUMBERS = itertools.count()
"""Keys of requests that must not share a batch, and numbers of versions."""


class Entry:
    """The part of a `Version` that accepts requests. The parts of it that are used here are declared below."""

    name: str
    number: int
    signature: Signature
    stats: Stats
    circuit: Circuit
    closed: bool
    _batcher: Batcher
    _plans: Plans
    _instances: list[Runs]
    _input_names: list[str]
    _capacity: int
    _loop: asyncio.AbstractEventLoop
    _behind: Run | None
    _alone: int
    _pump: Callable[[], None]
    _recall: Callable[[], None]

    @property
    def label(self) -> str:
        """The name and version of the model, for messages."""
        return f"model {self.name}, version {self.number}"

    def __init__(self) -> None:
        self._soon = False
        """Whether `_pump` will be called at the end of this turn of the event loop."""

    async def infer(self, inputs: Mapping[str, Wire], ask: Ask) -> tuple[Wire, ...]:
        """The outputs for these inputs, in the signature's order. Raises HostError."""
        started_s, waiting = time.monotonic(), Awaited(self._loop.create_future())
        try:
            self._queued(inputs, ask, started_s, waiting)
            answer = await waiting.answer
        except HostError:
            self.stats.times["fail"].add(time.monotonic() - started_s)
            raise
        finally:
            item, waiting.item = waiting.item, None
            if item is not None:
                self._withdraw(item)
            if ask.note is not None:
                waiting.note(ask.note, started_s, model=self.name, version=self.number)
        self.stats.times["success"].add(time.monotonic() - started_s)
        return answer

    def begin(self, inputs: Mapping[str, Wire], ask: Ask, waiting: WithCallback) -> None:
        """`infer` without a task: `waiting.deliver` is called later, once, unless the request is given up. Raises HostError."""
        started_s = time.monotonic()
        waiting.withdraw = self._withdraw
        try:
            self._queued(inputs, ask, started_s, waiting)
        except HostError:
            self.stats.times["fail"].add(time.monotonic() - started_s)
            raise

    def plan(self, ask: Ask) -> Plan | None:
        """Facts about the kind of a request, if `begin` has had one of this kind and `begin_group` takes it."""
        plan = self._plans.kept.get(ask.kind)
        return plan if plan is not None and self.signature.batched and plan.size <= self._capacity else None

    def in_order(self, inputs: Mapping[str, Wire]) -> tuple[Wire, ...]:
        """The inputs of a request, in the signature's order."""
        return tuple(map(inputs.__getitem__, self._input_names))

    def begin_group(self, group: Group, plan: Plan, priority: int, timeout_s: float | None) -> None:
        """`begin` for requests that arrived together and differ only in their tensors. `all_there` or
        `all_there_soon` has to be called next.

        `group` is told of errors, too: each request that has no room in the queue is refused.
        """
        now_s, count, instances = time.monotonic(), len(group.tensors), len(self._instances)
        deadline_s = None if timeout_s is None else now_s + min(timeout_s, MAX_TIMEOUT_S)
        group.withdraw = self._withdraw
        rest = group.item = Item(plan.rows * count, now_s, priority, deadline_s, plan.key, plan.most, group, count)
        if self.closed or self.circuit.tripped or not self._instances:
            try:
                self._check_open(now_s)
            except HostError as error:
                fail(rest, error, self.stats)
                return
        for full in (False, True):
            room = self._batcher.room(rest, instances)
            if room:
                item, rest = rest, None if room == rest.count else self._batcher.divide(rest, room)
                self._batcher.add(item, instances)
                self._overtakes(item)
            if rest is None:
                break
            if not full:
                self._pump()  # items that arrived in this turn may have left the queue
        else:
            assert rest is not None
            refusal = self._batcher.refusal(rest, 0, instances)
            assert refusal is not None
            self.stats.refused += rest.count
            fail(rest, self._overloaded(refusal), self.stats)

    def _overloaded(self, full: Full) -> Overloaded:
        return Overloaded(f"{self.label}: {full}", max(full.retry_after_s, 0.001))

    def _withdraw(self, item: Item) -> bool:
        """Remove a request for which nobody waits any more. Returns whether it was in the queue."""
        if self._batcher.withdraw(item):
            return True
        if self._behind is not None and self._behind.unwanted():
            self._recall()
        return False

    def _queued(self, inputs: Mapping[str, Wire], ask: Ask, now_s: float, waiting: Waiting) -> None:
        """Put a request into the queue. Raises HostError if it is not accepted."""
        rows, size, key, most = self._plans.kept.get(ask.kind) or self._plans.made(inputs, ask)
        if self.closed or self.circuit.tripped or not self._instances:
            self._check_open(now_s)
        if size > self._capacity:
            raise Overloaded(f"{self.label}: the inputs have {size} bytes, wanted at most {self._capacity} in a batch", 0)
        waiting.inputs = self.in_order(inputs)
        if not self.signature.batched:
            key, most = (next(NUMBERS), 1)
        deadline_s = None if ask.timeout_s is None else now_s + min(ask.timeout_s, MAX_TIMEOUT_S)
        item = waiting.item = Item(rows, now_s, ask.priority, deadline_s, key, most, waiting)
        try:
            try:
                self._batcher.add(item, len(self._instances))
            except Full:
                self._pump()  # items that arrived in this turn may have left the queue
                self._batcher.add(item, len(self._instances))
        except Full as error:
            self.stats.refused, waiting.item = self.stats.refused + 1, None
            raise self._overloaded(error) from None
        self._overtakes(item)
        self.all_there_soon()

    def _overtakes(self, item: Item) -> None:
        """Recall the batch that was sent ahead if an item, which is in the queue now, has to come first."""
        if self._behind is not None and self._batcher.overtakes(item):
            self._recall()

    def all_there(self) -> None:
        """All requests of this turn of the event loop have begun."""
        self._pump()

    def all_there_soon(self) -> None:
        """A request or a group has begun. Others of this turn of the event loop may follow, and then form one batch with it."""
        # If requests come one by one, this would only make a single client wait until the end of the turn.
        if not self._soon:
            if self._alone >= ALONE:
                self._pump()
            self._soon = True
            self._loop.call_soon(self._pump)

    def _check_open(self, now_s: float) -> None:
        if self.closed:
            raise Unavailable(f"{self.label} is being unloaded")
        open_s = self.circuit.open_s(now_s)
        if open_s or not self._instances:
            raise Unavailable(f"{self.label} failed and is being replaced", max(open_s, 1.0))
