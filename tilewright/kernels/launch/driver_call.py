"""Launches of a compiled kernel without the Python work that Triton repeats for every launch.

`compiled[grid](*arguments)` looks up the launch hooks and calls them, allocates scratch memory, and encodes each TMA
descriptor. This takes 5 microseconds of host time, or 20 with descriptors, in addition to 3 in the driver. At the end it calls
C code. From launch to launch, only the stream, the addresses and the encoded descriptors in the arguments of this call change.
So a `BareLaunch` lets Triton prepare these arguments once, intercepts them, and passes them to the C code again in later
launches. Encoded descriptors are cached under the addresses that they were made for.

This works with Triton 3.6 to 3.9, whose launchers wrap the C code in a Python function if there are descriptors. `bare_launch`
returns None if it does not recognise the launcher, or if the kernel uses scratch memory. Then Triton's own launcher is used.
It is also used while launch hooks are installed (replay.py), for example by a profiler.
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
"""Arguments of the C code, by launch, stream and addresses: a model uses the same addresses again. Holds no tensors."""
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
        """Whether the kernel has descriptors among its arguments."""

        def catch(*given: Any) -> None:
            self._seen.append(given)

        self._launcher.launch = catch
        if code is not None and self.encodes:
            self._run = around["launcher"].cell_contents
            cells = tuple({**around, "launcher": CellType(catch)}.values())
            self._launcher.launch = FunctionType(code, launcher.launch.__globals__, closure=cells)
        active: Any = driver.active
        self._device, self._stream = active.get_current_device, active.get_current_stream
        if self._device is torch.cuda.current_device:  # the call inside it, without the check that CUDA is initialised
            self._device = torch._C._cuda_getDevice
        if not self.encodes:
            given = self._caught(0, arguments)
            last = given[-1]
            self._nested = isinstance(last, (tuple, list)) and len(last) == len(arguments) and last[0] is arguments[0]
            """Whether the C code accepts the kernel's arguments as one sequence; if not, they follow the other arguments."""
            self._before, self._after = given[:3], given[4 : -1 if self._nested else -len(arguments)]

    def _caught(self, stream: int, arguments: Sequence[Any]) -> tuple[Any, ...]:
        with _CATCHING:
            self._launcher(*self._grid, stream, *self._rest, *arguments)
            return self._seen.pop()

    def __call__(self, arguments: Sequence[Any]) -> None:
        """Launch on the current stream. No argument may be a descriptor."""
        stream = self._stream(self._device())
        if self._nested:
            self._run(*self._before, stream, *self._after, arguments)
        else:
            self._run(*self._before, stream, *self._after, *arguments)

    def again(self, key: tuple[int, ...]) -> bool:
        """Repeat the launch that `encode` made for this key on the current stream. Returns False if there was none."""
        given = _ENCODED.get((self, self._stream(self._device()), *key))
        if given is None:
            return False
        self._run(*given)
        return True

    def encode(self, key: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Launch with descriptors. The key contains all addresses among the arguments."""
        stream = self._stream(self._device())
        given = self._caught(stream, arguments)
        with _CATCHING:  # backward passes run in threads of their own
            if len(_ENCODED) >= _MOST:
                del _ENCODED[next(iter(_ENCODED))]
            _ENCODED[self, stream, *key] = given
        self._run(*given)


def bare_launch(compiled: CompiledKernel, grid: tuple[int, ...], arguments: Sequence[Any]) -> BareLaunch | None:
    """The short way to launch a kernel whose module is loaded, or None if Triton's own launcher must be used.

    Args:
        compiled: the object that a launch through Triton returned.
        grid: three numbers.
        arguments: one launch's arguments, for all parameters of the kernel.
    """
    launcher: Any = getattr(compiled, "run", None)
    if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1):
        return None
    wrapped = getattr(launcher, "__dict__", {}).get("launch")
    plain = wrapped is not None and getattr(wrapped, "__code__", None) is None
    known = plain or (wrapped is not None and "launcher" in wrapped.__code__.co_freevars)
    return BareLaunch(compiled, launcher, grid, arguments) if known and not getattr(launcher, "gsan_enabled", False) else None
