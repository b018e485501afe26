"""Tensors in memory that a client shares with the server: the system shared memory extension of the protocol.

A client names a POSIX shared memory object, which is a file below /dev/shm, and the part of it that is a region. No processor
ever touches a mapping of that memory, because truncating a file kills the processes that do, by SIGBUS. The server keeps the
file open and uses `preadv` and `pwritev`, for which a file that has become too short is an ordinary error of the request that
names it. A tensor in a region is a `Part`. The model's process gets the open file and reads the bytes directly into its batch,
or has a GPU copy them (direct.py), so the server's process rarely copies them.

An object must be a regular file, not a link, and owned by the server's user. A file is closed when its region is unregistered
and the last request that names it has ended.
"""

import itertools
import os
import re
import stat
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tilewright.host.errors import NotFound, Refused

__all__ = [
    "INLINE_BYTES",
    "MISSING",
    "Part",
    "Place",
    "Read",
    "Region",
    "Regions",
    "read_all",
    "read_large",
    "shared_out",
    "write_each",
]

FOLDER = Path("/dev/shm")
KEY = re.compile(r"/?(?!\.{1,2}\Z|sem\.)[A-Za-z0-9_.-]{1,128}")
"""The name of an object. Names of semaphores begin with "sem."."""
MAX_NAME_CHARS = 256
MAX_REGIONS = 1024
MAX_KEPT = 1024
"""Requests whose parts are kept."""
MAX_BYTES = 64 << 30
"""Most bytes of all regions together."""
JOB_BYTES = 1 << 20
"""Least bytes that one thread reads at a time, if there are as many."""
MAX_READERS = 16
"""Most threads that read at once; more would only wait for the same memory."""
MISSING = "shared memory is off: send the tensor's data, or start the server with --shared-memory"


INLINE_BYTES = 1 << 20
"""Most bytes that are read by one thread, or written on the event loop; more are read by several threads, written by one."""
_NUMBERS = itertools.count()


class Place(NamedTuple):
    """The place of a tensor in shared memory, as named by a request."""

    region: str
    offset: int
    size: int


class Region:
    """An open file, and the part of it that may be used. `number` is its own in the server's process."""

    def __init__(self, name: str, key: str, offset: int, size: int, fd: int, number: int | None = None):
        self.name, self.key, self.offset, self.size, self.fd = name, key, offset, size, fd
        self.number = next(_NUMBERS) if number is None else number
        self.close = weakref.finalize(self, os.close, fd)  # when the last part of the region is gone

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.size}


class Part:
    """Some bytes of a region, from byte `at` of its file on. `len` is their number."""

    __slots__ = ("at", "region", "size")

    def __init__(self, region: Region, at: int, size: int):
        self.region, self.at, self.size = region, at, size

    def __len__(self) -> int:
        return self.size

    def cut(self, begin: int, end: int) -> "Part":
        """The bytes from `begin` to `end`."""
        return Part(self.region, self.at + begin, min(end, self.size) - begin)

    def read_into(self, view: memoryview) -> None:
        """Read all bytes into `view`. Raises Refused if the file has become too short or cannot be read."""
        done = 0
        while done < self.size:
            try:
                count = os.preadv(self.region.fd, [view[done : self.size]], self.at + done)
            except OSError as error:
                raise Refused(f"the shared memory region {self.region.name!r} cannot be read: {error.strerror}") from None
            if not count:
                raise self._short()
            done += count

    def write(self, data: bytes | memoryview) -> None:
        """Write to the beginning of this part. Raises Refused if there is no room or the file has become too short."""
        if len(data) > self.size:
            raise Refused(f"it has {len(data)} bytes, but its place in region {self.region.name!r} has {self.size}")
        fd, at = self.region.fd, self.at
        try:
            # The file's size: `fstat` would take several times as long. Nobody uses the position that this moves.
            if os.lseek(fd, 0, os.SEEK_END) < at + len(data):
                raise self._short()
            while data:
                count = os.pwrite(fd, data, at)
                data, at = memoryview(data)[count:] if count < len(data) else b"", at + count
        except OSError as error:
            raise Refused(f"the shared memory region {self.region.name!r} cannot be written: {error.strerror}") from None

    def _short(self) -> Refused:
        return Refused(
            f"the shared memory region {self.region.name!r} is shorter than it was when it was registered: "
            "its file ends before the tensor does"
        )


class Regions:
    """The regions that clients have registered with one server."""

    def __init__(self, folder: Path = FOLDER):
        self._folder = folder
        self._regions = dict[str, Region]()
        self.kept = dict[bytes, Any]()
        """What was made of parts for a request's bytes, as long as no region comes or goes."""
        self.watchers = set[Callable[[], object]]()
        """Called when a region comes or goes: whatever holds parts between requests forgets them."""

    def keep(self, key: bytes, value: Any) -> None:
        """Keep something that holds parts."""
        if len(self.kept) >= MAX_KEPT:
            self.kept.clear()
        self.kept[key] = value

    def register(self, name: str, key: Any, offset: Any, byte_size: Any) -> None:
        """Open an object's file.

        Raises:
            Refused: the name is invalid or in use; the object does not exist, belongs to another user or is too short; or
                there are too many regions.
        """
        if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise Refused(f"the region's name is {name[:80]!r}, wanted 1 to {MAX_NAME_CHARS} printable characters")
        if name in self._regions:
            raise Refused(f"a shared memory region {name!r} is registered already; unregister it first")
        if not isinstance(key, str) or not KEY.fullmatch(key):
            raise Refused(f"key is {str(key)[:140]!r}, wanted a shared memory object's name: letters, digits, '_', '.', '-'")
        if type(offset) is not int or type(byte_size) is not int or offset < 0 or byte_size < 1:
            got = f"offset is {str(offset)[:30]} and byte_size {str(byte_size)[:30]}"
            raise Refused(f"{got}, wanted whole numbers, from 0 and from 1 on")
        if len(self._regions) >= MAX_REGIONS:
            raise Refused(f"{MAX_REGIONS} shared memory regions are registered, the most that this server takes")
        if sum(one.size for one in self._regions.values()) + byte_size > MAX_BYTES:
            raise Refused(f"the shared memory regions would have more than {MAX_BYTES} bytes, the most that this server takes")
        self._changed()
        self._regions[name] = Region(name, key, offset, byte_size, self._opened(key, offset + byte_size))

    def _changed(self) -> None:
        self.kept.clear()
        for forget in self.watchers:
            forget()

    def _opened(self, key: str, end: int) -> int:
        """Open the file of an object, which must have at least `end` bytes."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        try:
            fd = os.open(self._folder / key.removeprefix("/"), flags)
        except OSError as error:
            raise Refused(f"the shared memory object {key!r} cannot be opened: {error.strerror}") from None
        about = os.fstat(fd)
        why = None
        if not stat.S_ISREG(about.st_mode):
            why = "is not a regular file"
        elif about.st_uid != os.geteuid():
            why = "belongs to another user than the server"
        elif about.st_size < end:
            why = f"has {about.st_size} bytes, but the region ends at {end}"
        if why is not None:
            os.close(fd)
            raise Refused(f"the shared memory object {key!r} {why}")
        return fd

    def unregister(self, name: str | None = None) -> None:
        """Forget a region, or all regions. An unknown name is no error. Requests that already name the region continue."""
        self._changed()
        if name is None:
            self._regions.clear()
        else:
            self._regions.pop(name, None)

    def status(self, name: str | None = None) -> list[dict[str, Any]]:
        """{"name", "key", "offset", "byte_size"} of a region, or of all. Raises NotFound."""
        return [one.json() for one in (self._regions.values() if name is None else [self._region(name)])]

    def _region(self, name: str) -> Region:
        found = self._regions.get(name)
        if found is None:
            raise NotFound(f"there is no shared memory region {name[:MAX_NAME_CHARS]!r}; register it first")
        return found

    def part(self, place: Place) -> Part:
        """The part that a request names. Raises NotFound, or Refused if it is outside of the region."""
        region = self._region(place.region)
        if min(place.offset, place.size) < 0 or place.offset + place.size > region.size:
            raise Refused(
                f"the shared memory region {region.name!r} has {region.size} bytes, but the request names "
                f"{str(place.size)[:30]} bytes from byte {str(place.offset)[:30]} on"
            )
        return Part(region, region.offset + place.offset, place.size)


class Read(NamedTuple):
    """A part of a request, and the destination of its bytes."""

    request: int
    part: Part
    into: memoryview


def write_each(parts: Sequence[Part], data: memoryview, size: int) -> list[int]:
    """Write `size` bytes of `data` to each part, one after another. The caller has checked that they have room.

    Returns the positions of the parts that were not written: `Part.write` tries again and says why.
    """
    failed, begin = list[int](), 0
    for position, part in enumerate(parts):
        end, fd, at = begin + size, part.region.fd, part.at
        try:
            if os.lseek(fd, 0, os.SEEK_END) < at + size or os.pwrite(fd, data[begin:end], at) < size:
                failed.append(position)
        except OSError:
            failed.append(position)
        begin = end
    return failed


def read_all(reads: Iterable[Read]) -> dict[int, str]:
    """Read parts; return request -> why one of its parts could not be read. Such a part is filled with zeros."""
    wrong = dict[int, str]()
    for request, part, into in reads:
        try:
            part.read_into(into)
        except Refused as error:
            wrong[request] = str(error)
            into[:] = bytes(len(into))
    return wrong


def read_large(reads: Sequence[Read]) -> dict[int, str]:
    """`read_all`, with several threads if there is much to read."""
    if sum([len(read.part) for read in reads]) <= INLINE_BYTES:
        return read_all(reads)
    jobs, wrong = deque(shared_out(reads)), dict[int, str]()
    for some in _readers().map(_read_jobs, [jobs] * min(len(jobs), _threads())):
        wrong |= some
    return wrong


def _read_jobs(jobs: deque[list[Read]]) -> dict[int, str]:
    """Run one thread: take the next job until there is none."""
    wrong = dict[int, str]()
    while True:
        try:
            job = jobs.popleft()
        except IndexError:
            return wrong
        wrong |= read_all(job)


@cache
def _threads() -> int:
    """The number of threads: a few more than cores, because other processes use these, too."""
    return min(MAX_READERS, len(os.sched_getaffinity(0)) + 4)


@cache
def _readers() -> ThreadPoolExecutor:
    """The threads that read."""
    return ThreadPoolExecutor(_threads(), "tilewright-read")


def shared_out(reads: Sequence[Read]) -> Iterator[list[Read]]:
    """The reads, divided into jobs for one thread each: of at least `JOB_BYTES` bytes, and less than twice that."""
    job, size = list[Read](), 0
    for read in reads:
        at, length = 0, len(read.part)
        while length - at > JOB_BYTES:
            job.append(Read(read.request, read.part.cut(at, at + JOB_BYTES), read.into[at : at + JOB_BYTES]))
            yield job
            job, size, at = [], 0, at + JOB_BYTES
        job.append(Read(read.request, read.part.cut(at, length), read.into[at:]) if at else read)
        size += length - at
        if size >= JOB_BYTES:
            yield job
            job, size = [], 0
    if job:
        yield job
