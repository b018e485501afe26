"""The engine in its own thread, and the way between that thread and the event loop.

One executor thread owns the engine: commands (submit, abort, look) and steps are its work items, so a command runs between
two steps and never beside one. What a step produced goes to the event loop in a single `call_soon_threadsafe`, however many
requests it touched, and from there into each request's `Channel`.

A step that raises, or a device that is lost, stops the engine for good: its state can no longer be trusted.
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
    """A caller that has gone takes no exception, and the log would show a traceback for each."""
    if not found.cancelled():
        found.exception()


def _tell(said: Sequence[tuple[asyncio.Future[None], BaseException | None]]) -> None:
    """Tell who still listens how it went."""
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
    """Runs `engine` in a thread of its own. Create it on the event loop that it shall serve; `close` ends the thread.

    `on_failure` is called on the event loop, with the exception, when the engine can do no more.
    `max_wait_s`: how long a request may wait for its start; None: for ever. `compiles`: has been started, and is stopped by
    `close`. `run_pass`: answers for whole texts, in the engine's thread.
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
        """Submissions that the engine's thread has not made yet, and who waits for each."""
        self._asked = 0
        """Samples that were sent to the engine's thread, ..."""
        self._seen = 0
        """... and of those, how many it has queued or refused."""
        self._room: tuple[Room, int] | None = None
        """Who may still come, and `_seen` when the engine said so."""

    @property
    def failures(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Steps that failed since one brought a token."""
        return self.engine.failed_steps

    @property
    def full(self) -> QueueFull | None:
        """What the engine would refuse a request with; what it said after its last step is looked at, and it is not asked."""
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
        except DeviceLost as lost:  # before this loop has heard of it
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
        """Return between two steps; if a rank of the model is gone by then, the engine has failed. Raises EngineStopped."""
        await self.call(self._check)

    async def run_pass(self, work: Pass) -> np.ndarray:
        """What the model says of whole texts, between two steps. Raises EngineStopped, and what the model raises."""
        run = self._run_pass
        assert run is not None, "asked of models that have numbers of texts"
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
        # shield: a command whose caller has gone still runs, so that the abort behind it finds what it must end.
        return await asyncio.shield(found)

    async def end(self, timeout_s: float) -> bool:
        """End the thread, or give up on it: a step that hangs must not hold the end of the process. Whether it ended."""
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
        """Read it in another thread, beside the engine's steps, and hold it between two of them."""
        adapters = self.engine.adapters
        if adapters is None:
            await super().load_adapter(name, folder)
            return
        read = await self._loop.run_in_executor(self._reading, adapters.read, folder)
        await self.call(lambda: self.engine.hold_adapter(name, read, str(folder)))

    async def unload_adapter(self, name: str) -> None:
        """Forget it between two steps."""
        adapters = self.engine.adapters
        if adapters is None:
            await super().unload_adapter(name)
        else:
            await self.call(lambda: adapters.remove(name))

    def close(self) -> None:
        """End the thread after the command or step that it is in."""
        self.stop_all(self.stopped or "the server has stopped")
        if self._compiles is not None:
            self._compiles.stop()
        # In the thread itself, so that it cannot be about to queue another step while the executor closes.
        self._executor.submit(lambda: None).result()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._grammars.close()
        self._reading.shutdown(wait=False, cancel_futures=True)

    # In the engine's thread ------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Queue what has arrived since the last time, and say how it went at once: each word costs both threads a switch."""
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
                    self._arrivals.popleft()  # last: who comes meanwhile need not call this thread
        finally:
            if self._arrivals:
                self._executor.submit(self._take_in)
            if said:
                self._loop.call_soon_threadsafe(_tell, said)

    def _submit(self, ids: Sequence[str], prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        taken: list[str] = []
        try:
            for request_id, prompt, param in zip(ids, prompts, params, strict=True):
                # What comes behind the first waits as long as it takes: the request as a whole has been started by then.
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
        check = getattr(self.engine.runner, "check", None)  # of a runner with several ranks
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
        """Hand out what a step has brought: plain events the short way."""
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
