"""Events about a replica's prefix cache for the router: which pages were added and which were removed.

Events go through a socket that the replica inherits. A message is its length (4 bytes, little-endian), a kind, and a body:

    s   from the router, once, before the replica starts: the replica's configuration, as JSON
    l   the stage of the replica's loading, in words; any number of times, before hello
    h   hello, once, when the model is loaded: what is served, and the page size, as JSON
    +   pages that were added to the cache: the first `DIGEST_BYTES` of each digest, concatenated
    -   pages that were removed from the cache
    0   the cache is empty

The engine's thread only appends to a queue. Another thread sends the collected events every `GATHER_S`. When the socket closes,
the router has ended, and the replica ends too.
"""

import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from tilewright.server.router import DIGEST_BYTES

__all__ = ["Frames", "Publisher", "send_spec", "split", "take_spec"]

GATHER_S = 0.02
MAX_FRAME_BYTES = 64 << 20
BATCH = 1 << 16
"""Most events that are sent at once."""


class Publisher:
    """Sends the events of a page pool. The object itself is the pool's listener. Call `hello` first."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._events: deque[tuple[bytes, bool]] = deque()
        for name, work in (("send", self._send), ("listen", self._listen)):
            threading.Thread(target=work, name=f"tilewright-digests-{name}", daemon=True).start()

    def __call__(self, digest: bytes, known: bool) -> None:
        """Record that a page was added to the cache (`known`) or removed; b"" means all pages."""
        self._events.append((digest[:DIGEST_BYTES], known))

    def stage(self, words: str) -> None:
        """Say how far loading is. Several lines, such as the memory plan, are left out."""
        if "\n" not in words:
            self._control.sendall(_frame(b"l", words.encode()))

    def hello(self, values: dict[str, Any]) -> None:
        """Send the description of what is served."""
        self._control.sendall(_frame(b"h", json.dumps(values).encode()))

    def _send(self) -> None:
        while True:
            time.sleep(GATHER_S)
            try:
                self.flush()
            except OSError:
                return  # the other thread notices it too, and ends the process

    def flush(self) -> None:
        """Send the collected events. Raises OSError if the router has gone."""
        taken = [self._events.popleft() for _ in range(min(len(self._events), BATCH))]
        for message in _messages(taken):
            self._control.sendall(message)

    def _listen(self) -> None:
        try:
            while self._control.recv(64):
                pass
        except OSError:
            pass
        os.kill(os.getpid(), signal.SIGTERM)


def _messages(events: list[tuple[bytes, bool]]) -> Iterator[bytes]:
    """Encode events in order. Neighbouring events of the same kind share a message."""
    for kind, run in groupby(events, key=lambda event: b"0" if not event[0] else b"+" if event[1] else b"-"):
        yield _frame(kind, b"".join(digest for digest, _ in run))


def _frame(kind: bytes, body: bytes) -> bytes:
    return (len(body) + 1).to_bytes(4, "little") + kind + body


class Frames:
    """Reassembles messages from the bytes of a socket."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (kind, body) of each complete message. Raises ValueError for an invalid length."""
        self._rest += data
        while len(self._rest) >= 4:
            size = int.from_bytes(self._rest[:4], "little")
            if not 1 <= size <= MAX_FRAME_BYTES:
                raise ValueError(f"a message from a replica gives its length as {size} bytes, wanted 1 to {MAX_FRAME_BYTES}")
            if len(self._rest) < 4 + size:
                return
            message = bytes(self._rest[4 : 4 + size])
            del self._rest[: 4 + size]
            yield message[:1], message[1:]


def send_spec(control: socket.socket, spec: dict[str, Any]) -> None:
    """Send a starting replica its configuration. It is not on the command line, because every user can read that."""
    control.sendall(_frame(b"s", json.dumps(spec).encode()))


def take_spec(control: socket.socket) -> dict[str, Any]:
    """Receive the configuration, in the replica. Raises ValueError if the router has gone."""
    frames = Frames()
    while data := control.recv(1 << 16):
        for _, body in frames.feed(data):
            return json.loads(body)
    raise ValueError("the router ended before it sent the configuration")


def split(body: bytes) -> list[bytes]:
    """The digests in a message."""
    return [body[at : at + DIGEST_BYTES] for at in range(0, len(body), DIGEST_BYTES)]
