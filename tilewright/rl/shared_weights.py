"""A model's parameters in memory that two processes share: the trainer writes them, the sampler copies them out.

The memory is a file that both map, in the memory of the machine where it has a folder for such files. In front are two
versions: the one whose writing was begun last, and the one that was finished last. A reader that finds them different, or
changed, reads again. No names of foreign files are opened and nothing is parsed: both sides lay the file out by their model.
"""

import hashlib
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilewright.models import Model

__all__ = ["SharedWeights"]

_HEADER = 64
_ALIGNMENT = 64
_FAST = Path("/dev/shm")


class SharedWeights:
    """The parameters of `model` in the file `path`; without it, in a new one, which `close` deletes.

    Raises:
        ValueError: the file is of another model.
    """

    def __init__(self, model: Model, path: Path | None = None) -> None:
        self._parameters = [parameter.detach() for _, parameter in sorted(model.named_parameters())]
        starts, end = [], _HEADER
        for parameter in self._parameters:
            starts.append(end)
            end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end - _HEADER
        self._owned = path is None
        if path is None:
            with tempfile.NamedTemporaryFile(dir=_FAST if _FAST.is_dir() else None, prefix="tilewright-", delete=False) as file:
                file.truncate(end)
            path = Path(file.name)
        self.path = path
        if path.stat().st_size != end:
            raise ValueError(f"{path} has {path.stat().st_size} bytes; wanted {end}, as this model's weights have")
        raw = np.memmap(path, np.uint8, "r+")
        self._versions, self._shape = raw[:16].view(np.int64), raw[16:48]
        memory = torch.from_numpy(raw)
        self._places: list[Tensor] = [
            memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            for start, parameter in zip(starts, self._parameters)
        ]
        told = np.frombuffer(
            hashlib.sha256(repr([(tuple(p.shape), p.dtype) for p in self._parameters]).encode()).digest(), np.uint8
        )
        if self._owned:
            self._shape[:], self._versions[:] = told, -1
        elif (self._shape != told).any():
            raise ValueError(f"the weights in {path} are of another shape than this model's")

    def push(self, version: int) -> dict[str, float]:
        """Write the model's parameters as this version. Returns how long it took, and how fast it was."""
        began = time.perf_counter()
        self._versions[0] = version
        for place, parameter in zip(self._places, self._parameters):
            place.copy_(parameter)
        self._versions[1] = version
        took = time.perf_counter() - began
        return {"push_s": took, "push_gb_per_s": self.nbytes / took / 1e9}

    @property
    def version(self) -> int:
        """Of what was written last; -1: nothing."""
        return int(self._versions[1])

    def pull(self) -> int:
        """Copy what was written last into the model's parameters, and return its version."""
        while True:
            before = self.version
            if before == int(self._versions[0]):
                for place, parameter in zip(self._places, self._parameters):
                    parameter.copy_(place)
                if before == int(self._versions[0]):
                    return before
            time.sleep(1e-3)

    def close(self) -> None:
        """Delete the file, where this side made it."""
        if self._owned:
            self.path.unlink(missing_ok=True)
