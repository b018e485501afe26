"""From an app to a listening process: the socket, the signals, the end.

The socket is bound before a model is loaded, so that a port in use is known at once; it listens only when the app is ready.

Signals: the first SIGTERM or Ctrl-C drains (/ready turns 503, new generations are refused, running ones finish, then exit code
0); the second ends running requests with an error and exits with 128 + its number (130 for Ctrl-C, 143 for SIGTERM); the third
ends the process on the spot. A failed engine answers what is open with errors and exits with 1. What a signal does before the
server is ready is the caller's: `tilewright serve` ends (`ends_on_sigterm` in cli/root.py).
"""

import errno
import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tilewright.server.app import Server
from tilewright.server.config import ServerConfig

__all__ = ["bind", "run_server", "url_of"]

FLUSH_TIMEOUT_S = 10
"""How long slow readers may take for what is already written to them, once the last request has finished."""
ABORT_FLUSH_TIMEOUT_S = 1
"""The same after a second signal."""


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address, not listening yet. Raises OSError with a message for the user."""
    where = f"{config.host} port {config.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(f"the host {config.host!r} is not known ({error.strerror}); wanted an address of this machine") from None
    # With `proto` given (TCP, not 0) asyncio sets TCP_NODELAY; without it every answer waits 40 ms for a delayed ACK.
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        advice = {
            errno.EADDRINUSE: "it is in use; stop the other program or choose another with --port (0: any free one)",
            errno.EACCES: "this user may not; choose a port from 1024 on with --port",
            errno.EADDRNOTAVAIL: "this machine does not have that address; 127.0.0.1 and 0.0.0.0 always work",
        }
        raise OSError(f"cannot listen on {where}: {advice.get(error.errno or 0, error.strerror)}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The address of a bound socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: FastAPI, listener: socket.socket, announce: Callable[[str], None], *, quiet: bool = False) -> int:
    """Serve until a signal or a failure of the engine; the process' exit code. `announce` gets lines for the user."""
    config = uvicorn.Config(
        app,
        log_level="error" if quiet else "warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
        lifespan="on",
    )
    server = _Uvicorn(config, app.state.server, announce, url_of(listener))
    server.run(sockets=[listener])
    return server.exit_code


class _Uvicorn(uvicorn.Server):
    """uvicorn with draining: its own shutdown closes the socket first, so nobody could ask whether it is still ready."""

    def __init__(self, config: uvicorn.Config, server: Server, announce: Callable[[str], None], url: str):
        super().__init__(config)
        self.exit_code = 0
        self._server = server
        self._announce = announce
        self._url = url
        self._signals: list[int] = []
        self._seen = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started:
            self._announce(f"Serving {self._server.served.name} at {self._url}  (API: {self._url}/v1, Ctrl-C ends)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the signal; `on_tick` acts on it, on the event loop. The third one does not wait for that."""
        self._signals.append(sig)
        if len(self._signals) > 2:
            os._exit(128 + sig)
        if self.should_exit:
            self.force_exit = True  # what is left is only slow readers

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: move towards the end that was asked for."""
        worker = self._server.worker
        while self._seen < len(self._signals):
            self._seen += 1
            if self._seen == 1:
                self._server.draining = True
                if worker.open_channels:
                    self._announce(f"Finishing {worker.open_channels} running requests; a second signal aborts them")
            else:
                worker.stop_all("the server was told to stop at once")
                self.config.timeout_graceful_shutdown = ABORT_FLUSH_TIMEOUT_S
                self.exit_code = 128 + self._signals[self._seen - 1]
        if self._server.failure is not None:
            self.exit_code = 1
            self.should_exit = True
        if self._server.draining and worker.open_channels == 0:
            self.should_exit = True
        return await super().on_tick(counter)
