"""A compiled kernel's way to the driver without what Triton does for every launch in Python.

`compiled[grid](*arguments)` asks which hooks there are and calls them, makes room for scratch memory, and encodes each
descriptor of the copy engine: 5 microseconds of host time, 20 with descriptors, beside 3 of the driver's own. What it hands to
its C code at the end differs from launch to launch in the stream, addresses and encoded descriptors alone. So that is caught
once, made by Triton's own code, and handed over again; encoded descriptors are kept by the addresses that they were made for.

It holds for Triton 3.6 to 3.9, whose launchers put a function around the C code where there are descriptors. `bare_launch`
gives None where it does not find what it knows, or a kernel has scratch memory: then launches go Triton's way. They do so too
while somebody has hooked into launches (replay.py), as profilers do.
"""

from collections.abc import Hashable, Sequence
from copy import copy
from threading import Lock
from types import CellType, FunctionType
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

__all__ = ["BareLaunch", "bare_launch"]

_MOST = 8192
_ENCODED: dict[Hashable, tuple[Any, ...]] = {}
"""What the C code is given, by launch, stream and addresses: a model meets the same ones again. No tensor is held."""
_CATCHING = Lock()


class BareLaunch:
    """Launches of one kernel with one grid; see `bare_launch`."""

    def __init__(self, compiled: CompiledKernel, launcher: Any, grid: tuple[int, ...], arguments: Sequence[Any]):
        self._grid, self._rest = grid, (compiled.function, compiled.packed_metadata, None, None, None)
        self._seen: list[tuple[Any, ...]] = []
        self._launcher, self._run = copy(launcher), launcher.launch
        code, cells = getattr(launcher.launch, "__code__", None), getattr(launcher.launch, "__closure__", None) or ()
        around = {} if code is None else dict(zip(code.co_freevars, cells, strict=True))
        self.encodes = "launcher" in around
        """Whether there are descriptors."""

        def catch(*given: Any) -> None:
            self._seen.append(given)

        self._launcher.launch = catch
        if code is not None and self.encodes:
            self._run = around["launcher"].cell_contents
            cells = tuple({**around, "launcher": CellType(catch)}.values())
            self._launcher.launch = FunctionType(code, launcher.launch.__globals__, closure=cells)
        active: Any = driver.active
        self._device, self._stream = active.get_current_device, active.get_current_stream
        if self._device is torch.cuda.current_device:  # what is left of it where CUDA has been initialised
            self._device = torch._C._cuda_getDevice
        if not self.encodes:
            given = self._caught(0, arguments)
            last = given[-1]
            self._nested = isinstance(last, (tuple, list)) and len(last) == len(arguments) and last[0] is arguments[0]
            """Whether the C code takes the kernel's arguments as one; if not, they follow the others."""
            self._before, self._after = given[:3], given[4 : -1 if self._nested else -len(arguments)]

    def _caught(self, stream: int, arguments: Sequence[Any]) -> tuple[Any, ...]:
        with _CATCHING:
            self._launcher(*self._grid, stream, *self._rest, *arguments)
            return self._seen.pop()

    def __call__(self, arguments: Sequence[Any]) -> None:
        """Launch on the current stream; no argument is a descriptor."""
        stream = self._stream(self._device())
        if self._nested:
            self._run(*self._before, stream, *self._after, arguments)
        else:
            self._run(*self._before, stream, *self._after, *arguments)

    def again(self, key: tuple[int, ...]) -> bool:
        """Launch as `encode` did for the key on this stream; False where it has not."""
        given = _ENCODED.get((self, self._stream(self._device()), *key))
        if given is None:
            return False
        self._run(*given)
        return True

    def encode(self, key: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Launch with descriptors; the key holds all addresses among the arguments."""
        stream = self._stream(self._device())
        given = self._caught(stream, arguments)
        with _CATCHING:  # backward passes run in threads of their own
            if len(_ENCODED) >= _MOST:
                del _ENCODED[next(iter(_ENCODED))]
            _ENCODED[self, stream, *key] = given
        self._run(*given)


def bare_launch(compiled: CompiledKernel, grid: tuple[int, ...], arguments: Sequence[Any]) -> BareLaunch | None:
    """The short way for a kernel whose module is loaded; None where Triton's own has to be taken.

    Args:
        compiled: what launching it gave.
        grid: three numbers.
        arguments: of a launch, all that the kernel has parameters for.
    """
    launcher: Any = getattr(compiled, "run", None)
    if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1):
        return None
    wrapped = getattr(launcher, "__dict__", {}).get("launch")
    plain = wrapped is not None and getattr(wrapped, "__code__", None) is None
    known = plain or (wrapped is not None and "launcher" in wrapped.__code__.co_freevars)
    return BareLaunch(compiled, launcher, grid, arguments) if known and not getattr(launcher, "gsan_enabled", False) else None
