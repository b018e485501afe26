"""Runs the engine in its own thread and passes data between that thread and the event loop.

One executor thread owns the engine. Its work items are commands (submit, abort, look) and steps, so a command runs between two
steps and never at the same time as one. The output of a step goes to the event loop in a single `call_soon_threadsafe`, for any
number of requests. The event loop puts it into the `Channel` of each request.

If a step raises, or the device is lost, the engine stops for good, because its state can no longer be trusted.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from tilewright.asm.jit import CompileCounter
from tilewright.engine.core import Engine
from tilewright.engine.grammar import Grammar
from tilewright.engine.pooling import Pass
from tilewright.engine.request import Delta, QueueFull, SamplingParams
from tilewright.engine.step import DeviceLost
from tilewright.engine.waiting import Room
from tilewright.server.grammars import GrammarCompiler
from tilewright.server.link import Channel, EngineLink, EngineStopped
from tilewright.server.live import LiveView
from tilewright.server.metrics import Latencies, Scrape

__all__ = ["EngineWorker"]

T = TypeVar("T")


def _take_exception(found: asyncio.Future[T]) -> None:
    """Retrieve the exception. If the caller has gone, nobody else does, and asyncio would log a traceback."""
    if not found.cancelled():
        found.exception()


def _tell(said: Sequence[tuple[asyncio.Future[None], BaseException | None]]) -> None:
    """Pass the results of submissions to the callers that still wait."""
    for taken, error in said:
        if taken.done():
            continue
        if error is None:
            taken.set_result(None)
        else:
            taken.set_exception(error)


def _failed(error: BaseException) -> str:
    return f"the engine failed: {type(error).__name__}: {error}"


class EngineWorker(EngineLink):
    """Runs `engine` in a thread of its own. Create it on the event loop that it serves; `close` ends the thread.

    Args:
        on_failure: called on the event loop, with the exception, when the engine has failed and does no more work.
        max_wait_s: how long a request may wait for its start; None: without limit.
        compiles: a started counter; `close` stops it.
        run_pass: computes embeddings or scores of whole texts, in the engine's thread.
    """

    def __init__(
        self,
        engine: Engine,
        latencies: Latencies,
        on_failure: Callable[[BaseException], None],
        *,
        max_wait_s: float | None = None,
        compiles: CompileCounter | None = None,
        run_pass: Callable[[Pass], np.ndarray] | None = None,
    ):
        super().__init__(latencies)
        self.engine = engine
        self._max_wait_s = max_wait_s
        self._compiles = compiles
        self._run_pass = run_pass
        self._live = LiveView(engine)
        self._grammars = GrammarCompiler(engine)
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tilewright-engine")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="tilewright-adapters")
        self._stepping = False  # only touched in the engine's thread: a step is queued or running
        self._arrivals: deque[tuple[Callable[[], None], asyncio.Future[None]]] = deque()
        """Submissions that the engine's thread has not made yet, each with the future that its caller waits for."""
        self._asked = 0
        """Number of samples sent to the engine's thread so far."""
        self._seen = 0
        """Number of those samples that the engine's thread has queued or refused."""
        self._room: tuple[Room, int] | None = None
        """The room in the engine's queue, and the value of `_seen` at the time when it was read."""

    @property
    def failures(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of steps that failed since the last step that produced a token."""
        return self.engine.failed_steps

    @property
    def full(self) -> QueueFull | None:
        """The error with which the engine would refuse a request now, judged by its state after its last step or submission."""
        now = self._room
        return None if now is None or now[0].left > self._asked - now[1] else now[0].refusal

    async def _submit_all(self, channel: Channel, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        if self.stopped is not None:
            raise EngineStopped(self.stopped)
        self._asked += channel.unfinished
        taken: asyncio.Future[None] = self._loop.create_future()
        self._arrivals.append((partial(self._submit, channel.ids, prompts, params), taken))
        if len(self._arrivals) == 1:
            self._executor.submit(self._take_in)
        try:
            await taken
        except DeviceLost as lost:  # it was raised before this event loop was told of it
            raise EngineStopped(self.stopped or _failed(lost)) from lost

    def _leave(self, channel: Channel) -> None:
        if channel.unfinished and self.stopped is None:
            # Runs after the submission even if that is still queued: the executor keeps the order.
            self._executor.submit(self._abort, channel.ids)

    async def scrape(self) -> Scrape:
        """The engine's numbers. Raises EngineStopped."""
        return Scrape(await self.call(self.engine.stats), 0 if self._compiles is None else self._compiles.after_ready)

    async def live(self) -> bytes:
        """The engine's state for the page, as JSON. Raises EngineStopped."""
        return await self.call(self._live.snapshot)

    async def ping(self) -> None:
        """Return between two steps. If a rank of the model is gone by then, the engine fails. Raises EngineStopped."""
        await self.call(self._check)

    async def run_pass(self, work: Pass) -> np.ndarray:
        """Embeddings or scores of whole texts, computed between two steps. Raises EngineStopped, and what the model raises."""
        run = self._run_pass
        assert run is not None, "this is called only for models that have embeddings"
        return await self.call(lambda: run(work))

    async def compile_grammar(self, grammar: Grammar) -> None:
        """Return once the engine has the grammar. Raises GrammarError."""
        await asyncio.wrap_future(self._grammars.submit(grammar), loop=self._loop)

    async def call(self, look: Callable[[], T]) -> T:
        """The result of `look()`, run in the engine's thread between two steps."""
        if self.stopped is not None:
            raise EngineStopped(self.stopped)
        found = asyncio.wrap_future(self._executor.submit(look), loop=self._loop)
        found.add_done_callback(_take_exception)
        # shield: the command still runs if its caller has gone, so that the abort that follows it finds the request to end.
        return await asyncio.shield(found)

    async def end(self, timeout_s: float) -> bool:
        """End the thread. Returns whether it ended in time: a step that hangs must not prevent the end of the process."""
        closing = threading.Thread(target=self.close, name="tilewright-close", daemon=True)
        closing.start()
        end_s = time.monotonic() + timeout_s
        while closing.is_alive() and time.monotonic() < end_s:
            await asyncio.sleep(0.005)
        return not closing.is_alive()

    async def adapter_names(self) -> Sequence[str]:
        """The adapters of the engine."""
        adapters = self.engine.adapters
        return [] if adapters is None else await self.call(lambda: list(adapters.names))

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Read the adapter in another thread while the engine steps, and add it to the engine between two steps."""
        adapters = self.engine.adapters
        if adapters is None:
            await super().load_adapter(name, folder)
            return
        read = await self._loop.run_in_executor(self._reading, adapters.read, folder)
        await self.call(lambda: self.engine.hold_adapter(name, read, str(folder)))

    async def unload_adapter(self, name: str) -> None:
        """Remove the adapter between two steps."""
        adapters = self.engine.adapters
        if adapters is None:
            await super().unload_adapter(name)
        else:
            await self.call(lambda: adapters.remove(name))

    def close(self) -> None:
        """End the thread after its current command or step."""
        self.stop_all(self.stopped or "the server has stopped")
        if self._compiles is not None:
            self._compiles.stop()
        # Wait for a work item in the thread itself: after it, the thread cannot queue another step while the executor closes.
        self._executor.submit(lambda: None).result()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._grammars.close()
        self._reading.shutdown(wait=False, cancel_futures=True)

    # In the engine's thread ------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Submit everything that arrived since the last call. The results go back together: each call costs a thread switch."""
        said = list[tuple[asyncio.Future[None], BaseException | None]]()
        try:
            while self._arrivals:
                submit, taken = self._arrivals[0]
                try:
                    submit()
                    said.append((taken, None))
                except (ValueError, RuntimeError) as error:  # a refusal
                    said.append((taken, error))
                except BaseException as error:
                    said.append((taken, error))
                    raise
                finally:
                    self._arrivals.popleft()  # last: a submission that arrives meanwhile need not wake this thread
        finally:
            if self._arrivals:
                self._executor.submit(self._take_in)
            if said:
                self._loop.call_soon_threadsafe(_tell, said)

    def _submit(self, ids: Sequence[str], prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        taken: list[str] = []
        try:
            for request_id, prompt, param in zip(ids, prompts, params, strict=True):
                # Prompts after the first may wait without limit: once the first one is accepted, so is the whole request.
                self.engine.submit(prompt, param, request_id, max_wait_s=None if taken else self._max_wait_s)
                taken.append(request_id)
        finally:
            self._seen += len(ids) * params[0].n
            if len(taken) < len(ids):
                self._abort(taken)
            else:
                self._keep_stepping()

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)
        self._keep_stepping()

    def _keep_stepping(self) -> None:
        room = None if self._max_wait_s is None else self.engine.scheduler.waiting.room(self._max_wait_s)
        self._room = None if room is None else (room, self._seen)
        if self._stepping or self.stopped is not None or not self.engine.has_work:
            return
        self._stepping = True
        self._executor.submit(self._step).add_done_callback(self._stepped)

    def _check(self) -> None:
        check = getattr(self.engine.runner, "check", None)  # only a runner with several ranks has it
        if check is not None:
            try:
                check()
            except DeviceLost as lost:
                self._loop.call_soon_threadsafe(self._fail, lost)

    def _step(self) -> None:
        deltas = self.engine.step()
        if deltas:
            self._loop.call_soon_threadsafe(self._spread, deltas, time.perf_counter())

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

    def _spread(self, deltas: Sequence[Delta], now_s: float) -> None:
        """Distribute the output of a step: plain text events go through `Direct`, all others through the channel."""
        self.batch.begin(now_s)
        self._deliver([delta for delta in deltas if not self._direct(delta)], now_s)
        self.batch.end()

    def _direct(self, delta: Delta) -> bool:
        channel = self._channels.get(delta.request_id)
        if channel is None or channel.direct is None or delta.finish_reason is not None or not delta.token_ids:
            return False
        return channel.direct.lanes[channel.choice(delta)].take(delta.text, len(delta.token_ids))

    def _fail(self, error: BaseException) -> None:
        self.stop_all(_failed(error))
        self._on_failure(error)
