"""A socket over which the server sends packets to a model's process, some with a file, without ever waiting for it."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from tilewright.host.regions import Region

__all__ = ["Channel"]


class Channel:
    """A channel to the process: packets go out as it has room for them. `broken` is called if it ends."""

    def __init__(self, channel: socket.socket, broken: Callable[[], object]):
        channel.setblocking(False)
        self.socket, self._broken = channel, broken
        self._outgoing = deque[tuple[bytes, Region | None]]()
        """Packets that are still to be sent, some with a region's file."""
        self._blocked = False
        """Whether the channel is full."""
        self._loop = asyncio.get_running_loop()

    def send(self, *packets: bytes, region: Region | None = None) -> None:
        """Send packets; the file of `region` goes with the first one."""
        for packet in packets:
            self._outgoing.append((packet, region))
            region = None
        if not self._blocked:
            self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            packet, region = self._outgoing[0]
            try:
                if region is None:
                    self.socket.send(packet)
                else:
                    socket.send_fds(self.socket, [packet], [region.fd])
            except BlockingIOError:
                if not self._blocked:
                    self._blocked = True
                    self._loop.add_writer(self.socket.fileno(), self._flush)
                return
            except OSError:
                self._broken()
                return
            self._outgoing.popleft()
        if self._blocked:
            self._blocked = False
            self._loop.remove_writer(self.socket.fileno())

    def close(self) -> None:
        """Close it; what is not sent is lost."""
        self._outgoing.clear()
        self._broken = lambda: None  # otherwise a cycle would keep the instance, and its memory, until it is collected
        self._loop.remove_writer(self.socket.fileno())
        self.socket.close()
