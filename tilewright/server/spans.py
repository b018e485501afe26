"""What the server knows of traces, whether or not there are any: a request may have a span, below which others are noted."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from starlette.types import Scope

from tilewright.extras import needed
from tilewright.server.config import ServerConfig

if TYPE_CHECKING:
    from tilewright.server.traces import Tracer

__all__ = ["RequestSpan", "put_span", "span_of", "tracer_of"]

_SPAN = "tilewright.span"


class RequestSpan(ABC):
    """The span of one request."""

    trace_id: str
    """32 hexadecimal digits."""
    traceparent: str
    """The header that makes this span the parent of another server's."""

    @abstractmethod
    def child(self, name: str, begin_s: float, end_s: float, **attributes: str | int | float) -> None:
        """Something below it has ended; by `time.monotonic`."""

    @abstractmethod
    def end(self, status: int) -> None:
        """The request has ended, with an HTTP status."""


def span_of(scope: Scope) -> RequestSpan | None:
    """The span of a request, if it has one."""
    return scope.get(_SPAN)


def put_span(scope: Scope, span: RequestSpan | None) -> None:
    """Give a request its span."""
    if span is not None:
        scope[_SPAN] = span


def tracer_of(config: ServerConfig) -> "Tracer | None":
    """What makes spans, where the config says where they go. Raises MissingExtra."""
    if config.traces is None:
        return None
    return needed("tilewright.server.traces", "traces").Tracer(config.traces, config.trace_share)
