"""A front process of a server of ordinary models: it reads and writes HTTP (fronts.py).

`python -m tilewright.server.v2.front STREAM MOVES`, started by the server; both are descriptors (relay.py). All deadlines of
connections hold here, too. The process ends with the server.
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

from tilewright.server.access import note, request_id_from
from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connection, Connections
from tilewright.server.files import connections_allowed
from tilewright.server.gate import Gate
from tilewright.server.logs import Log
from tilewright.server.memory import settle
from tilewright.server.metrics import HttpCounts
from tilewright.server.serve import FLUSH_TIMEOUT_S, uvicorn_config
from tilewright.server.shortcut import Done, Short, Taken
from tilewright.server.v2.heading import MAX_BODY_BYTES, Head, Heads, Request
from tilewright.server.v2.relay import ASK, CANCEL, CLOSED, END, READY, Arrivals, Frames, frame, move

__all__ = ["Front", "main"]

MOST_CONNECTIONS = 1 << 30
"""The server counts all of them."""
LOOK_AGAIN_S = 0.01
"""Pause before a connection is given back whose client has not read its last answer."""


class _Waiting(NamedTuple):
    """A request that the server answers."""

    head: Head
    client: str
    identity: str
    started_s: float
    done: Done


class Front(Frames):
    """The front: passes requests on to the server, and answers back to their connections."""

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
        self._unsent = list[bytes]()
        self._tasks = set[asyncio.Task[None]]()
        self.over = self._loop.create_future()

    # ---- the server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream is there."""
        assert isinstance(transport, asyncio.Transport)
        self._stream, arrivals = transport, Arrivals(self._moves)
        self._loop.add_reader(self._moves.fileno(), self._arrived, arrivals)
        self._tick()
        self.say(frame(READY))

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has ended."""
        os._exit(1)

    def _tick(self) -> None:
        """The answers' date, once a second."""
        date = formatdate(time.time(), usegmt=True).encode()
        self._state.default_headers = [(b"date", date), *self._uvicorn.encoded_headers]
        self._loop.call_later(1.0, self._tick)

    def say(self, message: bytes) -> None:
        """Send a message; those of one turn of the event loop are sent together."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        self._stream.write(b"".join(unsent))

    def data_received(self, data: bytes) -> None:
        """Answers of the server, or the end."""
        messages = list(self.messages(data))
        for kind, number, text, body in messages:
            if kind == END:
                self._loop.create_task(self._end()).add_done_callback(lambda _: self.over.set_result(None))
            elif (one := self._waiting.pop(number, None)) is not None:
                one.done(partial(self._short, one, kind, text, body), alone=len(messages) == 1)

    async def _end(self) -> None:
        """Close all connections, those with an answer under way after it."""
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
        """Give a connection back to the server; return whether it has it."""
        self._moves.setblocking(True)  # the server always receives
        try:
            move(self._moves, connection.socket, data)
        except OSError:
            return False
        finally:
            self._moves.setblocking(False)
        return True

    # ---- requests

    def take(self, data: bytes | bytearray, client: str) -> Taken | object | None:
        """The request that the data begins with, `PARTIAL`, or None: the server's."""
        found = self._heads.find(data)
        if not isinstance(found, Request):
            return found
        return Taken(found.end, partial(self._begin, found.head, bytes(data[found.begin : found.end]), client))

    def _begin(self, head: Head, body: bytes, client: str, done: Done) -> Callable[[], object]:
        number = next(self._numbers) & 0xFFFFFFFF
        identity = request_id_from(head.request_id or "")
        self._waiting[number] = _Waiting(head, client, identity, time.perf_counter(), done)
        self.say(frame(ASK, number, f"{head.path}\0{head.json_bytes or ''}".encode(), body))
        return partial(self._cancel, number)

    def _cancel(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None:
            self.say(frame(CANCEL, number))

    def _short(self, one: _Waiting, status: int, headers: bytes, body: bytes) -> Short:
        """The answer, noted in the log."""
        note(
            self._counts,
            method="POST",
            path=one.head.path,
            status=status,
            seconds=time.perf_counter() - one.started_s,
            request_id=one.identity,
            client=one.client,
        )
        return Short(status, b"%bx-request-id: %b\r\n" % (headers, one.identity.encode()), body)


class FrontConnection(Connection):
    """A connection, which goes back to the server with whatever the front does not understand."""

    def __init__(self, *args: Any, front: Front, **kwargs: Any):
        super().__init__(*args, pool=front.pool, **kwargs)
        self._front = front
        self._returned = False

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        if self.lingering or self._takes(self._pool.shortcuts, data):
            return
        held = bytes(self._held) + data
        self._hold(b"")
        self._give_back(held)

    def _give_back(self, data: bytes) -> None:
        if self._real.is_closing():
            return
        if self._real.get_write_buffer_size():  # the answers go out in their order
            self._real.pause_reading()
            self.loop.call_later(LOOK_AGAIN_S, self._give_back, data)
            return
        self._returned = self._front.give_back(self, data)
        self.abort()

    def _late(self) -> None:
        """A deadline is over: the server has an answer for who sent a part of a request."""
        if self._held and self._due_s is not None and self.loop.time() >= self._due_s:
            held, self._deadline = bytes(self._held), None
            self._hold(b"")
            self._give_back(held)
        else:
            super()._late()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, or the server's again."""
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
    """Serve until the server ends this process or itself."""
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
