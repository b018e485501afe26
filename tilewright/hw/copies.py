"""Copies from locked memory of the host to a card: by the card itself (DMA), in a stream of their own.

The processor only starts copies, and never reads the bytes. To start one takes a few microseconds whatever its size, and the
card pauses between copies that are started one by one. So several are started by one call, `cuMemcpyBatchAsync`, where the
driver has it (CUDA 13.0 and later).
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tilewright.hw.driver import Driver

__all__ = ["HostCopies"]

_IN_ORDER_OF_STREAM = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the memory of the host is read when the stream is there, like that of a single copy."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order, and (kind, number) of the two places, which count for managed memory only."""

    _fields_ = (("order", ctypes.c_int), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class HostCopies:
    """Copies from locked host memory to one CUDA device.

    Memory of the host is given by addresses, because it need not belong to a tensor. All methods can be called from any thread.
    The driver's functions are called rather than torch's, whose next kernel would report an error of theirs.

    Raises:
        RuntimeError: from every method, if the driver returns an error; the message has the driver's text.
        OSError: there is no driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._driver, number = Driver(device), ctypes.c_int()
        self.device = self._driver.device
        self._context = ctypes.c_void_p()
        self._driver("cuDeviceGet", ctypes.byref(number), ctypes.c_int(self.device.index))
        self._driver("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        # Of torch's streams with priority: it hands out the others again and again, so that a graph may be captured in one.
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        library, place, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p, ctypes.c_size_t
        self._copy = library.cuMemcpyHtoDAsync_v2
        self._copy.argtypes = (ctypes.c_uint64, place, size, place)
        self._copy_several = getattr(library, "cuMemcpyBatchAsync_v2", None)
        """None: an older driver."""
        if self._copy_several is not None:
            self._copy_several.argtypes = (place, place, place, size, place, place, size, place)
        self._attributes, self._first = _Attributes(_IN_ORDER_OF_STREAM), size(0)
        self._current = library.cuCtxGetCurrent

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Have torch's context of the device in the calling thread: a new thread has none, and torch would not give it one."""
        current = ctypes.c_void_p()
        if not self._current(ctypes.byref(current)) and current.value == self._context.value:
            yield
            return
        with torch.cuda.device(self.device):
            self._driver("cuCtxSetCurrent", self._context)
            yield

    def lock(self, address: int, nbytes: int) -> None:
        """Lock mapped pages, so that the card can read them. They must be unlocked before they are unmapped."""
        with self._here():
            self._driver("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(0))

    def unlock(self, address: int) -> None:
        """Unlock pages from which no copy is under way."""
        with self._here():
            self._driver("cuMemHostUnregister", ctypes.c_void_p(address))

    def room(self, nbytes: int) -> Tensor:
        """[nbytes] uint8 on the device, not initialised. Waits until the current stream no longer uses this memory."""
        room = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()  # the copies' stream does not wait for what used it before
        return room

    def begin(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Begin copies.

        Args:
            copies: (address on the device, address in locked memory of the host, bytes) of each. Nothing else may use the
                memory on the device until an event that is made later.

        If a copy cannot begin, those that have begun are complete when the error is raised.
        """
        with self._here():
            code = self._begin(copies)
            if code:
                self._stream.synchronize()
                nbytes = sum(size for _, _, size in copies)
                raise RuntimeError(f"a copy of {nbytes} bytes to {self.device} cannot begin: the driver's error {code}")

    def event(self) -> torch.cuda.Event:
        """The end of all copies that have begun."""
        event = torch.cuda.Event()
        with self._here():
            event.record(self._stream)
        return event

    def _begin(self, copies: Sequence[tuple[int, int, int]]) -> int:
        """Begin copies; return the driver's error, 0 if there is none."""
        stream, count = self._stream.cuda_stream, len(copies)
        if count > 1 and self._copy_several is not None:
            to, source, nbytes = [(ctypes.c_uint64 * count)(*column) for column in zip(*copies, strict=True)]
            attributes, first = ctypes.byref(self._attributes), ctypes.byref(self._first)
            return self._copy_several(to, source, nbytes, count, attributes, first, 1, stream)
        return next((code for one in copies if (code := self._copy(*one, stream))), 0)

    def follow(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait for an event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def wait(self, event: torch.cuda.Event | None = None) -> None:
        """Wait for an event, or until the current stream has done all its work."""
        (torch.cuda.current_stream(self.device) if event is None else event).synchronize()
