"""What computes batches, as a version of a model sees it: a process (instance.py), or another object in tests."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tilewright.host.arena import NO_TRAFFIC, Traffic
from tilewright.host.tensors import Wire

__all__ = ["RECALLED", "Done", "Reply", "Runs"]


class Reply(NamedTuple):
    """The result of a batch. `outputs` are views of shared memory, valid until the called function has returned."""

    outputs: tuple[Wire, ...]
    """Outputs of all requests together, in the signature's order; () if no request has an answer."""
    errors: dict[int, str]
    """Number of a request in the batch -> why it has no answer."""
    seconds: float
    unread: Mapping[int, str] = MappingProxyType({})
    """Number of a request -> why its inputs could not be read from the shared memory that it names."""
    traffic: Traffic = NO_TRAFFIC


RECALLED = Reply((), {}, 0.0)
"""The result of a batch that was never begun: it was recalled, its time was over, or the instance ended before."""
Done = Callable[[Reply | None], None]
"""Called once with the result of a batch; None: the instance ended during this batch."""


class Runs(Protocol):
    """Computes batches: a process, or another object in tests."""

    capacity: int
    most: int | None
    closed: bool
    blameless: bool
    """Whether the batch during which it ended may not be the cause, because the next one had begun, too."""
    on_end: Callable[[], object]
    """Called when it has ended, after `done` of its batches."""

    @property
    def busy(self) -> bool:
        """Whether it has a batch, or is closed."""
        ...

    @property
    def room(self) -> bool:
        """Whether it takes another batch behind the one that it has."""
        ...

    def run(self, parts: Sequence[int], batch: Sequence[Sequence[Wire]], done: Done, until_s: float = inf) -> None:
        """Compute a batch, after the one that runs, and call `done` once; it must not begin after `until_s`."""
        ...

    def recall(self) -> None:
        """Do not begin the batch behind the one that runs; its `done` is told, by RECALLED unless it has begun."""
        ...

    def close(self) -> None:
        """End it, whatever it is doing."""
        ...
