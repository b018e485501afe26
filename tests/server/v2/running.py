"""A server of models in a thread of the test's process; the models' processes are functions (tests/host/fakes.py)."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.host.fakes import Makes
from tilewright.host.config import ModelConfig
from tilewright.host.host import Host, Source
from tilewright.host.repository import Repository
from tilewright.server.config import ServerConfig
from tilewright.server.serve import HttpServer, bind
from tilewright.server.v2.app import create_models_app


def double(x: np.ndarray) -> np.ndarray:
    """The model; a row of -1 raises."""
    if (x == -1).any():
        raise ValueError("a poisoned row")
    return 2 * x


@dataclass
class Server:
    """A server that listens."""

    port: int
    rpc_port: int
    host: Host
    makes: Makes
    state: Any
    """Of its app."""

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, said: Any) -> tuple[int, Any]:
        """(status, JSON) of a JSON body."""
        status, _, body = self.request("POST", path, json.dumps(said).encode(), content_type="application/json")
        return status, json.loads(body)


@contextmanager
def serving(
    models: Mapping[str, ModelConfig] | None = None,
    repository: Path | None = None,
    makes: Makes | None = None,
    *,
    processes: bool = False,
    loaded: bool = True,
    **config: Any,
) -> Iterator[Server]:
    """A server of these models while the block runs; with `processes` they are models, in processes of their own.

    Without `loaded` the block begins as soon as the server answers.
    """
    makes = makes or Makes(double)
    sources = {name: Source(model, None) for name, model in (models or {}).items()}
    host = Host(None if repository is None else Repository(repository), sources, start=None if processes else makes)
    settings = ServerConfig(**{"port": 0, "grpc_port": 0, **config})
    listener = bind(settings)
    app = create_models_app(host, settings)
    server = HttpServer(app, listener)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started or (loaded and not host.started):
            assert thread.is_alive()
            assert app.state.server.failure is None
            time.sleep(0.001)
        rpc = app.state.server.rpc
        yield Server(listener.getsockname()[1], 0 if rpc is None else rpc.port, host, makes, app.state)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
