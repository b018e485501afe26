"""What a replica tells the router of its prefix cache, as it happens: which pages can be found, and which no longer can.

Events go through a socket that the replica inherits. A message is its length (4 bytes, little-endian), a kind, and a body:

    s   what the replica is, as JSON; from the router, once, before it starts
    l   the stage of its loading, in words; any number of times, before hello
    h   hello: what is served, and how large a page is, as JSON; once, when the model is loaded
    +   pages that can be found from now on: the first `DIGEST_BYTES` of each digest, one behind the other
    -   pages that can no longer be found
    0   none can

The engine's thread only appends to a queue; another thread sends what has gathered every `GATHER_S`. The end of the socket is
the end of the router, and ends the replica.
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
"""Digests in a message at most."""


class Publisher:
    """Sends the events of a page pool. Its call is the pool's listener; `hello` begins."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._events: deque[tuple[bytes, bool]] = deque()
        for name, work in (("send", self._send), ("listen", self._listen)):
            threading.Thread(target=work, name=f"tilewright-digests-{name}", daemon=True).start()

    def __call__(self, digest: bytes, known: bool) -> None:
        """A page can be found from now on, or no longer; b"" stands for all pages."""
        self._events.append((digest[:DIGEST_BYTES], known))

    def stage(self, words: str) -> None:
        """Say how far loading is. Several lines, such as the memory plan, are left out."""
        if "\n" not in words:
            self._control.sendall(_frame(b"l", words.encode()))

    def hello(self, values: dict[str, Any]) -> None:
        """Say what is served."""
        self._control.sendall(_frame(b"h", json.dumps(values).encode()))

    def _send(self) -> None:
        while True:
            time.sleep(GATHER_S)
            try:
                self.flush()
            except OSError:
                return  # the other thread hears of it too

    def flush(self) -> None:
        """Send what has gathered. Raises OSError where nobody listens any more."""
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
    """In order, equal kinds together."""
    for kind, run in groupby(events, key=lambda event: b"0" if not event[0] else b"+" if event[1] else b"-"):
        yield _frame(kind, b"".join(digest for digest, _ in run))


def _frame(kind: bytes, body: bytes) -> bytes:
    return (len(body) + 1).to_bytes(4, "little") + kind + body


class Frames:
    """Puts messages together again from bytes as they come."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """(kind, body) of each message that is whole. Raises ValueError for what cannot be one."""
        self._rest += data
        while len(self._rest) >= 4:
            size = int.from_bytes(self._rest[:4], "little")
            if not 1 <= size <= MAX_FRAME_BYTES:
                raise ValueError(f"a message of a replica says that it has {size} bytes, wanted 1 to {MAX_FRAME_BYTES}")
            if len(self._rest) < 4 + size:
                return
            message = bytes(self._rest[4 : 4 + size])
            del self._rest[: 4 + size]
            yield message[:1], message[1:]


def send_spec(control: socket.socket, spec: dict[str, Any]) -> None:
    """Tell a replica that is about to start what it is; not by its command line, which everybody can read."""
    control.sendall(_frame(b"s", json.dumps(spec).encode()))


def take_spec(control: socket.socket) -> dict[str, Any]:
    """The same, in the replica. Raises ValueError where the other side has gone."""
    frames = Frames()
    while data := control.recv(1 << 16):
        for _, body in frames.feed(data):
            return json.loads(body)
    raise ValueError("the router has gone before it said what to serve")


def split(body: bytes) -> list[bytes]:
    """The digests in a message."""
    return [body[at : at + DIGEST_BYTES] for at in range(0, len(body), DIGEST_BYTES)]
