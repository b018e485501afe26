"""What keeps the memory of a server even: garbage is collected in time, and few heaps fragment.

Python collects all its garbage cycles only when the objects that survived lately are a quarter of all others. Hundreds of
thousands of these come from imports, so cycles that requests leave behind would add up for long, and the collection would then
stop every stream while it visits all objects. Frozen objects are neither counted nor visited. glibc gives each new thread a
heap of its own; what one thread has freed, no other takes. Measured: docs/experiments/server-memory.md
"""

import ctypes
import gc
import platform

__all__ = ["settle"]

_M_ARENA_MAX = -8
"""glibc's malloc.h"""
_HEAPS = 2
"""One for the event loop, one for the engine's thread and the few that read bodies and write the log."""


def settle() -> None:
    """Call it once, when a process has loaded all that it serves and before it starts its threads."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _HEAPS)
    gc.collect()
    gc.freeze()
