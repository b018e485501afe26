"""The engine in a process of its own. It receives and sends token ids through a socket.

One thread runs a plain loop: read the messages of the fronts, make a step, send each front its rows of the step. The process
knows nothing of text and HTTP. No front can block it. The engine drops a front that

- has gone: this is noticed at the next message to it;
- does not read: this is noticed when `SEND_QUEUE` messages wait for it;
- sends an invalid message.

All requests of a dropped front are aborted.
"""

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.asm.jit import CompileCounter
from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.core import Engine
from tilewright.engine.deltas import StepDeltas
from tilewright.engine.grammar_masks import GrammarError
from tilewright.engine.pooling import Pass
from tilewright.engine.request import QueueFull
from tilewright.engine.step import HOST_ERRORS
from tilewright.extras import needed
from tilewright.server import wire
from tilewright.server.adapter_desk import AdapterDesk
from tilewright.server.grammars import GrammarCompiler
from tilewright.server.live import LiveView
from tilewright.server.metrics import added_gauges, process_numbers
from tilewright.server.wire import FRONT_BITS, WIRE_VERSION, WireError, address_of

zmq: Any = needed("zmq", "serve")

__all__ = ["EngineProcess"]

SEND_QUEUE = 512
"""Most messages (mostly steps) that may wait for a front that does not read."""
RECEIVE_QUEUE = 4096
LAST_WORDS_S = 1.0
TICK_S = 0.5
IDLE_MS = 250
COMPILING_MS = 5
MOST_AT_ONCE = 256
"""Most messages that are read between two steps."""

logger = logging.getLogger(__name__)


class _Front:
    """One front process, as the engine knows it."""

    def __init__(self, identity: bytes, number: int):
        self.identity = identity
        self.number = number
        self.requests: set[str] = set()
        """The requests that may be unfinished."""
        self.steps = 0
        self.gauges: dict[str, float] = {}


def _adapter_answer(number: int, answer: Any) -> bytes:
    if isinstance(answer, Exception):
        return wire.pack("refused", number, "adapter" if isinstance(answer, UnknownAdapter) else "value", str(answer), None)
    return wire.pack("answer", number, answer)


class EngineProcess:
    """Serves `engine` to fronts until the parent process has gone.

    Args:
        description: description of the model for the fronts (`Served.description`).
        folder: the socket is created here.
        parent: a descriptor that reads end-of-file once the parent has gone; None: only `stop` ends the loop.
        run_pass: computes embeddings or scores of whole texts; None if the model has none.
    """

    def __init__(
        self,
        engine: Engine,
        description: dict[str, Any],
        folder: Path,
        parent: int | None = None,
        *,
        run_pass: Callable[[Pass], np.ndarray] | None = None,
    ):
        self.engine = engine
        self._run_pass = run_pass
        self._description = description
        self._digest = hashlib.sha256(wire.pack(description)).digest()
        self._parent = parent
        self._fronts: dict[bytes, _Front] = {}
        self._by_number: dict[int, _Front] = {}
        # The number of the next front. It starts at random, so that streams of an earlier engine process match no front.
        self._count = secrets.randbits(16)
        self._identity = secrets.randbits(48)
        self._totals: dict[str, float] = {}
        self._live = LiveView(engine)
        self._grammars = GrammarCompiler(engine)
        self._adapters = AdapterDesk(engine, folder)
        self._compiling: list[tuple[bytes, int, Future[None]]] = []
        self._compiles = CompileCounter()
        self._stopping = False
        self._next_tick_s = 0.0
        self._failed = 0  # number of failed steps that the fronts were last told
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        options = {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: wire.MAX_FROM_FRONT_BYTES,
            zmq.ROUTER_MANDATORY: 1,
            zmq.SNDHWM: SEND_QUEUE,
            zmq.RCVHWM: RECEIVE_QUEUE,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.bind(address_of(folder))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if parent is not None:
            self._poller.register(parent, zmq.POLLIN)

    def stop(self) -> None:
        """Make `run` return after its current step. May be called from any thread."""
        self._stopping = True

    def run(self) -> int:
        """Serve. Returns the exit code of the process: 0 if it was told to end, 1 if the engine has failed."""
        self._compiles.start().mark_ready()
        try:
            while not self._stopping and self._take_messages():
                if self.engine.has_work:
                    self._step()
                else:
                    self._tick()
                if self.engine.lost is not None:
                    raise self.engine.lost
            return 0
        except (*HOST_ERRORS, RuntimeError) as error:
            # The engine's state can no longer be trusted. A new process starts from scratch.
            logger.error("the engine process ends", exc_info=error)
            self._say_why(f"{type(error).__name__}: {error}")
            return 1
        finally:
            self._compiles.stop()
            self._grammars.close()
            self._adapters.close()
            self._socket.close()
            self._context.term()

    def _say_why(self, why: str) -> None:
        """Tell the fronts why the engine ends, and wait up to `LAST_WORDS_S` for them to confirm it."""
        for front in list(self._fronts.values()):
            self._send(front, wire.pack("ended", why))
        end_s = time.monotonic() + LAST_WORDS_S
        while self._fronts and self._socket.poll(max(0, int(1000 * (end_s - time.monotonic())))):
            identity, *parts = self._socket.recv_multipart()
            if parts == [wire.pack("bye")]:
                self._fronts.pop(identity, None)

    def _step(self) -> None:
        step = self.engine.advance()
        self._tick()  # before the answers: a client that reads of a failed step then finds it counted in /health
        if not len(step):
            return
        numbers = step.streams >> FRONT_BITS
        for number in np.unique(numbers):
            front = self._by_number.get(int(number))
            if front is not None:  # otherwise it has gone, and its requests have been aborted
                rows = np.nonzero(numbers == number)[0]
                self._send(front, self._packed(front, step if len(rows) == len(step) else step.of(rows)))

    def _packed(self, front: _Front, step: StepDeltas) -> bytes:
        front.steps += 1
        return wire.pack_step(front.steps, step)

    # Messages --------------------------------------------------------------------------------------------------------

    def _take_messages(self) -> bool:
        """Handle the messages that have arrived; if the engine is idle, wait for one. Returns False if the parent has gone."""
        wait_ms = 0 if self.engine.has_work else COMPILING_MS if self._compiling or self._adapters.busy else IDLE_MS
        events = dict(self._poller.poll(wait_ms))
        if self._parent in events and not os.read(self._parent, 4096):  # pyright: ignore[reportArgumentType]
            return False
        for _ in range(MOST_AT_ONCE if self._socket in events else 0):
            try:
                identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._hear(identity, parts)
        waiting, self._compiling = self._compiling, []
        for identity, number, done in waiting:
            if not done.done():
                self._compiling.append((identity, number, done))
            elif (front := self._fronts.get(identity)) is not None:
                self._compiled(front, number, done.exception())
        for identity, number, answer in self._adapters.answers():
            if (front := self._fronts.get(identity)) is not None:
                self._send(front, _adapter_answer(number, answer))
        return True

    def _hear(self, identity: bytes, parts: Sequence[bytes]) -> None:
        try:
            if len(parts) != 1:
                raise WireError(f"a message has {len(parts)} parts, wanted one part")
            message = wire.unpack(parts[0])
            front = self._fronts.get(identity)
            if message[0] == "hello":
                self._welcome(identity, message)
            elif front is None and message[0] in ("abort", "stop", "counts"):
                return  # a late message of a front that has gone
            elif front is None:
                raise WireError(f"the first message of a front is {message[0][:30]!r}, wanted hello")
            else:
                self._heard(front, message)
        except WireError as error:
            logger.error("disconnecting a front process: %s", error)
            self._drop(identity, str(error))

    def _heard(self, front: _Front, message: list[Any]) -> None:
        kind = message[0]
        if kind == "submit":
            self._submit(front, message)
        elif kind == "abort":
            (ids,) = wire.check(message, list)
            for request_id in ids:
                if isinstance(request_id, str) and request_id in front.requests:
                    self.engine.abort(request_id)
        elif kind == "stop":
            (streams,) = wire.check(message, list)
            for stream in streams:
                if isinstance(stream, int) and stream >> FRONT_BITS == front.number:
                    self.engine.stop(stream)
        elif kind == "look":
            self._look(front, *wire.check(message, int, str))
        elif kind == "adapter":
            self._adapters.ask(front.identity, *wire.check(message, int, str, str, str))
        elif kind == "pass":
            self._pass(front, *wire.read_pass(message))
        elif kind == "grammar":
            number, value = wire.check(message, int, list)
            try:
                grammar = wire.read_grammar(value)
            except ValueError as error:
                if isinstance(error, WireError):
                    raise
                self._send(front, wire.pack("refused", number, "grammar", str(error), None))
            else:
                self._compiling.append((front.identity, number, self._grammars.submit(grammar)))
        elif kind == "counts":
            counts, gauges = wire.check(message, dict, dict)
            front.gauges = wire.read_numbers(gauges)
            for name, more in wire.read_numbers(counts).items():
                if name in self._totals or len(self._totals) < wire.MAX_NAMES:
                    self._totals[name] = self._totals.get(name, 0) + more
        else:
            raise WireError(f"a message has the unknown kind {kind[:30]!r}")

    def _welcome(self, identity: bytes, message: list[Any]) -> None:
        (version,) = wire.check(message, int)
        front = _Front(identity, self._count)
        if version == WIRE_VERSION:
            self._drop(identity, None)
            self._count += 1
            self._fronts[identity] = self._by_number[front.number] = front
        self._send(front, wire.pack("hello", WIRE_VERSION, front.number, self._identity, self._digest, self._description))

    def _submit(self, front: _Front, message: list[Any]) -> None:
        number = message[1] if len(message) > 1 and isinstance(message[1], int) else 0
        taken: list[str] = []
        refusal: tuple[str, str, float | None] | None = None
        try:
            submit = wire.read_submit(message)
            for request_id, prompt, params, low in zip(submit.ids, submit.prompts, submit.params, submit.streams, strict=True):
                streams = [front.number << FRONT_BITS | stream for stream in low]
                # Prompts after the first may wait without limit: once the first one is accepted, so is the whole request.
                wait_s = None if taken else submit.max_wait_s
                self.engine.submit(prompt, params, request_id, max_wait_s=wait_s, streams=streams)
                taken.append(request_id)
        except WireError:
            raise
        except QueueFull as error:
            refusal = ("late" if error.by_time else "full", str(error), error.retry_after_s)
        except GrammarError as error:
            refusal = ("grammar", str(error), None)
        except UnknownAdapter as error:
            refusal = ("adapter", str(error), None)
        except ValueError as error:
            refusal = ("value", str(error), None)
        if refusal is None:
            front.requests.update(taken)
            self._send(front, wire.pack("answer", number, None))
        else:
            for request_id in taken:
                self.engine.abort(request_id)
            self._send(front, wire.pack("refused", number, *refusal))

    def _look(self, front: _Front, number: int, what: str) -> None:
        if what == "ping":
            value: Any = None
        elif what == "live":
            value = self._live.snapshot()
        elif what == "scrape":
            stats = self.engine.stats()
            gauges = added_gauges([process_numbers(), *(one.gauges for one in self._fronts.values())])
            value = [{name: getattr(stats, name) for name in stats.__dataclass_fields__}, self._compiles.after_ready]
            value += [self._totals, gauges]
        else:
            raise WireError(f"a message asks for {what[:30]!r}, wanted ping, live or scrape")
        self._send(front, wire.pack("answer", number, value))

    def _pass(self, front: _Front, number: int, work: Pass) -> None:
        if self._run_pass is None:
            raise WireError("a message asks this model for embeddings, which it does not have")
        try:
            answer = wire.write_table(self._run_pass(work))
        except (*HOST_ERRORS, RuntimeError) as error:  # caused by these texts: only their request fails
            logger.error("a pass failed", exc_info=error)
            self._send(front, wire.pack("refused", number, "failed", f"{type(error).__name__}: {error}", None))
        else:
            self._send(front, wire.pack("answer", number, answer))

    def _compiled(self, front: _Front, number: int, error: BaseException | None) -> None:
        if error is None:
            self._send(front, wire.pack("answer", number, None))
        else:
            why = str(error) if isinstance(error, GrammarError) else f"{type(error).__name__}: {error}"
            self._send(front, wire.pack("refused", number, "grammar", why, None))

    # Fronts ----------------------------------------------------------------------------------------------------------

    def _send(self, front: _Front, raw: bytes) -> None:
        try:
            self._socket.send_multipart([front.identity, raw], zmq.NOBLOCK)
        except zmq.Again:
            logger.error("front %d does not read its messages; its requests are aborted", front.number)
            self._drop(front.identity, None)
        except zmq.ZMQError:  # it has gone
            self._drop(front.identity, None)

    def _drop(self, identity: bytes, why: str | None) -> None:
        """Abort all requests of a front. If it still reads, it is told `why`; it may send a hello again."""
        front = self._fronts.pop(identity, None)
        if front is not None:
            del self._by_number[front.number]
            for request_id in front.requests:
                self.engine.abort(request_id)
        if why is not None:
            try:
                self._socket.send_multipart([identity, wire.pack("lost", why)], zmq.NOBLOCK)
            except zmq.ZMQError:
                return

    def _tick(self) -> None:
        now_s = time.monotonic()
        failed = self.engine.failed_steps
        if now_s < self._next_tick_s and failed == self._failed:
            return
        self._next_tick_s, self._failed = now_s + TICK_S, failed
        live: Callable[[str], Any] = self.engine.scheduler.live
        for front in list(self._fronts.values()):
            front.requests = {request_id for request_id in front.requests if live(request_id)}
            self._send(front, wire.pack("tick", front.steps, failed))
