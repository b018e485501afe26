"""Ranks monitor each other: if one ends unexpectedly, the others end within seconds and report which one it was.

Each rank has a thread that writes a counter to the store every other second and reads the counters of the other ranks. A rank
is reported as gone if its counter stops growing; an error that a rank reports is passed on in the same way. If the store cannot
be reached, the launcher or rank 0 is gone.

The thread counts how many times in succession it read an unchanged counter; it does not measure the time in seconds. The
reason: all ranks may be suspended together for a while, for example by a scheduler that suspends a job. When they continue,
they must not regard each other as gone.
"""

import math
import os
import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["Watch"]


class Watch:
    """Watches the other ranks until `stop` is called.

    Args:
        address, port: of the store.
        rank, world: the number of this rank, and the number of all ranks.
        grace_s: time in which the main thread may end by itself after a failure was found, before the process is ended.
        every_s, silent_s: time between two checks, and time without a change of its counter after which a rank counts as gone.
            The latter is measured in checks: `silent_s / every_s` of them.
    """

    def __init__(
        self, address: str, port: int, rank: int, world: int, *, grace_s: float = 5.0, every_s: float = 2.0,
        silent_s: float = 16.0,
    ):  # fmt: skip
        self._store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        self._rank, self._world = rank, world
        self._grace_s, self._every_s, self._silent_s = grace_s, every_s, silent_s
        self._over, self._known = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # a client of the store has a single connection
        self._words = ""
        # Before the first wait: a rank whose counter was never written would not be missed by the others.
        self._store.set(f"alive/{rank}", "0")
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def verdict(self, timeout_s: float) -> str | None:
        """Wait up to `timeout_s` for a failure. Returns a message about it; None if no failure was found in this time."""
        return self._words if self._known.wait(timeout_s) else None

    def failed(self, why: str) -> None:
        """Report to the other ranks that this rank ends with an error."""
        try:
            with self._lock:
                self._store.set("failed", f"rank {self._rank} failed: {why}")
        except (RuntimeError, ValueError):  # the store is gone as well, so the others will notice that
            return

    def stop(self) -> None:
        """Stop watching at the end of the run. The other ranks no longer expect this rank's counter to grow."""
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
                words = "the process that connects the ranks (the launcher, or rank 0) is gone"
            if words:
                self._words = words
                self._known.set()
                # A rank that waits inside the library for a rank that is gone cannot be woken up.
                if not self._over.wait(self._grace_s):
                    print(f"error: rank {self._rank} ends: {words}", file=sys.stderr, flush=True)
                    os._exit(1)
                return

    def _look(self, beat: int, counts: dict[int, tuple[str, int]]) -> str:
        """Check the other ranks once. Returns a message about a failure, or ""."""
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
                return f"rank {other} is gone: it has sent no sign of life for {self._silent_s:.0f} seconds"
        return ""
