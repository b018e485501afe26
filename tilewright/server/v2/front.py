"""A front: a process that reads and writes HTTP for a server of ordinary models (fronts.py).

The server starts it by `python -m tilewright.server.v2.front STREAM MOVES`. Both arguments are numbers of file descriptors
(relay.py). All deadlines of connections apply here, too. The process ends with the server.
"""

import asyncio
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from uvicorn.server import ServerState

from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connection, Connections
from tilewright.server.files import connections_allowed
from tilewright.server.gate import Gate
from tilewright.server.logs import Log
from tilewright.server.memory import settle
from tilewright.server.metrics import HttpCounts
from tilewright.server.serve import FLUSH_TIMEOUT_S, uvicorn_config
from tilewright.server.shortcut import Done, Taken
from tilewright.server.v2.codec import MAX_KNOWN_BYTES
from tilewright.server.v2.heading import MAX_BODY_BYTES, Head, Heads, Request
from tilewright.server.v2.noted import Noted
from tilewright.server.v2.quick import JSON
from tilewright.server.v2.relay import (
    CANCEL,
    CLOSED,
    DEFINE_ANSWER,
    DEFINE_REQUEST,
    END,
    EVICT,
    IDLE,
    MAX_KNOWN,
    READY,
    REPEATED_ANSWERS,
    REPEATED_REQUESTS,
    REQUEST,
    Arrivals,
    Frames,
    frame,
    move,
    numbers,
    packed,
)
from tilewright.server.v2.room import answer

__all__ = ["Front", "main"]

MOST_CONNECTIONS = 1 << 30
"""No limit in this process: the server limits the connections of all processes together."""
LOOK_AGAIN_S = 0.01
"""Before a connection is given back, its client must have read all answers. This is the interval of the checks."""


class _Waiting(NamedTuple):
    """A request whose answer the server has not sent yet."""

    noted: Noted
    done: Done


_Content = tuple[str, str | None, bytes]
"""(path, length of the JSON if tensors follow it, body) of a request."""


class Front(Frames):
    """Forwards requests to the server, and its answers to the connections."""

    def __init__(self, config: ServerConfig, moves: socket.socket):
        super().__init__()
        self._config, self._moves = config, moves
        self.pool = Connections(config)
        self.pool.most = MOST_CONNECTIONS
        self.pool.shortcuts.append(self)
        self._counts = HttpCounts(lambda: len(self.pool.open), self.pool.ended)
        app = Starlette()
        self._heads = Heads(Gate(app, config, self._counts), self._counts, MAX_BODY_BYTES)
        self._state, self._uvicorn = ServerState(), uvicorn_config(app, partial(FrontConnection, front=self))
        self._uvicorn.load()
        self._loop = asyncio.get_running_loop()
        self._waiting = dict[int, _Waiting]()
        self._numbers = itertools.count()
        self._seen = dict[_Content, None]()
        """Contents of requests that came before."""
        self._known_requests = dict[_Content, int]()
        """Content of requests -> the number by which the server knows it."""
        self._known_answers = dict[int, bytes]()
        """Number that the server has given to an answer -> the body of the answer."""
        self._unsent = list[bytes]()
        self._contents, self._first = list[int](), 0
        """Contents for a REPEATED_REQUESTS message that is sent after `_unsent`, and the number of its first request."""
        self._tasks = set[asyncio.Task[None]]()
        self.over = self._loop.create_future()

    # ---- the server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream to the server is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._stream, arrivals = transport, Arrivals(self._moves)
        self._loop.add_reader(self._moves.fileno(), self._arrived, arrivals)
        self._tick()
        self.say(frame(READY))

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has ended: end this process."""
        os._exit(1)

    def _tick(self) -> None:
        """Update the date in the headers of answers, once per second."""
        date = formatdate(time.time(), usegmt=True).encode()
        self._state.default_headers = [(b"date", date), *self._uvicorn.encoded_headers]
        self._loop.call_later(1.0, self._tick)

    def say(self, message: bytes) -> None:
        """Send a message. The messages of one turn of the event loop are sent together."""
        if not (self._unsent or self._contents):
            self._loop.call_soon(self._send)
        self._end_contents()
        self._unsent.append(message)

    def _end_contents(self) -> None:
        """Turn the collected contents into a message, so that later messages are sent after them."""
        if self._contents:
            self._unsent.append(frame(REPEATED_REQUESTS, self._first, body=packed(self._contents)))
            self._contents.clear()

    def _send(self) -> None:
        self._end_contents()
        unsent, self._unsent = self._unsent, []
        self._stream.write(b"".join(unsent))

    def data_received(self, data: bytes) -> None:
        """Called with bytes from the server: answers, questions about idle connections, or END."""
        answers = list[tuple[int, int, bytes, bytes]]()
        for kind, number, text, body in self.messages(data):
            if kind == REPEATED_ANSWERS:
                known = self._known_answers[number]
                answers += [(request, 200, JSON, known) for request in numbers(body)]
            elif kind in (IDLE, EVICT):
                self.say(answer(self.pool, kind, number))
            elif kind == DEFINE_ANSWER:
                self._known_answers[number] = body
            elif kind == END:
                self._loop.create_task(self._end()).add_done_callback(lambda _: self.over.set_result(None))
            else:
                answers.append((number, kind, text, body))
        for number, *found in answers:
            if (one := self._waiting.pop(number, None)) is not None:
                one.done(partial(one.noted.answer, *found), alone=len(answers) == 1)

    async def _end(self) -> None:
        """Close all connections. Those with an answer in progress are closed after it."""
        for connection in list(self.pool.open):
            connection.shutdown()
        end_s = time.monotonic() + FLUSH_TIMEOUT_S
        while self.pool.open and time.monotonic() < end_s:
            await asyncio.sleep(0.02)

    # ---- connections

    def _arrived(self, arrivals: Arrivals) -> None:
        try:
            arrived = arrivals.next()
        except BlockingIOError:
            return
        except EOFError:
            os._exit(1)
        if arrived is not None:
            task = self._loop.create_task(self._accept(*arrived))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _accept(self, connection: socket.socket, data: bytes) -> None:
        make = partial(self._uvicorn.http_protocol_class, config=self._uvicorn, server_state=self._state, app_state={})
        try:
            _, protocol = await self._loop.connect_accepted_socket(make, connection)
        except OSError:
            self.say(frame(CLOSED))
            return
        protocol.data_received(data)

    def give_back(self, connection: "FrontConnection", data: bytes) -> bool:
        """Give a connection back to the server. Returns whether that succeeded."""
        self._moves.setblocking(True)  # blocks only briefly, because the server always receives
        try:
            move(self._moves, connection.socket, data)
        except OSError:
            return False
        finally:
            self._moves.setblocking(False)
        return True

    # ---- requests

    def take(self, data: bytes | bytearray, client: str) -> Taken | object | None:
        """The request at the start of the data; `PARTIAL`: it is incomplete; None: the server has to handle it."""
        found = self._heads.find(data)
        if not isinstance(found, Request):
            return found
        return Taken(found.end, partial(self._begin, found.head, bytes(data[found.begin : found.end]), client))

    def _begin(self, head: Head, body: bytes, client: str, done: Done) -> Callable[[], object]:
        number = next(self._numbers) & 0xFFFFFFFF
        self._waiting[number] = _Waiting(Noted(self._counts, head, client), done)
        known = None if len(body) > MAX_KNOWN_BYTES else self._number((head.path, head.json_bytes, body))
        if known is None:
            self.say(frame(REQUEST, number, _named(head.path, head.json_bytes), body))
        else:
            if not (self._unsent or self._contents):
                self._loop.call_soon(self._send)
            if number == 0:  # the requests of a message are numbered one by one
                self._end_contents()
            if not self._contents:
                self._first = number
            self._contents.append(known)
        return partial(self._cancel, number)

    def _number(self, content: _Content) -> int | None:
        """The number by which the server knows the content of a request; None: the content came for the first time."""
        number = self._known_requests.get(content)
        if number is not None:
            return number
        if content not in self._seen:
            if len(self._seen) >= MAX_KNOWN:
                self._seen.clear()
            self._seen[content] = None
            return None
        if len(self._known_requests) >= MAX_KNOWN:
            self._known_requests.clear()
        number = self._known_requests[content] = len(self._known_requests)
        self.say(frame(DEFINE_REQUEST, number, _named(*content[:2]), content[2]))
        return number

    def _cancel(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None:
            self.say(frame(CANCEL, number))


def _named(path: str, json_bytes: str | None) -> bytes:
    """The text of a message that contains a request."""
    return f"{path}\0{json_bytes or ''}".encode()


class FrontConnection(Connection):
    """A connection. When it receives bytes that the front does not understand, it goes back to the server with them."""

    def __init__(self, *args: Any, front: Front, **kwargs: Any):
        super().__init__(*args, pool=front.pool, **kwargs)
        self._front = front
        self._returned = False

    def data_received(self, data: bytes) -> None:
        """Called with bytes from the client."""
        if self.lingering or self._takes(self._pool.shortcuts, data):
            return
        held = bytes(self._held) + data
        self._hold(b"")
        self._give_back(held)

    def _give_back(self, data: bytes) -> None:
        if self._real.is_closing():
            return
        if self._real.get_write_buffer_size():  # earlier answers have to be sent first
            self._real.pause_reading()
            self.loop.call_later(LOOK_AGAIN_S, self._give_back, data)
            return
        self._returned = self._front.give_back(self, data)
        self.abort()

    def _late(self) -> None:
        """Called after a deadline. If the client has sent a part of a request, the server gets the connection and answers."""
        if self._held and self._due_s is not None and self.loop.time() >= self._due_s:
            held, self._deadline = bytes(self._held), None
            self._hold(b"")
            self._give_back(held)
        else:
            super()._late()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, or it has gone back to the server."""
        super().connection_lost(exc)
        if not self._returned:
            self._front.say(frame(CLOSED, text=(self.ended_for or "").encode()))


async def _serve(config: ServerConfig, stream: socket.socket, moves: socket.socket) -> None:
    moves.setblocking(False)
    front = Front(config, moves)
    await asyncio.get_running_loop().create_unix_connection(lambda: front, sock=stream)
    settle()
    await front.over


def main(stream: socket.socket, moves: socket.socket) -> None:
    """Serve until the server sends END or ends itself."""
    fields = json.loads(moves.recv(1 << 16))
    if fields["cors_origins"] is not None:
        fields["cors_origins"] = tuple(fields["cors_origins"])
    config = ServerConfig(**fields)
    connections_allowed(config.max_connections)
    with Log(config.log_level, config.log_format):
        asyncio.run(_serve(config, stream, moves))


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3]))
    os._exit(0)
