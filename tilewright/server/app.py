"""The HTTP server: OpenAI's endpoints, their checks before the engine is touched, health, metrics and the page.

    POST /v1/completions  /v1/chat/completions     generation, whole or streamed (stream.py)
    GET  /v1/models  /v1/models/{name}             the one model that is served
    POST /tokenize  /detokenize                    text <-> token ids
    GET  /health  /ready  /version  /metrics       alive; taking requests; which build; Prometheus
    GET  /  /live                                  the playground, and the engine state that it draws

With an API key, everything but the page's files, /health, /ready and /version asks for it. Without one, a server on a loopback
address refuses requests for another host name, so that a web page elsewhere cannot reach it through DNS rebinding; and since
only `application/json` bodies are read and no CORS header is sent, it cannot post to it either.

Not here: TLS, CORS, several models, quotas. A proxy does these.
"""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tilewright import __version__
from tilewright.asm.jit import CompileCounter
from tilewright.engine.core import Engine
from tilewright.server import errors
from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError, unavailable
from tilewright.server.intake import Intake
from tilewright.server.live import LiveView
from tilewright.server.metrics import CONTENT_TYPE, Metrics
from tilewright.server.prompts import Served, encode
from tilewright.server.protocol import Job, chat_job, completion_job, parse
from tilewright.server.stream import Answer
from tilewright.server.worker import EngineStopped, EngineWorker

__all__ = ["Server", "create_app"]

MAX_FAILURES = 10
"""Failed steps without a token in between, after which the device, not the requests, is to blame."""

PAGE = Path(__file__).parent / "page"
PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
OPEN_PATHS = {"/health", "/ready", "/version"}
LOCAL_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Server:
    """The endpoints and what they share. Its worker exists between startup and shutdown of the app."""

    worker: EngineWorker
    intake: Intake

    def __init__(self, engine: Engine, served: Served, config: ServerConfig):
        self.engine = engine
        self.served = served
        self.config = config
        self.compiles = CompileCounter()
        self.metrics = Metrics(lambda: self.compiles.after_ready)
        self.draining = False
        """Set once: no new generation is taken, running ones finish."""
        self.failure: BaseException | None = None
        """What stopped the engine."""
        self.live = LiveView(engine)
        self._created_s = int(time.time())

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start the engine's thread, and end it with the app. From here on no kernel should be compiled."""
        self.intake = Intake()
        self.worker = EngineWorker(self.engine, self.metrics.latencies, self._failed, max_wait_s=self.config.max_wait_s)
        self.compiles.start().mark_ready()
        try:
            yield
        finally:
            self.worker.close()
            self.intake.close()
            self.compiles.stop()

    def _failed(self, error: BaseException) -> None:
        self.failure = error
        logger.error("the engine failed; every request is answered with an error from here on", exc_info=error)

    # Generation ------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, completion_job)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, chat_job)

    async def _answer(self, request: Request, read: Callable[[bytes, Served, ServerConfig], Job]) -> Response:
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests", code="draining")
        job = await self._prepared(request, lambda raw: read(raw, self.served, self.config))
        return Answer(job, self.served, self.worker)

    async def _prepared(self, request: Request, read: Callable[[bytes], T]) -> T:
        """`read(body)`, off the event loop where that is worth it."""
        raw = await read_body(request, self.config)
        return await self.intake.run(raw, read, inline=request.url.path != "/v1/chat/completions")

    # Text and tokens -------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize {prompt, add_special_tokens?} -> {count, max_model_len, tokens}."""

        def work(raw: bytes) -> list[int]:
            body = parse(raw, TokenizeBody)
            self.served.check_name(body.model)
            if not body.prompt:
                return self.served.tokenizer.encode("", add_special=body.add_special_tokens)
            return encode(body.prompt, self.served, add_special=body.add_special_tokens)

        tokens = await self._prepared(request, work)
        return JSONResponse({"count": len(tokens), "max_model_len": self.served.max_model_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize {tokens} -> {prompt}."""

        def work(raw: bytes) -> str:
            body = parse(raw, DetokenizeBody)
            self.served.check_name(body.model)
            return self.served.tokenizer.decode(self.served.check_ids(body.tokens, "tokens"))

        return JSONResponse({"prompt": await self._prepared(request, work)})

    # About the server ------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self.served.check_name(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "tilewright",
            "max_model_len": self.served.max_model_len,
            "chat": self.served.has_chat,
        }

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine lives and does not fail request after request; 503 asks for a restart."""
        return self._state(healthy=self._alive)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while new requests are taken."""
        return self._state(healthy=self._alive and not self.draining)

    @property
    def _alive(self) -> bool:
        return self.worker.stopped is None and self.worker.failures < MAX_FAILURES

    def _state(self, *, healthy: bool) -> Response:
        if self._alive:
            status = "draining" if self.draining else "ready"
        else:
            status = "failing" if self.worker.stopped is None else "stopped"
        return JSONResponse({"status": status}, 200 if healthy else 503)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.render(await self._look(self.engine.stats)), media_type=CONTENT_TYPE)

    async def live_view(self, request: Request) -> Response:
        """GET /live: the engine's state for the page; ask a few times a second."""
        view = await self._look(self.live.snapshot)
        return Response(view, media_type="application/json", headers={"cache-control": "no-store"})

    async def _look(self, look: Callable[[], T]) -> T:
        try:
            return await self.worker.call(look)
        except EngineStopped as error:
            raise unavailable(str(error)) from None

    # The page --------------------------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """GET / and /page/{name}: static files of the playground."""
        path = PAGE / request.path_params.get("name", "index.html")
        if path.parent != PAGE or path.suffix not in PAGE_TYPES or not path.is_file():
            raise ApiError(404, f"the page has no file {request.url.path}")
        return Response(path.read_bytes(), media_type=PAGE_TYPES[path.suffix], headers=PAGE_HEADERS)


class TokenizeBody(BaseModel):
    """Fields of /tokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    """Fields of /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: list[int]


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The request's JSON body, as bytes. Raises `ApiError` 415, 413 or 408."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"content-type is {kind[:80]!r}, wanted application/json (curl: -H 'content-type: application/json')"
        )
    too_large = ApiError(413, f"the body is larger than {config.max_body_bytes} bytes, the most this server takes")
    if int(request.headers.get("content-length", 0)) > config.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > config.max_body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {config.body_timeout_s:g} s") from None
    return bytes(body)


class Gate:
    """ASGI middleware: the API key, or the Host check of a keyless local server."""

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._key = None if config.api_key is None else config.api_key.encode()
        self._local_only = config.loopback and self._key is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        refusal = self._refusal(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if self._local_only and not LOCAL_HOST.fullmatch(host):
            hint = "set an API key or another --host to serve other names"
            return ApiError(403, f"this server answers on localhost only, not as {host[:80]!r}; {hint}", code="wrong_host")
        if self._key is None or path in OPEN_PATHS or path == "/" or path.startswith("/page/"):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key):
            return None
        got = "a wrong key" if given else "none"
        message = (
            f"Incorrect API key: got {got}, wanted 'Authorization: Bearer <key>' with the key this server was started with"
        )
        return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def create_app(engine: Engine, served: Served, config: ServerConfig) -> FastAPI:
    """The ASGI app that serves `engine`; its `Server` is at `app.state.server`."""
    server = Server(engine, served, config)
    # No generated docs: their page loads scripts from elsewhere.
    app = FastAPI(title="tilewright", lifespan=server.lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = server
    app.add_middleware(Gate, config=config)
    errors.install(app)
    for path, endpoint in {
        "/v1/completions": server.completions,
        "/v1/chat/completions": server.chat_completions,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
    }.items():
        app.add_route(path, endpoint, methods=["POST"])
    for path, endpoint in {
        "/": server.page,
        "/page/{name}": server.page,
        "/health": server.health,
        "/live": server.live_view,
        "/metrics": server.prometheus,
        "/ready": server.ready,
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.model,
        "/version": server.version,
    }.items():
        app.add_route(path, endpoint, methods=["GET"])
    return app
