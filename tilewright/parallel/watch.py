"""Ranks that monitor each other: when one dies, the others end within seconds, and report which one.

A thread of each rank writes a counter to the store every other second and reads those of the others. If a counter stops
growing, or a rank reports an error, this is the verdict. If the store cannot be reached, the launcher or rank 0 is gone.

The thread counts how often it found a counter unchanged, and not the seconds in between. So ranks that were all stopped
for a while, as by a scheduler that suspends a job, do not take each other for gone when they continue.
"""

import math
import os
import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["Watch"]


class Watch:
    """Watches the other ranks until `stop`.

    Args:
        address, port: of the store.
        rank, world: this rank, and the number of ranks.
        grace_s: how long the main thread may take to end by itself after a verdict.
        every_s, silent_s: how often ranks are checked, and after what silence a rank counts as gone. The silence is counted in
            checks, `silent_s / every_s` of them.
    """

    def __init__(
        self, address: str, port: int, rank: int, world: int, *, grace_s: float = 5.0, every_s: float = 2.0,
        silent_s: float = 16.0,
    ):  # fmt: skip
        self._store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        self._rank, self._world = rank, world
        self._grace_s, self._every_s, self._silent_s = grace_s, every_s, silent_s
        self._over, self._known = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # a store's client is one connection
        self._words = ""
        # Before the first wait: the others would never miss a rank that dies before it was heard of.
        self._store.set(f"alive/{rank}", "0")
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def verdict(self, timeout_s: float) -> str | None:
        """Which rank is gone, once that is known; None if all others were alive during this time."""
        return self._words if self._known.wait(timeout_s) else None

    def failed(self, why: str) -> None:
        """Tell the others that this rank ends with an error."""
        try:
            with self._lock:
                self._store.set("failed", f"rank {self._rank} failed: {why}")
        except (RuntimeError, ValueError):  # the store is gone as well, so they know
            return

    def stop(self) -> None:
        """The run is over; the others may leave."""
        self._over.set()
        self._thread.join()
        try:
            self._store.set(f"alive/{self._rank}", "done")
        except (RuntimeError, ValueError):
            return

    def _run(self) -> None:
        counts: dict[int, tuple[str, int]] = {}
        beat = 0
        while not self._over.wait(self._every_s):
            beat += 1
            try:
                with self._lock:
                    words = self._look(beat, counts)
            except (RuntimeError, ValueError):
                words = "the process that the ranks meet at is gone: the launcher, or rank 0"
            if words:
                self._words = words
                self._known.set()
                # A rank that waits for a dead one inside the library cannot be woken up.
                if not self._over.wait(self._grace_s):
                    print(f"error: rank {self._rank} ends: {words}", file=sys.stderr, flush=True)
                    os._exit(1)
                return

    def _look(self, beat: int, counts: dict[int, tuple[str, int]]) -> str:
        """What is wrong, or ""."""
        self._store.set(f"alive/{self._rank}", str(beat))
        if self._store.check(["failed"]):
            return self._store.get("failed").decode(errors="replace")
        for other in range(self._world):
            key = f"alive/{other}"
            if other == self._rank or not self._store.check([key]):
                continue
            count = self._store.get(key).decode()
            last, unchanged = counts.get(other, ("", 0))
            counts[other] = (count, unchanged + 1 if count == last else 0)
            if count != "done" and counts[other][1] >= math.ceil(self._silent_s / self._every_s):
                return f"rank {other} is gone: nothing was heard of it for {self._silent_s:.0f} seconds"
        return ""
