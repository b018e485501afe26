"""The CUDA driver's own functions, for what torch has no call for: memory that is mapped by hand, or seen by two processes."""

import ctypes
from typing import Any

import torch

__all__ = ["Driver"]


class Driver:
    """Calls functions of the driver in torch's context of one CUDA device: `driver("cuMemRelease", handle)`."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        torch.zeros(1, device=self.device)  # makes the context
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        """Raises RuntimeError where the driver refuses; the message has its word for the reason."""
        with torch.cuda.device(self.device):
            code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name} on {self.device}: {(text.value or b'').decode() or code}")
