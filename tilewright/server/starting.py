"""A small server that answers on the port while the language model is being loaded and the app does not exist yet.

| request                            | answer                                                    |
|------------------------------------|-----------------------------------------------------------|
| /health, /v2/health/live           | 200: the process lives                                    |
| /ready, /v2/health/ready           | 503, and what is being loaded                             |
| /version                           | 200: the version                                          |
| anything else                      | 503 with Retry-After, in the error format of its API      |

It runs in a thread, on the listening socket that the real server uses later, and logs the progress of loading. Each answer
closes its connection, so that no client keeps a connection that is not served any more.
"""

import asyncio
import dataclasses
import math
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tilewright import __version__
from tilewright.host.loading import RETRY_S, Lines, Loading, state_of
from tilewright.server import errors
from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connections
from tilewright.server.errors import ApiError
from tilewright.server.gate import install_gates
from tilewright.server.metrics import HttpCounts
from tilewright.server.serve import HttpServer

__all__ = ["Starting"]

END_S = 1.0
"""How long the shutdown waits for clients that have connected but not sent a request yet."""
LIVE, READY = ("/health", "/v2/health/live"), ("/ready", "/v2/health/ready")
LAST = {"connection": "close"}
LATER = {**LAST, "retry-after": str(math.ceil(RETRY_S))}


class _State:
    """The attributes of a server that `HttpServer` uses."""

    def __init__(self, config: ServerConfig):
        self.connections = Connections(config)


class Starting(HttpServer):
    """While the context is entered: answers on a listening socket and logs the progress of loading.

    Args:
        listener: a listening socket. It is left open for the server that follows.
        say: called with each line for the log.
        what: description of what is loaded.
    """

    def __init__(self, config: ServerConfig, listener: socket.socket, say: Callable[[str], None], what: str):
        self.loading = Loading(what)
        self._say, self._lines = say, Lines(say)
        super().__init__(_app(self.loading, dataclasses.replace(config, traces=None)), listener.dup())
        self.config.timeout_graceful_shutdown = math.ceil(END_S)
        self._thread = threading.Thread(target=self.run, name="tilewright-starting", daemon=True)

    def __enter__(self) -> "Starting":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.should_exit = True
        self._thread.join()

    def stage(self, words: str) -> None:
        """Report a new stage of loading. Words of several lines, such as the memory plan, go to the log unchanged."""
        if "\n" in words:
            self._say(words)
        else:
            self.loading.note(words)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times per second."""
        self._lines.look(self.loading)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new connections, and answer the open ones."""
        for server in self.servers:
            server.close()
        end_s = asyncio.get_running_loop().time() + END_S
        while self.server_state.connections and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)


def _app(loading: Loading, config: ServerConfig) -> FastAPI:
    """The app of a server that is loading."""
    state = _State(config)
    counts = HttpCounts(lambda: len(state.connections.open), state.connections.ended)
    app = FastAPI(title="tilewright", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = state
    install_gates(app, config, counts)
    errors.install(app)

    async def answer(request: Request) -> Response:
        path = request.url.path
        if path in LIVE:
            return JSONResponse(state_of(loading), headers=LAST)
        if path in READY:
            return JSONResponse(state_of(loading), 503, headers=LAST)
        if path == "/version":
            return JSONResponse({"version": __version__}, headers=LAST)
        sentence = f"the server is not ready: {loading.sentence}"
        if path.startswith(("/v2", "/predict/")):
            return JSONResponse({"error": sentence}, 503, headers=LATER)
        return ApiError(503, sentence, type="service_unavailable", code="loading", headers=LATER).response()

    app.add_route("/{path:path}", answer, methods=["GET", "HEAD", "POST"])
    return app
