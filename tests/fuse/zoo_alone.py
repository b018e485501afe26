"""One process at a time measures on a card while several compile: a lock around everything that is timed.

Processes that prepare rows side by side would otherwise time their candidates beside each other's, and choose by noise. The
lock is a file; it stands around the stopwatch of tilewright and around Inductor's benchmarks.
"""

import fcntl
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright.fuse import judge
from tilewright.tune.measure import Stopwatch

__all__ = ["measure_alone"]


def measure_alone(path: Path) -> None:
    """From now on this process measures only while it holds the lock at `path`. Call it once, before anything is compiled."""
    lock = _Lock(path)
    for method, first in (("once", None), ("time", None), ("in_turns", _each_once)):
        setattr(Stopwatch, method, lock.around(getattr(Stopwatch, method), first))
    timed = lock.around(judge.timed_us, None)
    for module in (judge, *(sys.modules[f"tilewright.fuse.{name}"] for name in ("optimize", "rivals"))):
        vars(module)["timed_us"] = timed
    from torch._inductor.runtime import benchmarking

    for kind in (benchmarking.TritonBenchmarker, benchmarking.InductorBenchmarker):
        kind.benchmark_gpu = lock.around(kind.benchmark_gpu, lambda _, call, *rest, **named: call())


def _each_once(_: Stopwatch, calls: Sequence[Callable[[int], Any]], *rest: Any, **named: Any) -> None:
    for call in calls:
        call(0)


class _Lock:
    """A lock between processes, which a call inside of a locked call does not take again."""

    def __init__(self, path: Path):
        self.file = path.open("w")
        self.depth = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.depth += 1
        if self.depth == 1:
            fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                fcntl.flock(self.file, fcntl.LOCK_UN)

    def around(self, call: Callable[..., Any], first: Callable[..., Any] | None) -> Callable[..., Any]:
        """`call`, while the lock is held; `first`, of the same arguments, before: it compiles and loads what is timed."""

        @functools.wraps(call)
        def locked(*args: Any, **kwargs: Any) -> Any:
            if first is not None:
                first(*args, **kwargs)
            with self():
                return call(*args, **kwargs)

        return locked
