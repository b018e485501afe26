"""How batches reach a model's process: it receives their packets, and reads inputs that are in clients' shared memory.

| packet                     | meaning                                                                                     |
|----------------------------|---------------------------------------------------------------------------------------------|
| SHARED, {"number", "name"} | a region of shared memory; its file comes with the packet                                   |
| FORGET, number             | close this region's file                                                                    |
| READS, table               | bytes to read for the next batch: rows of five numbers, which `packed` writes               |
| arena's number, JSON       | a batch (worker.py)                                                                         |

A model with two arenas receives and reads its next batch in a thread, while it computes. A batch that may not begin any more is
not read.
"""

import json
import logging
import os
import resource
import socket
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

from tilewright.host.arena import Arena
from tilewright.host.regions import Part, Read, Region, read_large

__all__ = ["FORGET", "MAX_PACKET", "READS", "SHARED", "Intake", "ToRead", "packed"]

MAX_PACKET = 1 << 17
"""Most bytes of a message."""
MAX_TABLE = 32 << 10
"""Most bytes of a table; a longer one is divided."""
SHARED, FORGET, READS = b"S", b"F", b"R"
FIELDS = 5
"""(request, region, byte of its file, bytes, byte of the arena) of a read."""

ToRead = tuple[int, Part, int]
"""(request, what to read, the byte of the arena where it goes)."""
Arrived = tuple[int, bytes, dict[int, str]]
"""(arena of a batch, its JSON, requests that could not be read -> why)."""

logger = logging.getLogger(__name__)


def packed(reads: Sequence[ToRead]) -> Iterator[bytes]:
    """Tables of reads, each at most `MAX_TABLE` bytes long."""
    numbers = array("q")
    for request, part, at in reads:
        numbers.extend((request, part.region.number, part.at, len(part), at))
    table = numbers.tobytes()
    most = MAX_TABLE - MAX_TABLE % (FIELDS * numbers.itemsize)
    yield from (table[begin : begin + most] for begin in range(0, len(table), most))


class Intake:
    """The batches of a process, in their order, each with its inputs read; it ends when the server closes the channel.

    Args:
        channel: to the server.
        arenas: memory of batches.
        capacity: byte of an arena where the time stands until which its batch may begin.
    """

    def __init__(self, channel: socket.socket, arenas: Sequence[Arena], capacity: int):
        self._channel, self._arenas, self._capacity = channel, arenas, capacity
        self._regions = dict[int, Region]()
        _allow_files()

    def __iter__(self) -> Iterator[Arrived]:
        if len(self._arenas) < 2:
            yield from self._arriving()
            return
        arrived = SimpleQueue[Arrived | None]()
        threading.Thread(target=self._receive, args=(arrived,), name="tilewright-intake", daemon=True).start()
        yield from iter(arrived.get, None)

    def _receive(self, arrived: "SimpleQueue[Arrived | None]") -> None:
        try:
            for batch in self._arriving():
                arrived.put(batch)
        finally:
            arrived.put(None)

    def _arriving(self) -> Iterator[Arrived]:
        buffer = bytearray(MAX_PACKET)  # read into: as `recv` it would be mapped and unmapped for each packet
        view, reads = memoryview(buffer), array("q")
        while True:
            count, ancillary, _, _ = self._channel.recvmsg_into([buffer], socket.CMSG_SPACE(array("i", [0]).itemsize))
            if not count:
                return
            kind, rest = bytes(view[:1]), view[1:count]
            if kind == READS:
                reads.frombytes(rest)
            elif kind == SHARED:
                self._share(json.loads(bytes(rest)), ancillary)
            elif kind == FORGET:
                self._regions.pop(int(bytes(rest)), None)
            else:
                number, packet = kind[0], bytes(rest)
                yield number, packet, self._read(self._arenas[number], reads) if reads else {}
                reads = array("q")

    def _share(self, said: dict[str, object], ancillary: list[tuple[int, int, bytes]]) -> None:
        """Keep a region's file. It is missing if this process has too many open files."""
        number, name = said["number"], said["name"]
        assert isinstance(number, int)
        fds = array("i", ancillary[0][2]) if ancillary else array("i")
        if fds:
            self._regions[number] = Region(str(name), "", 0, 0, fds[0])

    def _read(self, arena: Arena, table: "array[int]") -> dict[int, str]:
        """Read a batch's inputs; return request -> why it could not be read."""
        if not arena.may_begin(self._capacity, time.monotonic()):
            return {}
        view, reads, unread = arena.view, list[Read](), dict[int, str]()
        for i in range(0, len(table), FIELDS):
            request, number, begin, size, at = table[i : i + FIELDS]
            region, into = self._regions.get(number), view[at : at + size]
            if region is None:
                into[:] = bytes(size)
                unread[request] = "its shared memory region cannot be read: the model's process has too many open files"
            else:
                reads.append(Read(request, Part(region, begin, size), into))
        return read_large(reads) | unread


def _allow_files() -> None:
    """Let this process open as many files as it may: each region is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            logger.warning("at most %d files can be open in the process %d: %s", soft, os.getpid(), error)
