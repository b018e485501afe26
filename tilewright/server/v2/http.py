"""Routes of the Open Inference Protocol v2, and POST /predict/NAME.

    GET  /v2  /v2/health/live  /v2/health/ready                    the server
    GET  /v2/models/NAME[/versions/N]                              metadata; /ready, /config and /stats below it
    POST /v2/models/NAME[/versions/N]/infer                        inference
    POST /v2/repository/index  /v2/repository/models/NAME/load  /unload
    GET  /v2/systemsharedmemory[/region/NAME]/status               with --shared-memory
    POST /v2/systemsharedmemory/region/NAME/register  [/region/NAME]/unregister
    POST /predict/NAME                                             JSON, CSV or an image (predict.py)

Errors have the format of the protocol: `{"error": sentence}`.
"""

import asyncio
import dataclasses
import json
import math
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tilewright import __version__
from tilewright.host.errors import Expired, Failed, HostError, NotFound, Overloaded, Refused, Unavailable
from tilewright.host.host import Answer, Host, Model
from tilewright.host.loading import state_of
from tilewright.host.regions import INLINE_BYTES as INLINE_REGION_BYTES
from tilewright.host.regions import MISSING, Regions
from tilewright.host.version import Ask
from tilewright.server.bodies import Bodies
from tilewright.server.config import ServerConfig
from tilewright.server.spans import RequestSpan, span_of
from tilewright.server.v2.codec import InferRequest, answer_body, inflated, parse_infer, parse_json, placed
from tilewright.server.v2.describe import config_of, extensions_of, index_of, metadata_of, stats_of
from tilewright.server.v2.predict import predict

__all__ = ["STATUS", "Inference", "answered", "failure", "noted"]

STATUS: dict[type[HostError], int] = {
    Refused: 400,
    NotFound: 404,
    Overloaded: 429,
    Failed: 500,
    Unavailable: 503,
    Expired: 504,
}
INLINE_BYTES = 64 << 10
"""Larger JSON is parsed, and larger answers are encoded, in a thread, so that they do not block the event loop."""


def failure(error: HostError) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the answer for an error."""
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1e3))
    return STATUS[type(error)], headers, json.dumps({"error": str(error)}).encode()


def noted(ask: Ask, span: RequestSpan | None) -> Ask:
    """The options of a request, extended so that the periods of the request are recorded in its span."""
    return ask if span is None else dataclasses.replace(ask, note=span.child)


async def answered(host: Host, name: str, version: str | None, asked: InferRequest, span: RequestSpan | None) -> Answer:
    """Compute the answer to a request, and write the outputs that it wants in shared memory. Raises HostError."""
    answer = await host.infer(name, version, asked.inputs, noted(asked.ask, span))
    if sum(map(len, asked.places.values())) <= INLINE_REGION_BYTES:
        placed(answer, asked.places)
    else:
        await asyncio.to_thread(placed, answer, asked.places)
    return answer


def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HostError)
    status, headers, body = failure(error)
    return Response(body, status, headers=headers)


class Inference:
    """The endpoints of one host. `regions` is clients' shared memory; None: it is off."""

    def __init__(self, host: Host, config: ServerConfig, regions: Regions | None = None):
        self.host, self.config, self.regions = host, config, regions
        self._bodies = Bodies(config)
        self.draining: Callable[[], bool] = lambda: False

    def install(self, app: FastAPI) -> frozenset[str]:
        """Add the routes to an app. Returns the paths that have no parameters."""
        for kind in STATUS:
            app.add_exception_handler(kind, _error)
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v2": self.server,
            "/v2/health/live": self.live,
            "/v2/health/ready": self.ready,
            "/v2/models/stats": self.stats,
            "/v2/systemsharedmemory/status": self.shared_status,
            "/v2/systemsharedmemory/region/{region}/status": self.shared_status,
            "/v2/models/{name}": self.metadata,
            "/v2/models/{name}/ready": self.model_ready,
            "/v2/models/{name}/config": self.model_config,
            "/v2/models/{name}/stats": self.stats,
        }
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v2/models/{name}/infer": self.infer,
            "/v2/repository/index": self.index,
            "/v2/repository/models/{name}/load": self.load,
            "/v2/repository/models/{name}/unload": self.unload,
            "/v2/systemsharedmemory/unregister": self.unshare,
            "/v2/systemsharedmemory/region/{region}/register": self.share,
            "/v2/systemsharedmemory/region/{region}/unregister": self.unshare,
            "/predict/{name}": self.predict,
            "/predict/{name}/versions/{version}": self.predict,
        }
        for paths, method in ((gets, "GET"), (posts, "POST")):
            for path, endpoint in paths.items():
                app.add_route(path, endpoint, methods=[method])
                if path.startswith("/v2/models/{name}"):
                    versioned = path.replace("{name}", "{name}/versions/{version}")
                    app.add_route(versioned, endpoint, methods=[method])
        return frozenset(path for path in (*gets, *posts) if "{" not in path)

    # ---- information

    async def server(self, request: Request) -> Response:
        """GET /v2."""
        extensions = extensions_of(shared_memory=self.regions is not None)
        return JSONResponse({"name": "tilewright", "version": __version__, "extensions": list(extensions)})

    async def live(self, request: Request) -> Response:
        """GET /v2/health/live."""
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        """GET /v2/health/ready: 200 while the server and every model accept requests."""
        if (loading := self.host.loading) is not None:
            return JSONResponse(state_of(loading), 503)
        ready = not self.draining() and all(model.ready for model in self.host.models.values())
        return Response(status_code=200 if ready else 503)

    def _model(self, request: Request) -> tuple[Model, int | None]:
        model = self.host.model(request.path_params["name"])
        return model, self.host.version(model, request.path_params.get("version"))

    async def metadata(self, request: Request) -> Response:
        """GET /v2/models/NAME."""
        model, version = self._model(request)
        return JSONResponse(metadata_of(model, version))

    async def model_ready(self, request: Request) -> Response:
        """GET /v2/models/NAME/ready."""
        model, version = self._model(request)
        ready = model.ready if version is None or model.pipeline else model.versions[version].ready
        return Response(status_code=200 if ready and not self.draining() else 503)

    async def model_config(self, request: Request) -> Response:
        """GET /v2/models/NAME/config."""
        return JSONResponse(config_of(self._model(request)[0]))

    async def stats(self, request: Request) -> Response:
        """GET /v2/models/stats and /v2/models/NAME/stats."""
        if "name" not in request.path_params:
            return JSONResponse({"model_stats": [one for m in self.host.models.values() for one in stats_of(m, None)]})
        return JSONResponse({"model_stats": stats_of(*self._model(request))})

    # ---- the repository

    async def index(self, request: Request) -> Response:
        """POST /v2/repository/index."""
        said = parse_json(await self._bodies.read(request))
        return JSONResponse(index_of(self.host, ready=bool(said.get("ready"))))

    async def load(self, request: Request) -> Response:
        """POST /v2/repository/models/NAME/load."""
        said = parse_json(await self._bodies.read(request))
        if said.get("parameters"):
            raise Refused("load takes no parameters: a model's config is its TOML, and its files are those of the repository")
        await self.host.load(request.path_params["name"])
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        """POST /v2/repository/models/NAME/unload."""
        parse_json(await self._bodies.read(request))
        await self.host.unload(request.path_params["name"])
        return JSONResponse({})

    # ---- shared memory

    def _shared(self) -> Regions:
        if self.regions is None:
            raise Refused(MISSING)
        return self.regions

    async def shared_status(self, request: Request) -> Response:
        """GET /v2/systemsharedmemory/status and /v2/systemsharedmemory/region/NAME/status."""
        return JSONResponse(self._shared().status(request.path_params.get("region")))

    async def share(self, request: Request) -> Response:
        """POST /v2/systemsharedmemory/region/NAME/register."""
        said = parse_json(await self._bodies.read(request))
        self._shared().register(request.path_params["region"], said.get("key"), said.get("offset", 0), said.get("byte_size"))
        return JSONResponse({})

    async def unshare(self, request: Request) -> Response:
        """POST /v2/systemsharedmemory/unregister and /v2/systemsharedmemory/region/NAME/unregister."""
        parse_json(await self._bodies.read(request))
        self._shared().unregister(request.path_params.get("region"))
        return JSONResponse({})

    # ---- inference

    def _check_open(self) -> None:
        if self.draining():
            raise Unavailable("the server is shutting down and takes no new requests")

    async def infer(self, request: Request) -> Response:
        """POST /v2/models/NAME/infer."""
        self._check_open()
        raw, headers = await self._bodies.read(request), request.headers
        if "content-encoding" in headers:
            raw = await asyncio.to_thread(inflated, raw, headers["content-encoding"], self.config.max_body_bytes)
        length = headers.get("inference-header-content-length")
        small = len(raw) <= INLINE_BYTES or (length is not None and length.isdecimal() and int(length[:12]) <= INLINE_BYTES)
        parse = (parse_infer, raw, length, self.regions)
        asked = parse_infer(*parse[1:]) if small else await asyncio.to_thread(*parse)
        name, version = request.path_params["name"], request.path_params.get("version")
        answer = await answered(self.host, name, version, asked, span_of(request.scope))
        size = sum(len(wire.data) for wire in answer.outputs.values())
        made = answer_body(answer, asked) if size <= INLINE_BYTES else await asyncio.to_thread(answer_body, answer, asked)
        body, json_bytes = made
        if json_bytes is None:
            return Response(body, media_type="application/json")
        said = {"inference-header-content-length": str(json_bytes)}
        return Response(body, media_type="application/octet-stream", headers=said)

    async def predict(self, request: Request) -> Response:
        """POST /predict/NAME."""
        self._check_open()
        model = self.host.model(request.path_params["name"])
        raw = await self._bodies.read(request)
        kind = request.headers.get("content-type", "")
        inputs = await asyncio.to_thread(predict, model.signature, raw, kind)
        answer = await self.host.infer(
            model.name, request.path_params.get("version"), inputs.inputs, noted(inputs.ask, span_of(request.scope))
        )
        media, body = inputs.answered(answer, request.headers.get("accept", ""))
        return Response(body if isinstance(body, bytes) else json.dumps(body, allow_nan=False), media_type=media)
