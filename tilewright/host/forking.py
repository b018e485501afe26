"""The server's side of the process that model processes are forked from (nursery.py)."""

import asyncio
import socket
import subprocess
import sys

__all__ = ["LoadFailed", "Nursery"]


class LoadFailed(ValueError):
    """A model cannot be loaded; the message says why."""


class Nursery:
    """The process from which model processes are forked; `start` starts one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def fork(self) -> tuple[int, socket.socket]:
        """(the pid of a new process, the socket to its worker). Raises LoadFailed if no process can be started."""
        async with self._lock:
            if self._process is None or self._process.poll() is not None:
                await self._start()
            assert self._socket is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                socket.send_fds(self._socket, [b"+"], [theirs.fileno()])
                pid = await asyncio.get_running_loop().sock_recv(self._socket, 64)
            except OSError as error:
                raise LoadFailed(f"no process for a model can be started: {error.strerror}") from None
            finally:
                theirs.close()
            if not pid:
                ours.close()
                raise LoadFailed("no process for a model can be started: the process from which they are forked has ended")
            ours.setblocking(False)
            return int(pid), ours

    async def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tilewright.host.nursery", str(theirs.fileno())]
        # A separate session, so that Ctrl-C on the terminal reaches only the server, which lets running requests finish.
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        if not await asyncio.get_running_loop().sock_recv(ours, 16):
            raise LoadFailed("the process from which models are forked ended while it started; its error is in the log")

    def close(self) -> None:
        """End this process, and with it every model process."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None
