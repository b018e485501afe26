"""What `/metrics` says: the engine's own numbers, read when asked for, and what only the server can measure.

The engine's numbers are derived from `EngineStats` at the moment of the scrape, so they cannot drift from the engine. The
server adds two histograms of latencies, counts of HTTP requests and connections, and `process_*` (memory, time, files).
Each server has its own registry: two of them in one process do not share numbers.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tilewright.engine.outputs import EngineStats

__all__ = ["CONTENT_TYPE", "HttpCounts", "Latencies", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

GAUGES = {
    "requests_running": ("Samples in the running batch", "running"),
    "requests_waiting": ("Samples in the queue", "waiting"),
    "kv_pages_total": ("Pages of the KV cache", "pages_total"),
    "kv_pages_used": ("Pages held by running requests", "pages_used"),
    "kv_pages_cached": ("Pages kept only for prefix reuse", "pages_cached"),
}
COUNTERS = {
    "prompt_tokens": ("Prompt tokens taken in", "prompt_tokens"),
    "generation_tokens": ("Tokens generated", "generated_tokens"),
    "prefix_query_tokens": ("Prompt tokens looked up in the prefix cache", "prefix_query_tokens"),
    "prefix_hit_tokens": ("Prompt tokens found in the prefix cache", "prefix_hit_tokens"),
    "drafted_tokens": ("Tokens guessed ahead", "drafted_tokens"),
    "accepted_tokens": ("Those of them that were right", "accepted_tokens"),
    "preemptions": ("Samples put back into the queue for want of pages", "preemptions"),
    "requests_finished": ("Samples that came to their end", "finished"),
    "requests_aborted": ("Samples aborted, mostly by clients that went away", "aborted"),
    "requests_failed": ("Samples that the model runner failed on", "failed"),
    "requests_expired": ("Samples given up because they were not started in time", "expired"),
}
ABOVE = ("/page/", "/v1/models/", "/v2/models/", "/v2/repository/", "/predict/")
"""Where a path has a name in it: these are counted together."""
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
NEXT_TOKEN_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)


class Latencies:
    """The two latencies that a reader of a stream feels, measured where deltas leave the engine's thread."""

    def __init__(self, registry: CollectorRegistry):
        self._first = Histogram(
            "tilewright_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._next = Histogram(
            "tilewright_inter_token_latency_seconds",
            "Between two tokens of a sample; tokens that arrive together share the time",
            buckets=NEXT_TOKEN_BUCKETS_S,
            registry=registry,
        )

    def first(self, seconds: float) -> None:
        """A sample's first token came `seconds` after its request."""
        self._first.observe(seconds)

    def following(self, seconds: float, tokens: int) -> None:
        """`tokens` more came together, `seconds` after those before."""
        for _ in range(tokens):
            self._next.observe(seconds / tokens)


class HttpCounts:
    """Requests that were answered, and connections; `paths` are those with a label of their own.

    Each number a client can choose would make a new time series: of other paths only the first part is looked at.
    """

    def __init__(self, connections: Callable[[], int], ended: Counter[str]):
        self.paths: frozenset[str] = frozenset()
        self.requests: Counter[tuple[str, int]] = Counter()
        """(path, status) -> requests."""
        self.wrong_keys = 0
        self.further: list[Collector] = []
        """What else stands in /metrics."""
        self._connections = connections
        self._ended = ended

    def count(self, path: str, status: int) -> None:
        """A request for `path` was answered with `status`."""
        above = next((f"{start}*" for start in ABOVE if path.startswith(start)), "other")
        self.requests[path if path in self.paths else above, status] += 1

    def collect(self) -> Iterator[Metric]:
        """The families of these counts."""
        family = CounterMetricFamily("tilewright_http_requests", "HTTP requests answered", labels=("path", "status"))
        for (path, status), number in sorted(self.requests.items()):
            family.add_metric((path, str(status)), number)
        yield family
        yield CounterMetricFamily("tilewright_http_wrong_keys", "Requests without the right API key", value=self.wrong_keys)
        yield GaugeMetricFamily("tilewright_http_connections", "Connections that are open", value=self._connections())
        ended = CounterMetricFamily(
            "tilewright_http_connections_ended", "Connections that the server ended, by reason", labels=("reason",)
        )
        for reason, number in sorted(self._ended.items()):
            ended.add_metric((reason,), number)
        yield ended
        for collector in self.further:
            yield from collector.collect()


class Metrics(Collector):
    """Everything `/metrics` shows. `compiles()` counts kernels compiled since the server was ready; it should stay 0."""

    def __init__(self, compiles: Callable[[], int], http: HttpCounts):
        self._registry = CollectorRegistry()
        self.latencies = Latencies(self._registry)
        self.http = http
        self._compiles = compiles
        self._stats: EngineStats | None = None
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, stats: EngineStats) -> bytes:
        """The exposition text for these numbers of the engine."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Prometheus' hook: the families made from the last stats."""
        if self._stats is None:
            return
        for name, (words, field) in GAUGES.items():
            yield GaugeMetricFamily(f"tilewright_{name}", words, value=getattr(self._stats, field))
        for name, (words, field) in COUNTERS.items():
            yield CounterMetricFamily(f"tilewright_{name}", words, value=getattr(self._stats, field))
        words = "Kernels compiled after the server was ready"
        yield CounterMetricFamily("tilewright_jit_compiles_after_ready", words, value=self._compiles())
        yield from self.http.collect()
