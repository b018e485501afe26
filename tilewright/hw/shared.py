"""Memory that two processes of one machine see: of a card (CUDA IPC), and of the host as a card copies fastest.

Who makes memory of a card holds it until the end; others open it by a handle of 64 bytes, and see what its owner writes once
the owner has waited for the device. Both sides have to know how large it is: a handle does not say it.
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
    """`nbytes` bytes on a CUDA device: new ones, or those that `handle` names, which another process has made.

    Raises:
        RuntimeError: the driver refuses; also for a handle of this very process.
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
        """What another process opens it by."""
        self.memory: Tensor = torch.as_tensor(self, device=self._driver.device)
        """[nbytes] uint8. Not to be touched after `close`."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self._start.value, False), "version": 2}

    def close(self) -> None:
        """Free the memory, or leave it to its owner. Twice is once."""
        if self._start.value:
            torch.cuda.synchronize(self._driver.device)
            self._driver("cuMemFree_v2" if self._owned else "cuIpcCloseMemHandle", self._start)
            self._start.value = 0

    def __del__(self) -> None:
        with suppress(AttributeError, RuntimeError, TypeError):  # at the end of the process the driver may have gone first
            self.close()


class Locked:
    """A host tensor whose pages stay where they are until `close`, so that a card copies them at the rate of its bus.

    Raises:
        RuntimeError: the driver refuses, as it does for files on most disks.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._driver, self._memory = Driver(device), memory  # not torch's call, whose refusal a later kernel would report
        self._driver("cuMemHostRegister_v2", self._place(), ctypes.c_size_t(memory.nbytes), ctypes.c_uint(0))

    def close(self) -> None:
        """Let the pages go."""
        torch.cuda.synchronize(self._driver.device)
        self._driver("cuMemHostUnregister", self._place())

    def _place(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._memory.data_ptr())
