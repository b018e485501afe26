"""The process from which model processes are forked: torch is imported once, so a new instance starts within milliseconds.

    python -m tilewright.host.nursery FD

The socket FD receives one-byte requests, each with the descriptor of a socket for the new process; the answer is its pid. The
nursery has one thread, runs no user code and never uses a device, so a fork of it is as good as a new process. It ends with the
server, and its children end with it, whatever they are doing.
"""

import ctypes
import os
import signal
import socket
import sys

from tilewright.host.worker import main as work

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Ask the system to kill this process when its parent ends: a model that hangs does not notice a closed socket."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(fd: int) -> None:
    """Fork a model process for each request, until the server ends."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end do not become zombies
    server = socket.socket(fileno=fd)
    server.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(server, 1, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            server.close()
            _die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                work(socket.socket(fileno=fds[0]))
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.close(fds[0])
        server.send(str(pid).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
