"""The engine in its own thread, and the way between that thread and the event loop.

One executor thread owns the engine: commands (submit, abort, look) and steps are its work items, so a command runs between
two steps and never beside one. What a step produced goes to the event loop in a single `call_soon_threadsafe`, however many
requests it touched, and from there into each request's `Channel`.

A request that the engine refuses fails alone: its exception travels back through its future. A step that raises, or a device
that is lost, stops the engine for good (its state can no longer be trusted): every open channel then raises `EngineStopped`,
and so does every later submission. A channel that is left before its end, for whatever reason, aborts its requests, which frees
their pages before the next step.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.core import Engine
from tilewright.engine.request import Delta, SamplingParams
from tilewright.server.metrics import Latencies

__all__ = ["Channel", "EngineStopped", "EngineWorker"]

T = TypeVar("T")


class EngineStopped(RuntimeError):
    """The engine takes no more work: a step failed, or the server was told to stop at once."""


class Channel:
    """Deltas of one HTTP request, which may be several engine requests; used on the event loop only."""

    def __init__(self, ids: Sequence[str], samples: int):
        self.ids = tuple(ids)
        self.unfinished = len(self.ids) * samples
        """Samples that are still to come to their end."""
        self.opened_s = time.perf_counter()
        self.last_token_s: dict[tuple[str, int], float] = {}
        """When a sample, by request id and index, had its last token."""
        self._deltas: list[Delta] = []
        self._changed = asyncio.Event()
        self._stopped: str | None = None

    def push(self, delta: Delta) -> None:
        """Add what a step produced."""
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self.unfinished -= 1
        self._changed.set()

    def stop(self, reason: str) -> None:
        """Make `take` raise `EngineStopped`."""
        self._stopped = reason
        self._changed.set()

    async def take(self) -> list[Delta]:
        """All deltas since the last call, in order; waits for at least one, and returns [] once all samples are finished.

        Raises:
            EngineStopped: no more will come.
        """
        while not self._deltas:
            if self.unfinished == 0:
                return []
            if self._stopped is not None:
                raise EngineStopped(self._stopped)
            self._changed.clear()
            await self._changed.wait()
        deltas, self._deltas = self._deltas, []
        return deltas


def _take_exception(found: asyncio.Future[T]) -> None:
    """A caller that has gone takes no exception, and the log would show a traceback for each."""
    if not found.cancelled():
        found.exception()


class EngineWorker:
    """Runs `engine` in a thread of its own. Create it on the event loop that it shall serve; `close` ends the thread.

    `on_failure` is called on the event loop, with the exception, when the engine can do no more.
    `max_wait_s`: how long a request may wait for its start; None: for ever.
    """

    def __init__(
        self,
        engine: Engine,
        latencies: Latencies,
        on_failure: Callable[[BaseException], None],
        *,
        max_wait_s: float | None = None,
    ):
        self.engine = engine
        self._max_wait_s = max_wait_s
        self._latencies = latencies
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tilewright-engine")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="tilewright-adapters")
        self._channels: dict[str, Channel] = {}
        self._stopped: str | None = None
        self._stepping = False  # only touched in the engine's thread: a step is queued or running

    @property
    def stopped(self) -> str | None:
        """Why the engine takes no more work, or None while it does."""
        return self._stopped

    @property
    def failures(self) -> int:
        """Steps that failed since one brought a token."""
        return self.engine.failed_steps

    @property
    def open_channels(self) -> int:
        """HTTP requests that wait for the engine."""
        return len(set(map(id, self._channels.values())))

    @asynccontextmanager
    async def open(self, name: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> AsyncIterator[Channel]:
        """Submit prompts, all or none, as requests `name` (one prompt) or `name-0`, `name-1` ...; abort them on leaving early.

        Raises:
            ValueError: the engine refuses a prompt.
            QueueFull: there is no room in the queue.
            EngineStopped: the engine takes no more work.
        """
        if self._stopped is not None:
            raise EngineStopped(self._stopped)
        ids = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        channel = Channel(ids, params[0].n)
        self._channels.update(dict.fromkeys(ids, channel))
        try:
            await self.call(lambda: self._submit(ids, prompts, params))
            yield channel
        finally:
            for request_id in ids:
                del self._channels[request_id]
            if channel.unfinished and self._stopped is None:
                # Runs after the submission even if that is still queued: the executor keeps the order.
                self._executor.submit(self._abort, ids)

    async def call(self, look: Callable[[], T]) -> T:
        """The result of `look()`, run in the engine's thread between two steps."""
        if self._stopped is not None:
            raise EngineStopped(self._stopped)
        found = asyncio.wrap_future(self._executor.submit(look), loop=self._loop)
        found.add_done_callback(_take_exception)
        # shield: a command whose caller has gone still runs, so that the abort behind it finds what it must end.
        return await asyncio.shield(found)

    async def adapter_names(self) -> Sequence[str]:
        """The adapters that requests may name. Raises EngineStopped."""
        adapters = self.engine.adapters
        return [] if adapters is None else await self.call(lambda: list(adapters.names))

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Hold the adapter in a folder. It is read in another thread, beside the engine's steps.

        Raises:
            ValueError: the folder cannot be taken, the name is taken, or there is no room.
            EngineStopped: the engine takes no more work.
        """
        adapters = self.engine.adapters
        if adapters is None:
            raise ValueError("this server has no room for adapters: start it with --max-adapters")
        read = await self._loop.run_in_executor(self._reading, adapters.read, folder)
        await self.call(lambda: self.engine.hold_adapter(name, read, str(folder)))

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises UnknownAdapter or EngineStopped."""
        adapters = self.engine.adapters
        if adapters is None:
            raise UnknownAdapter(f"there is no adapter {name!r} here")
        await self.call(lambda: adapters.remove(name))

    def stop_all(self, reason: str) -> None:
        """End every open channel with `EngineStopped`, and take no more work."""
        self._stopped = reason
        for channel in set(self._channels.values()):
            channel.stop(reason)

    def close(self) -> None:
        """End the thread after the command or step that it is in."""
        self.stop_all(self._stopped or "the server has stopped")
        # In the thread itself, so that it cannot be about to queue another step while the executor closes.
        self._executor.submit(lambda: None).result()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._reading.shutdown(wait=False, cancel_futures=True)

    # In the engine's thread ------------------------------------------------------------------------------------------

    def _submit(self, ids: Sequence[str], prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        taken: list[str] = []
        try:
            for request_id, prompt, param in zip(ids, prompts, params, strict=True):
                # What comes behind the first waits as long as it takes: the request as a whole has been started by then.
                self.engine.submit(prompt, param, request_id, max_wait_s=None if taken else self._max_wait_s)
                taken.append(request_id)
        finally:
            if len(taken) < len(ids):
                self._abort(taken)
        self._keep_stepping()

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)
        self._keep_stepping()

    def _keep_stepping(self) -> None:
        if self._stepping or self._stopped is not None or not self.engine.has_work:
            return
        self._stepping = True
        self._executor.submit(self._step).add_done_callback(self._stepped)

    def _step(self) -> None:
        deltas = self.engine.step()
        if deltas:
            self._loop.call_soon_threadsafe(self._deliver, deltas, time.perf_counter())

    def _stepped(self, step: Future[None]) -> None:
        self._stepping = False
        if step.cancelled():
            return
        error = step.exception() or self.engine.lost
        if error is None:
            self._keep_stepping()
        else:
            self._loop.call_soon_threadsafe(self._fail, error)

    # On the event loop -----------------------------------------------------------------------------------------------

    def _deliver(self, deltas: Sequence[Delta], now_s: float) -> None:
        for delta in deltas:
            channel = self._channels.get(delta.request_id)
            if channel is None:
                continue  # its client has gone; the abort is on its way
            self._measure(channel, delta, now_s)
            channel.push(delta)

    def _measure(self, channel: Channel, delta: Delta, now_s: float) -> None:
        if not delta.token_ids:
            return
        sample = (delta.request_id, delta.index)
        before_s = channel.last_token_s.get(sample)
        if before_s is None:
            self._latencies.first(now_s - channel.opened_s)
        else:
            self._latencies.following(now_s - before_s, len(delta.token_ids))
        channel.last_token_s[sample] = now_s

    def _fail(self, error: BaseException) -> None:
        self.stop_all(f"the engine failed: {type(error).__name__}: {error}")
        self._on_failure(error)
