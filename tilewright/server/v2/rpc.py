"""The Open Inference Protocol v2 over gRPC, on the event loop of the HTTP server and with the same models.

If the server has an API key, calls need `authorization: Bearer KEY` in their metadata, like the header of HTTP requests. Errors
are gRPC statuses. If the HTTP answer would have a Retry-After, the trailing metadata contain the time as `retry-after-ms`.
"""

import asyncio
import hmac
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from tilewright import __version__
from tilewright.extras import needed
from tilewright.host.errors import Expired, Failed, HostError, NotFound, Overloaded, Refused, Unavailable
from tilewright.host.host import Answer, Host
from tilewright.host.regions import MISSING, Part, Regions
from tilewright.host.tensors import DATATYPES, Wire
from tilewright.server.config import ServerConfig
from tilewright.server.v2.codec import InferRequest, ask_of, numbers, part_of, place_of, shape_of
from tilewright.server.v2.describe import config_of, extensions_of, index_of, metadata_of, stats_of
from tilewright.server.v2.http import answered

__all__ = ["Rpc"]

CODES: dict[type[HostError], str] = {
    Refused: "INVALID_ARGUMENT",
    NotFound: "NOT_FOUND",
    Overloaded: "RESOURCE_EXHAUSTED",
    Failed: "INTERNAL",
    Unavailable: "UNAVAILABLE",
    Expired: "DEADLINE_EXCEEDED",
}
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""Datatype -> the field that contains its numbers if they are not sent as raw bytes."""
DATA_TYPES = {name: number for number, name in enumerate(("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8"), 1)} | {
    name: number for number, name in enumerate(("INT16", "INT32", "INT64", "FP16", "FP32", "FP64"), 7)
}
DATA_TYPES["BF16"] = 14
"""Datatype -> its number in the model configuration."""
STREAM_DEPTH = 64
"""Size of the queue of requests that are in progress on one stream."""

logger = logging.getLogger(__name__)


class Rpc:
    """The gRPC server. `start` it on the event loop of the host."""

    def __init__(self, host: Host, config: ServerConfig, draining: Callable[[], bool], regions: Regions | None = None):
        self._grpc = needed("grpc", "grpc")
        needed("google.protobuf", "grpc")
        from tilewright.server.v2 import messages  # needs protobuf

        self._messages, self._host, self._config, self._draining = messages, host, config, draining
        self._regions = regions
        self._key = None if config.api_key is None else config.api_key.encode()
        self.port = 0
        self._server: Any = None

    @classmethod
    async def start(
        cls, host: Host, config: ServerConfig, draining: Callable[[], bool], regions: Regions | None = None
    ) -> "Rpc":
        """Listen on the port. Raises MissingExtra, or OSError: the port is in use or not on this machine."""
        self = cls(host, config, draining, regions)
        aio = needed("grpc.aio", "grpc")
        size = config.max_body_bytes + (1 << 16)
        options = [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
        self._server = aio.server(options=options, maximum_concurrent_rpcs=config.max_connections)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        where = f"[{config.host}]:{config.grpc_port}" if ":" in config.host else f"{config.host}:{config.grpc_port}"
        try:
            self.port = self._server.add_insecure_port(where)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise OSError(f"cannot listen on {where} for gRPC: it is in use, or no address of this machine; see --grpc-port")
        await self._server.start()
        logger.info("gRPC at %s port %d", config.host, self.port)
        return self

    async def stop(self) -> None:
        """Accept no more calls, and give running calls 5 s to finish."""
        await self._server.stop(5.0)

    def _handlers(self) -> Any:
        grpc, message = self._grpc, self._messages.message
        handlers = {}
        for name, (request, _) in self._messages.METHODS.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(
                self._guarded(getattr(self, f"_{_snake(name)}")),
                request_deserializer=message(request).FromString,
                response_serializer=lambda made: made.SerializeToString(),
            )
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=message("ModelInferRequest").FromString,
            response_serializer=lambda made: made.SerializeToString(),
        )
        return grpc.method_handlers_generic_handler(self._messages.SERVICE, handlers)

    # ---- for every call

    async def _check_key(self, context: Any) -> None:
        if self._key is None:
            return
        given = dict(context.invocation_metadata()).get("authorization", "")
        scheme, _, key = str(given).partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key):
            await context.abort(self._grpc.StatusCode.UNAUTHENTICATED, "the API key is missing or wrong; wanted 'Bearer <key>'")

    def _guarded(self, call: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        """A call that checks the API key first, and answers a HostError with a gRPC status."""

        async def guarded(request: Any, context: Any) -> Any:
            await self._check_key(context)
            try:
                return await call(request)
            except HostError as error:
                if error.retry_after_s is not None:
                    context.set_trailing_metadata((("retry-after-ms", str(math.ceil(error.retry_after_s * 1e3))),))
                await context.abort(getattr(self._grpc.StatusCode, CODES[type(error)]), str(error))

        return guarded

    def _made(self, kind: str, /, **fields: Any) -> Any:
        return self._messages.message(kind)(**fields)

    # ---- information

    async def _server_live(self, request: Any) -> Any:
        return self._made("ServerLiveResponse", live=True)

    async def _server_ready(self, request: Any) -> Any:
        ready = self._host.started and not self._draining() and all(model.ready for model in self._host.models.values())
        return self._made("ServerReadyResponse", ready=ready)

    def _model(self, request: Any) -> Any:
        model = self._host.model(request.name)
        return model, self._host.version(model, request.version)

    async def _model_ready(self, request: Any) -> Any:
        try:
            model, version = self._model(request)
        except (NotFound, Unavailable):
            return self._made("ModelReadyResponse", ready=False)
        ready = model.ready if version is None or model.pipeline else model.versions[version].ready
        return self._made("ModelReadyResponse", ready=ready and not self._draining())

    async def _server_metadata(self, request: Any) -> Any:
        extensions = extensions_of(shared_memory=self._regions is not None)
        return self._made("ServerMetadataResponse", name="tilewright", version=__version__, extensions=extensions)

    async def _model_metadata(self, request: Any) -> Any:
        return self._made("ModelMetadataResponse", **metadata_of(*self._model(request)))

    async def _model_config(self, request: Any) -> Any:
        said = config_of(self._model(request)[0])
        for side in ("input", "output"):
            for tensor in said[side]:
                tensor["data_type"] = DATA_TYPES[tensor["data_type"].removeprefix("TYPE_")]
        return self._made("ModelConfigResponse", config=said)

    async def _model_statistics(self, request: Any) -> Any:
        if request.name:
            return self._made("ModelStatisticsResponse", model_stats=stats_of(*self._model(request)))
        found = [one for model in self._host.models.values() for one in stats_of(model, None)]
        return self._made("ModelStatisticsResponse", model_stats=found)

    async def _repository_index(self, request: Any) -> Any:
        return self._made("RepositoryIndexResponse", models=index_of(self._host, ready=request.ready))

    async def _repository_model_load(self, request: Any) -> Any:
        if request.parameters:
            raise Refused("load takes no parameters: a model's config is its TOML, and its files are those of the repository")
        await self._host.load(request.model_name)
        return self._made("RepositoryModelLoadResponse")

    async def _repository_model_unload(self, request: Any) -> Any:
        await self._host.unload(request.model_name)
        return self._made("RepositoryModelUnloadResponse")

    def _shared(self) -> Regions:
        if self._regions is None:
            raise Refused(MISSING)
        return self._regions

    async def _system_shared_memory_status(self, request: Any) -> Any:
        regions = {one["name"]: one for one in self._shared().status(request.name or None)}
        return self._made("SystemSharedMemoryStatusResponse", regions=regions)

    async def _system_shared_memory_register(self, request: Any) -> Any:
        self._shared().register(request.name, request.key, request.offset, request.byte_size)
        return self._made("SystemSharedMemoryRegisterResponse")

    async def _system_shared_memory_unregister(self, request: Any) -> Any:
        self._shared().unregister(request.name or None)
        return self._made("SystemSharedMemoryUnregisterResponse")

    # ---- inference

    async def _model_infer(self, request: Any) -> Any:
        if self._draining():
            raise Unavailable("the server is shutting down and takes no new requests")
        inputs, parameters, places = _inputs(request, self._regions), _values(request.parameters), dict[str, Part]()
        wanted = [output.name for output in request.outputs]
        for output in request.outputs:
            place = place_of(_values(output.parameters), f"output {output.name[:200]!r}")
            if place is not None:
                places[output.name] = part_of(self._regions, place)
        if any("classification" in output.parameters for output in request.outputs):
            raise Refused("classification is not supported: take the scores and choose")
        asked = InferRequest(inputs, places=places, ask=ask_of(parameters))
        answer = await answered(self._host, request.model_name, request.model_version, asked, None)
        return self._answer(answer, request.id, wanted, places)

    def _answer(self, answer: Answer, identity: str, wanted: list[str], places: Mapping[str, Part]) -> Any:
        unknown = [name for name in wanted if name not in answer.outputs]
        if unknown:
            raise Refused(f"model {answer.model} has no output {unknown[0][:200]!r}; it has {', '.join(answer.outputs)}")
        chosen = {name: answer.outputs[name] for name in wanted} if wanted else answer.outputs
        return self._made(
            "ModelInferResponse",
            model_name=answer.model,
            model_version=str(answer.version),
            id=identity,
            outputs=[{"name": name, "datatype": wire.datatype, "shape": wire.shape} for name, wire in chosen.items()],
            # One entry for each output, because clients count them.
            raw_output_contents=[b"" if name in places else bytes(wire.raw) for name, wire in chosen.items()],
        )

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """ModelStreamInfer: several requests are computed at the same time; the answers come in the order of the requests."""
        await self._check_key(context)
        queue: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(STREAM_DEPTH)

        async def read() -> None:
            try:
                async for request in requests:
                    await queue.put(asyncio.ensure_future(self._streamed(request)))
            finally:
                await queue.put(None)

        reading = asyncio.ensure_future(read())
        try:
            while (task := await queue.get()) is not None:
                yield await task
        finally:
            reading.cancel()
            while not queue.empty():
                left = queue.get_nowait()
                if left is not None:
                    left.cancel()

    async def _streamed(self, request: Any) -> Any:
        try:
            return self._made("ModelStreamInferResponse", infer_response=await self._model_infer(request))
        except HostError as error:
            failed = self._made("ModelInferResponse", model_name=request.model_name, id=request.id)
            return self._made("ModelStreamInferResponse", error_message=str(error), infer_response=failed)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")


def _value(parameter: Any) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def _values(parameters: Any) -> dict[str, Any]:
    return {name: _value(value) for name, value in parameters.items()}


def _inputs(request: Any, regions: Regions | None) -> dict[str, Wire]:
    """The tensors of a request. Raises Refused if they are invalid, or NotFound: no such region."""
    places = [place_of(_values(one.parameters), f"input {one.name[:200]!r}") for one in request.inputs]
    raw, sent = list(request.raw_input_contents), places.count(None)
    if raw and len(raw) != sent:
        raise Refused(f"raw_input_contents has {len(raw)} entries for {sent} inputs; wanted one each")
    contents = iter(raw)
    found = dict[str, Wire]()
    for one, place in zip(request.inputs, places, strict=True):
        name, shape = one.name[:200], shape_of(tuple(one.shape), one.name[:200])
        if one.datatype not in DATATYPES:
            raise Refused(f"input {name!r} has datatype {one.datatype[:40]!r}, wanted one of {', '.join(DATATYPES)}")
        if name in found:
            raise Refused(f"two inputs have the name {name!r}")
        if place is not None:
            data = part_of(regions, place)
        elif raw:
            data = next(contents)
        elif one.datatype not in CONTENTS:
            raise Refused(f"input {name!r} is {one.datatype}, which goes as raw_input_contents only")
        else:
            data = numbers(list(getattr(one.contents, CONTENTS[one.datatype])), one.datatype, shape, name)
        found[name] = Wire(one.datatype, shape, data)
    return found
