"""Messages between a server of ordinary models and its fronts (fronts.py), over two sockets for each front.

A stream carries requests and answers, as frames: `FRAME`, then a text of at most 64 KiB, then a body.

| kind       | from   | number              | text                                  | body                    |
|------------|--------|---------------------|---------------------------------------|-------------------------|
| ASK        | front  | of the request      | path, zero byte, length of the JSON   | of the request          |
| KNOW       | front  | new, of these words | the same                              | the same                |
| AGAIN      | front  |                     |                                       | pairs: request, words   |
| CANCEL     | front  | of the request      |                                       |                         |
| CLOSED     | front  |                     | reason, if the front ended it         |                         |
| READY      | front  |                     |                                       |                         |
| IDLE       | server | of a question       |                                       |                         |
| IDLE       | front  | of the question     | since when a connection is idle       |                         |
| EVICT      | server | of a question       |                                       |                         |
| EVICT      | front  | of the question     | whether an idle connection was closed |                         |
| a status   | server | of the request      | headers                               | of the answer           |
| TOLD       | server | new, of these words |                                       | of an answer with JSON  |
| SAME       | server |                     |                                       | pairs: request, words   |
| END        | server |                     |                                       |                         |

Clients that leave their tensors in shared memory send the same words over and over, and get the same ones. So these cross the
stream once; then a request and its answer are two numbers each, and those of one turn of the event loop are one frame.

The other socket keeps the boundaries of packets. It carries connections: their files, with the bytes that came and are not
answered yet.
"""

import asyncio
import socket
import struct
from collections.abc import Iterator

__all__ = [
    "AGAIN",
    "ASK",
    "CANCEL",
    "CLOSED",
    "END",
    "EVICT",
    "IDLE",
    "KNOW",
    "MAX_KNOWN",
    "MAX_MOVED_BYTES",
    "PAIR",
    "READY",
    "SAME",
    "TOLD",
    "Arrivals",
    "Frames",
    "frame",
    "move",
]

FRAME = struct.Struct("<IIHH")
"""Bytes of the body, number, bytes of the text, kind."""
PAIR = struct.Struct("<II")
"""Number of a request, number of the words that it or its answer has."""
ASK, CANCEL, CLOSED, READY, END, KNOW, AGAIN, TOLD, SAME, IDLE, EVICT = range(11)
MAX_KNOWN = 1024
"""Words of each kind that are remembered; then their numbers begin again."""
MAX_MOVED_BYTES = 32 << 10
"""Most bytes in a packet with a connection."""
MORE, LAST = b"+", b"."
"""The first byte of a packet: whether more bytes of the same connection follow."""


def frame(kind: int, number: int = 0, text: bytes = b"", body: bytes = b"") -> bytes:
    """A message."""
    return b"%b%b%b" % (FRAME.pack(len(body), number, len(text), kind), text, body)


class Frames(asyncio.Protocol):
    """An end of the stream: divides what arrives into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def messages(self, data: bytes) -> Iterator[tuple[int, int, bytes, bytes]]:
        """(kind, number, text, body) of each message that is whole."""
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
    """Give a connection to the other process. Raises OSError: it was not given (BlockingIOError: there is no room now)."""
    parts = [data[at : at + MAX_MOVED_BYTES] for at in range(0, len(data), MAX_MOVED_BYTES)] or [b""]
    for number, part in enumerate(parts):
        kind = MORE if number + 1 < len(parts) else LAST
        socket.send_fds(channel, [kind + part], [] if number else [connection.fileno()])


class Arrivals:
    """Connections that the other process gives to this one."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._connection: socket.socket | None = None
        self._data = b""

    def next(self) -> tuple[socket.socket, bytes] | None:
        """(a connection, its bytes) once all of it is there. Raises EOFError: the other process has ended."""
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
