"""LoRA adapters over HTTP: which there are, and loading and unloading them while the server runs.

The engine knows which adapters there are; a request names one as its model. Loading is for whom the operator lets: only with
`--adapter-dir`, and only from folders below that one, wherever symbolic links lead. Names and paths are bounded; whatever is
wrong with a folder is one sentence to the client that asked for it, and nobody else notices.
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
"""How long a client waits for an adapter to be read and held."""
MAX_PATH = 4096
"""Characters of a path that a client may name; Linux takes no more."""


class UnloadBody(BaseModel):
    """Fields of /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True)
    lora_name: str = Field(min_length=1, max_length=MAX_NAME)


class LoadBody(UnloadBody):
    """Fields of /v1/load_lora_adapter."""

    lora_path: str = Field(min_length=1, max_length=MAX_PATH)
    """A folder, absolute or from `adapter_dir` on."""


def folder_below(path: str, config: ServerConfig) -> Path:
    """The folder that a client names.

    Raises:
        ApiError: 403, the operator allows none; 400, it is not below the operator's folder, or there is none.
    """
    check_allowed(config)
    assert config.adapter_dir is not None
    home = Path(config.adapter_dir).resolve()
    try:
        found = (home / path).resolve()
    except (OSError, RuntimeError, ValueError):
        raise bad_request("lora_path is no path of this system", "lora_path") from None
    # What lies outside is not told apart from what is not there.
    if home not in found.parents or not found.is_dir():
        raise bad_request(f"lora_path is {path[:200]!r}, wanted a folder below the server's folder for adapters", "lora_path")
    return found


def check_allowed(config: ServerConfig) -> None:
    """Raise ApiError (403) unless the operator lets clients load adapters."""
    if config.adapter_dir is None:
        raise ApiError(
            403, "this server loads no adapters on request: start it with --adapter-dir FOLDER", code="adapters_not_allowed"
        )


class ModelEndpoints:
    """/v1/models, and what changes its list.

    Args:
        worker: that of the server, once it runs.
        prepared: (request, read) -> read(body), off the event loop where that is worth it.
    """

    def __init__(
        self, served: Served, config: ServerConfig, worker: Callable[[], EngineLink], prepared: Callable[..., Awaitable[Any]]
    ):
        self._served, self._config, self._worker, self._prepared = served, config, worker, prepared
        self._created_s = int(time.time())

    async def list(self, request: Request) -> Response:
        """GET /v1/models: the model, and the adapters that the engine has for it."""
        names = [self._served.name, *await self._ask(self._worker().adapter_names())]
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def one(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        name = request.path_params["name"]
        if self._served.adapter_of(name) is not None and name not in (known := await self._ask(self._worker().adapter_names())):
            raise self._served.no_model(name, f"this server has {', '.join([self._served.name, *known])[:400]}")
        return JSONResponse(self._model(name))

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter {lora_name, lora_path}: from here on it is a model."""
        body = await self._prepared(request, lambda raw: parse(raw, LoadBody))
        folder = folder_below(body.lora_path, self._config)
        if body.lora_name == self._served.name:
            raise bad_request(f"lora_name is {body.lora_name!r}, the name of the model itself", "lora_name")
        await self._ask(self._worker().load_adapter(body.lora_name, folder))
        return JSONResponse(self._model(body.lora_name))

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter {lora_name}: no new request may name it; those that have it end with it."""
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
