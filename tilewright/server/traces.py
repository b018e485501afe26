"""OpenTelemetry traces: a span for each request, with child spans for its phases. Imported only if `traces` is set.

    POST /v1/completions            from the head to the last byte
      first token                   queue and prefill together, as far as the front can tell them
      decode                        from the first token to the last
    POST /v2/models/NAME/infer
      queue                         until its batch began
      compute                       the batch, with the model's own seconds

If the client sends a `traceparent` (W3C Trace Context), it is the parent of the request's span and determines whether the
request is sampled. Without it, a share of the requests is sampled (`share`). A thread of the library sends spans to the
collector in batches. If the collector is slow or gone, spans are lost, but no request is affected. Spans contain neither the
text nor the tensors of a request.
"""

import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tilewright import __version__
from tilewright.server.spans import RequestSpan

__all__ = ["Tracer"]

EXPORT_TIMEOUT_S = 5
_PATH = "/v1/traces"


class Tracer:
    """Makes the spans of one server.

    Args:
        endpoint: URL of a collector that accepts OTLP over HTTP, such as http://127.0.0.1:4318.
        share: share of the requests without a parent that are sampled, 0 to 1.
        exporter: replaces the collector; for tests.
    """

    def __init__(self, endpoint: str, share: float, exporter: SpanExporter | None = None):
        where = endpoint if endpoint.rstrip("/").endswith(_PATH) else endpoint.rstrip("/") + _PATH
        exporter = exporter or OTLPSpanExporter(endpoint=where, timeout=EXPORT_TIMEOUT_S)
        resource = Resource.create({"service.name": "tilewright", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(share)))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tilewright")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, route: str, headers: Mapping[str, str], request_id: str) -> RequestSpan | None:
        """Begin the span of a request. Returns None if the request is not sampled."""
        carried = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        context = self._propagator.extract(carried)
        attributes = {"http.request.method": method, "http.route": route, "tilewright.request_id": request_id}
        span = self._tracer.start_span(f"{method} {route}", context, SpanKind.SERVER, attributes)
        return _Span(self, span) if isinstance(span, Span) and not isinstance(span, NonRecordingSpan) else None

    def flush(self) -> None:
        """Send the spans that wait."""
        self._provider.force_flush()

    def child(self, parent: Span, name: str, begin_ns: int, end_ns: int, attributes: Mapping[str, str | int | float]) -> None:
        """Record a child span that has ended. Times are in nanoseconds since 1970."""
        context = set_span_in_context(parent)
        self._tracer.start_span(name, context, attributes=dict(attributes), start_time=begin_ns).end(end_ns)


class _Span(RequestSpan):
    def __init__(self, tracer: Tracer, span: Span):
        self._tracer, self._span = tracer, span
        # `perf_counter` is the same clock on Linux. The offset is measured for each request, because the system's clock may be
        # adjusted while the server runs.
        self._zero_ns = time.time_ns() - time.monotonic_ns()
        context = span.get_span_context()
        assert context is not None
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def child(self, name: str, begin_s: float, end_s: float, **attributes: str | int | float) -> None:
        begin_ns, end_ns = (self._zero_ns + int(seconds * 1e9) for seconds in (begin_s, end_s))
        self._tracer.child(self._span, name, begin_ns, end_ns, attributes)

    def end(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
