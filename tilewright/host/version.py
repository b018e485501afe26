"""A loaded version of a model: its queue, its processes, its circuit and its statistics, on one event loop.

What a broken model costs, and whom:

| what happens                        | the request | its companions        | the model                                    |
|-------------------------------------|-------------|-----------------------|----------------------------------------------|
| it raises, or makes a NaN           | an error    | their answers         | goes on                                      |
| it does so batch after batch        | an error    | an error              | is tried with zeros; where that fails too it |
|                                     |             |                       | is replaced, and its circuit opens           |
| its process dies, or a batch hangs  | an error    | computed again, alone | is replaced; its circuit is open while no    |
|                                     |             |                       | other process of it lives                    |

A request is tried a second time only where it shared its batch: whoever kills two processes is to blame.

The only instance of a model with large inputs gets its next batch while it computes one, where the batcher is certain of it
(`take_ahead`). A batch that is behind another has not begun: it is recalled when somebody more urgent comes or nobody waits for
it any more, and its requests go back to their places in the queue, as they do when the process is lost before their turn. After
a recall, and while the last batch failed, the next one waits until the instance is free. With several instances nothing is
handed over ahead: they overlap anyhow, and a batch could not go to another one that is free first.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from math import inf

from tilewright.host.batcher import Batch, Batcher, Full, Item
from tilewright.host.circuit import Circuit
from tilewright.host.config import ModelConfig
from tilewright.host.errors import Expired, Failed, HostError, Overloaded, Unavailable
from tilewright.host.forking import LoadFailed
from tilewright.host.instance import RECALLED, Reply, Runs
from tilewright.host.stats import Stats
from tilewright.host.tensors import Signature, Wire, zeros
from tilewright.host.waiting import Ask, CallbackAnswer, Plans, Run, Waiting, fail

__all__ = ["Ask", "Version"]

MAX_TIMEOUT_S = 86400.0
ALONE = 4
"""Batches of one request after which the next request is taken for a lone client's."""

logger = logging.getLogger(__name__)
_numbers = itertools.count()


class Version:
    """One version of one model.

    Args:
        name: the model's.
        number: of the version.
        config: of the model.
        signature: of the model.
        instances: processes that are loaded.
        revive: makes another. Raises LoadFailed.
    """

    def __init__(
        self,
        name: str,
        number: int,
        config: ModelConfig,
        signature: Signature,
        instances: Sequence[Runs],
        revive: Callable[[], Awaitable[Runs]],
    ):
        self.name, self.number, self.config, self.signature = name, number, config, signature
        self.stats, self.circuit = Stats(), Circuit()
        self._instances = list(instances)
        self._revive, self._capacity = revive, instances[0].capacity
        self._policy = config.policy(instances[0].most)
        self._batcher = Batcher(self._policy)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._plans = Plans(name, signature, self._policy.max_rows)
        self._soon = False
        """Whether `_pump` comes at the end of this turn of the event loop."""
        self._alone = 0
        """The last batches, as far as each was one request."""
        self._behind: Run | None = None
        """The batch that was handed over while another is computed."""
        self._recalled = False
        """Whether it was recalled, or has been since a batch was handed over to a free instance."""
        self.answers_one = False
        """Whether the batch that is being answered is one request."""
        self._failures = self._running = 0
        self._tasks = set[asyncio.Task[None]]()
        self._idle = asyncio.Event()
        self.closed = False

    @property
    def label(self) -> str:
        """The model in a sentence."""
        return f"model {self.name}, version {self.number}"

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self.closed and bool(self._instances) and not self.circuit.open_s(time.monotonic())

    @property
    def max_rows(self) -> int:
        """Most rows of a batch, and of a request."""
        return self._policy.max_rows

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._batcher)

    @property
    def running(self) -> int:
        """Requests that are being computed."""
        return self._running

    # ---- a request

    async def infer(self, inputs: Mapping[str, Wire], ask: Ask) -> tuple[Wire, ...]:
        """The outputs for these inputs, in the signature's order. Raises HostError."""
        started_s = time.monotonic()
        try:
            answer = await self._asked(inputs, ask, started_s)
        except HostError:
            self.stats.times["fail"].add(time.monotonic() - started_s)
            raise
        self.stats.times["success"].add(time.monotonic() - started_s)
        return answer

    def begin(
        self, inputs: Mapping[str, Wire], ask: Ask, done: Callable[[tuple[Wire, ...] | HostError], object]
    ) -> Callable[[], object]:
        """`infer` without a task: `done` is told once, later. Returns what gives the request up. Raises HostError."""
        started_s = time.monotonic()
        answer = CallbackAnswer(done, self.stats.times, started_s)
        try:
            item = self._queued(inputs, ask, started_s, answer)
        except HostError:
            self.stats.times["fail"].add(time.monotonic() - started_s)
            raise

        def give_up() -> None:
            answer.over = True
            self._withdraw(item)

        return give_up

    async def _asked(self, inputs: Mapping[str, Wire], ask: Ask, now_s: float) -> tuple[Wire, ...]:
        answer: asyncio.Future[tuple[Wire, ...]] = self._loop.create_future()
        item = self._queued(inputs, ask, now_s, answer)
        waiting: Waiting = item.payload
        try:
            return await answer
        finally:
            self._withdraw(item)
            if ask.note is not None:
                waiting.note(ask.note, now_s, model=self.name, version=self.number)

    def _withdraw(self, item: Item) -> None:
        """Nobody waits for it any more, if anybody did."""
        if not self._batcher.withdraw(item) and self._behind is not None and self._behind.unwanted():
            self._recall()

    def _queued(
        self, inputs: Mapping[str, Wire], ask: Ask, now_s: float, answer: "asyncio.Future[tuple[Wire, ...]] | CallbackAnswer"
    ) -> Item:
        """A request in the queue. Raises HostError: it is not taken."""
        rows, size, key = self._plans.kept.get(ask.kind) or self._plans.made(inputs, ask)
        self._check_open(now_s)
        wires = [inputs[spec.name] for spec in self.signature.inputs]
        if size > self._capacity:
            raise Overloaded(f"{self.label}: the inputs have {size} bytes, and a batch at most {self._capacity}", 0)
        most = max(rows, self._capacity // max(1, size // rows))
        if not self.signature.batched:
            key, most = (next(_numbers), 1)
        deadline_s = None if ask.timeout_s is None else now_s + min(ask.timeout_s, MAX_TIMEOUT_S)
        item = Item(rows, now_s, ask.priority, deadline_s, key, most, Waiting(wires, answer))
        try:
            try:
                self._batcher.add(item, len(self._instances))
            except Full:
                self._pump()  # who arrived in this turn may not be in the queue any more
                self._batcher.add(item, len(self._instances))
        except Full as error:
            self.stats.refused += 1
            raise Overloaded(f"{self.label}: {error}", max(error.retry_after_s, 0.001)) from None
        if self._behind is not None and self._batcher.overtakes(item):
            self._recall()
        # Behind everybody who has arrived in this turn of the event loop: they are one batch, not one and the rest. Where
        # requests come one by one, the turn's end is time that a lone client would wait for.
        if not self._soon:
            if self._alone >= ALONE:
                self._pump()
            self._soon = True
            self._loop.call_soon(self._pump)
        return item

    def _check_open(self, now_s: float) -> None:
        if self.closed:
            raise Unavailable(f"{self.label} is being unloaded")
        open_s = self.circuit.open_s(now_s)
        if open_s or not self._instances:
            raise Unavailable(f"{self.label} broke and is being replaced", max(open_s, 1.0))

    # ---- batches

    def _pump(self) -> None:
        """Give every free instance what it should compute now, and come back when there will be more."""
        self._soon, now_s, free = False, time.monotonic(), list[Runs]()
        if len(self._batcher):
            for item in self._batcher.expire(now_s):
                self.stats.expired += 1
                waited_s = now_s - item.arrival_s
                fail(item, Expired(f"{self.label}: the request was not started within its timeout ({waited_s:.3f} s)"))
            free = [instance for instance in self._instances if not instance.busy]
            while free and (batch := self._batcher.take(now_s)) is not None:
                self._send(free.pop(), batch, now_s)
            if not free and len(self._batcher) and self._instances:
                self._send_ahead(now_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        again_s = self._batcher.next_s(free=bool(free)) if len(self._batcher) else None
        if again_s is not None:
            self._timer = self._loop.call_later(max(0.0, again_s - now_s), self._pump)
        elif self.closed and not self._running:
            self._idle.set()

    def _send_ahead(self, now_s: float) -> None:
        """Give the only instance its next batch while it computes one."""
        if self._failures or self._recalled or self._behind is not None or self.config.instances > 1:
            return
        instance = self._instances[0]
        if instance.room and (batch := self._batcher.take_ahead(now_s)) is not None:
            self._send(instance, batch, now_s, ahead=True)

    def _send(self, instance: Runs, batch: Batch, now_s: float, *, ahead: bool = False) -> None:
        run, until_s = Run(batch, now_s), inf
        if ahead:
            self._behind = run
            until_s = min((item.deadline_s for item in batch.items if item.deadline_s is not None), default=inf)
        else:
            run.late = self._loop.call_later(self.config.batch_timeout_s, self._hangs, instance)
            self._recalled = False
        self._running += len(batch.items)
        self._alone = self._alone + 1 if len(batch.items) == 1 else 0

        def done(reply: Reply | None) -> None:
            self._running -= len(batch.items)
            if run is self._behind:
                self._behind = None
            elif run.late is not None:
                run.late.cancel()
            if self._behind is not None:
                self._begins(instance, self._behind)
            try:
                if reply is None:
                    self._lost(instance, batch)
                elif reply is RECALLED:
                    self._returned(batch)
                else:
                    self._finished(instance, run, reply)
            finally:  # an answer that cannot be made
                self._pump()

        parts, inputs = [item.rows for item in batch.items], [item.payload.inputs for item in batch.items]
        instance.run(parts, inputs, done, until_s)

    def _begins(self, instance: Runs, run: Run) -> None:
        """The batch before it was answered."""
        self._behind, run.began_s = None, time.monotonic()
        run.late = self._loop.call_later(self.config.batch_timeout_s, self._hangs, instance)
        self._batcher.begun()

    def _recall(self) -> None:
        """Let the batch that is behind another one come back, unless it has begun."""
        if self._behind is not None and not self._recalled:
            self._recalled = True
            self._instances[0].recall()

    def _returned(self, batch: Batch) -> None:
        """A batch was never begun."""
        self._batcher.restore(batch, lambda item: not item.payload.answer.done())
        if self.closed and not self._instances:
            self._drop(Unavailable(f"{self.label} was unloaded"))

    def _finished(self, instance: Runs, run: Run, reply: Reply) -> None:
        batch, ended_s = run.batch, time.monotonic()
        self.answers_one = len(batch.items) == 1
        answered, rows, queued_s = run.tell(reply, ended_s, self.label, self.signature)
        self.stats.inferences += rows
        self._batcher.took(batch, ended_s - run.began_s)
        self.stats.answered(answered, queued_s, run.began_s, ended_s, reply.seconds)
        if len(reply.errors) < len(batch.items):
            self._failures = 0
            self.circuit.worked()
            self.stats.batch(batch.rows, ended_s - run.began_s, reply.seconds)
        else:
            self._failures += 1
            if self._failures >= self.config.max_failures and not instance.busy:  # else the next batch tells
                self._probe(instance)

    # ---- what breaks

    def _probe(self, instance: Runs) -> None:
        """Compute zeros: a model that cannot even do that is broken, else the clients' inputs are to blame."""
        late = self._loop.call_later(self.config.batch_timeout_s, self._hangs, instance)

        def done(reply: Reply | None) -> None:
            late.cancel()
            if reply is None or reply.errors:
                reason = "its process ended" if reply is None else reply.errors[0]
                logger.error("%s: %d batches in a row failed, and so did zeros: %s", self.label, self._failures, reason)
                instance.close()
                self._replace(instance)
            self._failures = 0
            self._pump()

        instance.run([1], [zeros(self.signature)], done)

    def _hangs(self, instance: Runs) -> None:
        logger.error("%s: a batch ran for more than %g s; its process is killed", self.label, self.config.batch_timeout_s)
        instance.close()

    def _lost(self, instance: Runs, batch: Batch) -> None:
        """An instance died with a batch: its requests are tried again, each alone, and one that was alone has failed."""
        for item in batch.items:
            waiting: Waiting = item.payload
            if len(batch.items) == 1 or waiting.tried or self.closed:
                fail(item, Failed(f"{self.label}: its process died, or hung and was killed, while it computed this request"))
            elif not waiting.answer.done():
                waiting.tried = True
                alone = Item(item.rows, item.arrival_s, item.priority, item.deadline_s, next(_numbers), item.rows, waiting)
                try:
                    self._batcher.add(alone, taken=True)
                except Full as error:
                    fail(item, Overloaded(f"{self.label}: {error}", 1.0))
        self._replace(instance)

    def _replace(self, instance: Runs) -> None:
        if instance not in self._instances:
            return
        self._instances.remove(instance)
        self.stats.restarts += 1
        wait_s = 0.0 if self._instances else self.circuit.broken(time.monotonic())
        if not self.closed:
            task = self._loop.create_task(self._revived(wait_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _revived(self, wait_s: float) -> None:
        """Load an instance in the place of a lost one, at once, then less and less often."""
        while not self.closed:
            try:
                instance = await self._revive()
            except LoadFailed as error:
                logger.error("%s could not be loaded again: %s", self.label, error)
                if not self._instances:
                    self._drop(Unavailable(f"{self.label} could not be loaded again: {error}", max(1.0, wait_s)))
                    wait_s = self.circuit.broken(time.monotonic())
                await asyncio.sleep(max(1.0, wait_s))
                continue
            if self.closed:
                instance.close()
                return
            self._instances.append(instance)
            self._pump()
            return

    def _drop(self, error: HostError) -> None:
        for item in self._batcher.drain():
            fail(item, error)

    # ---- the end

    def abort(self, reason: str) -> None:
        """Take no more requests, and give up those that are there."""
        self.closed = True
        self._drop(Unavailable(f"{self.label}: {reason}"))
        for instance in list(self._instances):
            instance.close()

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Take no more requests, finish those that are there for at most so long, and end the processes."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        if self._instances and (len(self._batcher) or self._running):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        self._drop(Unavailable(f"{self.label} was unloaded"))
        if self._timer is not None:
            self._timer.cancel()
        for instance in list(self._instances):
            instance.close()
