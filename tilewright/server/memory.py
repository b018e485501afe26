"""What keeps the memory of a server even over days: nothing of what it loaded is looked at again, and few heaps fragment.

Python collects all its garbage cycles only when the objects that survived lately are a quarter of all others. Half a million of
these come from imports and the model's tokenizer, so cycles that requests leave behind (frames, tasks, errors) would add up for
an hour, and the collection would then stop every stream for as long as it takes to visit them all. Objects that are frozen
count for neither. glibc gives each new thread a heap of its own; what one thread has freed, no other takes.
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
