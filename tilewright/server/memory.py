"""What keeps the memory of a server even: garbage is collected in time, few heaps fragment, and what a step frees the next has.

Python collects all its garbage cycles only when the objects that survived lately are a quarter of all others. Hundreds of
thousands of these come from imports, so cycles that requests leave behind would add up for long, and the collection would then
stop every stream while it visits all objects. Frozen objects are neither counted nor visited. glibc gives each new thread a
heap of its own; what one thread has freed, no other takes. And it gives the top of a heap back to the system as soon as some
hundreds of kilobytes are free there: on a CPU, the system then has to clear the buffers of each step anew. Measured:
docs/experiments/server-memory.md
"""

import ctypes
import gc
import platform

__all__ = ["settle"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""glibc's malloc.h"""
_HEAPS = 2
"""One for the event loop, one for the engine's thread and the few that read bodies and write the log."""

_KEPT_BYTES = 64 << 20
"""Free bytes at the top of a heap that stay there."""
_HEAP_BYTES = 32 << 20
"""Smaller buffers come from a heap; glibc takes no larger limit."""


def settle() -> None:
    """Call it once, when a process has loaded all that it serves and before it starts its threads."""
    if platform.libc_ver()[0] == "glibc":
        malloc = ctypes.CDLL(None)
        malloc.mallopt(_M_ARENA_MAX, _HEAPS)
        malloc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        malloc.mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES)
    gc.collect()
    gc.freeze()
