"""Loads and unloads LoRA adapters on all replicas. A restarted replica gets the adapters before it gets requests.

An adapter is loaded on every replica or on none: if one replica refuses it, the others unload it again.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import aiohttp
from fastapi.responses import Response

from tilewright.engine.adapter_names import named_folders
from tilewright.server.adapters import LoadBody, UnloadBody, check_allowed, folder_below
from tilewright.server.config import ServerConfig
from tilewright.server.errors import unavailable
from tilewright.server.protocol import parse

__all__ = ["ReplicaAdapters"]

TIMEOUT = aiohttp.ClientTimeout(total=90)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Answer = tuple[int, bytes]
"""The status and the body of a replica."""

logger = logging.getLogger(__name__)


class ReplicaAdapters:
    """Keeps the adapters of all replicas equal.

    Args:
        given: NAME=FOLDER of the adapters that replicas load when they start.
        urls: returns the URLs of the replicas that accept requests now.
        session: returns the HTTP session of the front, once it runs.
    """

    def __init__(
        self,
        config: ServerConfig,
        given: Iterable[str],
        urls: Callable[[], Iterable[str]],
        session: Callable[[], aiohttp.ClientSession],
    ):
        self._config, self._urls, self._session = config, urls, session
        self._wanted: dict[str, str | None] = dict.fromkeys(named_folders(given))
        """Name -> the path from the client; None for the adapters in `given`."""
        self._lock = asyncio.Lock()

    async def load(self, raw: bytes) -> Response:
        """POST /v1/load_lora_adapter with this body. Raises ApiError."""
        body = parse(raw, LoadBody)
        folder_below(body.lora_path, self._config)
        async with self._lock:
            answers = await self._all(LOAD, body.model_dump())
            failed = [answer for answer in answers.values() if answer[0] != 200]
            if failed:
                back = [url for url, (status, _) in answers.items() if status == 200]
                await asyncio.gather(*(self._post(url + UNLOAD, {"lora_name": body.lora_name}) for url in back))
                return _passed(failed[0])
            self._wanted[body.lora_name] = body.lora_path
            return _passed(next(iter(answers.values())))

    async def unload(self, raw: bytes) -> Response:
        """POST /v1/unload_lora_adapter with this body. Raises ApiError."""
        check_allowed(self._config)
        body = parse(raw, UnloadBody)
        async with self._lock:
            answers = await self._all(UNLOAD, body.model_dump())
            self._wanted.pop(body.lora_name, None)
            good = [answer for answer in answers.values() if answer[0] == 200]
            return _passed((good or list(answers.values()))[0])

    async def prepare(self, url: str) -> None:
        """Give a replica that is about to accept requests the adapters of the others. Refusals are logged."""
        if self._config.adapter_dir is None:
            return
        async with self._lock, self._session().get(f"{url}/v1/models", timeout=TIMEOUT) as found:
            models = (await found.json())["data"]
            there = {one["id"] for one in models if "parent" in one}
            for name in there - self._wanted.keys():
                await self._said(url, name, self._post(url + UNLOAD, {"lora_name": name}))
            for name, path in self._wanted.items():
                if name not in there and path is not None:
                    await self._said(url, name, self._post(url + LOAD, {"lora_name": name, "lora_path": path}))

    async def _said(self, url: str, name: str, asked: Awaitable[Answer]) -> None:
        status, body = await asked
        if status != 200:
            logger.error("the replica at %s does not have the adapter %s, unlike the others: %s", url, name, body[:300])

    async def _all(self, path: str, body: Mapping[str, Any]) -> dict[str, Answer]:
        urls = list(self._urls())
        if not urls:
            raise unavailable("no replica is ready; try again soon", code="no_replica")
        answers = await asyncio.gather(*(self._post(url + path, body) for url in urls))
        return dict(zip(urls, answers, strict=True))

    async def _post(self, url: str, body: Mapping[str, Any]) -> Answer:
        try:
            async with self._session().post(url, json=body, timeout=TIMEOUT) as found:
                return found.status, await found.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            told = unavailable(f"a replica does not answer: {type(error).__name__}", code="replica_lost")
            return 503, json.dumps(told.body).encode()


def _passed(answer: Answer) -> Response:
    return Response(answer[1], answer[0], media_type="application/json")
