"""What `/metrics` says: the engine's own numbers, read when asked for, and two histograms that only the server can measure.

Everything but the histograms is derived from `EngineStats` at the moment of the scrape, so it cannot drift from the engine.
Each server has its own registry: two of them in one process do not share numbers.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tilewright.engine.outputs import EngineStats

__all__ = ["CONTENT_TYPE", "Latencies", "Metrics"]

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
    "preemptions": ("Samples put back into the queue for want of pages", "preemptions"),
    "requests_finished": ("Samples that came to their end", "finished"),
    "requests_aborted": ("Samples aborted, mostly by clients that went away", "aborted"),
    "requests_failed": ("Samples that the model runner failed on", "failed"),
}
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


class Metrics(Collector):
    """Everything `/metrics` shows. `compiles()` counts kernels compiled since the server was ready; it should stay 0."""

    def __init__(self, compiles: Callable[[], int]):
        self._registry = CollectorRegistry()
        self.latencies = Latencies(self._registry)
        self._compiles = compiles
        self._stats: EngineStats | None = None
        self._registry.register(self)

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
