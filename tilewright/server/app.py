"""The HTTP server: OpenAI's endpoints, the checks of a request before it reaches the engine, health, metrics and the web page.

    POST /v1/completions  /v1/chat/completions     generation; the answer comes whole or as a stream (stream.py)
    POST /v1/responses                             the same through OpenAI's newer Responses API (responses/)
    POST /v1/embeddings  /v1/score  /v1/rerank     embeddings and scores of whole texts (embeddings.py)
    GET  /v1/models  /v1/models/{name}             the served model and its LoRA adapters
    POST /v1/load_lora_adapter  /v1/unload_lora_adapter     only with --adapter-dir (adapters.py)
    POST /tokenize  /detokenize                    text or a chat <-> token ids (tokens.py)
    GET  /health  /ready  /version  /metrics       is it alive; does it accept requests; which build; Prometheus metrics
    GET  /openapi.json                             the description of the API
    GET  /  /live                                  the playground, and the engine state that it draws

If an API key is set, every path requires it except the page's files, /health, /ready and /version. gate.py contains this check
and the checks that keep foreign web pages out. access.py logs the requests. connections.py enforces the deadlines of
connections.

The server does not implement TLS, several models or quotas. Use a proxy for these.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tilewright import __version__
from tilewright.engine.core import Engine
from tilewright.engine.pooling import Pass
from tilewright.engine.request import QueueFull
from tilewright.host.loading import Loading, state_of
from tilewright.server import errors
from tilewright.server.access import CLIENT_GONE, tokens_of
from tilewright.server.adapters import ModelEndpoints
from tilewright.server.bodies import Bodies
from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connections
from tilewright.server.embeddings import PoolJob, embeddings_job, rerank_job, score_job
from tilewright.server.errors import ApiError, overloaded, unavailable
from tilewright.server.gate import Gate, install_gates
from tilewright.server.intake import Intake
from tilewright.server.link import EngineLink, EngineStopped
from tilewright.server.metrics import CONTENT_TYPE, HttpCounts, Metrics
from tilewright.server.openapi import openapi
from tilewright.server.pool import Pool
from tilewright.server.prompts import Served
from tilewright.server.protocol import Job, chat_job, completion_job
from tilewright.server.refusals import Refusals
from tilewright.server.reply import Reply, Writer
from tilewright.server.responses import ResponsesReply, responses_job
from tilewright.server.stream import Answer, unless_gone
from tilewright.server.structured import GrammarGate
from tilewright.server.tokens import TokenEndpoints
from tilewright.server.watchdog import Watchdog

__all__ = ["Server", "app_of", "create_app"]

MAX_FAILURES = 10
"""After this many failed steps in a row, with no token between them, the server blames the device and not the requests."""

INLINE = ("/v1/completions", "/v1/embeddings", "/detokenize")
"""Paths whose short bodies are parsed on the event loop, because that is fast: no chat template and no pairs of texts."""
LOOK_TIMEOUT_S = 10.0
"""How long /metrics and /live wait for the end of a step."""
CLOSE_TIMEOUT_S = 5.0
"""How long the server waits for the end of a step when it shuts down."""

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
PAGE_FILES = {path.name: path for path in PAGE.iterdir() if path.suffix in PAGE_TYPES}

logger = logging.getLogger(__name__)
T = TypeVar("T")
Connect = Callable[[Metrics, Callable[[BaseException], None]], EngineLink]
"""Creates the link to the engine, on the event loop. The second argument is called once if the engine fails, with the error."""


class Server:
    """The endpoints and what they share. Its `worker` exists only between the startup and the shutdown of the app."""

    worker: EngineLink
    intake: Intake
    grammars: GrammarGate
    watchdog: Watchdog

    pool: Pool | None

    def __init__(self, connect: "Connect", served: Served, config: ServerConfig):
        self._connect = connect
        self.served = served
        self.config = config
        self.connections = Connections(config)
        counts = HttpCounts(lambda: len(self.connections.open), self.connections.ended)
        self.metrics = Metrics(counts)
        self.api = "v1"
        """The first part of the API's paths."""
        self.draining = False
        """Set once, never reset: new generations are refused, running ones finish."""
        self.failure: BaseException | None = None
        """The error that stopped the engine."""
        self.loading: Callable[[], Loading | None] = lambda: None
        """Returns what is still being loaded in addition to the engine's model: ordinary models (v2/app.py)."""
        self.hung = False
        """Set at shutdown if the engine's thread is in a step that did not end. The process cannot end by itself then."""
        self._bodies = Bodies(config)
        self.models = ModelEndpoints(served, config, lambda: self.worker, self._prepared)
        self.tokens = TokenEndpoints(served, config, self._prepared)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start everything that the endpoints need, and stop it when the app ends."""
        self.intake = Intake()
        self.worker = self._connect(self.metrics, self._failed)
        await self.worker.begin()
        self.grammars = GrammarGate(self.worker)
        self.pool = self._make_pool()
        self.watchdog = Watchdog(self.worker, self.config.step_timeout_s)
        watching = asyncio.ensure_future(self.watchdog.run())
        try:
            yield
        finally:
            watching.cancel()
            if self.pool is not None:
                self.pool.close()
            self.hung = not await self.worker.end(CLOSE_TIMEOUT_S)
            if self.hung:
                logger.error(
                    "a step of the engine did not end within %g s; the process exits without waiting for it", CLOSE_TIMEOUT_S
                )
            self.intake.close()

    def _failed(self, error: BaseException) -> None:
        self.failure = error
        logger.error("the engine failed; from now on, every request is answered with an error", exc_info=error)

    # Generation ------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, completion_job)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, chat_job)

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        return await self._answer(request, responses_job, ResponsesReply)

    def _check_open(self) -> None:
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests", code="draining")
        if self.watchdog.hangs:
            raise unavailable("the engine is in a step that does not end; the server needs a restart", code="hanging")

    def refusal(self) -> QueueFull | None:
        """Why any request for text would be refused now; None if the request's body has to be read to decide."""
        return None if self.draining or self.watchdog.hangs or not self.served.generates else self.worker.full

    async def _answer(
        self,
        request: Request,
        read: Callable[[bytes, Served, ServerConfig], Job],
        writer: Callable[..., Writer] = Reply,
    ) -> Response:
        self._check_open()
        self.served.check_generates()
        raw = await self._body(request)
        if (full := self.worker.full) is not None:
            raise overloaded(str(full), full.retry_after_s)
        job = await self._read(request, raw, lambda raw: read(raw, self.served, self.config))
        grammar = job.params[0].grammar
        if grammar is not None:
            await self.grammars.check(grammar, job.grammar_field or "grammar")
        answer = Answer(job, self.served, self.worker, writer)
        tokens = tokens_of(request.scope)
        tokens.prompt, tokens.completion = sum(map(len, job.prompts)), lambda: answer.completion_tokens
        return answer

    # Numbers of texts ------------------------------------------------------------------------------------------------

    def _make_pool(self) -> Pool | None:
        return None if self.served.pooled is None else Pool(self.served.pooled, self.worker.run_pass)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        return await self._numbers(request, embeddings_job)

    async def score(self, request: Request) -> Response:
        """POST /v1/score."""
        return await self._numbers(request, score_job)

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank."""
        return await self._numbers(request, rerank_job)

    async def _numbers(self, request: Request, read: Callable[[bytes, Served, ServerConfig], PoolJob]) -> Response:
        self._check_open()
        job = await self._prepared(request, lambda raw: read(raw, self.served, self.config))
        assert self.pool is not None, "a job was made, so the model has numbers"
        tokens_of(request.scope).prompt = job.tokens
        try:
            asking = self.pool.ask(job.texts, labels=job.labels, dimensions=job.dimensions)
            rows = await unless_gone(request.receive, asking)
        except EngineStopped as error:
            raise unavailable(str(error)) from None
        if rows is None:
            return Response(status_code=CLIENT_GONE)
        body = await asyncio.get_running_loop().run_in_executor(None, job.answer, rows)
        return Response(body, media_type="application/json")

    async def _prepared(self, request: Request, read: Callable[[bytes], T]) -> T:
        """The result of `read(body)`. It runs outside the event loop if that is worth the overhead."""
        return await self._read(request, await self._body(request), read)

    async def _read(self, request: Request, raw: bytes, read: Callable[[bytes], T]) -> T:
        return await self.intake.run(raw, read, inline=request.url.path in INLINE)

    async def _body(self, request: Request) -> bytes:
        """The request's JSON body, as bytes. Raises `ApiError` 415, 413, 408 or 503."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            wanted = "wanted application/json (curl: -H 'content-type: application/json')"
            raise ApiError(415, f"content-type is {kind[:80]!r}, {wanted}")
        return await self._bodies.read(request)

    # About the server ------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine works. 503 if it has stopped, hangs or keeps failing: restart the server then."""
        return self._state(healthy=self._alive)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while the server accepts new requests and all models are loaded."""
        return self._state(healthy=self._alive and not self.draining and self.loading() is None)

    @property
    def _alive(self) -> bool:
        return self.worker.stopped is None and self.worker.failures < MAX_FAILURES and not self.watchdog.hangs

    def _state(self, *, healthy: bool) -> Response:
        if self._alive and not self.draining:
            return JSONResponse(state_of(self.loading()), 200 if healthy else 503)
        if self._alive:
            status = "draining"
        elif self.worker.stopped is not None:
            status = "stopped"
        else:
            status = "hanging" if self.watchdog.hangs else "failing"
        return JSONResponse({"status": status}, 200 if healthy else 503)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def description(self, request: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(openapi(self.config))

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.render(await self._look(self.worker.scrape())), media_type=CONTENT_TYPE)

    async def live_view(self, request: Request) -> Response:
        """GET /live: the engine's state for the page, which requests it a few times per second."""
        view = await self._look(self.worker.live())
        more = {"latencies": self.metrics.latencies.percentiles(), **({"draining": True} if self.draining else {})}
        view = view.removesuffix(b"}") + b", " + json.dumps(more).encode()[1:]
        return Response(view, media_type="application/json", headers={"cache-control": "no-store"})

    async def _look(self, look: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                return await look
        except EngineStopped as error:
            raise unavailable(str(error)) from None
        except TimeoutError:
            raise unavailable(f"the engine's step did not end within {LOOK_TIMEOUT_S:g} s", code="busy") from None

    # The page --------------------------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """GET / and /page/{name}: static files of the playground."""
        path = PAGE_FILES.get(request.path_params.get("name", "index.html"))
        if path is None:
            raise ApiError(404, f"the page has no file {request.url.path[:200]}")
        return Response(path.read_bytes(), media_type=PAGE_TYPES[path.suffix], headers=PAGE_HEADERS)


def create_app(
    engine: Engine, served: Served, config: ServerConfig, run_pass: Callable[[Pass], np.ndarray] | None = None
) -> FastAPI:
    """The ASGI app that serves `engine` in a thread of this process. Its `Server` is `app.state.server`.

    `run_pass` computes embeddings or scores of whole texts, if `served.pooled` states that the model has them. It is called in
    the engine's thread.
    """
    # Imported here because a front process has no engine and does not need them.
    from tilewright.asm.jit import CompileCounter
    from tilewright.server.worker import EngineWorker

    def connect(metrics: Metrics, on_failure: Callable[[BaseException], None]) -> EngineLink:
        compiles = CompileCounter().start()
        compiles.mark_ready()
        return EngineWorker(
            engine, metrics.latencies, on_failure, max_wait_s=config.max_wait_s, compiles=compiles, run_pass=run_pass
        )

    return app_of(Server(connect, served, config))


def app_of(server: Server) -> FastAPI:
    """The ASGI app with the endpoints of `server`, which becomes `app.state.server`."""
    counts = server.metrics.http
    # FastAPI's generated docs would load scripts from other sites. openapi.py makes the description from the body models.
    app = FastAPI(title="tilewright", lifespan=server.lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = server
    install_gates(app, server.config, counts)
    errors.install(app)
    posts = {
        "/v1/completions": server.completions,
        "/v1/chat/completions": server.chat_completions,
        "/v1/responses": server.responses,
        "/v1/embeddings": server.embeddings,
        "/v1/score": server.score,
        "/v1/rerank": server.rerank,
        "/v1/load_lora_adapter": server.models.load,
        "/v1/unload_lora_adapter": server.models.unload,
        "/tokenize": server.tokens.tokenize,
        "/detokenize": server.tokens.detokenize,
    }
    gets = {
        "/": server.page,
        "/page/{name}": server.page,
        "/health": server.health,
        "/live": server.live_view,
        "/metrics": server.prometheus,
        "/openapi.json": server.description,
        "/ready": server.ready,
        "/v1/models": server.models.list,
        "/v1/models/{name:path}": server.models.one,
        "/version": server.version,
    }
    for paths, method in ((posts, "POST"), (gets, "GET")):
        for path, endpoint in paths.items():
            app.add_route(path, endpoint, methods=[method])
    counts.paths = frozenset({*posts, *gets})
    server.connections.shortcuts.append(Refusals(server.refusal, Gate(app, server.config, counts), counts, server.config))
    return app
