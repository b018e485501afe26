"""What a connection asks of a shortcut: something that answers small requests of one kind without uvicorn."""

from collections.abc import Coroutine
from typing import Any, NamedTuple, Protocol

__all__ = ["PARTIAL", "Short", "Shortcut", "Taken"]

PARTIAL = object()
"""A shortcut's word for a request that it might take, once it is whole."""


class Short(NamedTuple):
    """A shortcut's answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class Taken(NamedTuple):
    """A request that a shortcut answers: how many bytes of the data it is, and what makes the answer."""

    bytes: int
    answer: Coroutine[Any, Any, Short]


class Shortcut(Protocol):
    """Answers some requests without uvicorn; whatever is unusual about one is a reason not to take it."""

    def take(self, data: bytes, client: str) -> Any:
        """`Taken`, `PARTIAL`, or None: uvicorn's."""
        ...
