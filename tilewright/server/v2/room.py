"""Makes room for a new connection when a server with fronts is at its connection limit: the longest idle one is closed.

That connection may be in another process. So the new connection waits, and nothing is read from it, while the server asks each
front since when its longest idle connection has been idle (all processes share this clock). Then the connection that has been
idle longest is closed, in whichever process it is. If no connection is idle, the new one is refused.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tilewright.server.connections import Connection, Connections
from tilewright.server.v2.relay import EVICT, IDLE, frame

__all__ = ["Link", "Rooms", "answer"]


class Link(Protocol):
    """The server's interface to a front."""

    connections: int

    def say(self, message: bytes) -> None:
        """Send a message."""
        ...


@dataclass(slots=True)
class _Asked:
    """A new connection, and the answers of the fronts so far."""

    newest: Connection
    awaited: set[Link]
    """Fronts that have not answered."""
    idle: dict[Link, float]
    """Front -> time since which its longest idle connection has been idle."""


class Rooms:
    """Makes room for new connections in all processes of one server.

    Args:
        pool: the connections of the server's own process.
        links: returns the fronts.
    """

    def __init__(self, pool: Connections, links: Callable[[], Iterable[Link]]):
        self._pool, self._links = pool, links
        self._open = dict[int, _Asked]()
        self._evicting = dict[int, tuple[Connection, Link]]()
        """Number of a question -> (new connection, front that has to close another connection for it)."""
        self._numbers = itertools.count()

    def ask(self, newest: Connection) -> bool:
        """Ask the fronts for room for a new connection, which waits meanwhile. Returns False if no front has a connection."""
        links = {link for link in self._links() if link.connections}
        if not links:
            return False
        number = next(self._numbers) & 0xFFFFFFFF
        self._open[number] = _Asked(newest, set(links), {})
        newest.wait()
        for link in links:
            link.say(frame(IDLE, number))
        return True

    def heard(self, link: Link, number: int, since: bytes) -> None:
        """Called with a front's answer: the time since which its longest idle connection has been idle; b"": none is idle."""
        asked = self._open.get(number)
        if asked is None:
            return
        asked.awaited.discard(link)
        if since:
            asked.idle[link] = float(since)
        if not asked.awaited:
            del self._open[number]
            self._decide(number, asked)

    def _decide(self, number: int, asked: _Asked) -> None:
        newest, own = asked.newest, self._pool.longest_idle(asked.newest)
        link = min(asked.idle, key=lambda link: asked.idle[link], default=None)
        if newest not in self._pool.open:
            return
        if self._pool.full and link is not None and (own is None or asked.idle[link] < own[1]):
            self._evicting[number] = newest, link
            link.say(frame(EVICT, number))
        else:
            newest.go_on(stays=not self._pool.full or self._pool.evict(newest))

    def evicted(self, number: int, *, done: bool) -> None:
        """Called when a front has closed a connection (`done`), or none of its connections is idle any more."""
        newest, _ = self._evicting.pop(number, (None, None))
        if newest is None or newest not in self._pool.open:
            return
        if done:
            newest.go_on(stays=True)
        elif not self.ask(newest):
            newest.go_on(stays=not self._pool.full or self._pool.evict(newest))

    def lost(self, link: Link) -> None:
        """Called when a front has ended, and its connections with it."""
        for number in list(self._open):
            self.heard(link, number, b"")
        for number in [number for number, (_, asked) in self._evicting.items() if asked is link]:
            self.evicted(number, done=True)


def answer(pool: Connections, kind: int, number: int) -> bytes:
    """A front's answer to IDLE or EVICT."""
    if kind == EVICT:
        return frame(EVICT, number, b"done" if pool.evict() else b"")
    oldest = pool.longest_idle()
    return frame(IDLE, number, b"" if oldest is None else repr(oldest[1]).encode())
