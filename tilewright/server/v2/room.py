"""Room for a new connection, if a server with fronts has as many connections as it may: the longest idle one is closed.

It may be in another process. So the new connection waits, unread, while every front is asked since when its longest idle
connection is idle (all processes share this clock). Then the one that has been idle longest is closed, wherever it is. If no
connection is idle, the new one is refused.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tilewright.server.connections import Connection, Connections
from tilewright.server.v2.relay import EVICT, IDLE, frame

__all__ = ["Link", "Rooms", "answer"]


class Link(Protocol):
    """A front, as the server sees it."""

    connections: int

    def say(self, message: bytes) -> None:
        """Send a message."""
        ...


@dataclass(slots=True)
class _Asked:
    """A new connection, and what fronts have said."""

    newest: Connection
    awaited: set[Link]
    """Fronts that have not answered."""
    idle: dict[Link, float]
    """Since when the longest idle connection of a front is idle."""


class Rooms:
    """Makes room in all processes of one server.

    Args:
        pool: the connections of the server's own process.
        links: the fronts.
    """

    def __init__(self, pool: Connections, links: Callable[[], Iterable[Link]]):
        self._pool, self._links = pool, links
        self._open = dict[int, _Asked]()
        self._evicting = dict[int, tuple[Connection, Link]]()
        """New connections for which a front was told to close another one."""
        self._numbers = itertools.count()

    def ask(self, newest: Connection) -> bool:
        """Let a new connection wait for room; return whether there is a front that can be asked."""
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
        """A front has said since when its longest idle connection is idle; b"": none is."""
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
        """A front has closed a connection, or none of its connections is idle any more."""
        newest, _ = self._evicting.pop(number, (None, None))
        if newest is None or newest not in self._pool.open:
            return
        if done:
            newest.go_on(stays=True)
        elif not self.ask(newest):
            newest.go_on(stays=not self._pool.full or self._pool.evict(newest))

    def lost(self, link: Link) -> None:
        """A front has ended, and its connections with it."""
        for number in list(self._open):
            self.heard(link, number, b"")
        for number in [number for number, (_, asked) in self._evicting.items() if asked is link]:
            self.evicted(number, done=True)


def answer(pool: Connections, kind: int, number: int) -> bytes:
    """What a front answers to IDLE or EVICT."""
    if kind == EVICT:
        return frame(EVICT, number, b"done" if pool.evict() else b"")
    oldest = pool.longest_idle()
    return frame(IDLE, number, b"" if oldest is None else repr(oldest[1]).encode())
