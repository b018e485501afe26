"""The interface to traces, which are optional: a request may have a span, and code may add child spans to it."""

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
        """Record a child span that has ended. Times are those of `time.monotonic`, in seconds."""

    @abstractmethod
    def end(self, status: int) -> None:
        """End the span of the request, with its HTTP status."""


def span_of(scope: Scope) -> RequestSpan | None:
    """The span of a request, if it has one."""
    return scope.get(_SPAN)


def put_span(scope: Scope, span: RequestSpan | None) -> None:
    """Store the span of a request in its scope."""
    if span is not None:
        scope[_SPAN] = span


def tracer_of(config: ServerConfig) -> "Tracer | None":
    """The tracer, or None if the config names no collector. Raises MissingExtra if OpenTelemetry is not installed."""
    if config.traces is None:
        return None
    return needed("tilewright.server.traces", "traces").Tracer(config.traces, config.trace_share)
