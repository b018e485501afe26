"""A stand-in for a GPU that copies from locked memory: it copies as late as it may, and notes what would be an error."""

import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

Copy = tuple[int, int, int]


class Copies:
    """Copies that were begun, and whether they are done."""

    def __init__(self, copies: Sequence[Copy], memory: Tensor | None):
        self.copies, self.memory, self.done = list(copies), memory, False


class StandIn:
    """`Copies`, with the memory of a "device" on the host.

    It reads through /proc/self/mem: where the system has no page, that is an error, and not the end of the process.
    """

    def __init__(self, refuses: Sequence[str] = ()) -> None:
        self.refuses = set(refuses)
        """Names of methods that raise RuntimeError."""
        self.log = list[str]()
        self.locked = dict[int, int]()
        self.copied = list[Copy]()
        self.wrong = list[str]()
        self.rooms = list[Tensor]()
        self._pending = list[Copies]()
        self._guard = threading.RLock()
        self._memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    def _does(self, what: str) -> None:
        self.log.append(what)
        if what in self.refuses:
            raise RuntimeError(f"{what} is refused")

    def lock(self, address: int, nbytes: int) -> None:
        with self._guard:
            self._does("lock")
            try:
                for page in range(address, address + nbytes, 4096):
                    os.pread(self._memory, 1, page)
            except OSError:
                raise RuntimeError("there is no such memory") from None
            self.locked[address] = nbytes

    def unlock(self, address: int) -> None:
        with self._guard:
            self._does("unlock")
            for begun in self._pending:
                for _, source, size in begun.copies:
                    if not begun.done and source < address + self.locked[address] and address < source + size:
                        self.wrong.append("memory is unlocked while it is copied")
            del self.locked[address]

    def room(self, nbytes: int) -> Tensor:
        self._does("room")
        self.rooms.append(torch.full((nbytes,), 0x55, dtype=torch.uint8))
        return self.rooms[-1]

    def begin(self, copies: Sequence[Copy]) -> None:
        with self._guard:
            self._does("begin")
            room = next(one for one in self.rooms if one.data_ptr() <= copies[0][0] < one.data_ptr() + len(one))
            spans = [(to, to + size) for begun in self._pending for to, _, size in begun.copies]
            if any(begin < to + size and to < end for begin, end in spans for to, _, size in copies):
                self.wrong.append("memory is written to which another copy is under way")
            self._pending.append(Copies(copies, room))

    def event(self) -> list[Copies]:
        if "event" in self.refuses:
            raise RuntimeError("event is refused")
        return list(self._pending)

    def follow(self, event: list[Copies]) -> None:
        for copies in event:
            self._do(copies)

    def _do(self, begun: Copies) -> None:
        with self._guard:
            if begun.done:
                return
            for to, source, size in begun.copies:
                if not any(at <= source and source + size <= at + nbytes for at, nbytes in self.locked.items()):
                    self.wrong.append("memory is copied that is not locked")
                assert begun.memory is not None
                begin = to - begun.memory.data_ptr()
                data = bytearray(os.pread(self._memory, size, source))
                begun.memory[begin : begin + size] = torch.frombuffer(data, dtype=torch.uint8)
                self.copied.append((begin, source, size))
            begun.done = True
            self._pending.remove(begun)

    def wait(self, event: object = None) -> None:
        self.log.append("wait")
        if "wait" in self.refuses:
            raise RuntimeError("CUDA error: the device is gone")
