"""A link to an engine in another process, over the socket of wire.py.

This side makes the text. Every step of the engine arrives as arrays of tokens; a reader turns them into text and finds stop
strings, and the link tells the engine about them. While there is no engine, requests are refused at once, and open requests
have ended. When an engine process is running again, the link sends a hello and continues.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.grammar import Grammar
from tilewright.engine.grammar_masks import GrammarError
from tilewright.engine.outputs import EngineStats
from tilewright.engine.pooling import Pass
from tilewright.engine.reader import Reader
from tilewright.engine.request import QueueFull, SamplingParams
from tilewright.extras import needed
from tilewright.server import wire
from tilewright.server.direct import Direct
from tilewright.server.link import Channel, EngineLink, EngineStopped
from tilewright.server.metrics import Metrics, Scrape
from tilewright.server.prompts import Served
from tilewright.server.wire import FRONT_BITS, WIRE_VERSION, Submit, WireError

zmq: Any = needed("zmq", "serve")
zmq_asyncio: Any = needed("zmq.asyncio", "serve")
zmq_monitor: Any = needed("zmq.utils.monitor", "serve")

__all__ = ["RemoteEngine", "ask_for_served"]

RECEIVE_QUEUE = 4096
RECONNECT_MS = 50
MOST_AT_ONCE = 32
"""Most messages that are handled before other tasks run."""
COUNTS_S = 0.5
"""Interval at which this process sends its counts to the engine."""
BEGIN_S = 30.0
NO_ENGINE = "the engine process has ended and is being restarted; try again in a few seconds"
SENT_AWAY = "this part of the server did not keep up with the engine, which dropped its requests; send the request again"

logger = logging.getLogger(__name__)


class OtherModel(RuntimeError):
    """The new engine process serves another model than the one before."""


def _options(socket: Any) -> None:
    options = {
        zmq.IMMEDIATE: 1,  # do not queue messages for an engine that is not connected
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: wire.MAX_FROM_ENGINE_BYTES,
        zmq.RCVHWM: RECEIVE_QUEUE,
        zmq.RECONNECT_IVL: RECONNECT_MS,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


def ask_for_served(address: str, timeout_s: float) -> Served:
    """Ask the engine at `address` what it serves.

    Raises:
        TimeoutError: the engine does not answer in time.
        ValueError: the engine has another version of the protocol.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        _options(socket)
        socket.connect(address)
        end_s = time.monotonic() + timeout_s
        socket.setsockopt(zmq.SNDTIMEO, int(1000 * timeout_s))
        try:
            socket.send(wire.pack("hello", WIRE_VERSION))
            while True:
                if not socket.poll(max(0, int(1000 * (end_s - time.monotonic())))):
                    raise zmq.Again
                message = wire.unpack(socket.recv())
                if message[0] == "hello":
                    return Served.described(_welcomed(message)[3])
        except zmq.Again:
            raise TimeoutError(f"the engine process does not answer within {timeout_s:g} s") from None


def _welcomed(message: list[Any]) -> tuple[int, int, bytes, dict[str, Any]]:
    """(number of this front, identity of the engine, digest of the description, the description). Raises WireError."""
    spoken = message[1] if len(message) > 1 else None
    if spoken != WIRE_VERSION:
        versions = (
            f"the engine process uses version {spoken!r:.20} of the messages, but this process uses version {WIRE_VERSION}"
        )
        raise WireError(f"{versions}; both must come from the same installation, so restart the server")
    _, number, engine, digest, description = wire.check(message, int, int, int, bytes, dict)
    return number, engine, digest, description


class RemoteEngine(EngineLink):
    """Create it on the event loop that it serves; `end` ends it.

    `max_wait_s`: how long a request may wait for its start. `on_failure` is called if the link fails or the engine does not fit
    this process, which then has to be started anew.
    """

    returns = True

    def __init__(
        self,
        address: str,
        served: Served,
        metrics: Metrics,
        on_failure: Callable[[BaseException], None],
        *,
        max_wait_s: float,
    ):
        super().__init__(metrics.latencies)
        self._tokenizer = served.tokenizer
        self._digest: bytes | None = None
        self.stopped = NO_ENGINE
        self._ended = False
        self._max_wait_s = max_wait_s
        self._metrics = metrics
        self._on_failure = on_failure
        self._front: int | None = None
        self._reader = Reader(None)
        self._engine = -1
        self._streams = 0
        self._numbers = 0
        self._steps = 0
        self._said: dict[str, float] = {}  # the counts that were sent to the engine so far
        self._open_streams: dict[Channel, list[int]] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._context = zmq_asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _options(self._socket)
        self._at_once = zmq.Socket.shadow(self._socket)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        self._socket.connect(address)
        self._tasks = [self._start(work()) for work in (self._read, self._watch, self._count)]

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended:
            self.stop_all(f"the link to the engine failed: {error}")
            self._on_failure(error)

    async def begin(self) -> None:
        """Wait for the engine's hello, for at most `BEGIN_S`: an engine that is being started again takes longer."""
        end_s = time.monotonic() + BEGIN_S
        while self.stopped is not None and time.monotonic() < end_s:
            await asyncio.sleep(0.005)

    # Up and down -----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """React to the start and the end of the connection."""
        while True:
            event = await zmq_monitor.recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._send(wire.pack("hello", WIRE_VERSION))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._lose(self.stopped or NO_ENGINE)

    def _lose(self, reason: str) -> None:
        """Handle the loss of the engine: there is none, or it does not know this front. Ends all channels and questions."""
        self._front = None
        if not self._ended:
            self.stopped = reason
        self._reader.clear()
        self._end_channels(reason)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineStopped(reason))

    def stop_all(self, reason: str) -> None:
        """End every open channel with `EngineStopped`, and accept no more work."""
        self._ended = True
        super().stop_all(reason)

    async def end(self, timeout_s: float) -> bool:
        """End the link. The engine aborts unfinished requests; this method does not wait for it."""
        self.stop_all(self.stopped or "the server has stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._say_counts()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=200)
        self._context.term()
        return True

    # Messages from the engine ----------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            if self._hear_all(await self._socket.recv()):
                await asyncio.sleep(0)  # let other tasks run: `recv` does not yield while there are messages

    def _hear_all(self, raw: bytes) -> bool:
        """Handle a message and those that have arrived after it, so that the output of several steps is written together.

        Returns whether there was more than one.
        """
        now_s = time.perf_counter()
        heard = 0
        self.batch.begin(now_s)
        try:
            while True:
                heard += 1
                self._hear(wire.unpack(raw), now_s)
                if heard == MOST_AT_ONCE:
                    break
                raw = self._at_once.recv(zmq.NOBLOCK)
        except zmq.Again:
            pass
        except WireError as error:
            logger.error("a message of the engine process is not valid: %s", error)
            self._lose(SENT_AWAY)
            self._send(wire.pack("hello", WIRE_VERSION))
        finally:
            self.batch.end()
        return heard > 1

    def _hear(self, message: list[Any], now_s: float) -> None:
        kind = message[0]
        if kind == "hello":
            number, engine, digest, _ = _welcomed(message)
            if self._digest not in (None, digest):
                raise OtherModel("the engine process now serves another model")
            self._lose(NO_ENGINE)
            self._digest = digest
            self._front, self._steps = number, 0
            if engine != self._engine:
                self._engine, self._said = engine, {}
            self._reader = Reader(self._tokenizer)
            self.failures = 0
            if not self._ended:
                self.stopped = None
        elif self._front is None:
            return  # a message from before the hello
        elif kind == "step":
            number, step = wire.read_step(message)
            self._next_step(number)
            self._deliver(self._reader.read(step), now_s)
            if self._reader.stopped:
                self._send(wire.pack("stop", self._reader.stopped))
                self._reader.stopped.clear()
        elif kind == "tick":
            number, self.failures = wire.check(message, int, int)
            self._steps -= 1
            self._next_step(number)
        elif kind == "ended":
            self._lose(f"the engine failed: {wire.check(message, str)[0]}")
            self._send(wire.pack("bye"))
        elif kind == "lost":
            logger.error("the engine process disconnected this front: %s", *wire.check(message, str))
            self._lose(SENT_AWAY)
            self._send(wire.pack("hello", WIRE_VERSION))
        else:
            self._answered(message)

    def _next_step(self, number: int) -> None:
        self._steps += 1
        if number != self._steps:
            raise WireError(f"received step {number}, wanted step {self._steps}")

    def _answered(self, message: list[Any]) -> None:
        if message[0] == "answer":
            number, result = message[1:] if len(message) == 3 else (None, None)
            error = None
        elif message[0] == "refused":
            number, kind, why, retry_s = wire.check(message, int, str, str, (float, type(None)))
            kinds: dict[str, Exception] = {
                "full": QueueFull(why, retry_s or 1.0), "late": QueueFull(why, retry_s or 1.0, by_time=True),
                "grammar": GrammarError(why), "failed": RuntimeError(why),
                "adapter": UnknownAdapter(why),
            }  # fmt: skip
            error = kinds.get(kind, ValueError(why))
            result = None
        else:
            raise WireError(f"a message has the unknown kind {message[0][:30]!r}")
        answer = self._answers.get(number) if isinstance(number, int) else None
        if answer is not None and not answer.done():
            answer.set_result(result) if error is None else answer.set_exception(error)

    # Messages to the engine ------------------------------------------------------------------------------------------

    def _send(self, raw: bytes) -> None:
        """Send a message. Raises nothing: without an engine the message is lost, and so are the requests that it concerns."""
        sent = self._socket.send(raw, zmq.NOBLOCK)
        if sent.done() and not sent.cancelled():
            sent.exception()

    async def _ask(self, raw: Callable[[int], bytes]) -> Any:
        """Send a question and return the engine's answer. Raises the engine's refusal, or EngineStopped."""
        if self.stopped is not None:
            raise EngineStopped(self.stopped)
        self._numbers += 1
        number = self._numbers
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(raw(number))
            return await answer
        finally:
            del self._answers[number]

    async def _submit_all(self, channel: Channel, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        low: list[list[int]] = []
        for one in params:
            low.append(list(range(self._streams, self._streams + one.n)))
            self._streams += one.n
        front = self._front or 0
        streams = [[front << FRONT_BITS | stream for stream in several] for several in low]
        self._open_streams[channel] = [stream for several in streams for stream in several]
        for request_id, prompt, one, several in zip(channel.ids, prompts, params, streams, strict=True):
            self._reader.open(several, request_id, prompt, one)
        wait_s = self._max_wait_s if math.isfinite(self._max_wait_s) else None
        await self._ask(
            lambda number: wire.pack_submit(Submit(number, list(channel.ids), list(prompts), list(params), low, wait_s))
        )

    def attach(self, channel: Channel, direct: Direct) -> None:
        """Send the plain events of a channel through the direct path."""
        super().attach(channel, direct)
        for choice, stream in enumerate(self._open_streams.get(channel, ())):
            self._reader.direct(stream, direct.lanes[choice].take)

    def _leave(self, channel: Channel) -> None:
        self._reader.close(self._open_streams.pop(channel, ()))
        if channel.unfinished and self.stopped is None:
            self._send(wire.pack("abort", list(channel.ids)))

    async def run_pass(self, work: Pass) -> np.ndarray:
        """Embeddings or scores of whole texts, computed between two steps. Raises EngineStopped, or RuntimeError."""
        return wire.read_table(await self._ask(lambda number: wire.pack_pass(number, work)))

    async def compile_grammar(self, grammar: Grammar) -> None:
        """Return once the engine has the grammar. Raises GrammarError or EngineStopped."""
        await self._ask(lambda number: wire.pack("grammar", number, wire.write_grammar(grammar)))

    async def adapter_names(self) -> Sequence[str]:
        """The adapters of the engine. Raises EngineStopped."""
        return await self._ask(lambda number: wire.pack("adapter", number, "list", "", ""))

    async def load_adapter(self, name: str, folder: Path) -> None:
        """See `EngineLink`."""
        await self._ask(lambda number: wire.pack("adapter", number, "load", name, str(folder)))

    async def unload_adapter(self, name: str) -> None:
        """See `EngineLink`."""
        await self._ask(lambda number: wire.pack("adapter", number, "unload", name, ""))

    async def ping(self) -> None:
        """Return between two steps of the engine. Raises EngineStopped."""
        await self._ask(lambda number: wire.pack("look", number, "ping"))

    async def live(self) -> bytes:
        """The engine's state for the page, as JSON. Raises EngineStopped."""
        return await self._ask(lambda number: wire.pack("look", number, "live"))

    async def scrape(self) -> Scrape:
        """The numbers of the engine and of all fronts. Those of the other fronts are up to `COUNTS_S` old."""
        self._say_counts()
        stats, compiles, counts, gauges = await self._ask(lambda number: wire.pack("look", number, "scrape"))
        return Scrape(EngineStats(**stats), compiles, counts, gauges)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(COUNTS_S)
            self._say_counts()

    def _say_counts(self) -> None:
        """Send the engine the increase of the counts since the last call, and the current gauges."""
        if self._front is None:
            return
        now = self._metrics.counts()
        more = {name: number - self._said.get(name, 0) for name, number in now.items()}
        self._said = now
        self._send(wire.pack("counts", {name: number for name, number in more.items() if number}, self._metrics.gauges()))
