"""Memory that the server and one model process share: tensors cross the border without being sent.

The memory is anonymous (memfd), so nothing is left behind by whatever end. The model's process makes it and passes its
descriptor; either side maps it. It can grow, for outputs whose size nobody knows before they are there; then both map it anew.
"""

import mmap
import os
import struct

__all__ = ["ALIGN", "SECONDS", "Arena", "aligned"]

ALIGN = 64
"""Bytes: where a tensor may begin."""
SECONDS = struct.Struct("<d")
"""What a batch took, in front of the words of a reply: without it these are the same again and again."""


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

    def close(self) -> None:
        """Let go of it; the memory ends with its last user."""
        os.close(self.fd)
