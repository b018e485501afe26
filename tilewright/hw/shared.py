"""Memory that two processes of one machine share: on a card (CUDA IPC), and on the host, locked for fast copies by a card.

The process that allocates memory on a card owns it until the end. Other processes open it by a handle of 64 bytes. They see the
owner's writes after the owner has synchronised with the device. Both sides must know the size of the memory, because the handle
does not contain it.
"""

import ctypes
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tilewright.hw.driver import Driver

__all__ = ["HANDLE_BYTES", "CardMemory", "Locked"]

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CardMemory:
    """`nbytes` bytes on a CUDA device: newly allocated, or opened by the `handle` of another process.

    Raises:
        RuntimeError: the driver returns an error; also for a handle of this same process.
    """

    def __init__(self, nbytes: int, device: torch.device, handle: bytes | None = None) -> None:
        self._driver, self._start, self._nbytes = Driver(device), ctypes.c_uint64(), nbytes
        self._owned = handle is None
        name = _Handle()
        if handle is None:
            self._driver("cuMemAlloc_v2", ctypes.byref(self._start), ctypes.c_size_t(max(nbytes, 1)))
            self._driver("cuIpcGetMemHandle", ctypes.byref(name), self._start)
        else:
            name.reserved[:] = list(handle)
            self._driver("cuIpcOpenMemHandle_v2", ctypes.byref(self._start), name, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self.handle = bytes(name.reserved)
        """The handle with which another process opens it."""
        self.memory: Tensor = torch.as_tensor(self, device=self._driver.device)
        """[nbytes] uint8. Must not be used after `close`."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self._start.value, False), "version": 2}

    def close(self) -> None:
        """Free the memory, or only detach from it if another process owns it. May be called twice."""
        if self._start.value:
            torch.cuda.synchronize(self._driver.device)
            self._driver("cuMemFree_v2" if self._owned else "cuIpcCloseMemHandle", self._start)
            self._start.value = 0

    def __del__(self) -> None:
        with suppress(AttributeError, RuntimeError, TypeError):  # at the end of the process the driver may be gone already
            self.close()


class Locked:
    """A host tensor whose pages are locked until `close`, so that a card copies them at the full rate of its bus.

    Raises:
        RuntimeError: the driver returns an error, as for files on most disks.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._driver, self._memory = Driver(device), memory  # not torch's call: a later kernel would report its error
        self._driver("cuMemHostRegister_v2", self._place(), ctypes.c_size_t(memory.nbytes), ctypes.c_uint(0))

    def close(self) -> None:
        """Unlock the pages."""
        torch.cuda.synchronize(self._driver.device)
        self._driver("cuMemHostUnregister", self._place())

    def _place(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._memory.data_ptr())
