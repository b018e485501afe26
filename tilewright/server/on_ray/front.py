"""The front of replicas on a Ray cluster. It accepts requests as every tilewright server does, and passes each to a replica.

Ray Serve chooses the replica: it draws two at random and takes the one with fewer requests. It also replaces replicas that die,
and changes their number.

| event                                            | reaction                                                              |
|--------------------------------------------------|-----------------------------------------------------------------------|
| a replica dies before the head of its answer     | the request is sent again, to a replica that Ray Serve chooses        |
| a replica dies later                             | a stream ends with the error event `replica_lost`                     |
| a replica answers 429 or 503                     | the request is sent once more; a second refusal goes to the client    |
| there is no replica                              | the request waits for up to `max_wait_s`, then it gets a 503          |
| a request loads or unloads a model or adapter    | it goes to all replicas; if one of them fails, its answer is returned |
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Receive, Scope, Send

from tilewright.server import errors
from tilewright.server.access import request_id_of
from tilewright.server.bodies import Bodies
from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connections
from tilewright.server.errors import unavailable
from tilewright.server.gate import install_gates
from tilewright.server.metrics import CONTENT_TYPE, HttpCounts
from tilewright.server.on_ray.replica import Head
from tilewright.server.passing import BUSY, Running, labelled, lost_event, nobody
from tilewright.server.spans import span_of

__all__ = ["APP", "DEPLOYMENT", "RayFront", "front_on_ray"]

APP, DEPLOYMENT = "tilewright", "replica"
ATTEMPTS = 5
"""Most times that a request is sent to a replica."""
BUSY_ATTEMPTS = 2
LOOK_S = 1.0
CONTROL_S = 600.0
"""How long it may take to load a model in all replicas."""
OWN = (b"host", b"authorization", b"origin", b"connection", b"content-length", b"transfer-encoding", b"x-request-id")
"""Headers of a client that concern only the front and are not passed on."""
TOGETHER = ("/v2/repository/models/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Prefixes of paths that change what a replica serves. A POST to them goes to all replicas."""

logger = logging.getLogger(__name__)


class _Named:
    def __init__(self, name: str):
        self.name = name


class RayFront:
    """The endpoints. It also has the attributes of a server that `run_server` uses."""

    def __init__(self, handle: DeploymentHandle, about: dict[str, Any], config: ServerConfig):
        self.config, self.served, self.api = config, _Named(about["name"]), about["api"]
        self._handle, self._bodies = handle, Bodies(config)
        self.connections = Connections(config)
        self.counts = HttpCounts(lambda: len(self.connections.open), self.connections.ended)
        self.worker = Running()
        self.draining = self.hung = False
        self.failure: BaseException | None = None
        self.retries: Counter[str] = Counter()
        """Reason for sending a request again -> number of times."""
        self.replicas = 1
        """Number of replicas that accept requests, according to Ray."""

    def loading(self) -> None:
        """Returns None: the replicas were ready before this front was created."""

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Watch the number of replicas while the app runs."""
        watching = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            try:
                self.replicas = await asyncio.to_thread(running_replicas)
            except (RayError, RayServeException, ConnectionError, TimeoutError) as error:
                self.replicas = 0
                logger.error("the state of the replicas could not be read from Ray: %s", str(error)[:300])
            await asyncio.sleep(LOOK_S)

    async def anything(self, request: Request) -> Response:
        """Pass the request to a replica."""
        if self.draining and request.method == "POST":
            raise unavailable("the server is shutting down and takes no new requests", code="draining")
        raw = b"" if request.method in ("GET", "HEAD") else await self._bodies.read(request)
        return _Passed(self, request, raw)

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the front works. Ray replaces failed replicas."""
        return self._state(self.failure is None)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while at least one replica accepts requests."""
        return self._state(self.failure is None and not self.draining and self.replicas > 0)

    def _state(self, healthy: bool) -> Response:
        status = "draining" if self.draining else "ready" if self.replicas else "starting"
        return JSONResponse({"status": status, "replicas": self.replicas}, 200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: the front's own numbers, and those of all replicas with the label `replica`."""
        lines = ["# TYPE tilewright_ray_replicas gauge", f"tilewright_ray_replicas {self.replicas}"]
        lines.append("# TYPE tilewright_router_retries_total counter")
        lines += [f'tilewright_router_retries_total{{reason="{why}"}} {count}' for why, count in sorted(self.retries.items())]
        found = await self.every(scope_of(request, "GET", "/metrics"), b"", 10.0)
        lines += labelled((number, body.decode()) for number, ((status, _), body) in enumerate(found) if status == 200)
        return Response("\n".join([*lines, ""]), media_type=CONTENT_TYPE)

    async def every(self, scope: dict[str, Any], body: bytes, timeout_s: float) -> list[tuple[Head, bytes]]:
        """The answers of all replicas. Raises `ApiError` if one of them does not answer."""
        try:
            return await self._handle.broadcast("whole", scope, body).results_async(timeout_s=timeout_s)
        except (RayError, RayServeException, TimeoutError) as error:
            raise unavailable(f"not every replica answers: {str(error)[:200]}", code="no_replica") from None

    def ask(self, scope: dict[str, Any], body: bytes) -> Any:
        """Send a request to a replica. Returns a stream with the pieces of its answer, as `Replica.answer` yields them."""
        return self._handle.options(method_name="answer", stream=True).remote(scope, body)


def running_replicas() -> int:
    """Number of replicas that accept requests."""
    status = serve.status().applications.get(APP)
    deployment = None if status is None else status.deployments.get(DEPLOYMENT)
    return 0 if deployment is None else sum(n for state, n in deployment.replica_states.items() if state == "RUNNING")


def scope_of(request: Request, method: str | None = None, path: str | None = None) -> dict[str, Any]:
    """The ASGI scope of a request for a replica."""
    given = request.scope
    headers = [(name, value) for name, value in given["headers"] if name not in OWN]
    headers += [(b"host", b"localhost"), (b"x-request-id", request_id_of(given).encode())]
    if (span := span_of(given)) is not None:
        headers = [header for header in headers if header[0] != b"traceparent"]
        headers.append((b"traceparent", span.traceparent.encode()))
    path = str(path or given["path"])
    return {
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method or given["method"],
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": given["query_string"],
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }


class _Passed(Response):
    """The answer of a replica. The request to the replica is made while this response is sent."""

    def __init__(self, front: RayFront, request: Request, raw: bytes):
        super().__init__()
        self._front, self._request, self._raw = front, request, raw
        self._scope = scope_of(request)
        self._scope["headers"].append((b"content-length", str(len(raw)).encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a replica's answer. Raises `ApiError` only if nothing has been sent."""
        await self._front.worker.pass_on(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        path, front = self._scope["path"], self._front
        if self._scope["method"] == "POST" and path.startswith(TOGETHER):
            found = await front.every(self._scope, self._raw, CONTROL_S)
            (status, headers), body = max(found, key=lambda one: one[0][0])
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        loop = asyncio.get_running_loop()
        end_s, busy = loop.time() + front.config.max_wait_s, 0
        for _ in range(ATTEMPTS):
            while not front.replicas and loop.time() < end_s:
                await asyncio.sleep(0.05)
            why = await self._ask(send, last=busy + 1 >= BUSY_ATTEMPTS)
            if why is None:
                return
            busy += why == "busy"
            front.retries[why] += 1
        raise nobody()

    async def _ask(self, send: Send, *, last: bool) -> str | None:
        """Send the request to a replica and pass on its answer. `last`: pass on a refusal, too.

        Returns why the request has to be sent again; None: the client has its answer.
        """
        pieces, sent = self._front.ask(self._scope, self._raw), False
        try:
            async for piece in pieces:
                if isinstance(piece, bytes):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    continue
                status, headers = piece
                if status in BUSY and not last:
                    return "busy"
                sent = True
                self._streams = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
                await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return None
        except (RayError, RayServeException) as error:
            if not sent:
                logger.warning("a replica was lost before it answered: %s", str(error).splitlines()[0][:200])
                return "lost"
            logger.error("a replica was lost during an answer: %s", str(error).splitlines()[0][:200])
            words = lost_event() if self._streams else b""
            await send({"type": "http.response.body", "body": words, "more_body": not self._streams})
            return None
        finally:
            pieces.cancel()


def front_on_ray(handle: DeploymentHandle, about: dict[str, Any], config: ServerConfig) -> FastAPI:
    """The ASGI app in front of replicas. Its `RayFront` is `app.state.server`."""
    front = RayFront(handle, about, config)
    app = FastAPI(title="tilewright", lifespan=front.lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = front
    install_gates(app, config, front.counts)
    errors.install(app)
    for path, endpoint in (("/health", front.health), ("/ready", front.ready), ("/metrics", front.metrics)):
        app.add_route(path, endpoint, methods=["GET"])
    app.add_route("/{path:path}", front.anything, methods=["GET", "POST"])
    front.counts.paths = frozenset({"/v1/completions", "/v1/chat/completions", "/health", "/ready", "/metrics"})
    return app
