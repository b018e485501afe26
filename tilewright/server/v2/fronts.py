"""Processes that speak HTTP for a server of ordinary models, so that one core does not limit how many requests it answers.

The server accepts every connection. When a connection has sent several plain inference requests (heading.py), it moves to the
front that has the fewest connections. The front (front.py) reads the requests and forwards their bodies to the server. The
server computes the answers, and the front writes them. If a front receives bytes that it does not understand, it gives them and
the connection back to the server. That connection then stays with the server.

So one process does everything except reading and writing HTTP, with and without fronts: it manages models, batches, regions of
shared memory and statistics. If a front ends, its connections are lost and a new front is started.
"""

import asyncio
import dataclasses
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from tilewright.host.errors import Unavailable
from tilewright.host.host import Host
from tilewright.host.regions import Regions
from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connection, Connections
from tilewright.server.metrics import HttpCounts
from tilewright.server.v2.heading import Head, Heads, Request
from tilewright.server.v2.quick import JSON, Pending, begin
from tilewright.server.v2.relay import (
    CANCEL,
    CLOSED,
    DEFINE_ANSWER,
    DEFINE_REQUEST,
    END,
    EVICT,
    IDLE,
    MAX_KNOWN,
    MAX_MOVED_BYTES,
    PAIR,
    READY,
    REPEATED_ANSWERS,
    REPEATED_REQUESTS,
    REQUEST,
    Arrivals,
    Frames,
    frame,
    move,
)
from tilewright.server.v2.room import Rooms

__all__ = ["Fronts"]

MOVES_AFTER = 3
"""The server itself answers this many plain requests of a connection first: moving a short-lived connection does not pay."""
RESTART_DELAY_S = 1.0
"""Delay before a front that ended is replaced."""
END_S = 12.0
"""Time that the fronts have to write their last answers before they are killed."""

FAILED = json.dumps({"error": "the server failed on this request; its log has the traceback"}).encode()

logger = logging.getLogger(__name__)


class Fronts:
    """The fronts of one server.

    Args:
        host: the models.
        config: of the server; `fronts` is the number of fronts.
        connections: the connections of this process.
        heads: finds plain requests.
        counts: counts the requests.
        draining: returns whether new requests are refused.
        regions: clients' shared memory; None: it is off.
    """

    def __init__(
        self,
        host: Host,
        config: ServerConfig,
        connections: Connections,
        heads: Heads,
        counts: HttpCounts,
        draining: Callable[[], bool],
        regions: Regions | None,
    ):
        self.host, self.counts, self.draining, self.regions = host, counts, draining, regions
        self.connections = connections
        self._config, self._heads = config, heads
        self._links = set[_Link]()
        self.rooms = Rooms(connections, lambda: [link for link in self._links if link.ready])
        self._loop = asyncio.get_running_loop()
        self._tasks = set[asyncio.Task[None]]()
        self._closing = False

    def start(self) -> None:
        """Start all fronts. Until they are ready, the server does everything itself."""
        for _ in range(self._config.fronts or 0):
            self._start_one()
        self.connections.away, self.connections.room_elsewhere = self.take, self.rooms.ask

    def _start_one(self) -> None:
        if not self._closing:
            self.do(self._started())

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a task of its own."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _started(self) -> None:
        stream, their_stream = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        moves, their_moves = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs = their_stream.fileno(), their_moves.fileno()
        command = [sys.executable, "-m", "tilewright.server.v2.front", *map(str, theirs)]
        # A separate session, so that Ctrl-C on the terminal reaches only the server, which lets running requests finish.
        process = subprocess.Popen(command, pass_fds=theirs, stdin=subprocess.DEVNULL, start_new_session=True)
        their_stream.close()
        their_moves.close()
        moves.send(json.dumps(dataclasses.asdict(self._config)).encode())
        moves.setblocking(False)
        link = _Link(self, process, moves)
        self._links.add(link)
        await self._loop.create_unix_connection(lambda: link, sock=stream)

    def take(self, connection: Connection, data: bytes) -> bool:
        """Give a connection to a front if the request at the start of the data is plain. Returns whether a front has it now."""
        if self.draining() or len(data) > MAX_MOVED_BYTES or not isinstance(self._heads.find(data), Request):
            return False
        connection.plain += 1
        ready = [link for link in self._links if link.ready]
        if connection.plain <= MOVES_AFTER or not ready:
            return False
        return min(ready, key=lambda link: link.connections).give(connection, data)

    def lost(self, link: "_Link") -> None:
        """Called when a front has ended."""
        self._links.discard(link)
        self.connections.elsewhere -= link.connections
        link.connections = 0
        self.rooms.lost(link)
        if not self._closing:
            logger.error("a front process ended; another is started")
            self._loop.call_later(RESTART_DELAY_S, self._start_one)

    async def returned(self, connection: socket.socket, data: bytes) -> None:
        """Serve a connection that a front has given back."""
        make = self.connections.make
        assert make is not None
        try:
            _, protocol = await self._loop.connect_accepted_socket(make, connection)
        except OSError:
            return
        assert isinstance(protocol, Connection)
        protocol.stays = True
        protocol.data_received(data)

    async def close(self) -> None:
        """End the fronts after they have written the answers that are ready."""
        self._closing, self.connections.away, self.connections.room_elsewhere = True, None, None
        for task in self._tasks:
            task.cancel()
        end_s, links = time.monotonic() + END_S, list(self._links)
        for link in links:
            link.end()
        for link in links:
            try:
                await asyncio.to_thread(link.process.wait, max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                link.process.kill()
                link.process.wait()


class _Link(Frames):
    """The server's end of the two sockets to a front."""

    def __init__(self, fronts: Fronts, process: "subprocess.Popen[bytes]", moves: socket.socket):
        super().__init__()
        self.process, self.connections, self.ready = process, 0, False
        self._fronts, self._moves, self._arrivals = fronts, moves, Arrivals(moves)
        self._loop = asyncio.get_running_loop()
        self._open = dict[int, _Passed]()
        """Number -> request that is not answered yet."""
        self._keys = dict[bytes, _Key]()
        self._known_requests = dict[int, tuple[_Key, bytes]]()
        """Number of a request's content -> the content, as key and body."""
        self._known_answers = dict[bytes, int]()
        """Body of an answer -> the number by which the front knows it."""
        self._made = list[_Passed]()
        """Requests whose answers can be created."""
        self._stream: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream to the front is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._stream = transport
        self._loop.add_reader(self._moves.fileno(), self._returned)

    def connection_lost(self, exc: Exception | None) -> None:
        """The front has ended: give up its requests."""
        self.ready = False
        self._loop.remove_reader(self._moves.fileno())
        self._moves.close()
        for one in self._open.values():
            one.give_up()
        self._open.clear()
        self._fronts.lost(self)
        self._loop.run_in_executor(None, self.process.wait)

    def data_received(self, data: bytes) -> None:
        """Called with messages from the front."""
        for kind, number, text, body in self.messages(data):
            if kind == REPEATED_REQUESTS:
                known = self._known_requests
                for request, content in PAIR.iter_unpack(body):
                    self._begin(request, *known[content])
            elif kind == REQUEST:
                self._begin(number, self._key(text), body)
            elif kind == DEFINE_REQUEST:
                self._known_requests[number] = self._key(text), body
            elif kind == CANCEL:
                if (one := self._open.pop(number, None)) is not None:
                    one.give_up()
            elif kind == CLOSED:
                self._left()
                if text:
                    self._fronts.connections.ended[text.decode()] += 1
            elif kind == READY:
                self.ready = True
            elif kind == IDLE:
                self._fronts.rooms.heard(self, number, text)
            elif kind == EVICT:
                self._fronts.rooms.evicted(number, done=bool(text))

    def _left(self) -> None:
        self.connections -= 1
        self._fronts.connections.elsewhere -= 1

    # ---- connections

    def give(self, connection: Connection, data: bytes) -> bool:
        """Give the front a connection and the bytes that have arrived on it. Returns whether the front has it now."""
        try:
            move(self._moves, connection.socket, data)
        except OSError:  # the front is busy, or has ended
            return False
        self.connections += 1
        self._fronts.connections.elsewhere += 1
        connection.abort()  # the front has its own descriptor
        return True

    def _returned(self) -> None:
        try:
            arrived = self._arrivals.next()
        except BlockingIOError:
            return
        except (OSError, EOFError):  # `connection_lost` handles the end of a front
            self._loop.remove_reader(self._moves.fileno())
            return
        if arrived is not None:
            self._left()
            self._fronts.do(self._fronts.returned(*arrived))

    # ---- requests

    def _key(self, text: bytes) -> "_Key":
        found = self._keys.get(text)
        if found is None:
            if len(self._keys) >= MAX_KNOWN:
                self._keys.clear()
            head = _head_of(text)
            found = self._keys[text] = _Key(head, self._fronts.counts.route(head.path))
        return found

    def _begin(self, number: int, key: "_Key", body: bytes) -> None:
        one, fronts = _Passed(self, number, key.route), self._fronts
        self._open[number] = one
        if fronts.draining():
            one.deliver(Unavailable("the server is shutting down and takes no new requests"))
        else:
            begin(fronts.host, fronts.regions, key.head, body, one)

    def answered(self, one: "_Passed", *, alone: bool) -> None:
        """Called when the answer of a request can be created. The answers of one turn of the event loop are sent together."""
        if self._open.pop(one.number, None) is None:
            return  # nobody waits for it any more
        self._made.append(one)
        if len(self._made) > 1:
            return
        if alone:
            self._send()
        else:
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        made, sent, repeated, done, counts = self._made, list[bytes](), list[bytes](), 0, self._fronts.counts.requests
        self._made = []
        try:
            for one in made:
                done += 1
                try:
                    if (body := one.again()) is not None:
                        known = self._known_answers.get(body)
                        if known is None:
                            known = self._define_answer(body, sent, repeated)
                        repeated.append(PAIR.pack(one.number, known))
                        counts[one.route, 200] += 1
                    else:
                        status, headers, body = one.made()
                        counts[one.route, status] += 1
                        sent.append(frame(status, one.number, headers, body))
                except BaseException:
                    sent.append(frame(500, one.number, JSON, FAILED))
                    raise  # to the event loop, which logs it
        finally:
            # An error affects only its own request: the others are still answered.
            if done < len(made):
                self._made = made[done:] + self._made
                self._loop.call_soon(self._send)
            if repeated:
                sent.append(frame(REPEATED_ANSWERS, body=b"".join(repeated)))
            assert self._stream is not None
            self._stream.write(b"".join(sent))

    def _define_answer(self, body: bytes, sent: list[bytes], repeated: list[bytes]) -> int:
        """Send the body of an answer to the front, with a new number. Returns the number."""
        if repeated:  # send these pairs first: their numbers may be used again below
            sent.append(frame(REPEATED_ANSWERS, body=b"".join(repeated)))
            repeated.clear()
        if len(self._known_answers) >= MAX_KNOWN:
            self._known_answers.clear()
        number = self._known_answers[body] = len(self._known_answers)
        sent.append(frame(DEFINE_ANSWER, number, body=body))
        return number

    def say(self, message: bytes) -> None:
        """Send a message."""
        assert self._stream is not None
        self._stream.write(message)

    def end(self) -> None:
        """Make the front close its connections and end."""
        if self._stream is None:
            self.process.kill()
        else:
            self._stream.write(frame(END))


class _Passed(Pending):
    """A request that a front has forwarded."""

    __slots__ = ("_link", "number", "route")

    def __init__(self, link: _Link, number: int, route: str):
        super().__init__()
        self._link, self.number, self.route = link, number, route

    def ready(self, *, alone: bool) -> None:
        self._link.answered(self, alone=alone)


class _Key(NamedTuple):
    """The information about a request that a front sends in addition to its body."""

    head: Head
    route: str
    """The route under which the request is counted."""


def _head_of(key: bytes) -> Head:
    """The head of a request, from the text of a front's message: its path and the length of its JSON."""
    path, _, json_bytes = key.decode().partition("\0")
    parts = path.split("/")  # /v2/models/NAME[/versions/N]/infer
    return Head(path, parts[3], parts[5] if len(parts) > 5 else None, 0, json_bytes or None, None)
