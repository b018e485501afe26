"""The interface between the event loop and an engine, which runs in a thread (worker.py) or in another process (remote.py).

An HTTP request opens a `Channel`, and the link puts the output of the engine's steps into it. If the engine refuses a request,
only that request fails. If the engine itself fails, every open channel ends with `EngineStopped`, and so does every later
request. If a channel is left before its end, for whatever reason, its requests are aborted, and their pages are freed before
the next step.
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
"""How long one refusal is applied to later requests as well: the expected wait can shorten by at most this time meanwhile."""


WHOLE_DELTAS = 64
"""Deltas that the task of a whole (not streamed) answer takes at a time: few enough not to block the event loop for long."""


class EngineStopped(RuntimeError):
    """The engine accepts no more work: a step failed, or the server was told to stop at once."""


class Channel:
    """The deltas of one HTTP request, which may consist of several engine requests. Used on the event loop only."""

    def __init__(self, ids: Sequence[str], samples: int):
        self.ids = tuple(ids)
        self._first = {request_id: place * samples for place, request_id in enumerate(ids)}
        self.samples = len(self.ids) * samples
        self.unfinished = self.samples
        """Number of samples that have not finished."""
        self.opened_s = time.perf_counter()
        self.last_token_s: dict[int, float] = {}
        """Choice index -> time of the sample's latest token."""
        self.waiting = False
        """Whether the task has taken all deltas and waits for more."""
        self.whole = False
        """Whether the answer is not streamed. Its task is then woken only for the first token, for ends of samples, and for
        `WHOLE_DELTAS` deltas at a time."""
        self._begun = False
        self.direct: Direct | None = None
        """The direct path of plain events (direct.py), once the answer has begun and if it may use that path."""
        self._deltas: list[Delta] = []
        self._changed = asyncio.Event()
        self._stopped: str | None = None

    def choice(self, delta: Delta) -> int:
        """The index of a delta's sample among the samples of all prompts of the request."""
        return self._first[delta.request_id] + delta.index

    def push(self, delta: Delta) -> None:
        """Add a delta that a step produced."""
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
        """Wake the task so that it takes the deltas."""
        self.waiting = False  # already now, before the task runs
        self._changed.set()

    def _left(self, direct: Direct) -> list[Delta]:
        """Pending text of the direct path as deltas, to be written before later deltas. Its tokens are already counted."""
        samples = self.samples // len(self.ids)
        return [Delta(self.ids[choice // samples], choice % samples, text=text) for choice, text in direct.left()]

    def stop(self, reason: str) -> None:
        """Make `take` raise `EngineStopped`."""
        self._stopped = reason
        self._changed.set()

    @property
    def untaken(self) -> int:
        """Number of tokens that have arrived but were not taken yet."""
        return sum(len(delta.token_ids) for delta in self._deltas)

    async def take(self) -> list[Delta]:
        """All deltas since the last call, in order. Waits for at least one; returns [] once all samples are finished.

        Raises:
            EngineStopped: the engine has stopped, so no more deltas will come.
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
    """A link to an engine, used on one event loop. `stopped`: why the engine accepts no more work; None while it does."""

    failures: int = 0
    """Number of steps that failed since the last step that produced a token."""
    returns: bool = False
    """Whether a stopped engine may come back later."""

    def __init__(self, latencies: Latencies):
        self._latencies = latencies
        self.batch = Batch(latencies)
        """The output of a step that goes through the direct path; used by `Direct`."""
        self._channels: dict[str, Channel] = {}
        self.stopped: str | None = None
        self._refused: tuple[QueueFull, float] | None = None

    @property
    def full(self) -> QueueFull | None:
        """A recent refusal that holds for any other request too, or None. Such requests are refused without being parsed."""
        if self._refused is None or time.monotonic() - self._refused[1] > REFUSAL_S:
            return None
        return self._refused[0]

    @property
    def open_channels(self) -> int:
        """Number of HTTP requests that wait for the engine."""
        return len(set(map(id, self._channels.values())))

    async def begin(self) -> None:  # noqa: B027 (most links have their engine)
        """Wait a moment for an engine that has not answered yet."""

    @asynccontextmanager
    async def open(self, name: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> AsyncIterator[Channel]:
        """Submit prompts, either all or none. Leaving the context early aborts them.

        The engine requests are called `name` (one prompt) or `name-0`, `name-1` ... (several).

        Raises:
            ValueError: the engine refuses a prompt.
            QueueFull: there is no room in the queue.
            EngineStopped: the engine accepts no more work.
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
            # Requests that arrive later or have a later priority would wait even longer, until the queue has moved on.
            if full.by_time and params[0].priority == 0:
                self._refused = full, time.monotonic()
            raise

    def stop_all(self, reason: str) -> None:
        """End every open channel with `EngineStopped`, and accept no more work."""
        self.stopped = reason
        self._end_channels(reason)

    def _end_channels(self, reason: str) -> None:
        for channel in set(self._channels.values()):
            channel.stop(reason)

    def attach(self, channel: Channel, direct: Direct) -> None:
        """Send the plain events of a channel through the direct path."""
        channel.direct = direct

    def _deliver(self, deltas: Sequence[Delta], now_s: float) -> None:
        for delta in deltas:
            channel = self._channels.get(delta.request_id)
            if channel is None:
                continue  # the client has gone; the abort is already queued
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
        """Called when a channel is left. Abort its unfinished requests."""

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
        """Embeddings or scores of whole texts, computed between two steps. Raises EngineStopped, and what the model raises."""

    @abstractmethod
    async def compile_grammar(self, grammar: Grammar) -> None:
        """Return once the engine has the grammar. Raises GrammarError or EngineStopped."""

    async def adapter_names(self) -> Sequence[str]:
        """The LoRA adapters that requests may name. Raises EngineStopped."""
        return []

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load the LoRA adapter in a folder under a name.

        Raises:
            ValueError: the folder has no usable adapter, the name is in use, or there is no room.
            EngineStopped: the engine accepts no more work.
        """
        raise ValueError("this server has no room for adapters; start it with --max-adapters")

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Raises UnknownAdapter or EngineStopped."""
        raise UnknownAdapter(f"there is no adapter {name!r} here")

    @abstractmethod
    async def end(self, timeout_s: float) -> bool:
        """End the link after the engine's current step. Returns False if that step did not end within the timeout."""
