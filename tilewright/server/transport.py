"""The transport that uvicorn sees of a connection (connections.py)."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["ConnectionTransport"]


class Closes(Protocol):
    """A connection, as far as its transport needs it."""

    lingering: bool

    def close(self) -> None:
        """Close once all is sent."""
        ...

    def write(self, data: bytes) -> None:
        """Send."""
        ...


class ConnectionTransport:
    """The transport that uvicorn sees: its `close` is the connection's."""

    def __init__(self, real: asyncio.Transport, connection: Closes):
        self._real = real
        self._connection = connection

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(self._real, name)

    def close(self) -> None:
        """Close as `Connection.close` does."""
        if not self._connection.lingering:
            self._connection.close()

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._connection.lingering or self._real.is_closing()

    def write(self, data: bytes) -> None:
        """Send, unless the connection has been closed for writing."""
        if not self._connection.lingering:
            self._connection.write(data)
