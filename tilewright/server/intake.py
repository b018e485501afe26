"""Where bodies are read and turned into jobs, so that a large or slow one delays nobody but itself.

A short body is read on the event loop, at once. Anything else goes to threads: a few for what takes milliseconds or runs a chat
template, and one for large bodies, which are worked on one after the other, so that their memory is needed once.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tilewright.server.errors import overloaded

__all__ = ["Intake"]

INLINE_BYTES = 4096
LARGE_BYTES = 1 << 18
"""Bodies above this take 10 ms and more."""
THREADS = 4
"""Few: each that runs Python takes turns of 5 ms with the event loop."""
MAX_LARGE = 16
"""Large bodies that wait, or are worked on, at once."""

T = TypeVar("T")


class Intake:
    """Runs the reading of bodies for one server."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tilewright-intake")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="tilewright-large-intake")
        self._large_open = 0

    async def run(self, raw: bytes, read: Callable[[bytes], T], *, inline: bool) -> T:
        """`read(raw)`; `inline`: a short one may run on the event loop.

        Raises:
            ApiError: 429; `MAX_LARGE` large bodies are being read already. And whatever `read` raises.
        """
        if inline and len(raw) <= INLINE_BYTES:
            return read(raw)
        loop = asyncio.get_running_loop()
        if len(raw) <= LARGE_BYTES:
            return await loop.run_in_executor(self._threads, read, raw)
        if self._large_open >= MAX_LARGE:
            raise overloaded(f"{MAX_LARGE} bodies of more than {LARGE_BYTES} bytes are being read; try again in 5 s", 5.0)
        self._large_open += 1
        try:
            return await loop.run_in_executor(self._large, read, raw)
        finally:
            self._large_open -= 1

    def close(self) -> None:
        """End the threads, after what they are in."""
        for threads in (self._threads, self._large):
            threads.shutdown(wait=False, cancel_futures=True)
