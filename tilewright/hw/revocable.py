"""Memory that can be returned to the system and taken again at the same address, so that tensors and captured graphs stay
valid.

On a CUDA device a range of addresses is reserved once, and the driver maps physical memory into it and out of it (cuMemCreate,
cuMemMap), without torch's allocator. On a CPU it is an anonymous mapping whose pages the kernel takes back. The content is
lost: when the memory is taken again, it is zero.

Not here: memory that several processes share, and saving the content to the host.
"""

import ctypes
import mmap
import time
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tilewright.hw.driver import Driver

__all__ = ["Revocable"]

_CHUNK = 1 << 28
"""Bytes of one physical allocation: large enough for few calls, and small enough not to need a large free block."""
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Revocable:
    """`nbytes` bytes on a device, available from the beginning.

    Raises:
        RuntimeError: the driver returns an error.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device, self.nbytes, self.held = device, nbytes, False
        self._place: _Cuda | _Host = _Cuda(nbytes, device) if device.type == "cuda" else _Host(nbytes)
        self.take()
        self.memory: Tensor = self._place.tensor()
        """[nbytes] uint8. Must not be used while the memory is given back."""
        self.memory.zero_()

    def give_back(self) -> float:
        """Return the memory to the system after the device has finished all its work; returns the seconds that this took."""
        began = time.perf_counter()
        if self.held:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._place.give_back()
            self.held = False
        return time.perf_counter() - began

    def take(self) -> float:
        """Take zeroed memory at the same addresses; returns the seconds that this took. Raises RuntimeError if there is
        none."""
        began = time.perf_counter()
        if not self.held:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # frees memory that torch keeps for later
            self._place.take()
            self.held = True
            if hasattr(self, "memory"):
                self.memory.zero_()
        return time.perf_counter() - began


class _Host:
    """An anonymous mapping on the host."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))

    def tensor(self) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def take(self) -> None:
        """Nothing to do: the kernel provides a page when it is first used."""

    def give_back(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)


class _Cuda:
    """A reserved range of addresses, and the physical memory mapped into it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._call = Driver(device)
        self._device = self._call.device
        self._properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, self._device.index))
        least = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(least), ctypes.byref(self._properties), ctypes.c_int(0))
        self._asked, self._size = nbytes, -(-nbytes // least.value) * least.value
        self._start = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(self._start), ctypes.c_size_t(self._size), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self._mapped: list[tuple[int, int, ctypes.c_uint64]] = []
        """Offset, size and handle of each physical allocation."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._asked,), "typestr": "|u1", "data": (self._start.value, False), "version": 2}

    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self._device)

    def take(self) -> None:
        try:
            for begin in range(0, self._size, _CHUNK):
                self._map(begin, min(_CHUNK, self._size - begin))
        except RuntimeError:
            self.give_back()
            raise

    def give_back(self) -> None:
        while self._mapped:
            begin, size, handle = self._mapped.pop()
            self._call("cuMemUnmap", ctypes.c_uint64(self._start.value + begin), ctypes.c_size_t(size))
            self._call("cuMemRelease", handle)

    def __del__(self) -> None:
        """Runs when no tensor uses the memory any more."""
        with suppress(AttributeError, RuntimeError, TypeError):  # at the end of the process the driver may be gone already
            torch.cuda.synchronize(self._device)
            self.give_back()
            self._call("cuMemAddressFree", self._start, ctypes.c_size_t(self._size))

    def _map(self, begin: int, nbytes: int) -> None:
        place, size, handle = ctypes.c_uint64(self._start.value + begin), ctypes.c_size_t(nbytes), ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        self._call("cuMemMap", place, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self._mapped.append((begin, nbytes, handle))
        access = _Access(self._properties.location, _READ_WRITE)
        self._call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
