"""LoRA adapters over HTTP: listing, loading and unloading them while the server runs.

The engine has the list of adapters; a request selects one by its name in the `model` field. Clients may load adapters only if
the operator set `--adapter-dir`, and only from folders below that folder, after symbolic links are resolved. The lengths of
names and paths are limited. If a folder has no usable adapter, the client that requested it gets an error of one sentence;
other clients are not affected.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from tilewright.engine.adapter_names import MAX_NAME, UnknownAdapter
from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError, bad_request, unavailable
from tilewright.server.link import EngineLink, EngineStopped
from tilewright.server.prompts import Served
from tilewright.server.protocol import parse

__all__ = ["LoadBody", "ModelEndpoints", "UnloadBody"]

LOAD_TIMEOUT_S = 60.0
"""How long a client waits for an adapter to be loaded."""
MAX_PATH = 4096
"""Most characters in a path from a client; Linux accepts no more."""


class UnloadBody(BaseModel):
    """Fields of /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True)
    lora_name: str = Field(min_length=1, max_length=MAX_NAME)


class LoadBody(UnloadBody):
    """Fields of /v1/load_lora_adapter."""

    lora_path: str = Field(min_length=1, max_length=MAX_PATH)
    """A folder: an absolute path, or one relative to `adapter_dir`."""


def folder_below(path: str, config: ServerConfig) -> Path:
    """The folder for a path from a client.

    Raises:
        ApiError: 403, the operator does not allow loading; 400, the path is not below the operator's folder or does not exist.
    """
    check_allowed(config)
    assert config.adapter_dir is not None
    home = Path(config.adapter_dir).resolve()
    try:
        found = (home / path).resolve()
    except (OSError, RuntimeError, ValueError):
        raise bad_request("lora_path is not a valid path on this system", "lora_path") from None
    # The error is the same for a folder outside and for one that does not exist, so it reveals nothing about other folders.
    if home not in found.parents or not found.is_dir():
        raise bad_request(f"lora_path is {path[:200]!r}, wanted a folder below the server's folder for adapters", "lora_path")
    return found


def check_allowed(config: ServerConfig) -> None:
    """Raise ApiError (403) unless the operator allows clients to load adapters."""
    if config.adapter_dir is None:
        raise ApiError(
            403,
            "this server does not load adapters on request; start it with --adapter-dir FOLDER",
            code="adapters_not_allowed",
        )


class ModelEndpoints:
    """The endpoints of /v1/models, and those that load and unload adapters.

    Args:
        worker: returns the server's link to the engine, once it runs.
        prepared: (request, read) -> read(body), which runs outside the event loop if that is worth the overhead.
    """

    def __init__(
        self, served: Served, config: ServerConfig, worker: Callable[[], EngineLink], prepared: Callable[..., Awaitable[Any]]
    ):
        self._served, self._config, self._worker, self._prepared = served, config, worker, prepared
        self._created_s = int(time.time())

    async def list(self, request: Request) -> Response:
        """GET /v1/models: the model and its adapters in the engine."""
        names = [self._served.name, *await self._ask(self._worker().adapter_names())]
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def one(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        name = request.path_params["name"]
        if self._served.adapter_of(name) is not None and name not in (known := await self._ask(self._worker().adapter_names())):
            raise self._served.no_model(name, f"this server has {', '.join([self._served.name, *known])[:400]}")
        return JSONResponse(self._model(name))

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter {lora_name, lora_path}: afterwards requests may use the name as their model."""
        body = await self._prepared(request, lambda raw: parse(raw, LoadBody))
        folder = folder_below(body.lora_path, self._config)
        if body.lora_name == self._served.name:
            raise bad_request(
                f"lora_name is {body.lora_name!r}, which is the name of the model itself; use another name", "lora_name"
            )
        await self._ask(self._worker().load_adapter(body.lora_name, folder))
        return JSONResponse(self._model(body.lora_name))

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter {lora_name}: new requests may not use it; running requests finish with it."""
        check_allowed(self._config)
        body = await self._prepared(request, lambda raw: parse(raw, UnloadBody))
        await self._ask(self._worker().unload_adapter(body.lora_name))
        return JSONResponse({"id": body.lora_name, "object": "model", "deleted": True})

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                return await answer
        except UnknownAdapter as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from None
        except ValueError as error:
            raise bad_request(str(error), code="adapter_refused") from None
        except EngineStopped as error:
            raise unavailable(str(error)) from None
        except TimeoutError:
            raise unavailable(f"the engine did not answer within {LOAD_TIMEOUT_S:g} s", code="busy") from None

    def _model(self, name: str) -> dict[str, object]:
        served = self._served
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "tilewright",
            "max_model_len": served.max_model_len,
            "chat": served.has_chat,
            **({} if name == served.name else {"parent": served.name}),
        }
