"""Answers small requests of one kind that come by the thousand without uvicorn: a `Shortcut`.

A connection offers its bytes to the shortcuts of its server as long as one accepts them. Everything unusual goes to uvicorn.

Answers that become ready in the same turn of the event loop are made together and then sent together (`Outbox`). So a client
that the first answer wakes keeps running while the others are sent, and is not woken for each. If answers become ready one at a
time, they are sent at once, because a lone client would have to wait for another turn of the event loop.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tilewright.server.errors import ApiError

__all__ = ["PARTIAL", "Done", "Outbox", "Short", "Shortcut", "Shortened", "Taken"]

PARTIAL = object()
"""A shortcut returns this for an incomplete request that it might accept once it is complete."""
MAX_HELD_BYTES = 128 << 10
"""Limit for bytes that a client sends while a shortcut answers it. Above the limit, reading pauses."""
MAX_ALL_HELD_BYTES = 256 << 20
"""Limit for bytes that are kept for shortcuts on all connections together. Above the limit, requests go to uvicorn."""


class Short(NamedTuple):
    """A shortcut's answer."""

    status: int
    headers: bytes
    """The encoded header lines, each with its line break."""
    body: bytes


class Done(Protocol):
    """A callback that a shortcut calls once, when a request can be answered."""

    def __call__(self, make: Callable[[], Short], *, alone: bool = False) -> None:
        """`make` creates the answer and may raise. It is called soon. With `alone` it is called before this call returns, if no
        other answers are ready."""
        ...


class Taken(NamedTuple):
    """A request that a shortcut answers: its length in the data, and the function that begins to answer it.

    `begin` may call `Done` before it returns. It returns a function that is called if the client leaves before the answer is
    ready. With `close` the connection ends after the answer, whose headers must announce that.
    """

    bytes: int
    begin: Callable[[Done], Callable[[], object]]
    close: bool = False


class Shortcut(Protocol):
    """Answers some requests without uvicorn. It should not accept a request that is unusual in any way."""

    def take(self, data: bytes | bytearray, client: str) -> Any:
        """Returns `Taken`, `PARTIAL`, or None: uvicorn handles the request.

        If `data` is a `bytearray` and the shortcut accepts the request, it may keep views of `data`.
        """
        ...


class Outbox:
    """Collects the answers of one turn of the event loop and sends them in the next, or at once while they come one by one."""

    def __init__(self) -> None:
        self.held_bytes = 0
        """Bytes of incomplete requests that shortcuts might accept, on all connections together."""
        self._ready: deque[tuple[Shortened, Callable[[], Short]]] = deque()
        self._alone = True
        """Whether the last batch had fewer than two answers."""
        self._sent_one = False
        """Whether an answer was sent at once in this turn of the event loop."""
        self._headers, self._written = list[tuple[bytes, bytes]](), b""

    def usual(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The headers of all answers as bytes; the list is another one each second."""
        if headers is not self._headers:
            self._headers, self._written = headers, b"".join([b"%b: %b\r\n" % header for header in headers])
        return self._written

    def add(self, connection: "Shortened", make: Callable[[], Short], *, alone: bool = False) -> None:
        """Add an answer that can be made. With `alone`, this call may run `make` immediately, and then it raises its errors."""
        if alone and self._alone and not (self._sent_one or self._ready):
            self._sent_one = True
            try:
                self._send_one(connection, make)
            finally:  # after sending the answer, because the client waits for it
                connection.loop.call_soon(self._next_turn)
            return
        self._ready.append((connection, make))
        if len(self._ready) == 1:
            connection.loop.call_soon(self._send)

    def _next_turn(self) -> None:
        self._sent_one = False

    @staticmethod
    def _send_one(connection: "Shortened", make: Callable[[], Short]) -> None:
        try:
            data = connection.made(make)
        except BaseException:
            connection.failed()
            raise
        if data is not None:
            connection.send(data)
            if connection.holds:  # further requests: begin them later, not within the call that reported this answer
                connection.loop.call_soon(connection.sent)
            else:
                connection.sent()

    def _send(self) -> None:
        made = list[tuple[Shortened, bytes]]()
        try:
            while self._ready:
                connection, make = self._ready[0]
                try:
                    data = connection.made(make)
                except BaseException:
                    connection.failed()
                    raise  # the event loop logs it
                finally:
                    self._ready.popleft()
                if data is not None:
                    made.append((connection, data))
        finally:
            if self._ready:  # an error affects only its own request: the other answers still go out
                self._ready[0][0].loop.call_soon(self._send)
            self._alone = len(made) < 2
            for connection, data in made:
                connection.send(data)
            for connection, _ in made:
                connection.sent()


class Shortened(H11Protocol):
    """The part of a connection that works with shortcuts. `Connection` has the rest; the parts used here are declared below."""

    lingering: bool
    _real: asyncio.Transport
    _stop: Callable[[], None]
    _watch: Callable[[], None]
    close: Callable[[], None]
    linger: Callable[[], None]
    _write_head: Callable[[], None]
    _answer: Callable[[ApiError], None]

    def __init__(self, *args: Any, outbox: Outbox, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._outbox = outbox
        self._held: bytes | bytearray = b""  # bytes of an incomplete request, or bytes that came after a shortcut's request
        self._counted = 0  # number of these bytes that are included in the outbox's count
        self._short: Callable[[], object] | None = None
        """Gives up the request that a shortcut is answering; None: there is no such request."""
        self._ends = False  # whether the connection ends once the shortcut has answered
        self.untouched = True
        """Whether uvicorn has received no byte yet, so that it waits for a request."""
        self.plain, self.stays = 0, False
        """Number of plain requests so far, and whether another process returned the connection; for `Connections.away`."""
        self.ended_for: str | None = None
        """The reason for which the server cut the connection."""

    @property
    def socket(self) -> socket.socket:
        """The socket."""
        return self._real.get_extra_info("socket")

    @property
    def _rests(self) -> bool:
        """Whether the connection is idle: no request is in progress or partly received, and all answers have been sent."""
        busy = self._short is not None or (self.cycle is not None and not self.cycle.response_complete)
        return not (busy or self._held or self.conn.their_state is not h11.IDLE or self._real.get_write_buffer_size())

    def _takes(self, shortcuts: Sequence[Shortcut], data: bytes) -> bool:
        """Whether a shortcut accepts these bytes, or they are kept until more arrive."""
        if self._short is not None:
            self._hold(self._held + data)
            if len(self._held) > MAX_HELD_BYTES:
                self.flow.pause_reading()
            return True
        if not self.untouched:
            busy = self.cycle is not None and not self.cycle.response_complete
            if busy or self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
                return False
        whole: bytes | bytearray = data
        if self._held:
            whole = self._held if isinstance(self._held, bytearray) else bytearray(self._held)
            whole += data  # in place: a large body comes in many pieces
        taken = _asked(shortcuts, whole, self.client[0] if self.client else "-")
        if taken is PARTIAL and self._outbox.held_bytes + len(data) <= MAX_ALL_HELD_BYTES:
            self._hold(whole)
            return True
        if taken is None or taken is PARTIAL:
            self._hold(bytes(whole[: len(whole) - len(data)]))
            return False
        self._hold(bytes(whole[taken.bytes :]) if taken.bytes < len(whole) else b"")
        self._ends = self._ends or taken.close
        self._unset_keepalive_if_required()
        self._stop()
        self._short = _begun
        give_up = taken.begin(self._ready)
        if self._short is _begun:
            self._short = give_up
        return True

    def _hold(self, data: bytes | bytearray) -> None:
        """Replace the kept bytes by these."""
        self._outbox.held_bytes += len(data) - self._counted
        self._held, self._counted = data, len(data)

    def _ready(self, make: Callable[[], Short], *, alone: bool = False) -> None:
        """Called when the shortcut's answer can be made. Until it is sent, further bytes of the client are kept."""
        self._short = _begun
        self._outbox.add(self, make, alone=alone)

    def made(self, make: Callable[[], Short]) -> bytes | None:
        """Make an answer. Returns its bytes; None: the client has gone."""
        if self._real.is_closing():
            self._short = None
            return None
        status, headers, body = make()
        usual = self._outbox.usual(self.server_state.default_headers)
        length, words = len(body), STATUS_PHRASES[status]
        return b"HTTP/1.1 %d %b\r\n%b%bcontent-length: %d\r\n\r\n%b" % (status, words, usual, headers, length, body)

    def failed(self) -> None:
        """Called when an answer could not be made: sends a 500."""
        self._short = None
        self._answer(ApiError(500, "the server failed on this request; its log has the traceback", type="server_error"))

    @property
    def holds(self) -> bool:
        """Whether bytes have arrived after the request."""
        return bool(self._held)

    def send(self, data: bytes) -> None:
        """Send an answer."""
        self._short = None
        self._write_head()
        self._real.write(data)

    def sent(self) -> None:
        """Called after an answer was sent. Handles the bytes that arrived meanwhile."""
        if self._ends:
            # If unread bytes are left, closing at once would make the kernel send a reset.
            (self.linger if self._held else self.close)()
            return
        self._watch()
        held = bytes(self._held)
        self._hold(b"")
        if held:
            self.flow.resume_reading()
            self.data_received(held)


def _asked(shortcuts: Sequence[Shortcut], data: bytes | bytearray, client: str) -> Any:
    """The `Taken` of the first shortcut that accepts the request; otherwise `PARTIAL` if one still might, or None."""
    found = None
    for shortcut in shortcuts:
        said = shortcut.take(data, client)
        if said is not None and said is not PARTIAL:
            return said
        found = found or said
    return found


def _begun() -> None:
    """Does nothing: the answer is already there, so there is nothing to give up."""
