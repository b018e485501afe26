"""The way between the event loop and an engine, wherever that runs: in a thread here (worker.py) or in a process (remote.py).

An HTTP request opens a `Channel`, into which the link puts what the engine's steps bring. A request that the engine refuses
fails alone. An engine that can do no more ends every open channel with `EngineStopped`, and refuses with it from then on. A
channel that is left before its end, for whatever reason, aborts its requests, which frees their pages before the next step.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.grammar import Grammar
from tilewright.engine.pooling import Pass
from tilewright.engine.request import Delta, QueueFull, SamplingParams
from tilewright.server.direct import Batch, Direct
from tilewright.server.metrics import Latencies, Scrape

__all__ = ["REFUSAL_S", "Channel", "EngineLink", "EngineStopped"]

REFUSAL_S = 0.1
"""How long a queue that takes too much time is taken to do so: no waiting time becomes shorter by more in that time."""


WHOLE_DELTAS = 64
"""What a task that answers with all at once takes at a time: as much as holds up nobody else on the event loop."""


class EngineStopped(RuntimeError):
    """The engine takes no more work: a step failed, or the server was told to stop at once."""


class Channel:
    """Deltas of one HTTP request, which may be several engine requests; used on the event loop only."""

    def __init__(self, ids: Sequence[str], samples: int):
        self.ids = tuple(ids)
        self._first = {request_id: place * samples for place, request_id in enumerate(ids)}
        self.samples = len(self.ids) * samples
        self.unfinished = self.samples
        """Samples that are still to come to their end."""
        self.opened_s = time.perf_counter()
        self.last_token_s: dict[int, float] = {}
        """When a sample, by its choice, had its last token."""
        self.waiting = False
        """Whether all has been taken, and more is waited for."""
        self.whole = False
        """Whether the answer is sent as a whole: its task is woken for the first token, for ends, and for many at once."""
        self._begun = False
        self.direct: Direct | None = None
        """The short way, once the answer has begun and if it may take it."""
        self._deltas: list[Delta] = []
        self._changed = asyncio.Event()
        self._stopped: str | None = None

    def choice(self, delta: Delta) -> int:
        """Which of the request's samples, all prompts together, a delta is of."""
        return self._first[delta.request_id] + delta.index

    def push(self, delta: Delta) -> None:
        """Add what a step produced."""
        if self.direct is not None and self.direct.pending:
            self._deltas += self._left(self.direct)
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self.unfinished -= 1
        elif self.whole and self._begun and len(self._deltas) % WHOLE_DELTAS:
            return
        self._begun = True
        self.wake()

    def wake(self) -> None:
        """Let the task take what has come."""
        self.waiting = False  # before it runs
        self._changed.set()

    def _left(self, direct: Direct) -> list[Delta]:
        """What waits in the short way, to be written before what has come behind it. Its tokens have been counted there."""
        samples = self.samples // len(self.ids)
        return [Delta(self.ids[choice // samples], choice % samples, text=text) for choice, text in direct.left()]

    def stop(self, reason: str) -> None:
        """Make `take` raise `EngineStopped`."""
        self._stopped = reason
        self._changed.set()

    @property
    def untaken(self) -> int:
        """Tokens that have come and were not taken."""
        return sum(len(delta.token_ids) for delta in self._deltas)

    async def take(self) -> list[Delta]:
        """All deltas since the last call, in order; waits for at least one, and returns [] once all samples are finished.

        Raises:
            EngineStopped: no more will come.
        """
        while not self._deltas:
            if self.direct is not None and self.direct.pending:
                if self.direct.wire.blocked:
                    return self._left(self.direct)
                self.direct.write()
            if self.unfinished == 0:
                return []
            if self._stopped is not None:
                raise EngineStopped(self._stopped)
            self._changed.clear()
            self.waiting = True
            try:
                await self._changed.wait()
            finally:
                self.waiting = False
        deltas, self._deltas = self._deltas, []
        return deltas


class EngineLink(ABC):
    """Used on one event loop. `stopped`: why the engine takes no more work, or None while it does."""

    failures: int = 0
    """Steps that failed since one brought a token."""
    returns: bool = False
    """Whether an engine that has stopped may be there again later."""

    def __init__(self, latencies: Latencies):
        self._latencies = latencies
        self.batch = Batch(latencies)
        """For `Direct`: what a step writes the short way."""
        self._channels: dict[str, Channel] = {}
        self.stopped: str | None = None
        self._refused: tuple[QueueFull, float] | None = None

    @property
    def full(self) -> QueueFull | None:
        """What a request was refused with a moment ago, if any other would be: the next need not be parsed to be refused."""
        if self._refused is None or time.monotonic() - self._refused[1] > REFUSAL_S:
            return None
        return self._refused[0]

    @property
    def open_channels(self) -> int:
        """HTTP requests that wait for the engine."""
        return len(set(map(id, self._channels.values())))

    async def begin(self) -> None:  # noqa: B027 (most links have their engine)
        """Wait a moment for an engine that is not there yet."""

    @asynccontextmanager
    async def open(self, name: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> AsyncIterator[Channel]:
        """Submit prompts, all or none, as requests `name` (one prompt) or `name-0`, `name-1` ...; abort them on leaving early.

        Raises:
            ValueError: the engine refuses a prompt.
            QueueFull: there is no room in the queue.
            EngineStopped: the engine takes no more work.
        """
        if self.stopped is not None:
            raise EngineStopped(self.stopped)
        ids = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        channel = Channel(ids, params[0].n)
        self._channels.update(dict.fromkeys(ids, channel))
        try:
            await self._submitted(channel, prompts, params)
            yield channel
        finally:
            for request_id in ids:
                del self._channels[request_id]
            self._leave(channel)

    async def _submitted(self, channel: Channel, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        try:
            await self._submit_all(channel, prompts, params)
        except QueueFull as full:
            # Who comes later, or has a later priority, would wait for longer, until the queue has moved on.
            if full.by_time and params[0].priority == 0:
                self._refused = full, time.monotonic()
            raise

    def stop_all(self, reason: str) -> None:
        """End every open channel with `EngineStopped`, and take no more work."""
        self.stopped = reason
        self._end_channels(reason)

    def _end_channels(self, reason: str) -> None:
        for channel in set(self._channels.values()):
            channel.stop(reason)

    def attach(self, channel: Channel, direct: Direct) -> None:
        """Let the plain events of a channel take the short way."""
        channel.direct = direct

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
        sample = channel.choice(delta)
        before_s = channel.last_token_s.get(sample)
        if before_s is None:
            self._latencies.first(now_s - channel.opened_s)
        else:
            self._latencies.following(now_s - before_s, len(delta.token_ids))
        channel.last_token_s[sample] = now_s

    @abstractmethod
    async def _submit_all(self, channel: Channel, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        """Submit the prompts of a channel; see `open`."""

    @abstractmethod
    def _leave(self, channel: Channel) -> None:
        """A channel is left; abort what is unfinished of it."""

    @abstractmethod
    async def scrape(self) -> Scrape:
        """The engine's numbers. Raises EngineStopped."""

    @abstractmethod
    async def live(self) -> bytes:
        """The engine's state for the page, as JSON. Raises EngineStopped."""

    @abstractmethod
    async def ping(self) -> None:
        """Return between two steps of the engine. Raises EngineStopped."""

    @abstractmethod
    async def run_pass(self, work: Pass) -> np.ndarray:
        """What the model says of whole texts, between two steps of the engine. Raises EngineStopped, or as it does."""

    @abstractmethod
    async def compile_grammar(self, grammar: Grammar) -> None:
        """Return once the engine has the grammar. Raises GrammarError or EngineStopped."""

    async def adapter_names(self) -> Sequence[str]:
        """The LoRA adapters that requests may name. Raises EngineStopped."""
        return []

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Hold the LoRA adapter in a folder under a name.

        Raises:
            ValueError: the folder cannot be taken, the name is taken, or there is no room.
            EngineStopped: the engine takes no more work.
        """
        raise ValueError("this server has no room for adapters: start it with --max-adapters")

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. Raises UnknownAdapter or EngineStopped."""
        raise UnknownAdapter(f"there is no adapter {name!r} here")

    @abstractmethod
    async def end(self, timeout_s: float) -> bool:
        """End the link, after the step that the engine is in. False: that step hangs, and was given up on."""
