"""Runs an app as a listening process: the socket, the signals and the shutdown.

The socket listens before a model is loaded. So a port that is in use is noticed at once, and clients get the answer that the
server is loading (from starting.py for a language model; ordinary models are loaded while their server answers). The log shows
the progress of loading.

Signals:

- While a model is being loaded and no request runs, a signal ends the process at once, with 128 + the signal's number.
- Later, the first SIGTERM or Ctrl-C drains the server: /ready answers 503, new generations are refused, running ones finish,
  and the exit code is 0.
- The second signal, or `drain_timeout_s` after the first, ends running requests with an error. The exit code is 128 + the
  signal's number (130 for Ctrl-C, 143 for SIGTERM).
- The third signal ends the process immediately.

Neither a client that does not read nor a step that hangs can delay the end. If the engine fails, open requests are answered
with errors, and the exit code is 1. The effect of a signal before `run_server` is up to the caller: `tilewright serve` ends
(`ends_on_sigterm` in cli/root.py).
"""

import asyncio
import errno
import functools
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from tilewright.host.loading import Lines
from tilewright.server.app import Server
from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connection
from tilewright.server.files import connections_allowed
from tilewright.server.logs import Log
from tilewright.server.memory import settle

__all__ = ["FLUSH_TIMEOUT_S", "HttpServer", "bind", "run_server", "url_of", "uvicorn_config"]

BACKLOG = 2048
"""Connections that the kernel holds until they are accepted."""
MAX_HEAD_BYTES = 32 << 10

FLUSH_TIMEOUT_S = 10
"""After the last request has finished: how long slow clients may take to read what the server has already written."""
ABORT_FLUSH_TIMEOUT_S = 1
"""The same after a second signal."""


def bind(config: ServerConfig, *, listen: bool = False) -> socket.socket:
    """A socket bound to the configured address. Raises OSError with a message for the user.

    With `listen` it also listens. Only then is the port closed to other processes, and clients that connect wait for an answer.
    """
    listener = _bound(config.host, config.port, "--port", listen=listen)
    if config.grpc_port and listen:
        try:
            _bound(config.host, config.grpc_port, "--grpc-port", listen=True).close()
        except OSError:
            listener.close()
            raise
    return listener


def _bound(host: str, port: int, option: str, *, listen: bool) -> socket.socket:
    where = f"{host} port {port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(f"the host {host!r} is not known ({error.strerror}); give an address of this machine") from None
    # asyncio sets TCP_NODELAY only if `proto` is TCP and not 0. Without TCP_NODELAY each answer waits 40 ms for a delayed ACK.
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        if listen:
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        advice = {
            errno.EADDRINUSE: f"it is in use; stop the other program or choose another with {option} (0: any free one)",
            errno.EACCES: f"this user may not use this port; choose a port of at least 1024 with {option}",
            errno.EADDRNOTAVAIL: "this machine does not have that address; 127.0.0.1 and 0.0.0.0 always work",
        }
        raise OSError(f"cannot listen on {where}: {advice.get(error.errno or 0, error.strerror)}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The address of a bound socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_config(app: ASGIApp, connection: Callable[..., Connection]) -> uvicorn.Config:
    """uvicorn's configuration for an app of this package: HTTP/1.1 through `Connection`, nothing else."""
    return uvicorn.Config(
        app,
        http=connection,  # pyright: ignore[reportArgumentType]  # called like the class
        ws="none",
        loop="asyncio",  # the one that is tested; uvicorn would use uvloop if another package has installed it
        log_config=None,
        log_level="error",  # its warnings are about requests that are not valid HTTP: a client could fill the log with them
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        # Accept one connection at a time: asyncio tries to accept `backlog` times in a row, even if no descriptor is free.
        backlog=1,
        lifespan="on",
    )


def run_server(app: FastAPI, listener: socket.socket, log: Log, ready: Callable[[], object] | None = None) -> int:
    """Serve until a signal or a failure of the engine. Returns the process' exit code. `log` must have been entered.

    `ready` is called once the server accepts requests. If it is None, a log line states the address instead.

    If a step of the engine hangs, the function does not return: it ends the process.

    Raises:
        ValueError: the process may not open enough files to serve even one client.
    """
    ours: Server = app.state.server
    limit = connections_allowed(ours.config.max_connections)
    if limit < ours.config.max_connections:
        wanted = f"--max-connections is {ours.config.max_connections}"
        log.say(f"warning: only {limit} connections at a time, because of the limit on open files (ulimit -n); {wanted}")
    ours.connections.most = limit
    settle()
    server = _Draining(app, listener, log.say, ready)
    server.run()
    if ours.hung:
        log.close()
        os._exit(server.exit_code or 1)
    return server.exit_code


class HttpServer(uvicorn.Server):
    """uvicorn for an app of this package, on a bound socket: `run()` serves until `should_exit` is set."""

    def __init__(self, app: FastAPI, listener: socket.socket):
        super().__init__(uvicorn_config(app, functools.partial(Connection, pool=app.state.server.connections)))
        self._server: Server = app.state.server
        self._listener = listener

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; `sockets` defaults to the socket given to the constructor."""
        super().run(sockets=sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        asyncio.get_running_loop().set_exception_handler(self._server.connections.on_loop_error)
        await super().startup(sockets)
        if self.started:
            about = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
            self._server.connections.make = functools.partial(self.config.http_protocol_class, **about)
            self._listener.listen(BACKLOG)


class _Draining(HttpServer):
    """An `HttpServer` that drains. uvicorn's own shutdown closes the socket first, so /ready could no longer be requested."""

    def __init__(
        self, app: FastAPI, listener: socket.socket, announce: Callable[[str], None], ready: Callable[[], object] | None
    ):
        super().__init__(app, listener)
        self.exit_code = 0
        self._announce = announce
        self._ready: Callable[[], object] | None = ready or self._say_where
        """Called once everything is loaded."""
        self._lines = Lines(announce)
        self._signals: list[int] = []
        self._drain_end_s: float | None = None
        """The time at which requests that still run are aborted."""
        self._abort_end_s: float | None = None
        """The time after which the shutdown no longer waits for requests."""

    def _say_where(self) -> None:
        url = url_of(self._listener)
        self._announce(f"Serving {self._server.served.name} at {url}  (API: {url}/{self._server.api}, Ctrl-C ends)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Record the signal; `on_tick` acts on it, on the event loop. The third signal ends the process immediately."""
        self._signals.append(sig)
        if len(self._signals) > 2:
            os._exit(128 + sig)
        if self.should_exit:
            self.force_exit = True  # only slow readers are left

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's shutdown. With `force_exit` it skips the app's own shutdown, which runs here: it takes a bounded time."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times per second: act on signals, timeouts and failures."""
        running = self._server.worker.open_channels
        if self._ready is not None and self._server.failure is None:
            self._starts(self._ready, running)
        if self._signals and self._drain_end_s is None:
            self._server.draining = True
            seconds = self._server.config.drain_timeout_s
            self._drain_end_s = time.monotonic() + seconds
            if running:
                words = f"Finishing {running} running requests, for at most {seconds:g} s; a second signal aborts them"
                self._announce(words)
        if self._drain_end_s is not None and self._abort_end_s is None:
            if len(self._signals) > 1:
                self._abort("the server was told to stop immediately")
            elif running and time.monotonic() > self._drain_end_s:
                self._announce(f"Aborting {running} requests that did not finish in time")
                self._abort("the server is shutting down, and the request did not finish in time")
        if self._server.failure is not None:
            self.exit_code = 1
            self.should_exit = True
        late = self._abort_end_s is not None and time.monotonic() > self._abort_end_s
        if self._server.draining and (running == 0 or late):
            self.should_exit = True
        return await super().on_tick(counter)

    def _starts(self, ready: Callable[[], object], running: int) -> None:
        """Log the progress or the end of loading. Until then a signal ends the server without draining if no request runs."""
        loading = self._server.loading()
        if loading is None:
            self._ready = None
            ready()
        elif self._signals and not running:
            self._announce("interrupted" if self._signals[0] == signal.SIGINT else "terminated")
            self.exit_code = 128 + self._signals[0]
            self.should_exit = True
        else:
            self._lines.look(loading)

    def _abort(self, reason: str) -> None:
        """End running requests with an error, and the process soon after, whether or not the clients read the error."""
        self._server.worker.stop_all(reason)
        self._abort_end_s = time.monotonic() + ABORT_FLUSH_TIMEOUT_S
        self.config.timeout_graceful_shutdown = ABORT_FLUSH_TIMEOUT_S
        self.exit_code = 128 + self._signals[-1]
