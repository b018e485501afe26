"""Memory that the server and one model process share: tensors cross the border without being sent.

The memory is anonymous (memfd), so nothing is left behind by whatever end. The model's process makes it and passes its
descriptor; either side maps it. It can grow, for outputs whose size nobody knows before they are there; then both map it anew.

It holds one batch: the inputs, a line that says until when the batch may begin, and the outputs. A model with large inputs has
two such memories, so that one batch is laid out while another is computed.
"""

import mmap
import os
import struct
from math import inf

__all__ = ["ALIGN", "NOT_BEGUN", "SECONDS", "Arena", "aligned"]

ALIGN = 64
"""Bytes: where a tensor may begin."""
SECONDS = struct.Struct("<d")
"""What a batch took, in front of the words of a reply: without it these are the same again and again."""
NOT_BEGUN = b"-"
"""The answer to a batch that came to its turn too late."""


def aligned(size: int) -> int:
    """The size, rounded up to where the next tensor may begin."""
    return -(-size // ALIGN) * ALIGN


class Arena:
    """Shared memory. `view` is its bytes, until it grows."""

    def __init__(self, fd: int, size: int):
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> "Arena":
        """New memory. Raises OSError: there is not enough."""
        fd = os.memfd_create("tilewright-model", os.MFD_CLOEXEC)
        size = max(ALIGN, aligned(size))
        os.ftruncate(fd, size)
        return cls(fd, size)

    def grow(self, size: int) -> None:
        """Make it larger; what lay in it lies there still."""
        os.ftruncate(self.fd, aligned(size))
        self.remap(aligned(size))

    def remap(self, size: int) -> None:
        """The other side has grown it to `size` bytes. Views of the old mapping stay readable."""
        self.size = size
        self._map = mmap.mmap(self.fd, size)
        self.view = memoryview(self._map)

    def begin_by(self, at: int, until_s: float = inf) -> None:
        """Write at `at` until when the batch may begin, by `time.monotonic`, which all processes share; 0 recalls it."""
        SECONDS.pack_into(self.view, at, until_s)

    def may_begin(self, at: int, now_s: float) -> bool:
        """Whether the batch may still begin."""
        return now_s < SECONDS.unpack_from(self.view, at)[0]

    def close(self) -> None:
        """Let go of it; the memory ends with its last user."""
        os.close(self.fd)
