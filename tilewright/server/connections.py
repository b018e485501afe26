"""Deadlines and a limit on connections, around uvicorn's HTTP/1.1 protocol, so that no client can block the server.

| what a client does                                | what happens                                                             |
|---------------------------------------------------|--------------------------------------------------------------------------|
| connects and sends no complete head               | after `head_timeout_s`: 408 if a part came, and the connection is closed |
| goes on sending a body that is answered already   | it is read and dropped for `REST_TIMEOUT_S`, then the connection is cut  |
| does not read its answer                          | the connection is cut if no byte leaves for `write_timeout_s`            |
| connects while `Connections.limit` are open       | the longest idle one is closed; if none is idle, the new one gets a 503  |
| sends something that is not HTTP                  | 400 as an OpenAI error object, and the connection is closed              |

If a connection is closed while its client still writes, the server first closes only its writing side and reads for `LINGER_S`
more. Closing it at once would make the kernel send a reset, which can destroy the answer before the client reads it.

uvicorn parses, routes and writes; this file only decides when a connection has to end. Requests that a `Shortcut` answers
(small requests of one kind that come by the thousand) do not go through uvicorn. All deadlines apply to them too.
"""

import asyncio
import errno
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES

from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError, unavailable
from tilewright.server.files import files_free
from tilewright.server.shortcut import Outbox, Shortcut, Shortened
from tilewright.server.transport import ConnectionTransport

__all__ = ["CONNECTION", "Connection", "Connections"]

LINGER_S = 2.0
REST_TIMEOUT_S = 30.0
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SPARE_CONNECTIONS = 8
"""Number of descriptors that are kept free once the process has run out of them."""
SAY_AGAIN_S = 10.0
LOOK_AGAIN_S = 2.0
"""Interval at which the server checks whether descriptors are free again."""
CONNECTION = "tilewright.connection"
"""The key of the connection in the scope of a request."""
HEAD, REST = "head", "rest"
STATUS_LINE = b"HTTP/1.1 "

logger = logging.getLogger(__name__)


class Connections:
    """State shared by the connections of one server: the limit, the idle connections, and counts of ended ones by reason."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.most = config.max_connections
        """The limit. `run_server` lowers it to the number of files that the process may open."""
        self._lowered: int | None = None
        self.open: set[Connection] = set()
        self.elsewhere = 0
        """Number of connections that other processes serve."""
        self.away: Callable[[Connection, bytes], bool] | None = None
        """Passes a connection to another process, with the bytes that have arrived. Returns whether it did."""
        self.make: Callable[[], asyncio.Protocol] | None = None
        """Creates a connection of this server."""
        self.ended: Counter[str] = Counter()
        """Reason -> number of connections that the server ended for it."""
        self.shortcuts: list[Shortcut] = []
        self.outbox = Outbox()
        self.room_elsewhere: Callable[[Connection], bool] | None = None
        """Asks other processes for room for a new connection, which waits for it. Returns whether they were asked."""
        self._idle: dict[Connection, float] = {}  # since when each is idle, ordered by that time
        self._say_again_s = 0.0

    @property
    def limit(self) -> int:
        """Most connections that may be open now: fewer than `most` while descriptors are scarce."""
        return self.most if self._lowered is None else min(self.most, self._lowered)

    def mark(self, connection: "Connection", *, idle: bool) -> None:
        """Record whether a connection is idle: it waits for its client, and no request of it is being answered."""
        if not idle:
            self._idle.pop(connection, None)
        elif connection not in self._idle:
            self._idle[connection] = time.monotonic()

    @property
    def full(self) -> bool:
        """Whether there are more connections than may be, with those of other processes."""
        return len(self.open) + self.elsewhere > self.limit

    def make_room(self, newest: "Connection") -> bool:
        """Returns whether `newest` may stay, at least for now. Closes the longest idle connection if there are too many."""
        if not self.full:
            return True
        if self.elsewhere and self.room_elsewhere is not None and self.room_elsewhere(newest):
            return True
        return self.evict(newest)

    def longest_idle(self, newest: "Connection | None" = None) -> "tuple[Connection, float] | None":
        """(the longest idle connection of this process besides `newest`, since when by `time.monotonic`), if there is one."""
        return next((one for one in self._idle.items() if one[0] is not newest), None)

    def evict(self, newest: "Connection | None" = None) -> bool:
        """Close the longest idle connection of this process besides `newest`; return whether there is one."""
        oldest = self.longest_idle(newest)
        if oldest is not None:
            self.end(oldest[0], "evicted")
        return oldest is not None

    def end(self, connection: "Connection", reason: str) -> None:
        """Cut a connection and count the reason."""
        self.ended[reason] += 1
        connection.ended_for = reason
        self._idle.pop(connection, None)
        connection.abort()

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler. If accept fails for lack of descriptors, it closes idle connections and logs a
        line, at most every `SAY_AGAIN_S`."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in OUT_OF_FILES or "accept" not in context["message"]:
            loop.default_exception_handler(context)
            return
        # With the lower limit, each new connection evicts an idle one before descriptors run out and accept fails again.
        if self._lowered is None:
            loop.call_later(LOOK_AGAIN_S, self._look_again, loop)
        self._lowered = max(1, len(self.open) - SPARE_CONNECTIONS)
        for connection in list(self._idle)[:SPARE_CONNECTIONS]:
            self.end(connection, "evicted")
        if time.monotonic() >= self._say_again_s:
            self._say_again_s = time.monotonic() + SAY_AGAIN_S
            few = f"at most {self.limit} at a time until descriptors are free again"
            logger.error("no new connections for a second: %s; %s; raise `ulimit -n`", error.strerror, few)

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raise the lowered limit by the number of free descriptors, up to `most`."""
        assert self._lowered is not None
        try:
            free = files_free()
        except OSError:  # not even one descriptor is free for this check
            free = 0
        self._lowered = max(self._lowered, int(min(len(self.open) + free - SPARE_CONNECTIONS, self.most)))
        if self._lowered < self.most:
            loop.call_later(LOOK_AGAIN_S, self._look_again, loop)
        else:
            self._lowered = None


class Connection(Shortened):
    """One connection. `pool`: the `Connections` of its server."""

    def __init__(self, *args: Any, pool: Connections, **kwargs: Any):
        super().__init__(*args, outbox=pool.outbox, **kwargs)
        self._pool = pool
        self._phase: str | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._due_s: float | None = None
        """The deadline of the current phase, by the event loop's clock."""
        self._stall: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._head = b""
        """The head of an answer whose body is not written yet."""
        self._real = cast(asyncio.Transport, None)  # set by connection_made, as in the base class
        self.lingering = False
        self._inner, self.app = self.app, self._with_connection

    async def _with_connection(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the app with this connection in its scope."""
        scope[CONNECTION] = self
        await self._inner(scope, receive, send)

    @property
    def chunked(self) -> bool:
        """Whether an answer of unknown length is sent in chunks. HTTP/1.0 clients do not understand chunks."""
        return self.conn.their_http_version == b"1.1"

    @property
    def blocked(self) -> bool:
        """Whether data written now would have to wait, or the client can no longer read it."""
        return self.flow.write_paused or self.lingering or self._real.is_closing()

    def write_chunk(self, data: bytes) -> None:
        """Write a chunk of the current answer directly to the transport, bypassing uvicorn, which began the answer."""
        self._write_head()
        self._real.write(b"%x\r\n%b\r\n" % (len(data), data))

    def write(self, data: bytes) -> None:
        """Write data from uvicorn. The head of an answer is written together with the data that follows it in the same turn of
        the event loop, because each call of the socket costs both sides a context switch."""
        if data.startswith(STATUS_LINE) and not self._head:
            self._head = data
            self.loop.call_soon(self._write_head)
        else:
            head, self._head = self._head, b""
            self._real.write(head + data if head else data)

    def _write_head(self) -> None:
        head, self._head = self._head, b""
        if head:
            self._real.write(head)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called when a client has connected."""
        self._real = transport
        super().connection_made(cast(asyncio.Transport, ConnectionTransport(transport, self)))
        self._pool.open.add(self)
        if self._pool.make_room(self):
            self._watch()
        else:
            self._refuse()

    def _refuse(self) -> None:
        self._pool.ended["refused"] += 1
        busy = f"all {self._pool.limit} connections of this server are busy; try again later"
        self._answer(unavailable(busy, code="too_many_connections"))

    def wait(self) -> None:
        """Read nothing until `go_on`."""
        self._real.pause_reading()

    def go_on(self, *, stays: bool) -> None:
        """Read on; or refuse the connection, which does not stay."""
        if not self._real.is_closing():
            self._real.resume_reading()
            if not stays:
                self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection has ended, on either side."""
        self._pool.open.discard(self)
        self._pool.mark(self, idle=False)
        self._hold(b"")
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        if self._short is not None:
            self._short()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called with bytes from the client."""
        if self.lingering:
            return
        if self._pool.away is not None and not self.stays and self._rests and self._pool.away(self, data):
            return
        if self._takes(self._pool.shortcuts, data):
            return
        if self._held:
            data = bytes(self._held) + data
            self._hold(b"")
        self.untouched = False
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Called when an answer has been written."""
        super().on_response_complete()
        self._watch()

    def shutdown(self) -> None:
        """Called when the server ends. Closes the connection at once, or after the answer that is being written."""
        if self.lingering:
            self.abort()
        elif self._short is not None:
            self._ends = True
        else:
            super().shutdown()

    def abort(self) -> None:
        """Cut the connection. Unsent data is lost."""
        self._real.abort()

    def _stop(self) -> None:
        """Called when a request is complete: stop waiting for the client."""
        self._due_s = self._phase = None
        self._pool.mark(self, idle=False)

    # Ends that a client causes by its behaviour ----------------------------------------------------------------------

    def _watch(self) -> None:
        """Start the deadline of the connection's current phase. The deadline counts from the beginning of the phase."""
        phase, theirs = None, h11.IDLE if self.untouched else self.conn.their_state
        if not self.transport.is_closing():
            if theirs is h11.IDLE:
                phase = HEAD
            elif theirs is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
                phase = REST
        if phase == self._phase:
            return
        self._phase = phase
        self._pool.mark(self, idle=phase is not None or self.lingering)
        self._due_s = None
        if phase is not None:
            seconds = self._pool.config.head_timeout_s if phase == HEAD else REST_TIMEOUT_S
            self._due_s = self.loop.time() + seconds
            # A timer that fires too early checks the deadline and starts again, so one timer serves all requests.
            if self._deadline is not None and self._deadline.when() > self._due_s:
                self._deadline.cancel()
                self._deadline = None
            if self._deadline is None:
                self._deadline = self.loop.call_at(self._due_s, self._late)

    def _late(self) -> None:
        self._deadline = None
        if self._due_s is None:
            return
        if self.loop.time() < self._due_s:
            self._deadline = self.loop.call_at(self._due_s, self._late)
            return
        if self._held:  # a shortcut waited for the rest of a request, which did not come
            held = bytes(self._held)
            self._hold(b"")
            self.untouched = False
            super().data_received(held)
            self._watch()
            if self._phase != HEAD:
                return
        if self._phase == HEAD and self.conn.trailing_data[0]:
            self._pool.ended["head_timeout"] += 1
            wait = f"{self._pool.config.head_timeout_s:g} s"
            self._answer(ApiError(408, f"the request's head did not arrive within {wait}", code="head_timeout"))
        else:
            self._pool.end(self, "head_timeout" if self._phase == HEAD else "body_after_answer")

    def send_400_response(self, msg: str) -> None:
        """Replaces uvicorn's answer to a request that is not valid HTTP."""
        self._pool.ended["invalid"] += 1
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nothing more that the request's task writes may be sent
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(ApiError(400, "this is not a valid HTTP/1.1 request", code="invalid_http"))
        else:
            self.abort()

    def _answer(self, error: ApiError) -> None:
        """Send an error outside the task of any request, and close the connection."""
        body = json.dumps(error.body).encode()
        headers = {**error.headers, "content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        head = h11.Response(status_code=error.status, headers=raw, reason=STATUS_PHRASES[error.status])
        self._write_head()
        self._real.write(b"".join(self.conn.send(event) or b"" for event in (head, h11.Data(data=body), h11.EndOfMessage())))
        self.linger()

    # Ends ------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close once everything is sent. If the client may still be sending, close only the writing side first."""
        self._write_head()
        unfinished = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if unfinished and self._real.can_write_eof() and not self._real.is_closing():
            self.linger()
        else:
            self._real.close()
            self._expect_progress()

    def linger(self) -> None:
        """Close the writing side. For `LINGER_S` more, read and drop what the client sends."""
        self.lingering = True
        self._write_head()
        self._real.write_eof()
        self._real.resume_reading()
        self._phase = None
        self._pool.mark(self, idle=True)
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(LINGER_S, self._real.close)
        self._expect_progress()

    # Clients that do not read ----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Called when the write buffer is full because the client reads too slowly."""
        super().pause_writing()
        self._expect_progress()

    def resume_writing(self) -> None:
        """Called when the client has read enough of the write buffer."""
        super().resume_writing()
        if self._stall is not None and not self._real.is_closing():
            self._stall.cancel()
            self._stall = None

    def _expect_progress(self) -> None:
        """Cut the connection unless some written data leaves within the write timeout."""
        self._unsent = self._real.get_write_buffer_size()
        if self._stall is not None:
            self._stall.cancel()
        self._stall = self.loop.call_later(self._pool.config.write_timeout_s, self._stalled) if self._unsent else None

    def _stalled(self) -> None:
        if 0 < self._real.get_write_buffer_size() < self._unsent:
            self._expect_progress()
        elif self._real.get_write_buffer_size():
            self._pool.end(self, "write_timeout")
