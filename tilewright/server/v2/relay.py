"""Messages between a server of ordinary models and its fronts (fronts.py), over two sockets for each front.

The first socket is a stream of messages with requests and answers. A message is `FRAME`, a text of at most 64 KiB, and a body.

| kind              | from   | number         | text                                  | body                                  |
|-------------------|--------|----------------|---------------------------------------|---------------------------------------|
| REQUEST           | front  | the request    | path, zero byte, length of the JSON   | the body of the request               |
| DEFINE_REQUEST    | front  | the new number | path, zero byte, length of the JSON   | the body of the request               |
| REPEATED_REQUESTS | front  | first request  |                                       | numbers of the requests' contents     |
| CANCEL            | front  | the request    |                                       |                                       |
| CLOSED            | front  |                | reason, if the front closed it        |                                       |
| READY             | front  |                |                                       |                                       |
| IDLE              | server | the question   |                                       |                                       |
| IDLE              | front  | the question   | start time of the longest idle period |                                       |
| EVICT             | server | the question   |                                       |                                       |
| EVICT             | front  | the question   | whether an idle connection was closed |                                       |
| a status          | server | the request    | headers                               | the body of the answer                |
| DEFINE_ANSWER     | server | the new number |                                       | the body of a JSON answer             |
| REPEATED_ANSWERS  | server | the answer's   |                                       | numbers of the requests               |
| END               | server |                |                                       |                                       |

Clients that leave their tensors in shared memory send requests with the same content (path, length of the JSON, body) over and
over, and get the same answers. When a content or an answer is repeated for the first time, a DEFINE message sends it with a
number. After that, each request and each answer is only a number. The requests of one turn of the event loop, which are
numbered one by one, are one message. So are answers with the same content.

The other socket preserves packet boundaries. It carries connections: the descriptor of each, and the bytes that have arrived on
it but are not answered yet.
"""

import asyncio
import socket
import struct
from array import array
from collections.abc import Iterable, Iterator

__all__ = [
    "CANCEL",
    "CLOSED",
    "DEFINE_ANSWER",
    "DEFINE_REQUEST",
    "END",
    "EVICT",
    "IDLE",
    "MAX_KNOWN",
    "MAX_MOVED_BYTES",
    "READY",
    "REPEATED_ANSWERS",
    "REPEATED_REQUESTS",
    "REQUEST",
    "Arrivals",
    "Frames",
    "frame",
    "move",
    "numbers",
    "packed",
]

FRAME = struct.Struct("<IIHH")
"""Size of the body in bytes, number, size of the text in bytes, kind."""
REQUEST, CANCEL, CLOSED, READY, END, DEFINE_REQUEST, REPEATED_REQUESTS, DEFINE_ANSWER, REPEATED_ANSWERS, IDLE, EVICT = range(11)
MAX_KNOWN = 1024
"""Most contents of requests with a number, and most answers with a number. After that, numbering starts again at 0."""
MAX_MOVED_BYTES = 32 << 10
"""Most bytes of a connection in one packet."""
MORE, LAST = b"+", b"."
"""The first byte of a packet: whether more packets of the same connection follow."""


def frame(kind: int, number: int = 0, text: bytes = b"", body: bytes = b"") -> bytes:
    """The bytes of a message."""
    return b"%b%b%b" % (FRAME.pack(len(body), number, len(text), kind), text, body)


def packed(some: Iterable[int]) -> bytes:
    """The bytes of numbers of requests or contents."""
    return array("I", some).tobytes()


def numbers(data: bytes) -> "array[int]":
    """The numbers from `packed`."""
    found = array("I")
    found.frombytes(data)
    return found


class Frames(asyncio.Protocol):
    """One end of the stream. Divides the received bytes into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def messages(self, data: bytes) -> Iterator[tuple[int, int, bytes, bytes]]:
        """(kind, number, text, body) of each message that is complete."""
        data = self._rest + data if self._rest else data
        at = 0
        while len(data) - at >= FRAME.size:
            size, number, text, kind = FRAME.unpack_from(data, at)
            begin = at + FRAME.size
            end = begin + text + size
            if len(data) < end:
                break
            yield kind, number, data[begin : begin + text], data[begin + text : end]
            at = end
        self._rest = data[at:]


def move(channel: socket.socket, connection: socket.socket, data: bytes) -> None:
    """Pass a connection to the other process. Raises OSError if that failed (BlockingIOError: the socket is full now)."""
    parts = [data[at : at + MAX_MOVED_BYTES] for at in range(0, len(data), MAX_MOVED_BYTES)] or [b""]
    for number, part in enumerate(parts):
        kind = MORE if number + 1 < len(parts) else LAST
        socket.send_fds(channel, [kind + part], [] if number else [connection.fileno()])


class Arrivals:
    """Receives the connections that the other process passes to this one."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._connection: socket.socket | None = None
        self._data = b""

    def next(self) -> tuple[socket.socket, bytes] | None:
        """Receive a packet. Returns (connection, its bytes) after the last packet of a connection, otherwise None.

        Raises EOFError: the other process has ended.
        """
        packet, fds, _, _ = socket.recv_fds(self._channel, 1 + MAX_MOVED_BYTES, 1)
        if not packet:
            raise EOFError
        if fds:
            self._connection = socket.socket(fileno=fds[0])
            self._connection.setblocking(False)
        self._data += packet[1:]
        if packet[:1] == MORE:
            return None
        connection, data = self._connection, self._data
        self._connection, self._data = None, b""
        return None if connection is None else (connection, data)
