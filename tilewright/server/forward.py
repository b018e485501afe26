"""The front of several replicas. It accepts requests as a server of one process does, and passes each to one replica.

The front parses and checks a request, because its token ids determine which replica has its beginning in the cache (router.py).
It sends the body unchanged to the replica, and passes the answer on as it arrives.

If a replica cannot be reached, ends, drains or is full, the request does not fail: another replica is tried, as long as no part
of the answer has been sent. If a part of a stream has been sent, the stream ends with an error event, as in a server of one
process.

`/metrics` contains the numbers of all replicas, each with the label `replica`, and those of the router. Any ready replica
answers everything else (models, tokenize, the page).
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tilewright.engine.blocks import page_digest
from tilewright.host.loading import Loading
from tilewright.server import errors
from tilewright.server.access import request_id_of, tokens_of
from tilewright.server.bodies import Bodies
from tilewright.server.config import ServerConfig
from tilewright.server.connections import Connections
from tilewright.server.errors import unavailable
from tilewright.server.fleet import Fleet, Replica
from tilewright.server.forward_adapters import ReplicaAdapters
from tilewright.server.forward_metrics import router_metrics
from tilewright.server.gate import install_gates
from tilewright.server.intake import Intake
from tilewright.server.logs import Log
from tilewright.server.metrics import CONTENT_TYPE, HttpCounts
from tilewright.server.passing import BUSY, Running, labelled, lost_event, nobody
from tilewright.server.prompts import Served
from tilewright.server.protocol import Job, chat_job, completion_job
from tilewright.server.responses import responses_job
from tilewright.server.router import DIGEST_BYTES, Decision
from tilewright.server.serve import run_server
from tilewright.server.spans import span_of
from tilewright.server.starting import Starting

__all__ = ["Front", "digests_of", "front_of", "serve_replicas"]

PASSED_ON = ("content-type", "retry-after", "cache-control", "x-accel-buffering", "x-tilewright-ignored")
"""Headers of a replica's answer that are passed to the client. The others concern the connection to the replica."""
MAX_PAGES = 1 << 14
"""Most pages of a prompt that are looked up."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5)

logger = logging.getLogger(__name__)


def digests_of(prompt: list[int], page_tokens: int) -> list[bytes]:
    """Digests of the whole pages of a prompt, as the engine computes them, cut to the `DIGEST_BYTES` that the router keeps."""
    found, digest = [], b""
    for start in range(0, min(len(prompt) - page_tokens + 1, MAX_PAGES * page_tokens), page_tokens):
        digest = page_digest(digest, prompt[start : start + page_tokens])
        found.append(digest[:DIGEST_BYTES])
    return found


class Front:
    """The endpoints. It also has the attributes of a server that `run_server` uses."""

    api = "v1"
    """The first part of the API's paths."""

    def __init__(self, fleet: Fleet, served: Served, config: ServerConfig):
        self.fleet, self.served, self.config = fleet, served, config
        self._bodies = Bodies(config)
        self.connections = Connections(config)
        self.counts = HttpCounts(lambda: len(self.connections.open), self.connections.ended)
        self.worker = Running()
        self.draining = self.hung = False
        self.failure: BaseException | None = None
        self._loading = Loading(f"the first replica of {served.name}")
        given = fleet.engine_options.get("adapters") or ()
        self.adapters = ReplicaAdapters(config, given, self._ready_urls, lambda: self.session)
        fleet.prepare = self._prepare
        self.retries: Counter[str] = Counter()
        """Reason for passing a request to another replica -> number of times."""

    intake: Intake
    session: aiohttp.ClientSession

    def loading(self) -> Loading | None:
        """What is being loaded, until the first replica accepts requests; then None."""
        return None if self.fleet.ready else self._loading

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Watch the replicas while the app runs."""
        self.intake = Intake()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        key = {"authorization": f"Bearer {self.fleet.key}"}
        async with aiohttp.ClientSession(
            connector=connector, timeout=TIMEOUT, auto_decompress=False, headers=key
        ) as self.session:
            watching = asyncio.ensure_future(self.fleet.watch(self.session))
            watching.add_done_callback(self._watched)
            try:
                yield
            finally:
                self.fleet.ending = True
                watching.cancel()
                self.intake.close()

    def _watched(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            logger.error("watching the replicas failed", exc_info=error)

    # Generation ------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, completion_job)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, chat_job)

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        return await self._generate(request, responses_job)

    async def _generate(self, request: Request, read: Callable[[bytes, Served, ServerConfig], Job]) -> Response:
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests", code="draining")
        page_tokens = self.fleet.router.page_tokens

        def work(raw: bytes) -> tuple[bytes, Job, list[bytes]]:
            job = read(raw, self.served, self.config)
            return raw, job, digests_of(job.prompts[0], page_tokens)

        raw, job, digests = await self.intake.run(await self._bodies.read(request), work, inline=False)
        tokens_of(request.scope).prompt = sum(map(len, job.prompts))
        return _Forwarded(self, request, raw, job, digests)

    # Adapters --------------------------------------------------------------------------------------------------------

    def _ready_urls(self) -> list[str]:
        return [self.fleet.replicas[index].url for index in self.fleet.ready]

    async def _prepare(self, replica: Replica) -> None:
        try:
            await self.adapters.prepare(replica.url)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            logger.error("replica %d could not be asked for its adapters: %s", replica.index, error)

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        return await self.adapters.load(await self._bodies.read(request))

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        return await self.adapters.unload(await self._bodies.read(request))

    # Everything else -------------------------------------------------------------------------------------------------

    async def anything(self, request: Request) -> Response:
        """Pass the request to a ready replica, the least loaded first."""
        raw = b"" if request.method in ("GET", "HEAD") else await self._bodies.read(request)
        router = self.fleet.router
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        for index in sorted(self.fleet.ready, key=router.load_of):
            try:
                url = self.fleet.replicas[index].url + target
                async with self.session.request(request.method, url, data=raw or None, headers=self.headers(request)) as found:
                    return Response(await found.read(), found.status, headers=passed_on(found))
            except (aiohttp.ClientError, OSError):
                self.fleet.suspect(index)
        raise nobody()

    def headers(self, request: Request) -> dict[str, str]:
        """The headers for a request to a replica."""
        found = {"x-request-id": request_id_of(request.scope)}
        if (span := span_of(request.scope)) is not None:
            found["traceparent"] = span.traceparent
        if kind := request.headers.get("content-type"):
            found["content-type"] = kind
        return found

    async def health(self, request: Request) -> Response:
        """GET /health: 503 only if watching the replicas has failed. A replica that is down is restarted automatically."""
        return self._state(self.failure is None)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while at least one replica accepts requests."""
        return self._state(self.failure is None and not self.draining and bool(self.fleet.ready))

    def _state(self, healthy: bool) -> Response:
        status = "stopped" if self.failure else "draining" if self.draining else "ready" if self.fleet.ready else "starting"
        replicas = [
            {"ready": one.ready, "restarts": one.restarts, **({"loading": one.stage} if one.stage else {})}
            for one in self.fleet.replicas
        ]
        return JSONResponse({"status": status, "replicas": replicas}, 200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""

        async def text_of(index: int) -> str:
            try:
                async with self.session.get(f"{self.fleet.replicas[index].url}/metrics") as found:
                    return await found.text() if found.status == 200 else ""
            except (aiohttp.ClientError, OSError):
                return ""

        ready = self.fleet.ready
        texts = await asyncio.gather(*map(text_of, ready))
        lines = [*router_metrics(self.fleet, self.retries), *labelled(zip(ready, texts)), ""]
        return Response("\n".join(lines), media_type=CONTENT_TYPE)


def passed_on(found: aiohttp.ClientResponse) -> dict[str, str]:
    """The headers of a replica's answer for the client."""
    return {name: found.headers[name] for name in PASSED_ON if name in found.headers}


class _Forwarded(Response):
    """The answer of a replica. The request to the replica is made while this response is sent."""

    def __init__(self, front: Front, request: Request, raw: bytes, job: Job, digests: list[bytes]):
        super().__init__()
        self._front, self._request, self._raw, self._job, self._digests = front, request, raw, job, digests
        self._tokens = sum(map(len, job.prompts))
        self._chosen = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a replica's answer. Raises `ApiError` only if nothing has been sent."""
        await self._front.worker.pass_on(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        front, tried, last = self._front, set[int](), None
        while True:
            if not tried:
                await self._somebody()
            left = [index for index in front.fleet.ready if index not in tried]
            if not left:
                break
            decision = front.fleet.router.choose(self._digests, self._tokens, left)
            tried.add(decision.replica)
            last, why = await self._ask(decision, send, last)
            if why is None:
                return
            front.retries[why] += 1
        if last is None:
            raise nobody()
        status, headers, body = last
        await Response(body, status, headers=headers)(self._request.scope, self._request.receive, send)

    async def _somebody(self) -> None:
        """If all replicas are being restarted, wait for one, for at most `max_wait_s`."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._front.config.max_wait_s
        while not self._front.fleet.ready and loop.time() < end_s:
            await asyncio.sleep(0.05)

    async def _ask(
        self, decision: Decision, send: Send, last: tuple[int, dict[str, str], bytes] | None
    ) -> tuple[tuple[int, dict[str, str], bytes] | None, str | None]:
        """Send the request to a replica and pass on its answer.

        Returns (the refusal to pass on if no other replica answers, why another replica has to be tried or None: the client has
        its answer).
        """
        front, fleet = self._front, self._front.fleet
        self._chosen += 1
        name = f"{request_id_of(self._request.scope)} {id(self)} {self._chosen}"
        fleet.router.started(name, decision, self._digests)
        url = fleet.replicas[decision.replica].url + self._job.path
        sent = False
        try:
            async with front.session.post(url, data=self._raw, headers=front.headers(self._request)) as found:
                if found.status in BUSY:
                    body = await found.read()
                    return (found.status, passed_on(found), body), "full" if found.status == 429 else "unavailable"
                if "text/event-stream" not in found.headers.get("content-type", ""):
                    body = await found.read()
                    await Response(body, found.status, headers=passed_on(found))(
                        self._request.scope, self._request.receive, send
                    )
                    return None, None
                chunks = found.content.iter_any()
                first = await anext(chunks, b"")
                if not first:
                    raise aiohttp.ClientPayloadError("the stream is empty")
                fleet.router.first_token(name)
                raw_headers = [(key.encode(), value.encode()) for key, value in passed_on(found).items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
                sent = True
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return None, None
        except (aiohttp.ClientError, OSError) as error:
            fleet.suspect(decision.replica)
            if not sent:
                return last, "lost"
            logger.error("replica %d was lost during an answer: %s", decision.replica, error)
            await send({"type": "http.response.body", "body": lost_event()})
            return None, None
        finally:
            fleet.router.finished(name)


def front_of(fleet: Fleet, served: Served, config: ServerConfig) -> FastAPI:
    """The ASGI app in front of replicas. Its `Front` is `app.state.server`."""
    front = Front(fleet, served, config)
    app = FastAPI(title="tilewright", lifespan=front.lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = front
    install_gates(app, config, front.counts)
    errors.install(app)
    posts = {
        "/v1/completions": front.completions,
        "/v1/chat/completions": front.chat_completions,
        "/v1/responses": front.responses,
        "/v1/load_lora_adapter": front.load_adapter,
        "/v1/unload_lora_adapter": front.unload_adapter,
    }
    posts |= dict.fromkeys(("/tokenize", "/detokenize", "/v1/embeddings", "/v1/score", "/v1/rerank"), front.anything)
    gets = {"/health": front.health, "/ready": front.ready, "/metrics": front.metrics}
    gets |= dict.fromkeys(("/", "/page/{name}", "/live", "/openapi.json", "/version", "/v1/models"), front.anything)
    gets["/v1/models/{name:path}"] = front.anything
    for paths, method in ((posts, "POST"), (gets, "GET")):
        for path, endpoint in paths.items():
            app.add_route(path, endpoint, methods=[method])
    front.counts.paths = frozenset({*posts, *gets})
    return app


def serve_replicas(spec: dict[str, Any], config: ServerConfig, listener: socket.socket, log: Log) -> int:
    """Start replicas and serve them on a bound socket until a signal. Returns the exit code. `spec`: see `Fleet`.

    Raises:
        ValueError: a replica does not start.
    """
    fleet = Fleet(spec, config, log.say)
    try:
        with Starting(config, listener, log.say, f"{spec['name']} in {config.replicas} replicas") as starting:
            fleet.start_all(starting.stage)
        served = Served.described(fleet.hello["served"])
        return run_server(front_of(fleet, served, config), listener, log)
    finally:
        fleet.end()
