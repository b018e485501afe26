"""Bodies of requests: read within time and size, of all requests together too, and parsed off the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError, unavailable
from tilewright.server.intake import Intake

__all__ = ["Bodies"]

T = TypeVar("T")

INLINE = ("/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
"""Paths whose short bodies take no time to read: neither a chat template nor pairs of texts."""


class Bodies:
    """What servers share that take JSON in. Theirs are `config`, and `intake` while they run."""

    config: ServerConfig
    intake: Intake

    def __init__(self) -> None:
        self._body_bytes = 0  # of all requests whose body is being read

    async def _prepared(self, request: Request, read: Callable[[bytes], T]) -> T:
        """`read(body)`, off the event loop where that is worth it."""
        raw = await self._body(request)
        return await self.intake.run(raw, read, inline=request.url.path in INLINE)

    async def _body(self, request: Request) -> bytes:
        """The request's JSON body, as bytes. Raises `ApiError` 415, 413, 408 or 503."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            wanted = "wanted application/json (curl: -H 'content-type: application/json')"
            raise ApiError(415, f"content-type is {kind[:80]!r}, {wanted}")
        config, body = self.config, bytearray()
        too_large = ApiError(413, f"the body is larger than {config.max_body_bytes} bytes, the most this server takes")
        if int(request.headers.get("content-length", 0)) > config.max_body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(config.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    self._body_bytes += len(chunk)
                    if len(body) > config.max_body_bytes:
                        raise too_large
                    if self._body_bytes > config.max_bodies * config.max_body_bytes:
                        raise unavailable("too many large bodies are arriving at once; come again later", code="bodies")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {config.body_timeout_s:g} s") from None
        finally:
            self._body_bytes -= len(body)
        return bytes(body)
