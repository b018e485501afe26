"""Settings that keep a server's memory use constant: timely garbage collection, few heaps, and reuse of freed memory.

- Python runs a full collection of garbage cycles only when the number of objects that survived recently is a quarter of the
  number of all older objects. Imports create hundreds of thousands of objects. So garbage cycles of requests would accumulate
  for a long time, and the full collection would then stop every stream while it visits all objects. Frozen objects are neither
  counted nor visited.
- glibc gives each new thread a heap of its own, and one thread does not reuse memory that another has freed.
- glibc returns the top of a heap to the system as soon as some hundreds of kilobytes are free there. On a CPU, the system then
  has to clear the buffers of each step again.

Measured: docs/experiments/server-memory.md
"""

import ctypes
import gc
import platform

__all__ = ["settle"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Constants of glibc's malloc.h."""
_HEAPS = 2
"""One heap for the event loop, one for the engine's thread and the few threads that parse bodies and write the log."""

_KEPT_BYTES = 64 << 20
"""Free bytes that stay at the top of a heap."""
_HEAP_BYTES = 32 << 20
"""Buffers smaller than this are allocated on a heap. This is the largest limit that glibc accepts."""


def settle() -> None:
    """Apply the settings. Call it once, after a process has loaded everything that it serves and before it starts threads."""
    if platform.libc_ver()[0] == "glibc":
        malloc = ctypes.CDLL(None)
        malloc.mallopt(_M_ARENA_MAX, _HEAPS)
        malloc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        malloc.mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES)
    gc.collect()
    gc.freeze()
