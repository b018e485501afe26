"""A model's parameters in memory that two processes share: the trainer writes them, and the sampler copies them from there.

The memory is a file that both processes map, in a memory file system if the machine has one. If both use the same GPU, the
memory may be GPU memory instead; the file then contains the handle that opens it. The file begins with two version numbers:
that of the write that was begun last, and that of the write that was finished last. A reader reads again if the two differ, or
if they changed while it was reading. Only the given file is opened, and nothing is parsed: both sides derive the layout from
their models.

The parameters of each dtype are together, in the layout of kernels/optimizer/pack.py. In GPU memory one launch copies them all.
"""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilewright.hw.shared import HANDLE_BYTES, CardMemory, Locked
from tilewright.kernels.optimizer.pack import Packing, flat_size
from tilewright.models import Model

__all__ = ["SharedWeights", "layout_of", "parameters_of"]

_HEADER = 64
_FAST = Path("/dev/shm")


def parameters_of(model: Model) -> list[Tensor]:
    """A model's parameters, ordered by name, so that the order is the same on both sides."""
    return [parameter.detach() for _, parameter in sorted(model.named_parameters())]


def layout_of(parameters: Sequence[Tensor]) -> bytes:
    """32 bytes that identify the shapes and dtypes of a model's parameters."""
    return hashlib.sha256(repr([(tuple(p.shape), p.dtype) for p in parameters]).encode()).digest()


class SharedWeights:
    """The parameters of `model` in the file `path`. Without a path, in a new file, which `close` deletes.

    on_card: keep the parameters in GPU memory on the model's device; the file contains the handle.

    Raises:
        RuntimeError: the GPU's driver cannot share its memory.
        ValueError: the file is for another model.
    """

    def __init__(self, model: Model, path: Path | None = None, *, on_card: bool = False) -> None:
        self._parameters = parameters_of(model)
        self._device = self._parameters[0].device
        pieces = list(_by_dtype(self._parameters).items())
        sizes = [flat_size([parameter.numel() for parameter in piece]) * dtype.itemsize for dtype, piece in pieces]
        self.nbytes = sum(sizes)
        self._owned = path is None
        size = _HEADER + (HANDLE_BYTES if on_card else self.nbytes)
        if path is None:
            with tempfile.NamedTemporaryFile(dir=_folder_for(size), prefix="tilewright-", delete=False) as file:
                file.truncate(size)
            path = Path(file.name)
        self.path = path
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, but the weights of this model need {size}")
        raw = np.memmap(path, np.uint8, "r+")
        self._versions, self._layout = raw[:16].view(np.int64), raw[16:48]
        layout = np.frombuffer(layout_of(self._parameters), np.uint8)
        if not self._owned and (self._layout != layout).any():
            raise ValueError(f"the weights in {path} have other shapes or dtypes than this model's")
        self._card: CardMemory | None = None
        self._locked: Locked | None = None
        try:
            memory = self._on_card(raw[_HEADER:]) if on_card else self._on_host(torch.from_numpy(raw))
        except RuntimeError:
            self.close()
            raise
        self.memory: Tensor = memory
        """[nbytes] uint8: what both sides see. Must not be used after `close`."""
        self._packings = [Packing(flat.view(dtype), piece) for flat, (dtype, piece) in zip(memory.split(sizes), pieces)]
        if self._owned:
            self._layout[:], self._versions[:] = layout, -1

    def push(self, version: int) -> dict[str, float]:
        """Write the model's parameters as this version. Returns the time that this took, and the rate."""
        began = time.perf_counter()
        self._versions[0] = version
        for packing in self._packings:
            packing.pack()
        self._settle()
        self._versions[1] = version
        took = time.perf_counter() - began
        locked = {} if self._device.type == "cpu" or self._card else {"push_locked": float(self._locked is not None)}
        return {"push_s": took, "push_gb_per_s": self.nbytes / took / 1e9, **locked}

    @property
    def version(self) -> int:
        """The version that was written last; -1 if there is none."""
        return int(self._versions[1])

    def pull(self) -> int:
        """Copy the version that was written last into the model's parameters. Returns the version."""
        while True:
            before = self.version
            if before == int(self._versions[0]):
                for packing in self._packings:
                    packing.unpack()
                self._settle()
                if before == int(self._versions[0]):
                    return before
            time.sleep(1e-3)

    def close(self) -> None:
        """Unlock pages. Delete the file and free GPU memory, if this side created them. May be called twice."""
        if self._locked is not None:
            self._locked.close()
            self._locked = None
        if self._card is not None:
            self._card.close()
        if self._owned:
            self.path.unlink(missing_ok=True)

    def _on_card(self, place: np.ndarray) -> Tensor:
        self._card = CardMemory(self.nbytes, self._device, None if self._owned else place.tobytes())
        if self._owned:
            place[:] = np.frombuffer(self._card.handle, np.uint8)
        return self._card.memory

    def _on_host(self, raw: Tensor) -> Tensor:
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # without locked pages, copies are slower, which the rate from `push` shows
                self._locked = Locked(raw, self._device)
        return raw[_HEADER:]

    def _settle(self) -> None:
        """Wait for the copies."""
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)


def _by_dtype(parameters: Sequence[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """The parameters of each dtype, in their order."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return found


def _folder_for(size: int) -> Path | None:
    """A folder in a memory file system, if it has enough room; None: use the default folder for temporary files."""
    return _FAST if _FAST.is_dir() and shutil.disk_usage(_FAST).free > size else None
