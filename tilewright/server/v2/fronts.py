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
from typing import Any

from tilewright.host.host import Host
from tilewright.host.regions import Regions
from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connection, Connections
from tilewright.server.metrics import HttpCounts
from tilewright.server.v2.heading import Heads, Request
from tilewright.server.v2.link import Link
from tilewright.server.v2.relay import MAX_MOVED_BYTES
from tilewright.server.v2.repeats import Repeats
from tilewright.server.v2.room import Rooms

__all__ = ["Fronts"]

MOVES_AFTER = 3
"""The server itself answers this many plain requests of a connection first: moving a short-lived connection does not pay."""
RESTART_DELAY_S = 1.0
"""Delay before a front that ended is replaced."""
END_S = 12.0
"""Time that the fronts have to write their last answers before they are killed."""

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
        self._links, self.repeats = set[Link](), Repeats(host, regions, draining)
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
        link = Link(self, process, moves)
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

    def lost(self, link: Link) -> None:
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
        self.repeats.close()
        for link in links:
            link.end()
        for link in links:
            try:
                await asyncio.to_thread(link.process.wait, max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                link.process.kill()
                link.process.wait()
