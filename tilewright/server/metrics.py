"""The content of `/metrics`: the engine's own numbers, read at each scrape, and numbers that only the server can measure.

The engine's numbers are derived from `EngineStats` at the moment of the scrape, so they cannot drift from the engine. The
server adds two histograms of latencies, counts of HTTP requests and connections, and `process_*` (memory, time, files).
Each server has its own registry: two of them in one process do not share numbers.

A server of several processes reports the numbers of all of them together. Its counts are plain numbers by name
(`Metrics.counts`), so that the counts of several processes can be added.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tilewright.engine.outputs import EngineStats
from tilewright.server.aliases import aliases

if TYPE_CHECKING:
    from tilewright.server.traces import Tracer

__all__ = ["CONTENT_TYPE", "HttpCounts", "Latencies", "Metrics", "Scrape", "added_gauges", "process_numbers"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

GAUGES = {
    "requests_running": ("Samples in the running batch", "running"),
    "requests_waiting": ("Samples in the queue", "waiting"),
    "kv_pages_total": ("Pages of the KV cache", "pages_total"),
    "kv_pages_used": ("Pages held by running requests", "pages_used"),
    "kv_pages_cached": ("Pages kept only for prefix reuse", "pages_cached"),
    "host_pages_total": ("Pages of host memory for pages that leave the KV cache", "host_pages_total"),
    "host_pages_used": ("Pages of host memory in use", "host_pages_used"),
    "window_pages_total": ("Pages of the separate cache for layers with a sliding window", "window_pages_total"),
    "window_pages_used": ("Pages of that cache held by running requests", "window_pages_used"),
}
COUNTERS = {
    "prompt_tokens": ("Prompt tokens received", "prompt_tokens"),
    "generation_tokens": ("Tokens generated", "generated_tokens"),
    "prefix_query_tokens": ("Prompt tokens looked up in the prefix cache", "prefix_query_tokens"),
    "prefix_hit_tokens": ("Prompt tokens found in the prefix cache", "prefix_hit_tokens"),
    "pages_out": ("Pages copied to host memory", "pages_out"),
    "pages_in": ("Pages copied back from host memory", "pages_in"),
    "window_pages_returned": (
        "Window pages freed by running requests, because the window had moved past them",
        "window_pages_returned",
    ),
    "drafted_tokens": ("Tokens guessed ahead", "drafted_tokens"),
    "accepted_tokens": ("Drafted tokens that were accepted", "accepted_tokens"),
    "forced_tokens": ("Accepted tokens that were the only choice of a grammar", "forced_tokens"),
    "preemptions": ("Samples put back into the queue because pages ran out", "preemptions"),
    "requests_finished": ("Samples that finished", "finished"),
    "requests_aborted": ("Samples aborted, mostly because the client disconnected", "aborted"),
    "requests_failed": ("Samples on which the model runner failed", "failed"),
    "requests_expired": ("Samples given up because they did not start in time", "expired"),
}
ABOVE = ("/page/", "/v1/models/", "/v2/models/", "/v2/repository/", "/predict/")
"""Path prefixes that are followed by a name. All paths with the same prefix are counted together."""
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
NEXT_TOKEN_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)


class _Histogram:
    """Durations in seconds, counted in buckets. The names of its counts begin with `name`."""

    def __init__(self, name: str, words: str, bounds: tuple[float, ...]):
        self.name, self.words, self.bounds = name, words, bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a duration `times` times."""
        self.buckets[bisect_left(self.bounds, seconds)] += times
        self.sum_s += seconds * times

    def percentiles_ms(self) -> dict[str, float]:
        """p50, p90 and p99 in milliseconds, interpolated from the buckets; {} if nothing was observed."""
        total, found = sum(self.buckets), {}
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)) if total else ():
            wanted, low_s = share * total, 0.0
            for number, high_s in zip(self.buckets, (*self.bounds, self.bounds[-1])):
                if wanted <= number:
                    found[name] = 1e3 * (low_s + (high_s - low_s) * wanted / number)
                    break
                wanted, low_s = wanted - number, high_s
        return found

    def counts(self) -> Iterator[tuple[str, float]]:
        """The numbers of the histogram by name."""
        yield from ((f"{self.name} {i}", number) for i, number in enumerate(self.buckets) if number)
        yield f"{self.name} sum", self.sum_s

    def family(self, counts: Mapping[str, float]) -> Metric:
        """The Prometheus family for such numbers."""
        buckets, below = [], 0.0
        for i, bound in enumerate((*map(str, self.bounds), "+Inf")):
            below += counts.get(f"{self.name} {i}", 0)
            buckets.append((bound, below))
        return HistogramMetricFamily(
            f"tilewright_{self.name}", self.words, buckets=buckets, sum_value=counts.get(f"{self.name} sum", 0.0)
        )


class Latencies:
    """The two latencies that the client of a stream notices, measured when the output of a step reaches the event loop."""

    def __init__(self) -> None:
        self.histograms = (
            _Histogram(
                "time_to_first_token_seconds", "From the arrival of a request to its first token", FIRST_TOKEN_BUCKETS_S
            ),
            _Histogram(
                "inter_token_latency_seconds",
                "Between two tokens of a sample; tokens that arrive together share the time",
                NEXT_TOKEN_BUCKETS_S,
            ),
        )

    def percentiles(self) -> dict[str, dict[str, float]]:
        """p50, p90, p99 in milliseconds since the start, of first tokens ("ttft") and later ones ("itl"); {} before any."""
        return {name: each.percentiles_ms() for name, each in zip(("ttft", "itl"), self.histograms)}

    def first(self, seconds: float) -> None:
        """Record that a sample's first token came `seconds` after its request."""
        self.histograms[0].observe(seconds)

    def following(self, seconds: float, tokens: int, samples: int = 1) -> None:
        """Record that each of `samples` samples got `tokens` tokens together, `seconds` after its tokens before."""
        self.histograms[1].observe(seconds / tokens, tokens * samples)


@dataclass(frozen=True)
class Scrape:
    """The numbers in /metrics that do not come from the process which renders it."""

    stats: EngineStats
    compiles: int
    """Kernels compiled since the server was ready; should stay 0."""
    counts: Mapping[str, float] | None = None
    """Sums of `Metrics.counts` over all processes of the server; None: this process is the only one."""
    gauges: Mapping[str, float] | None = None
    """`Metrics.gauges` of all processes, merged by `added_gauges`; None: this process is the only one."""


class HttpCounts:
    """Counts of answered requests and of connections. `paths`: the paths with a label of their own.

    A client can choose any path, and each label value makes a new time series. So other paths are counted under the prefix in
    `ABOVE` that they begin with, or as "other".
    """

    def __init__(self, connections: Callable[[], int], ended: Counter[str]):
        self.paths: frozenset[str] = frozenset()
        self.requests: Counter[tuple[str, int]] = Counter()
        """(path, status) -> number of requests."""
        self.wrong_keys = 0
        self.further: list[Collector] = []
        """Collectors of further metrics."""
        self.tracer: Tracer | None = None
        """Creates a span for each request; None: no traces."""
        self._connections = connections
        self._ended = ended

    def count(self, path: str, status: int) -> None:
        """Count a request for `path` that was answered with `status`."""
        self.requests[self.route(path), status] += 1

    def route(self, path: str) -> str:
        """The label under which a path is counted."""
        return path if path in self.paths else _below(path)

    def counts(self) -> Iterator[tuple[str, float]]:
        """Counters (numbers that only increase) by name."""
        yield from ((f"requests {path} {status}", number) for (path, status), number in self.requests.items())
        yield from ((f"ended {reason}", number) for reason, number in self._ended.items())
        yield "wrong_keys", self.wrong_keys

    def collect(self) -> Iterator[Metric]:
        """The families of these counts, for this process alone, and those of further collectors."""
        yield from _http_families(dict(self.counts()), self.connections)
        for collector in self.further:
            yield from collector.collect()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return self._connections()


@lru_cache(maxsize=256)
def _below(path: str) -> str:
    """What a path without a label of its own is counted as."""
    return next((f"{start}*" for start in ABOVE if path.startswith(start)), "other")


def _http_families(counts: Mapping[str, float], connections: float) -> Iterator[Metric]:
    requests = CounterMetricFamily("tilewright_http_requests", "HTTP requests answered", labels=("path", "status"))
    ended = CounterMetricFamily(
        "tilewright_http_connections_ended", "Connections that the server ended, by reason", labels=("reason",)
    )
    for name in sorted(counts):
        kind, *labels = name.split(" ")
        if kind in ("requests", "ended"):
            (requests if kind == "requests" else ended).add_metric(labels, counts[name])
    yield requests
    wrong = counts.get("wrong_keys", 0)
    yield CounterMetricFamily("tilewright_http_wrong_keys", "Requests without the right API key", value=wrong)
    yield GaugeMetricFamily("tilewright_http_connections", "Connections that are open", value=connections)
    yield ended


def process_numbers() -> dict[str, float]:
    """`process_*` of this process: memory, time, files. Empty if the system does not provide these numbers."""
    families = ProcessCollector(registry=None).collect()  # pyright: ignore[reportArgumentType]
    return {sample.name: sample.value for family in families for sample in family.samples}


_LEAST = ("process_start_time_seconds", "process_max_fds")
"""Gauges for which the minimum over the processes is reported, not the sum."""


def added_gauges(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge `Metrics.gauges` of several processes: sums, or minima for the names in `_LEAST`."""
    found: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            before = found.get(name)
            found[name] = value if before is None else min(before, value) if name in _LEAST else before + value
    return found


class Metrics(Collector):
    """Everything in `/metrics`."""

    def __init__(self, http: HttpCounts):
        self._registry = CollectorRegistry()
        self.latencies = Latencies()
        self.http = http
        self._scrape: Scrape | None = None
        self._registry.register(self)

    def counts(self) -> dict[str, float]:
        """The counters of this process (numbers that only increase) by name."""
        parts = (self.http.counts(), *(histogram.counts() for histogram in self.latencies.histograms))
        return {name: number for part in parts for name, number in part}

    def gauges(self) -> dict[str, float]:
        """The gauges of this process (current values): its connections, and `process_*`."""
        return {"connections": self.http.connections, **process_numbers()}

    def render(self, scrape: Scrape) -> bytes:
        """The exposition text for these numbers of the engine."""
        self._scrape = scrape
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Prometheus' hook: the families made from the last scrape."""
        if self._scrape is None:
            return
        scrape, stats = self._scrape, self._scrape.stats
        counts = self.counts() if scrape.counts is None else scrape.counts
        gauges = self.gauges() if scrape.gauges is None else scrape.gauges
        for name, (words, field) in GAUGES.items():
            yield GaugeMetricFamily(f"tilewright_{name}", words, value=getattr(stats, field))
        for name, (words, field) in COUNTERS.items():
            yield CounterMetricFamily(f"tilewright_{name}", words, value=getattr(stats, field))
        yield from aliases(stats)
        words = "Kernels compiled after the server was ready"
        yield CounterMetricFamily("tilewright_jit_compiles_after_ready", words, value=scrape.compiles)
        yield from (histogram.family(counts) for histogram in self.latencies.histograms)
        yield from _http_families(counts, gauges["connections"])
        for collector in self.http.further:
            yield from collector.collect()
        for name, value in gauges.items():
            if name == "process_cpu_seconds_total":
                yield CounterMetricFamily("process_cpu_seconds", "Processor time, user and system", value=value)
            elif name.startswith("process_"):
                yield GaugeMetricFamily(name, name.replace("_", " "), value=value)
