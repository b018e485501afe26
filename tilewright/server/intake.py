"""Runs the parsing of request bodies in such a way that a large or slow body does not delay other requests.

A short body is parsed on the event loop, at once. All others go to threads: a few threads for bodies that take milliseconds or
need a chat template, and one thread for large bodies. Large bodies are parsed one after the other, so that only one at a time
needs memory for parsing.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tilewright.server.errors import overloaded

__all__ = ["Intake"]

INLINE_BYTES = 4096
LARGE_BYTES = 1 << 18
"""Bodies larger than this take 10 ms and more to parse."""
THREADS = 4
"""Only a few: each thread that runs Python takes turns of 5 ms with the event loop."""
MAX_LARGE = 16
"""Most large bodies that wait or are being parsed."""

T = TypeVar("T")


class Intake:
    """Runs the parsing of bodies for one server."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tilewright-intake")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="tilewright-large-intake")
        self._large_open = 0

    async def run(self, raw: bytes, read: Callable[[bytes], T], *, inline: bool) -> T:
        """The result of `read(raw)`. With `inline`, a short body may be parsed on the event loop.

        Raises:
            ApiError: 429; `MAX_LARGE` large bodies wait or are being parsed. In addition, whatever `read` raises.
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
        """End the threads after their current work."""
        for threads in (self._threads, self._large):
            threads.shutdown(wait=False, cancel_futures=True)
