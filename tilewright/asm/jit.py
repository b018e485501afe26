"""Which kernels does this process compile, and when: the counter behind "zero JIT after ready".

It listens where Triton's compiler reports (`triton.knobs.compilation.listener`), which tells a kernel that was compiled from
one that was read from the disk cache. Triton's `jit_post_compile_hook` cannot tell the two apart, and to call it Triton turns
every constant of the kernel into JSON, which raises for constants that JSON does not know (Gluon layouts).

Not counted: kernels that the process already holds (a launch of those costs nothing), the interpreter's, and compiles in other
processes.
"""

from dataclasses import dataclass
from threading import Lock
from typing import Any

from triton import knobs

__all__ = ["CompileCounter", "Compiled"]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel variant that this process had to get."""

    kernel: str
    arch: int
    from_disk: bool
    """Read from Triton's disk cache: milliseconds, where compiling takes a good part of a second."""
    seconds: float


class CompileCounter:
    """Counts the kernels that this process compiles, from `start()` on, before and after it was ready.

    A server starts one before it loads a model and calls `mark_ready()` when it begins to listen. Several may run at once;
    they chain, as any listener that was there before does. Compiles may be reported from any thread.
    """

    def __init__(self) -> None:
        self._events: list[Compiled] = []
        self._ready_at: int | None = None
        self._before: Any = None
        self._listening = False
        self._lock = Lock()

    def start(self) -> "CompileCounter":
        """Begin to listen; returns itself. Raises RuntimeError when it already listens."""
        if self._listening:
            raise RuntimeError("CompileCounter.start: it has been started already; use a second counter")
        self._before, knobs.compilation.listener, self._listening = knobs.compilation.listener, self._heard, True
        return self

    def stop(self) -> None:
        """Stop listening; counters stop in the reverse order of their start. Raises RuntimeError when another is in between."""
        if knobs.compilation.listener != self._heard:
            raise RuntimeError("CompileCounter.stop: not the listener that was started last; stop that one first")
        knobs.compilation.listener, self._listening = self._before, False

    def mark_ready(self) -> None:
        """From here on nothing should be compiled."""
        self._ready_at = len(self._events)

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """All since `start()`, in order."""
        return tuple(self._events)

    @property
    def late(self) -> tuple[Compiled, ...]:
        """What came after `mark_ready()`, read from disk or compiled; empty before."""
        return tuple(self._events[self._ready_at :]) if self._ready_at is not None else ()

    @property
    def after_ready(self) -> int:
        """How many kernels were compiled after `mark_ready()`: the number that has to stay 0."""
        return sum(not event.from_disk for event in self.late)

    def _heard(self, *, src: Any, metadata: dict[str, Any], metadata_group: Any, times: Any, cache_hit: bool) -> None:
        event = Compiled(
            kernel=src.name, arch=metadata["target"].arch, from_disk=cache_hit, seconds=1e-6 * times.total if times else 0.0
        )
        with self._lock:
            self._events.append(event)
        if self._before is not None:
            self._before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
