"""How batches reach a model's process: it receives their packets, and reads inputs that are in clients' shared memory.

| packet                             | meaning                                                                             |
|------------------------------------|-------------------------------------------------------------------------------------|
| SHARED, {"number", "name", ...}    | a region of shared memory, and its place in the file that comes with the packet     |
| FORGET, number                     | close this region's file                                                            |
| READS, table                       | bytes to read for the next batch: rows of five numbers, which `Reads` writes        |
| arena, bytes of table, table, JSON | a batch (worker.py), with the last or only part of its table                        |

A process with two arenas has two channels. Over the second one come regions, and batches that are sent ahead: a thread receives
and reads them while the model computes. A batch for a model that has nothing to do comes over the first one and is not passed
from thread to thread. A batch that may not begin any more is not read.

What a GPU can copy from shared memory by itself is not read here: the copies are begun (direct.py).
"""

import json
import logging
import os
import resource
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, Queue
from typing import NamedTuple

from tilewright.host.arena import Arena
from tilewright.host.direct import Direct, Fetched
from tilewright.host.regions import Part, Read, Region, read_large

__all__ = ["FORGET", "MAX_PACKET", "SHARED", "Arrived", "Intake", "Reads", "packed", "packets"]

MAX_PACKET = 1 << 17
"""Most bytes of a message."""
MAX_TABLE = 32 << 10
"""Most bytes of a table; a longer one is divided."""
SHARED, FORGET, READS = b"S", b"F", b"R"
BATCH = struct.Struct("<BI")
FIELDS = 5
"""(request, region, byte of its file, bytes, byte of the arena) of a read."""

logger = logging.getLogger(__name__)


class Reads:
    """What is to be read from clients' memory for a batch. It is kept by column, because a batch may name hundreds of parts."""

    def __init__(self) -> None:
        self.parts = list[Part]()
        self._requests, self._places = array("q"), array("q")

    def extend(self, requests: Iterable[int], parts: Sequence[Part], places: Iterable[int]) -> None:
        """Add parts, each with the number of its request and the byte of the arena where it goes."""
        self._requests.extend(requests)
        self.parts += parts
        self._places.extend(places)

    def regions(self) -> list[int]:
        """The number of each part's region."""
        return [part.region.number for part in self.parts]

    def table(self) -> bytes:
        """Rows of five numbers, one for each part."""
        numbers = array("q", bytes(FIELDS * self._requests.itemsize * len(self.parts)))
        columns = (
            self._requests,
            array("q", self.regions()),
            array("q", [part.at for part in self.parts]),
            array("q", [part.size for part in self.parts]),
            self._places,
        )
        for column, values in enumerate(columns):
            numbers[column::FIELDS] = values
        return numbers.tobytes()


class Arrived(NamedTuple):
    """A batch."""

    arena: int
    """The number of the arena that it is in."""
    words: bytes
    """Its JSON."""
    unread: dict[int, str]
    """Requests that could not be read -> why."""
    fetched: Fetched | None
    """Inputs that are on their way to the GPU; its `end` must be called before the batch is answered."""
    read: int
    """Bytes of shared memory that were read."""


def packed(reads: Reads) -> Iterator[bytes]:
    """Tables of reads, each at most `MAX_TABLE` bytes long."""
    table = reads.table()
    most = MAX_TABLE - MAX_TABLE % (FIELDS * array("q").itemsize)
    yield from (table[begin : begin + most] for begin in range(0, len(table), most))


def packets(arena: int, words: bytes, reads: Reads) -> list[bytes]:
    """The packets of a batch: its JSON, and what is to be read for it."""
    *tables, last = list(packed(reads)) if reads.parts else [b""]
    return [*(READS + table for table in tables), BATCH.pack(arena, len(last)) + last + words]


class Intake:
    """The batches of a process, in the order in which the server sent them, each with its inputs read.

    Args:
        channel: to the server.
        ahead: the second channel of a process with two arenas.
        arenas: memory of batches.
        capacity: byte of an arena where the time stands until which its batch may begin.
        direct: what a GPU copies from shared memory by itself.
    """

    def __init__(
        self,
        channel: socket.socket,
        ahead: socket.socket | None,
        arenas: Sequence[Arena],
        capacity: int,
        direct: Direct | None = None,
    ):
        self._direct = direct
        self._channel, self._ahead, self._arenas, self._capacity = channel, ahead, arenas, capacity
        self._regions = dict[int, Region | None]()
        """By number; None: there was no room for another open file."""
        self._shared = threading.Condition()
        """Notified when a region is there."""
        self._batches = self._arriving(channel)
        self._arrived = Queue[Arrived | None]()
        """What came over the second channel; None: it is closed. (A `SimpleQueue` waits for ever after some short timeouts.)"""
        self._wake, self._poll = os.eventfd(0, os.EFD_SEMAPHORE), select.poll()
        """Counts what is in the queue; waits for it and for the first channel."""
        self._over = False
        _allow_files()
        if ahead is not None:
            for source in (channel.fileno(), self._wake):
                self._poll.register(source, select.POLLIN)
            threading.Thread(target=self._receive, args=(ahead,), name="tilewright-intake", daemon=True).start()

    def next(self, *, within_s: float | None = None) -> Arrived | None:
        """The next batch. None: the server has closed a channel, or none has been read within so many seconds.

        `within_s` is for the time in which a batch is computed. What comes then is sent ahead.
        """
        if self._over:
            return None
        if within_s is not None:
            return self._sent_ahead(within_s)
        if self._ahead is None:
            return next(self._batches, None)
        ready = [source for source, _ in self._poll.poll()]
        if self._channel.fileno() in ready:  # older than what was sent ahead, because it is not sent behind a batch
            batch = next(self._batches, None)
        else:
            os.eventfd_read(self._wake)
            batch = self._arrived.get()
        self._over = batch is None
        return batch

    def _sent_ahead(self, within_s: float) -> Arrived | None:
        """The next batch that comes over the second channel within so many seconds, or None."""
        try:
            batch = self._arrived.get(timeout=within_s)
        except Empty:
            return None
        os.eventfd_read(self._wake)
        self._over = batch is None
        return batch

    def _receive(self, ahead: socket.socket) -> None:
        """Receive batches over the second channel."""
        try:
            for batch in self._arriving(ahead):
                self._arrived.put(batch)
                os.eventfd_write(self._wake, 1)
        finally:
            self._arrived.put(None)
            os.eventfd_write(self._wake, 1)

    def _arriving(self, channel: socket.socket) -> Iterator[Arrived]:
        buffer = bytearray(MAX_PACKET)  # read into: as `recv` it would be mapped and unmapped for each packet
        view, reads, room = memoryview(buffer), array("q"), socket.CMSG_SPACE(array("i", [0]).itemsize)
        while True:
            count, ancillary, _, _ = channel.recvmsg_into([buffer], room)
            if not count:
                return
            kind = bytes(view[:1])
            if kind == READS:
                reads.frombytes(view[1:count])
            elif kind == SHARED:
                self._share(json.loads(bytes(view[1:count])), ancillary)
            elif kind == FORGET:
                self._forget(int(bytes(view[1:count])))
            else:
                number, size = BATCH.unpack_from(buffer)
                begin = BATCH.size + size
                reads.frombytes(view[BATCH.size : begin])
                unread, fetched, size = self._read(number, reads) if reads else ({}, None, 0)
                yield Arrived(number, bytes(view[begin:count]), unread, fetched, size)
                fetched = None  # otherwise the device's copy of the batch would be kept until the next one
                reads = array("q")

    def _share(self, said: dict[str, object], ancillary: list[tuple[int, int, bytes]]) -> None:
        """Keep a region's file. It is missing if this process has too many open files."""
        number, name, offset, size = said["number"], said["name"], said["offset"], said["size"]
        assert isinstance(number, int)
        assert isinstance(offset, int)
        assert isinstance(size, int)
        fds = array("i", ancillary[0][2]) if ancillary else array("i")
        region = Region(str(name), "", offset, size, fds[0], number) if fds else None
        if region is not None and self._direct is not None:
            self._direct.add(region)
        with self._shared:
            self._regions[number] = region
            self._shared.notify_all()

    def _forget(self, number: int) -> None:
        """Close a region's file, and unlock its pages."""
        self._regions.pop(number, None)
        if self._direct is not None:
            self._direct.forget(number)

    def _region(self, number: int) -> Region | None:
        """A region, whose file may still be on its way over the other channel."""
        if number not in self._regions:
            with self._shared:
                self._shared.wait_for(lambda: number in self._regions)
        return self._regions[number]

    def _read(self, arena: int, table: "array[int]") -> tuple[dict[int, str], Fetched | None, int]:
        """Read a batch's inputs.

        Returns:
            (request -> why it could not be read, what the GPU copies, bytes that were read).
        """
        if not self._arenas[arena].may_begin(self._capacity, time.monotonic()):
            return {}, None, 0
        fields = iter(table)
        rows = list(zip(*[fields] * FIELDS, strict=True))
        left, fetched = rows, None
        if self._direct is not None:
            gathering = self._direct.gather(arena)
            left = [row for row in rows if not gathering.take(*row[1:])]
            fetched = gathering.end()
            if fetched is None:
                left = rows
        view, reads, unread = self._arenas[arena].view, list[Read](), dict[int, str]()
        for request, number, begin, size, at in left:
            region, into = self._region(number), view[at : at + size]
            if region is None:
                into[:] = bytes(size)
                unread[request] = "its shared memory region cannot be read: the model's process has too many open files"
            else:
                reads.append(Read(request, Part(region, begin, size), into))
        return read_large(reads) | unread, fetched, sum([len(read.part) for read in reads])


def _allow_files() -> None:
    """Let this process open as many files as it may: each region is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            logger.warning("at most %d files can be open in the process %d: %s", soft, os.getpid(), error)
