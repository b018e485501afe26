"""Memory shared by the server and one model process, so that tensors need not be sent.

The memory is anonymous (memfd), so nothing is left behind, however the processes end. The model's process makes it and passes
its descriptor; both sides map it. It can grow, for outputs whose size is unknown until they are computed; then both sides map
it again.

It holds one batch: the inputs, the time until which the batch may begin, and the outputs. A model with large inputs has two
such memories, so that one batch is written while another is computed.
"""

import mmap
import os
import struct
from math import inf
from typing import NamedTuple

__all__ = ["ALIGN", "NOT_BEGUN", "NO_TRAFFIC", "SECONDS", "TRAFFIC", "Arena", "Traffic", "aligned"]

ALIGN = 64
"""Tensors begin at multiples of this many bytes."""
SECONDS = struct.Struct("<d")
"""The seconds that a batch took, which come before the text of a reply; without them, equal batches have equal replies."""
TRAFFIC = struct.Struct("<3q")
"""A `Traffic`, which comes before the seconds."""
NOT_BEGUN = b"-"
"""The answer to a batch that could not begin in time."""


class Traffic(NamedTuple):
    """How the inputs of a batch came from clients' shared memory, in bytes."""

    direct: int = 0
    """Copied by the GPU, from locked pages."""
    read: int = 0
    """Read by a processor."""
    locked: int = 0
    """Locked by the model's process after the batch."""


NO_TRAFFIC = Traffic()


def aligned(size: int) -> int:
    """The size, rounded up to the next place at which a tensor may begin."""
    return -(-size // ALIGN) * ALIGN


class Arena:
    """Shared memory. `view` is its bytes, until it grows."""

    def __init__(self, fd: int, size: int):
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> "Arena":
        """Make new memory of `size` bytes. Raises OSError if there is not enough."""
        fd = os.memfd_create("tilewright-model", os.MFD_CLOEXEC)
        size = max(ALIGN, aligned(size))
        os.ftruncate(fd, size)
        return cls(fd, size)

    def grow(self, size: int) -> None:
        """Make it larger; its contents stay."""
        os.ftruncate(self.fd, aligned(size))
        self.remap(aligned(size))

    def remap(self, size: int) -> None:
        """Map it again after the other side has grown it to `size` bytes. Views of the old mapping stay readable."""
        self.size = size
        self._map = mmap.mmap(self.fd, size)
        self.view = memoryview(self._map)

    def begin_by(self, at: int, until_s: float = inf) -> None:
        """Write at offset `at` the time until which a new batch may begin, by `time.monotonic`, which processes share."""
        SECONDS.pack_into(self.view, at, until_s)
        self.view[at + SECONDS.size] = 0

    def recall(self, at: int) -> None:
        """The batch may not begin any more. It may have begun."""
        SECONDS.pack_into(self.view, at, 0.0)

    def may_begin(self, at: int, now_s: float) -> bool:
        """Whether the batch may still begin."""
        return now_s < SECONDS.unpack_from(self.view, at)[0]

    def begins(self, at: int) -> None:
        """Note that the batch begins."""
        self.view[at + SECONDS.size] = 1

    def begun(self, at: int) -> bool:
        """Whether this was noted."""
        return bool(self.view[at + SECONDS.size])

    def close(self) -> None:
        """Close the descriptor; the memory is freed when its last user closes it."""
        os.close(self.fd)
