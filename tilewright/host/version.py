"""A loaded version of a model: its queue, its processes, its circuit and its statistics, on one event loop.

What a broken model costs, and whom:

| what happens                        | the request | its companions        | the model                                    |
|-------------------------------------|-------------|-----------------------|----------------------------------------------|
| it raises, or makes a NaN           | an error    | their answers         | goes on                                      |
| it does so batch after batch        | an error    | an error              | is tried with zeros; where that fails too it |
|                                     |             |                       | is replaced, and its circuit opens           |
| its process dies, or a batch hangs  | an error    | computed again, alone | is replaced; its circuit is open while no    |
|                                     |             |                       | other process of it lives                    |

A request is tried a second time only if it shared its batch: a request that kills two processes is the cause.

If a model with large inputs has a single instance, this gets its next batch while it computes one, provided that the batcher is
certain of it (`take_ahead`). A batch behind another one has not begun. It is recalled if a more urgent request arrives or if
nobody waits for it any more; its requests then return to their places in the queue, as they do if the process is lost before
their turn. After a recall, and if the last batch failed, the next one waits until the instance is free. With several instances,
which overlap in any case, no batch is sent ahead: it could not go to the one that is free first.
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
from tilewright.host.waiting import Ask, Awaited, Plans, Run, Waiting, WithCallback, fail, kept, may_be_kept

__all__ = ["Ask", "Version"]

MAX_TIMEOUT_S = 86400.0
ALONE = 4
"""After this many batches of one request, the next request is assumed to come from a single client."""

logger = logging.getLogger(__name__)
_numbers = itertools.count()


class Version:
    """One version of one model.

    Args:
        name: name of the model.
        number: number of the version.
        config: config of the model.
        signature: signature of the model.
        instances: processes that have loaded the model.
        revive: starts another process. Raises LoadFailed.
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
        self.serial = next(_numbers)
        """Its own number among all versions of all models in this process."""
        self.output_names = [spec.name for spec in signature.outputs]
        self._input_names = [spec.name for spec in signature.inputs]
        self.stats, self.circuit = Stats(), Circuit()
        self._instances = list(instances)
        self._revive, self._capacity = revive, instances[0].capacity
        self._policy = config.policy(instances[0].most)
        self._batcher = Batcher(self._policy)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._plans = Plans(name, signature, self._policy.max_rows, self._capacity)
        self._soon = False
        """Whether `_pump` will be called at the end of this turn of the event loop."""
        self._alone = 0
        """The number of latest batches that had one request each."""
        self._behind: Run | None = None
        """The batch that was sent ahead, while another one is computed."""
        self._recalled = False
        """Whether a batch was recalled since a free instance last got one."""
        self.answers_one = False
        """Whether the batch that is being answered has one request."""
        self._failures = self._running = 0
        self._tasks = set[asyncio.Task[None]]()
        self._idle = asyncio.Event()
        self.closed = False

    @property
    def label(self) -> str:
        """The name and version of the model, for messages."""
        return f"model {self.name}, version {self.number}"

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return not self.closed and bool(self._instances) and not self.circuit.open_s(time.monotonic())

    @property
    def max_rows(self) -> int:
        """Most rows of a batch, and of a request."""
        return self._policy.max_rows

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._batcher)

    @property
    def running(self) -> int:
        """The number of requests that are being computed."""
        return self._running

    # ---- a request

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

    def _withdraw(self, item: Item) -> None:
        """Remove a request for which nobody waits any more."""
        if not self._batcher.withdraw(item) and self._behind is not None and self._behind.unwanted():
            self._recall()

    def _queued(self, inputs: Mapping[str, Wire], ask: Ask, now_s: float, waiting: Waiting) -> None:
        """Put a request into the queue. Raises HostError if it is not accepted."""
        rows, size, key, most = self._plans.kept.get(ask.kind) or self._plans.made(inputs, ask)
        if self.closed or self.circuit.tripped or not self._instances:
            self._check_open(now_s)
        if size > self._capacity:
            raise Overloaded(f"{self.label}: the inputs have {size} bytes, wanted at most {self._capacity} in a batch", 0)
        waiting.inputs = tuple(map(inputs.__getitem__, self._input_names))
        if not self.signature.batched:
            key, most = (next(_numbers), 1)
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
            raise Overloaded(f"{self.label}: {error}", max(error.retry_after_s, 0.001)) from None
        if self._behind is not None and self._batcher.overtakes(item):
            self._recall()
        # Call it after all requests of this turn of the event loop have arrived, so that they form one batch. If requests come
        # one by one, this would only make a single client wait until the end of the turn.
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

    # ---- batches

    def _pump(self) -> None:
        """Give a batch to every free instance, and schedule the next call for when there will be more to do."""
        self._soon, now_s, free = False, time.monotonic(), list[Runs]()
        if len(self._batcher):
            for item in self._batcher.expire(now_s):
                self.stats.expired += 1
                waited_s = now_s - item.arrival_s
                why = f"{self.label}: the request was not started within its timeout ({waited_s:.3f} s)"
                fail(item, Expired(why), self.stats)
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
            self._recalled = False
        self._running += len(batch.items)
        self._alone = self._alone + 1 if len(batch.items) == 1 else 0

        def done(reply: Reply | None) -> None:
            run.over = True
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
            finally:  # also if an answer cannot be made
                self._pump()

        parts, inputs = [item.rows for item in batch.items], [item.payload.inputs for item in batch.items]
        instance.run(parts, inputs, done, until_s)
        if not ahead and not run.over:
            # Not before: the time that this process takes to hand over a batch is not the model's.
            run.late = self._loop.call_later(self.config.batch_timeout_s, self._hangs, instance)

    def _begins(self, instance: Runs, run: Run) -> None:
        """Note that a batch begins, because the batch before it was answered."""
        self._behind, run.began_s = None, time.monotonic()
        run.late = self._loop.call_later(self.config.batch_timeout_s, self._hangs, instance)
        self._batcher.begun()

    def _recall(self) -> None:
        """Recall the batch that was sent ahead, unless it has begun."""
        if self._behind is not None and not self._recalled:
            self._recalled = True
            self._instances[0].recall()

    def _returned(self, batch: Batch) -> None:
        """Handle a batch that was never begun."""
        self._batcher.restore(batch, lambda item: not item.payload.done())
        if self.closed and not self._instances:
            self._drop(Unavailable(f"{self.label} was unloaded"))

    def _finished(self, instance: Runs, run: Run, reply: Reply) -> None:
        batch, ended_s = run.batch, time.monotonic()
        if len(self._batcher) and not (instance.busy or reply.errors or self._failures) and may_be_kept(reply):
            reply = kept(reply)
            self._pump()  # the model computes its next batch while the answers are made
        self.answers_one = len(batch.items) == 1
        run.tell(reply, ended_s, self.label, self.signature, self.stats)
        self._batcher.took(batch, ended_s - run.began_s)
        if len(reply.errors) < len(batch.items):
            self._failures = 0
            self.circuit.worked()
            self.stats.batch(batch.rows, ended_s - run.began_s, reply.seconds, reply.traffic)
        else:
            self._failures += 1
            if self._failures >= self.config.max_failures and not instance.busy:  # else the next batch decides
                self._probe(instance)

    # ---- what breaks

    def _probe(self, instance: Runs) -> None:
        """Compute a batch of zeros: if this fails, the model is broken; otherwise the clients' inputs are the cause."""
        late: asyncio.TimerHandle | None = None
        over = False

        def done(reply: Reply | None) -> None:
            nonlocal over
            over = True
            if late is not None:
                late.cancel()
            if reply is None or reply.errors:
                reason = "its process ended" if reply is None else reply.errors[0]
                logger.error("%s: %d batches in a row failed, and so did zeros: %s", self.label, self._failures, reason)
                instance.close()
                self._replace(instance)
            self._failures = 0
            self._pump()

        instance.run([1], [zeros(self.signature)], done)
        if not over:
            late = self._loop.call_later(self.config.batch_timeout_s, self._hangs, instance)

    def _hangs(self, instance: Runs) -> None:
        logger.error("%s: a batch ran for more than %g s; its process is killed", self.label, self.config.batch_timeout_s)
        instance.close()

    def _lost(self, instance: Runs, batch: Batch) -> None:
        """Handle a batch whose instance died: its requests are tried again, each alone; a request that was alone fails."""
        for item in batch.items:
            waiting: Waiting = item.payload
            if len(batch.items) == 1 or waiting.tried or self.closed:
                why = f"{self.label}: its process died, or hung and was killed, while it computed this request"
                fail(item, Failed(why), self.stats)
            elif not waiting.done():
                waiting.tried, number = True, next(_numbers)
                alone = Item(item.rows, item.arrival_s, item.priority, item.deadline_s, number, item.rows, waiting)
                waiting.item = alone
                try:
                    self._batcher.add(alone, taken=True)
                except Full as error:
                    fail(item, Overloaded(f"{self.label}: {error}", 1.0), self.stats)
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
        """Load an instance in place of a lost one: immediately, and after failures at growing intervals."""
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
            fail(item, error, self.stats)

    # ---- the end

    def abort(self, reason: str) -> None:
        """Accept no more requests, and cancel those that wait or run."""
        self.closed = True
        self._drop(Unavailable(f"{self.label}: {reason}"))
        for instance in list(self._instances):
            instance.close()

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Accept no more requests, let the present ones finish for at most so many seconds, and end the processes."""
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
