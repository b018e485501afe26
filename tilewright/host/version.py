"""A loaded version of a model: its queue, its processes, its circuit and its statistics, on one event loop.

What a broken model costs, and whom:

| what happens                        | the request | its companions        | the model                                    |
|-------------------------------------|-------------|-----------------------|----------------------------------------------|
| it raises, or makes a NaN           | an error    | their answers         | goes on                                      |
| it does so batch after batch        | an error    | an error              | is tried with zeros; where that fails too it |
|                                     |             |                       | is replaced, and its circuit opens           |
| its process dies, or a batch hangs  | an error    | computed again, alone | is replaced; its circuit is open while no    |
|                                     |             |                       | other process of it lives                    |

A request is tried a second time only if it shared its batch, or if the next batch had begun: a request that kills two processes
is the cause. Nothing is sent ahead behind the second attempt, so that it cannot be blamed for others. Requests whose batch had
not begun return to the queue, unless several processes in a row ended like this. A process that dies while it has no batch is
replaced at once.

If a model with large inputs has a single instance, this gets its next batch while it computes one, provided that the batcher is
certain of it (`take_ahead`). A batch behind another one begins shortly before that ends, or when that is answered (turns.py).
Until then it is recalled if a more urgent request arrives or if nobody waits for it any more; its requests return to their
places in the queue, as they do if the process is lost before their turn. After a recall, and if the last batch failed, the next
one waits until the instance is free. With several instances, which overlap in any case, no batch is sent ahead: it could not go
to the one that is free first.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf

from tilewright.host.batcher import Batch, Batcher, Full, Item
from tilewright.host.circuit import Circuit
from tilewright.host.config import ModelConfig
from tilewright.host.entry import NUMBERS, Entry
from tilewright.host.errors import Expired, Failed, HostError, Overloaded, Unavailable
from tilewright.host.forking import LoadFailed
from tilewright.host.running import Run, kept, may_be_kept
from tilewright.host.runs import RECALLED, Reply, Runs
from tilewright.host.stats import Stats
from tilewright.host.tensors import Signature, zeros
from tilewright.host.waiting import Ask, Plans, Waiting, fail, singly, wanted

__all__ = ["Ask", "Version"]

MAX_UNBEGUN = 4
"""Batches in a row whose process may end before they begin. Then they are handled as if they had begun."""

logger = logging.getLogger(__name__)


class Version(Entry):
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
        super().__init__()
        self.name, self.number, self.config, self.signature = name, number, config, signature
        self.serial = next(NUMBERS)
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
        self._alone = 0
        """The number of latest batches that had one request each."""
        self._behind: Run | None = None
        """The batch that was sent ahead, while another one is computed."""
        self._recalled = False
        """Whether a batch was recalled since a free instance last got one."""
        self.answers_one = False
        """Whether the batch that is being answered has one request."""
        self._failures = self._running = self._unbegun = 0
        """Batches that failed, requests that are computed, and batches in a row whose process ended before they began."""
        self._careful = False
        """Whether the running batch is the second attempt of a request."""
        self._tasks = set[asyncio.Task[None]]()
        self._idle = asyncio.Event()
        self.closed = False
        for instance in self._instances:
            self._watch(instance)

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

    # ---- batches

    def _pump(self) -> None:
        """Give a batch to every free instance, and schedule the next call for when there will be more to do."""
        self._soon, now_s, free = False, time.monotonic(), list[Runs]()
        if len(self._batcher):
            for item in self._batcher.expire(now_s):
                self.stats.expired += item.count
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
        if self._failures or self._recalled or self._careful or self._behind is not None or self.config.instances > 1:
            return
        instance = self._instances[0]
        if instance.room and (batch := self._batcher.take_ahead(now_s)) is not None:
            self._send(instance, batch, now_s, ahead=True)

    def _send(self, instance: Runs, batch: Batch, now_s: float, *, ahead: bool = False) -> None:
        run, until_s, count = Run(batch, now_s), inf, batch.requests
        if ahead:
            self._behind = run
            until_s = min((item.deadline_s for item in batch.items if item.deadline_s is not None), default=inf)
        else:
            self._recalled, self._careful = False, _tried(batch)
        self._running += count
        self._alone = self._alone + 1 if count == 1 else 0

        def done(reply: Reply | None) -> None:
            run.over = True
            self._running -= count
            to_blame = count == 1 and not (reply is None and instance.blameless)
            if run is self._behind:
                self._behind = None
            elif run.late is not None:
                run.late.cancel()
            if self._behind is not None:
                self._begins(instance, self._behind)
            try:
                if reply is None:
                    self._lost(instance, batch, to_blame=to_blame)
                elif reply is RECALLED:
                    self._returned(instance, batch)
                else:
                    self._finished(instance, run, reply)
            finally:  # also if an answer cannot be made
                self._pump()

        instance.run(*run.laid_out(), done, until_s)
        if not ahead and not run.over:
            # Not before: the time that this process takes to hand over a batch is not the model's.
            run.late = self._loop.call_later(self.config.batch_timeout_s, self._hangs, instance)

    def _begins(self, instance: Runs, run: Run) -> None:
        """Note that a batch begins, because the batch before it was answered."""
        self._behind, run.began_s, self._careful = None, time.monotonic(), _tried(run.batch)
        run.late = self._loop.call_later(self.config.batch_timeout_s, self._hangs, instance)
        self._batcher.begun()

    def _recall(self) -> None:
        """Recall the batch that was sent ahead, unless it has begun."""
        if self._behind is not None and not self._recalled:
            self._recalled = True
            self._instances[0].recall()

    def _returned(self, instance: Runs, batch: Batch) -> None:
        """Handle a batch that was never begun."""
        self._unbegun += instance.closed
        if self._unbegun > MAX_UNBEGUN:
            return self._lost(instance, batch, to_blame=False)
        self._batcher.restore(batch, wanted)

    def _finished(self, instance: Runs, run: Run, reply: Reply) -> None:
        batch, ended_s, self._unbegun = run.batch, time.monotonic(), 0
        gets_next = instance.room or not instance.busy
        if len(self._batcher) and gets_next and not (reply.errors or self._failures) and may_be_kept(reply):
            reply = kept(reply)
            self._pump()  # the model has its next batch while the answers are made
        self.answers_one = batch.requests == 1
        run.tell(reply, ended_s, self.label, self.signature, self.stats)
        self._batcher.took(batch, ended_s - run.began_s)
        if len(reply.errors) < batch.requests:
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
                self._replace(instance)
                instance.close()
            self._failures = 0
            self._pump()

        instance.run([1], [zeros(self.signature)], done)
        if not over:
            late = self._loop.call_later(self.config.batch_timeout_s, self._hangs, instance)

    def _hangs(self, instance: Runs) -> None:
        logger.error("%s: a batch ran for more than %g s; its process is killed", self.label, self.config.batch_timeout_s)
        instance.close()

    def _lost(self, instance: Runs, batch: Batch, *, to_blame: bool) -> None:
        """Handle a batch whose instance died: its requests are tried again, each alone.

        `to_blame`: it had a single request, which fails because no other can be the cause.
        """
        for item in chain.from_iterable(map(singly, batch.items)):
            waiting: Waiting = item.payload
            if to_blame or waiting.tried or self.closed:
                why = f"{self.label}: its process died, or hung and was killed, while it computed this request"
                fail(item, Failed(why), self.stats)
            elif not waiting.done():
                waiting.tried, number = True, next(NUMBERS)
                alone = Item(item.rows, item.arrival_s, item.priority, item.deadline_s, number, item.rows, waiting)
                waiting.item = alone
                try:
                    self._batcher.add(alone, taken=True)
                except Full as error:
                    fail(item, Overloaded(f"{self.label}: {error}", 1.0), self.stats)
        self._replace(instance)

    def _watch(self, instance: Runs) -> None:
        """Notice it when an instance ends, also one that has no batch."""
        instance.on_end = partial(self._ended, instance)
        if instance.closed:
            self._loop.call_soon(self._ended, instance)

    def _ended(self, instance: Runs) -> None:
        """Replace an instance, unless this was done because of its batch; at the end, drop what nobody will compute."""
        if self.closed and all(one.closed for one in self._instances):
            self._drop(Unavailable(f"{self.label} was unloaded"))
        elif not self.closed and instance in self._instances:
            logger.error("%s: its process ended although no batch had begun, and is replaced", self.label)
            self._replace(instance)
        self._pump()

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
            self._watch(instance)
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


def _tried(batch: Batch) -> bool:
    """Whether a batch is the second attempt of a request, which is then alone."""
    return batch.requests == 1 and batch.items[0].payload.tried
