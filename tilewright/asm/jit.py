"""Counts the kernels that this process compiles, with time and reason: the check behind "zero JIT after ready".

It uses the reports of Triton's compiler (`triton.knobs.compilation.listener`), which distinguish a kernel that was compiled
from one that was read from the disk cache or a bundle. Triton's `jit_post_compile_hook` does not, and for it Triton converts
every constant of the kernel to JSON, which raises for constants that JSON does not support (Gluon layouts).

Not counted: kernels that the process already has (their launch costs nothing), the interpreter's, and compiles in other
processes.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from triton import knobs

__all__ = ["CompileCounter", "Compiled", "LateCompile", "log_late", "raise_late"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel variant that this process compiled or read."""

    kernel: str
    arch: int
    from_disk: bool
    """Whether it was read from Triton's disk cache or a bundle: milliseconds, while compiling takes a good part of a second."""
    seconds: float
    reason: str
    """Its difference from the nearest variant that was there already: "EVEN_K: True -> False"."""


class LateCompile(RuntimeError):
    """A kernel was compiled after the process was ready, although that was forbidden."""


def log_late(event: Compiled) -> None:
    """Log that a kernel was compiled or read late, and why."""
    verb = "read from disk" if event.from_disk else "compiled"
    _LOG.warning("%s was %s after the start (%.2f s): %s", event.kernel, verb, event.seconds, event.reason)


def raise_late(event: Compiled) -> None:
    """Raise LateCompile for a kernel that was compiled; log one that was only read."""
    log_late(event)
    if not event.from_disk:
        raise LateCompile(f"{event.kernel} was compiled after the start: {event.reason}")


class CompileCounter:
    """Counts the kernels that this process compiles after `start()`, before and after it is ready.

    A server starts a counter before it loads a model, and calls `mark_ready()` when it begins to listen. Several counters may
    run at once, and a listener that another library has set is still called. Compiles may be reported from any thread.

    Args:
        on_late: called with every kernel that comes after `mark_ready()`, in the thread that launches it; its exceptions reach
            the launch.
    """

    def __init__(self, on_late: Callable[[Compiled], None] | None = None) -> None:
        self._events: list[Compiled] = []
        self._ready_at: int | None = None
        self._on_late = on_late

    def start(self) -> "CompileCounter":
        """Start counting; return the counter itself. Raises RuntimeError if it was started already."""
        _SWITCHBOARD.add(self)
        return self

    def stop(self) -> None:
        """Stop counting. Raises RuntimeError if it was not started."""
        _SWITCHBOARD.remove(self)

    def mark_ready(self) -> None:
        """Note that nothing should be compiled from now on."""
        self._ready_at = len(self._events)

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """All kernels since `start()`, in order."""
        return tuple(self._events)

    @property
    def late(self) -> tuple[Compiled, ...]:
        """Kernels that were compiled or read from disk after `mark_ready()`; empty before that."""
        return tuple(self._events[self._ready_at :]) if self._ready_at is not None else ()

    @property
    def after_ready(self) -> int:
        """The number of kernels compiled after `mark_ready()`, which should stay 0."""
        return sum(not event.from_disk for event in self.late)

    def _hear(self, event: Compiled) -> None:
        self._events.append(event)
        if self._ready_at is not None and self._on_late is not None:
            self._on_late(event)


class _Switchboard:
    """Triton's one listener, for all counters of the process."""

    def __init__(self) -> None:
        self._counters: list[CompileCounter] = []
        self._before: Any = None
        self._variants: dict[str, list[Mapping[str, str]]] = {}
        self._lock = Lock()

    def add(self, counter: CompileCounter) -> None:
        with self._lock:
            if counter in self._counters:
                raise RuntimeError("CompileCounter.start: it has been started already; use a second counter")
            if not self._counters:
                self._before, knobs.compilation.listener = knobs.compilation.listener, self._heard
            self._counters.append(counter)

    def remove(self, counter: CompileCounter) -> None:
        with self._lock:
            if counter not in self._counters:
                raise RuntimeError("CompileCounter.stop: it does not listen; start it first")
            self._counters.remove(counter)
            # A listener that was set later still calls ours: then ours stays, without any counter.
            if not self._counters and knobs.compilation.listener == self._heard:
                knobs.compilation.listener = self._before

    def _heard(self, *, src: Any, metadata: dict[str, Any], metadata_group: Any, times: Any, cache_hit: bool) -> None:
        variant = _variant(src, metadata)
        with self._lock:
            known = self._variants.setdefault(src.name, [])
            event = Compiled(
                kernel=src.name,
                arch=metadata["target"].arch,
                from_disk=cache_hit,
                seconds=1e-6 * times.total if times else 0.0,
                reason=_difference(variant, known),
            )
            known.append(variant)
            counters = list(self._counters)
        if self._before is not None:
            self._before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
        for counter in counters:
            counter._hear(event)


def _variant(src: Any, metadata: Mapping[str, Any]) -> dict[str, str]:
    """The values for which Triton specialised a kernel: argument types, constants, alignments, options."""
    names = src.fn.arg_names if hasattr(src, "fn") else ()

    def name(path: Any) -> str:
        index = path[0] if isinstance(path, tuple) else path
        return names[index] if isinstance(index, int) and index < len(names) else str(index)

    found = {name(key): str(kind) for key, kind in getattr(src, "signature", {}).items()}
    found |= {name(path): repr(value) for path, value in getattr(src, "constants", {}).items()}
    for path, attrs in getattr(src, "attrs", {}).items():
        if not attrs:
            continue
        found[name(path)] = f"{found.get(name(path), '')} {attrs}".strip()
    found |= {option: str(metadata.get(option)) for option in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
    return found


def _difference(variant: Mapping[str, str], known: list[Mapping[str, str]]) -> str:
    """The difference of a variant from the nearest known one, as text."""
    if not known:
        return "the first variant of this kernel"

    def changed(other: Mapping[str, str]) -> list[str]:
        return [key for key in sorted({*variant, *other}) if variant.get(key) != other.get(key)]

    nearest = min(known, key=lambda other: len(changed(other)))
    changes = [f"{key}: {nearest.get(key)} -> {variant.get(key)}" for key in changed(nearest)]
    return "; ".join(changes) or "the same as one before, in another context"


_SWITCHBOARD = _Switchboard()
