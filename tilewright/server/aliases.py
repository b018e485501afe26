"""Metrics of the engine's load under the names that existing gateways and autoscalers read. The values are the same as those
of tilewright's own metrics."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from tilewright.engine.outputs import EngineStats

__all__ = ["aliases"]


def aliases(stats: EngineStats) -> Iterator[Metric]:
    """The gauges that Kubernetes' inference gateways read."""
    usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
    yield GaugeMetricFamily("vllm:num_requests_running", "tilewright_requests_running", value=stats.running)
    yield GaugeMetricFamily("vllm:num_requests_waiting", "tilewright_requests_waiting", value=stats.waiting)
    yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV cache that running requests hold, 0 to 1", value=usage)
