"""Reads request bodies, with limits on the time, on the size, and on the memory of all bodies together."""

import asyncio

from fastapi import Request

from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError, unavailable

__all__ = ["Bodies"]


class Bodies:
    """Reads the bodies of one server's requests."""

    def __init__(self, config: ServerConfig):
        self._config = config
        self._bytes = 0  # bytes of all bodies that are being read

    async def read(self, request: Request) -> bytes:
        """The request's body. Raises `ApiError` 413, 408 or 503."""
        config, body = self._config, bytearray()
        most = f"{config.max_body_bytes} bytes, the most this server takes (--max-body-mib)"
        too_large = ApiError(413, f"the body is larger than {most}")
        if int(request.headers.get("content-length", 0)) > config.max_body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(config.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    self._bytes += len(chunk)
                    if len(body) > config.max_body_bytes:
                        raise too_large
                    if self._bytes > config.max_bodies * config.max_body_bytes:
                        raise unavailable("too many large bodies are arriving at once; try again later", code="bodies")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {config.body_timeout_s:g} s") from None
        finally:
            self._bytes -= len(body)
        return bytes(body)
