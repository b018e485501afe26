"""A server of ordinary models, either alone or in the process and on the port of a language model's server.

`attach` adds models to an existing app; `create_models_app` creates an app that serves only models. The server already answers
while the models are being loaded. Until all are loaded, /ready returns 503. A request for a model that is not loaded yet gets a
503, too. The processes of the models end with the server.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tilewright import __version__
from tilewright.extras import MissingExtra
from tilewright.host.errors import HostError
from tilewright.host.host import Host
from tilewright.host.loading import READY, Loading, state_of
from tilewright.host.regions import Regions
from tilewright.server import errors
from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connections
from tilewright.server.gate import Gate, install_gates
from tilewright.server.metrics import CONTENT_TYPE, HttpCounts
from tilewright.server.v2.fronts import Fronts
from tilewright.server.v2.heading import MAX_BODY_BYTES, Heads
from tilewright.server.v2.http import Inference
from tilewright.server.v2.metrics import HostMetrics
from tilewright.server.v2.quick import Quick

if TYPE_CHECKING:
    from tilewright.server.v2.rpc import Rpc

__all__ = ["ModelServer", "attach", "create_models_app"]

logger = logging.getLogger(__name__)


def attach(app: FastAPI, host: Host, config: ServerConfig) -> None:
    """Serve `host` from an app whose server is at `app.state.server`.

    The models begin to load when the app starts. The task `app.state.loaded` loads them; it raises nothing.
    """
    server = app.state.server
    server.rpc, app.state.host = None, host
    server.loading = lambda: host.loading
    regions = Regions() if config.shared_memory else None
    inference = Inference(host, config, regions)
    inference.draining = lambda: server.draining
    counts: HttpCounts = server.counts if isinstance(server, ModelServer) else server.metrics.http
    counts.paths |= inference.install(app)
    counts.further.append(HostMetrics(host))
    gate = Gate(app, config, counts)
    server.connections.shortcuts.append(Quick(host, gate, counts, inference.draining, config.max_body_bytes, regions))
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with inner(app):
            try:
                server.rpc = await _rpc(host, config, inference, regions)
            except (OSError, MissingExtra) as error:
                logger.error("%s", error)
                server.failure = error
            app.state.loaded = loaded = asyncio.ensure_future(_load(host, server))
            fronts = app.state.fronts = None
            if config.fronts:
                heads = Heads(gate, counts, MAX_BODY_BYTES)
                fronts = Fronts(host, config, server.connections, heads, counts, inference.draining, regions)
                fronts.start()
                app.state.fronts = fronts
            try:
                yield
            finally:
                loaded.cancel()
                await asyncio.wait({loaded})
                if server.rpc is not None:
                    await server.rpc.stop()
                if fronts is not None:
                    await fronts.close()
                await host.close()
                if regions is not None:
                    regions.unregister()

    app.router.lifespan_context = lifespan  # pyright: ignore[reportAttributeAccessIssue]


async def _load(host: Host, server: Any) -> None:
    """Load the models, unless the server has already failed. If a model of the command line cannot load, the server fails."""
    if server.failure is not None:
        return
    started_s = time.monotonic()
    try:
        await host.start()
    except (HostError, ValueError, OSError) as error:
        logger.error("%s", error)
        server.failure = error
        return
    logger.info("%d models loaded in %.1f s: %s", len(host.models), time.monotonic() - started_s, ", ".join(host.models))


async def _rpc(host: Host, config: ServerConfig, inference: Inference, regions: Regions | None) -> "Rpc | None":
    if config.grpc_port is None:
        return None
    from tilewright.server.v2.rpc import Rpc  # needs an extra

    return await Rpc.start(host, config, inference.draining, regions)


@dataclass
class _Requests:
    """The part of an engine worker's interface that serve.py uses, for models."""

    host: Host

    @property
    def open_channels(self) -> int:
        """Number of requests that are not answered yet."""
        return self.host.running

    def stop_all(self, reason: str) -> None:
        """Answer all open requests with an error."""
        self.host.abort(reason)


@dataclass
class _Named:
    name: str


class ModelServer:
    """The state of a server that serves only ordinary models, as serve.py and the routes outside the protocol use it."""

    def __init__(self, host: Host, config: ServerConfig):
        self.host, self.config = host, config
        self.connections = Connections(config)
        self.counts = HttpCounts(lambda: len(self.connections.open) + self.connections.elsewhere, self.connections.ended)
        self.draining = False
        self.loading: Callable[[], Loading | None] = lambda: host.loading
        """Returns the state of loading; None: all models are loaded."""
        self.rpc: Rpc | None = None
        self.api = "v2"
        self.failure: BaseException | None = None
        self.hung = False
        self.worker = _Requests(host)
        self.served = _Named("models")
        self._registry = CollectorRegistry()
        self._registry.register(_Collected(self.counts))
        ProcessCollector(registry=self._registry)

    @property
    def _state(self) -> dict[str, str]:
        return {"status": "draining"} if self.draining else state_of(self.loading())

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the process serves. If a model's process fails, it is replaced without a server restart."""
        return JSONResponse(self._state)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while new requests are accepted and all models are loaded."""
        return JSONResponse(self._state, 200 if self._state == READY else 503)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE)


class _Collected(Collector):
    def __init__(self, counts: HttpCounts):
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus to collect the metrics."""
        yield from self._counts.collect()


def create_models_app(host: Host, config: ServerConfig) -> FastAPI:
    """The ASGI app that serves only `host`. Its `ModelServer` is at `app.state.server`."""
    server = ModelServer(host, config)
    app = FastAPI(title="tilewright", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = server
    install_gates(app, config, server.counts, exposed=("inference-header-content-length",))
    errors.install(app)
    gets = {"/health": server.health, "/ready": server.ready, "/version": server.version, "/metrics": server.prometheus}
    for path, endpoint in gets.items():
        app.add_route(path, endpoint, methods=["GET"])
    server.counts.paths = frozenset(gets)
    attach(app, host, config)
    return app
