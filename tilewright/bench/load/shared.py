"""Memory that a load test shares with a service on the same machine: a POSIX object, with a region for each request in flight.

Objects are named after this process and a random number, so two load tests never use the same one. They are unlinked when the
test ends, however it ends: `multiprocessing.shared_memory` removes them even if the process was killed.
"""

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple

import aiohttp

__all__ = ["Slot", "Slots"]

MAX_SLOTS = 1000
"""A server of this project has 1,024 regions."""
FREE_BYTES = 1 << 20
"""Bytes of /dev/shm that are left free."""
CLOSE_S = 5.0
"""How long the service may take to forget the regions."""

Fill = Callable[[str], tuple[bytes, bytes]]
"""A region's name -> (the body of its requests, the first bytes of the region)."""


class Slot(NamedTuple):
    """A region, and the body of the requests that name it."""

    name: str
    memory: SharedMemory
    body: bytes


class Slots:
    """A pool of regions of `size` bytes: as many as the most requests that were in flight at once."""

    def __init__(self, session: aiohttp.ClientSession, url: str, size: int, fill: Fill):
        self._session, self._url, self._size, self._fill = session, f"{url}/v2/systemsharedmemory/region", size, fill
        self._prefix = f"tilewright-load-{os.getpid()}-{secrets.token_hex(4)}"
        self._all, self._free = list[Slot](), list[Slot]()

    async def reserve(self, count: int) -> None:
        """Make sure that there are at least `count` regions. Raises OSError or ValueError with a sentence."""
        if count > MAX_SLOTS:
            raise ValueError(f"{count} users need a region of shared memory each, but at most {MAX_SLOTS} are possible")
        while len(self._all) < count:
            self._free.append(await self._open())

    async def take(self) -> Slot:
        """Take an unused region, or make a new one if there is none. Raises OSError or ValueError."""
        return self._free.pop() if self._free else await self._open()

    def give(self, slot: Slot) -> None:
        """Return a region to the pool."""
        self._free.append(slot)

    async def _open(self) -> Slot:
        if len(self._all) >= MAX_SLOTS:
            raise ValueError(f"more than {MAX_SLOTS} requests are in flight, and each needs a region of shared memory")
        name = f"{self._prefix}-{len(self._all)}"
        # If /dev/shm has no room for a page, writing the page would end this process with SIGBUS.
        if shutil.disk_usage("/dev/shm").free < self._size + FREE_BYTES:
            raise OSError(f"/dev/shm has no room for {len(self._all) + 1} regions of {self._size} bytes")
        body, data = self._fill(name)
        slot = Slot(name, SharedMemory(name, create=True, size=self._size), body)
        self._all.append(slot)
        memory = slot.memory.buf
        assert memory is not None
        memory[: len(data)] = data
        await self._post(f"{name}/register", {"key": f"/{name}", "offset": 0, "byte_size": self._size})
        return slot

    async def _post(self, path: str, body: dict[str, object]) -> None:
        try:
            async with self._session.post(f"{self._url}/{path}", json=body) as response:
                text = (await response.content.read(2048)).decode(errors="replace")
                if response.status != 200:
                    raise ValueError(f"the service refused a region of shared memory: {response.status} {text[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"{self._url}/{path} cannot be reached: {error}") from None

    async def close(self) -> None:
        """Remove the objects, and have the service forget the regions."""
        held, self._all, self._free = self._all, [], []
        for slot in held:
            slot.memory.close()
            slot.memory.unlink()
        try:
            async with asyncio.timeout(CLOSE_S):
                for slot in held:
                    await self._post(f"{slot.name}/unregister", {})
        except (OSError, ValueError):
            pass  # the service is gone, or has forgotten the regions already
