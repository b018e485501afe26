"""Functions of the CUDA driver that torch does not offer: mapping memory by hand, and sharing it between processes."""

import ctypes
from typing import Any

import torch

__all__ = ["Driver"]


class Driver:
    """Calls driver functions in torch's context of one CUDA device: `driver("cuMemRelease", handle)`."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        torch.zeros(1, device=self.device)  # creates the context
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        """Raises RuntimeError if the driver returns an error; the message has the driver's text."""
        with torch.cuda.device(self.device):
            code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name} on {self.device}: {(text.value or b'').decode() or code}")
