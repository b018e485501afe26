"""Small requests of one kind that come by the thousand: a `Shortcut` answers them without uvicorn.

A connection hands its bytes to the shortcuts of its server as long as one takes them; everything unusual goes to uvicorn.
Answers that become ready in one turn of the event loop are made together, and then sent together (`Outbox`): a client that is
woken by one of them goes on while the next ones are sent, and is not woken for each. Where answers come one by one, they are
sent at once: a turn of the event loop is time that a lone client waits for.
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
"""A shortcut's word for a request that it might take, once it is whole."""
MAX_HELD_BYTES = 128 << 10
"""Of what a client sends on while a shortcut answers it; more is not read yet."""
MAX_ALL_HELD_BYTES = 256 << 20
"""Of what is kept on all connections for shortcuts; uvicorn gets what is beyond."""


class Short(NamedTuple):
    """A shortcut's answer."""

    status: int
    headers: bytes
    """Written, each with its line's end."""
    body: bytes


class Done(Protocol):
    """Told once that a request is answered."""

    def __call__(self, make: Callable[[], Short], *, alone: bool = False) -> None:
        """`make` makes the answer: soon, or now where it is told `alone`, beside no other answer; it may raise."""
        ...


class Taken(NamedTuple):
    """A request that a shortcut answers: how many bytes of the data it is, and what begins with it.

    `begin` may be done before it returns; it returns what is called if the client leaves before it is done. With `close` the
    connection ends with the answer, whose headers say so.
    """

    bytes: int
    begin: Callable[[Done], Callable[[], object]]
    close: bool = False


class Shortcut(Protocol):
    """Answers some requests without uvicorn; whatever is unusual about one is a reason not to take it."""

    def take(self, data: bytes | bytearray, client: str) -> Any:
        """`Taken`, `PARTIAL`, or None: uvicorn's. A `bytearray` is the shortcut's to keep views of, once it takes a request."""
        ...


class Outbox:
    """Answers of one turn of the event loop, which go out in the next; or at once, as long as they come one by one."""

    def __init__(self) -> None:
        self.held_bytes = 0
        """Of requests that shortcuts might take once they are whole, on all connections together."""
        self._ready: deque[tuple[Shortened, Callable[[], Short]]] = deque()
        self._alone = True
        """Whether no two answers went out together the last time."""
        self._sent_one = False
        """In this turn of the event loop."""
        self._headers, self._written = list[tuple[bytes, bytes]](), b""

    def usual(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The headers of all answers as bytes; the list is another one each second."""
        if headers is not self._headers:
            self._headers, self._written = headers, b"".join([b"%b: %b\r\n" % header for header in headers])
        return self._written

    def add(self, connection: "Shortened", make: Callable[[], Short], *, alone: bool = False) -> None:
        """An answer is ready to be made; `alone`: it may be now, and raise."""
        if alone and self._alone and not (self._sent_one or self._ready):
            self._sent_one = True
            try:
                self._send_one(connection, make)
            finally:  # later than the answer, which somebody waits for
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
            if connection.holds:  # requests, which are not begun within what has told this answer
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
                    raise  # to the event loop, which logs it
                finally:
                    self._ready.popleft()
                if data is not None:
                    made.append((connection, data))
        finally:
            if self._ready:  # what one request ran into is its own: the others are answered
                self._ready[0][0].loop.call_soon(self._send)
            self._alone = len(made) < 2
            for connection, data in made:
                connection.send(data)
            for connection, _ in made:
                connection.sent()


class Shortened(H11Protocol):
    """The part of a connection that a shortcut serves; `Connection` has the rest, which stands here as far as it is used."""

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
        self._held: bytes | bytearray = b""  # what came behind or before a shortcut's request
        self._counted = 0  # bytes of it that are in the outbox's count
        self._short: Callable[[], object] | None = None
        """What gives up the shortcut's request that is being answered."""
        self._ends = False  # once the shortcut has answered
        self.untouched = True
        """Whether uvicorn has got no byte yet, so that it waits for a request."""
        self.plain, self.stays = 0, False
        """Plain requests so far, and whether another process gave it back; for `Connections.away`."""
        self.ended_for: str | None = None
        """The reason for which the server cut it."""

    @property
    def socket(self) -> socket.socket:
        """The socket."""
        return self._real.get_extra_info("socket")

    @property
    def _rests(self) -> bool:
        """Whether no request is under way, nothing of one has come, and all answers have been sent."""
        busy = self._short is not None or (self.cycle is not None and not self.cycle.response_complete)
        return not (busy or self._held or self.conn.their_state is not h11.IDLE or self._real.get_write_buffer_size())

    def _takes(self, shortcuts: Sequence[Shortcut], data: bytes) -> bool:
        """Whether a shortcut has these bytes, or keeps them until more are there."""
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
        """Keep these bytes, and no others."""
        self._outbox.held_bytes += len(data) - self._counted
        self._held, self._counted = data, len(data)

    def _ready(self, make: Callable[[], Short], *, alone: bool = False) -> None:
        """The shortcut's answer can be made; until it is sent, what the client sends on is held."""
        self._short = _begun
        self._outbox.add(self, make, alone=alone)

    def made(self, make: Callable[[], Short]) -> bytes | None:
        """An answer's bytes; None: nobody is there any more."""
        if self._real.is_closing():
            self._short = None
            return None
        status, headers, body = make()
        usual = self._outbox.usual(self.server_state.default_headers)
        length, words = len(body), STATUS_PHRASES[status]
        return b"HTTP/1.1 %d %b\r\n%b%bcontent-length: %d\r\n\r\n%b" % (status, words, usual, headers, length, body)

    def failed(self) -> None:
        """An answer could not be made."""
        self._short = None
        self._answer(ApiError(500, "the server failed on this request; its log has the traceback", type="server_error"))

    @property
    def holds(self) -> bool:
        """Whether something has come behind the request."""
        return bool(self._held)

    def send(self, data: bytes) -> None:
        """Send an answer."""
        self._short = None
        self._write_head()
        self._real.write(data)

    def sent(self) -> None:
        """Go on with what came meanwhile."""
        if self._ends:
            # With bytes that nobody reads, closing at once would make the kernel send a reset.
            (self.linger if self._held else self.close)()
            return
        self._watch()
        held = bytes(self._held)
        self._hold(b"")
        if held:
            self.flow.resume_reading()
            self.data_received(held)


def _asked(shortcuts: Sequence[Shortcut], data: bytes | bytearray, client: str) -> Any:
    """What the first shortcut says that takes the request; else `PARTIAL` if one still might."""
    found = None
    for shortcut in shortcuts:
        said = shortcut.take(data, client)
        if said is not None and said is not PARTIAL:
            return said
        found = found or said
    return found


def _begun() -> None:
    """Gives up nothing: the answer is there already."""
