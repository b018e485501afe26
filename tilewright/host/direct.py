"""Tensors that a GPU copies from clients' shared memory by itself, so that no processor reads their bytes.

The model's process maps a region, and the driver locks its pages. From then on a batch's tensors go from the region to their
places on the device by DMA. Where the memory of a batch (arena.py) has a tensor at some byte, the device's copy of that memory
has it at the same byte. What cannot be copied like this is read into the memory of the batch, and copied from there, as it is
without a GPU: see `MIN_BYTES`, and the reasons in `Direct._lock`. A thread of its own locks and unlocks, because that takes
long; until a region is locked, its tensors are read.

The processor never touches the mapping, because a file that its client has made shorter would then end this process (SIGBUS).
Locked pages stay as they are, also when the file no longer has them. So before each copy two things are checked. If the file
has become too short, the tensor is read, which fails with the usual message. If the file got other pages in place of the locked
ones, because it was made shorter and longer again, the process has no page there any more (`/proc/self/pagemap`, documented in
Linux's admin-guide/mm/pagemap.rst). The tensor is then read, and the region is locked again. A look at pages takes longer than
everything else, so they are looked at again only if the status of the file has changed since (`st_ctime`). Whatever takes pages
from a file changes this time; to write through a mapping does not.
"""

import ctypes
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.host.regions import Region

if TYPE_CHECKING:  # the server and its fronts import this too, and torch is most of a process's start
    from torch import Tensor

__all__ = ["MIN_BYTES", "Copies", "Direct", "Fetched", "Gathering", "Mapped"]

MIN_BYTES = 64 << 10
"""Least bytes of a tensor that the GPU copies by itself. Each such copy takes some microseconds to check and to begin. Smaller
tensors are read into the batch's memory in about that time, and go to the device together. Besides, the driver may read a small
copy's bytes with the processor, which must not touch the mapping."""
MAX_LOCKED_BYTES = 16 << 30
"""Most bytes that one process locks, together. They count in the machine's memory once, whatever the number of processes."""
MEMORY_SHARE = 4
"""It also locks at most this part (1/N) of the machine's memory, because locked pages cannot be moved or swapped out."""
TOGETHER, TOGETHER_BYTES = 16, 4 << 20
"""Copies are begun together for so many tensors, or for so many bytes."""
SETTLED_NS = 10**8
"""Age from which on the time of a file's last change tells it from later ones: the clock of files ticks every 10 ms."""
MAX_CHECKED = 1 << 8
"""Number of places of a region that are known to have their pages."""
MAX_LOCKS = 3
"""How often a region is locked whose file gets other pages again and again."""

_HIGHEST_BIT = bytes(range(0x80, 0x100))

logger = logging.getLogger(__name__)


class Copies(Protocol):
    """What the device does: `hw.copies.HostCopies`, where the methods are explained, or another object in tests."""

    def lock(self, address: int, nbytes: int) -> None: ...
    def unlock(self, address: int) -> None: ...
    def room(self, nbytes: int) -> "Tensor": ...
    def begin(self, copies: Sequence[tuple[int, int, int]]) -> None: ...
    def event(self) -> Any: ...
    def follow(self, event: Any) -> None: ...
    def wait(self, event: Any = None) -> None: ...


class Mapped:
    """The bytes of a region's file from `begin` to `end`, mapped at `address` and locked, as long as this object is in use."""

    __slots__ = ("__weakref__", "address", "begin", "checked", "end", "region")

    def __init__(self, region: Region, address: int, begin: int, end: int):
        self.region, self.address, self.begin, self.end = region, address, begin, end
        self.checked = dict[tuple[int, int], int]()
        """(first byte, bytes) -> the time of the file's last change, after which all pages of these bytes were there."""


class Fetched:
    """The inputs of a batch of which some bytes are on their way to the device.

    Args:
        memory: [nbytes] uint8: the device's copy of the batch's memory.
        spans: (first byte, byte behind the last) of what was copied, in ascending order.
        held: where it was copied from.
        copies, event: the device, and the end of the copies.
    """

    def __init__(self, memory: "Tensor", spans: list[tuple[int, int]], held: set[Mapped], copies: Copies, event: Any):
        self.memory, self.spans, self._held, self._copies = memory, spans, held, copies
        self._event: Any | None = event
        self.nbytes = sum(end - begin for begin, end in spans)

    def begin(self, arena: "Tensor", inputs: Sequence[tuple[int, int]]) -> None:
        """Let the model's stream wait for the copies, and copy what was read by the processor.

        Args:
            arena: [nbytes] uint8: the memory of the batch, on the host.
            inputs: (first byte, byte behind the last) of each input in it.
        """
        self._follow()
        for begin, end in _between(inputs, self.spans):
            self.memory[begin:end].copy_(arena[begin:end], non_blocking=True)

    def end(self, mark: Any = None) -> None:
        """Wait until neither a region, nor the memory of the batch or its copy is read any more. Raises RuntimeError.

        `mark`: an event behind all that reads them. Otherwise this also waits for what has begun since.
        """
        try:
            self._follow()  # the batch may not have begun
            self._copies.wait(mark)
        finally:
            self._held.clear()

    def _follow(self) -> None:
        if self._event is not None:
            self._copies.follow(self._event)
            self._event = None


def _between(inputs: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of the inputs that no span has; both are in ascending order."""
    found = list[tuple[int, int]]()
    for begin, end in inputs:
        for first, last in spans:
            if first >= end:
                break
            if last > begin:
                if first > begin:
                    found.append((begin, first))
                begin = last
        if begin < end:
            found.append((begin, end))
    return found


class _Memory:
    """Mapping without Python's `mmap`, which would keep a second open file for each region."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def map(self, fd: int, begin: int, nbytes: int) -> int:
        """The address of a file's bytes from `begin` on. Raises OSError."""
        address = self._libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, begin)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map`."""
        self._libc.munmap(address, nbytes)

    def present(self, address: int, nbytes: int) -> bool:
        """Whether the process has all pages of these bytes. Locked pages that a file no longer has are gone from here."""
        first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
        count = 8 * (last - first + 1)
        entries = os.pread(self._pages, count, 8 * first)  # 64 bits for each page; the highest one says that it is there
        return len(entries) == count and not entries[7::8].translate(None, _HIGHEST_BIT)


class Direct:
    """The locked regions of a process, and the device's copies of the memory of its batches.

    Args:
        copies: the device.
        arenas: number of batches that the process has memory for.
        nbytes: most bytes of a batch's inputs.
        most_bytes: most bytes to lock.

    Raises:
        OSError: the pages of a process cannot be checked on this system.
    """

    def __init__(self, copies: Copies, arenas: int, nbytes: int, most_bytes: int | None = None):
        self._copies, self._arenas, self._nbytes = copies, arenas, nbytes
        self._memory = _Memory()
        installed = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        self._most_bytes = min(MAX_LOCKED_BYTES, installed // MEMORY_SHARE) if most_bytes is None else most_bytes
        self._rooms = list["Tensor"]()
        self._locks = dict[int, int]()
        """Number of a region -> how often it was locked."""
        self._mapped = dict[int, Mapped]()
        self._guard = threading.Lock()
        self._jobs = SimpleQueue[Callable[[], object]]()
        self._on = True
        self.locked_bytes = 0
        threading.Thread(target=self._work, name="tilewright-lock", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def settle(self) -> None:
        """Wait until what was added and forgotten so far is locked and unlocked."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    # ---- regions

    def add(self, region: Region) -> None:
        """Lock a region soon."""
        with self._guard:
            self._locks[region.number] = 0
        self._jobs.put(partial(self._lock, region))

    def forget(self, number: int) -> None:
        """Unlock a region as soon as no batch needs it any more."""
        with self._guard:
            self._locks.pop(number, None)
            self._mapped.pop(number, None)

    def _lock(self, region: Region) -> None:
        begin = region.offset - region.offset % mmap.PAGESIZE
        end = region.offset + region.size
        nbytes = end - begin
        if not self._on or region.number not in self._locks:
            return
        try:
            if self.locked_bytes + nbytes > self._most_bytes:
                raise OSError(f"it has {nbytes} bytes, {self.locked_bytes} are locked, and {self._most_bytes} may be")
            if not self._rooms:
                self._rooms = [self._copies.room(self._nbytes) for _ in range(self._arenas)]
            mapped = self._locked(region, begin, end)
        except (OSError, RuntimeError) as error:
            why = str(error)  # the error itself would keep the mapping for as long as somebody keeps the log's record
            logger.warning(
                "the shared memory region %r is not page-locked, so the processor copies its tensors: %s", region.name, why
            )
            return
        with self._guard:
            if region.number in self._locks:
                self._locks[region.number] += 1
                self._mapped[region.number] = mapped

    def _locked(self, region: Region, begin: int, end: int) -> Mapped:
        """Map and lock bytes of a region's file. Raises OSError or RuntimeError."""
        nbytes = end - begin
        if os.fstat(region.fd).st_size < end:
            raise OSError("its file has become too short")
        address = self._memory.map(region.fd, begin, nbytes)
        try:
            self._copies.lock(address, nbytes)
        except (OSError, RuntimeError):
            self._memory.unmap(address, nbytes)
            raise
        self.locked_bytes += nbytes
        mapped = Mapped(region, address, begin, end)
        # Its last user is any thread; unlocking takes long, and is not done while another thread waits.
        weakref.finalize(mapped, self._jobs.put, partial(self._unlock, address, nbytes)).atexit = False
        if not self._memory.present(address + nbytes - 1, 1):
            raise OSError("this system does not say which pages a process has")
        return mapped

    def _unlock(self, address: int, nbytes: int) -> None:
        try:
            self._copies.unlock(address)
        except RuntimeError as error:  # the pages may still be locked, so their addresses must not be used again
            logger.warning("%d bytes of shared memory stay locked: %s", nbytes, error)
            return
        self._memory.unmap(address, nbytes)
        self.locked_bytes -= nbytes

    # ---- batches

    def source(self, number: int, begin: int, size: int) -> Mapped | None:
        """Where to copy bytes of a region's file from; None: they have to be read.

        Args:
            number: of the region.
            begin, size: the first byte in its file, and how many.
        """
        mapped, end = self._mapped.get(number), begin + size
        if mapped is None or size < MIN_BYTES or not self._on or begin < mapped.begin or end > mapped.end:
            return None
        status = os.fstat(mapped.region.fd)
        if end > status.st_size:
            return None
        if mapped.checked.get((begin, size)) == status.st_ctime_ns or self._present(mapped, begin, size, status.st_ctime_ns):
            return mapped
        return None

    def _present(self, mapped: Mapped, begin: int, size: int, changed_ns: int) -> bool:
        """Whether the locked pages of these bytes are those of the file, whose last change was at `changed_ns`."""
        settled = time.time_ns() - changed_ns > SETTLED_NS
        if not self._memory.present(mapped.address + begin - mapped.begin, size):
            self._again(mapped.region, mapped)
            return False
        if settled:
            if len(mapped.checked) >= MAX_CHECKED:
                mapped.checked.clear()
            mapped.checked[begin, size] = changed_ns
        return True

    def _again(self, region: Region, mapped: Mapped) -> None:
        """Lock the pages that a region's file has now."""
        with self._guard:
            if self._mapped.get(region.number) is not mapped:
                return
            del self._mapped[region.number]
            again = self._locks.get(region.number, MAX_LOCKS) < MAX_LOCKS
        if again:
            self._jobs.put(partial(self._lock, region))
        else:
            logger.warning(
                "the shared memory region %r is no longer page-locked, so the processor copies its tensors: its file got other "
                "pages %d times",
                region.name,
                MAX_LOCKS,
            )

    def gather(self, arena: int) -> "Gathering":
        """Begin to collect what is copied for a batch."""
        return Gathering(self, self._copies, self._rooms[arena] if self._rooms else None)

    def fails(self, error: Exception) -> None:
        """Have the processor read everything from now on."""
        self._on = False
        logger.warning("the GPU cannot copy from shared memory, so the processor does: %s", error)


class Gathering:
    """Tensors of one batch that are copied to the device. Copies begin while later tensors are still being checked."""

    def __init__(self, direct: Direct, copies: Copies, room: "Tensor | None"):
        self._direct, self._copies, self._room = direct, copies, room
        self._start = 0 if room is None else room.data_ptr()
        self._waiting = list[tuple[int, int, int]]()
        """Copies that have not begun. Neighbours are one copy."""
        self._last: Mapped | None = None
        """Where the last of them is copied from."""
        self._count = self._bytes = 0
        """The number of tensors in them, and their bytes."""
        self._spans, self._held = list[tuple[int, int]](), set[Mapped]()
        self._failed = False

    def take(self, number: int, begin: int, size: int, at: int) -> bool:
        """Have bytes of a region copied; return whether they will be. Call it in the order of places.

        Args:
            number, begin, size: as for `Direct.source`.
            at: the byte of the batch's memory where they belong.
        """
        mapped = None if self._room is None else self._direct.source(number, begin, size)
        if mapped is None:
            return False
        to, address = self._start + at, mapped.address + begin - mapped.begin
        last = self._waiting[-1] if mapped is self._last else None
        if last is not None and last[0] + last[2] == to and last[1] + last[2] == address:
            self._waiting[-1] = last[0], last[1], last[2] + size
        else:
            self._waiting.append((to, address, size))
        spans = self._spans
        if spans and spans[-1][1] == at:
            spans[-1] = spans[-1][0], at + size
        else:
            spans.append((at, at + size))
        self._held.add(mapped)
        self._last, self._count, self._bytes = mapped, self._count + 1, self._bytes + size
        if self._count >= TOGETHER or self._bytes >= TOGETHER_BYTES:
            self._begin()
        return True

    def _begin(self) -> None:
        copies = self._waiting
        self._waiting, self._last, self._count, self._bytes = [], None, 0, 0
        try:
            self._copies.begin(copies)
        except RuntimeError as error:
            self._failed = True
            self._direct.fails(error)

    def end(self) -> Fetched | None:
        """What was taken. None: nothing, or the device refuses a copy; then everything that was taken has to be read."""
        if self._waiting:
            self._begin()
        if self._room is None or self._failed or not self._spans:
            return None
        try:
            event = self._copies.event()
        except RuntimeError as error:
            self._direct.fails(error)
            return None
        return Fetched(self._room, self._spans, self._held, self._copies, event)
