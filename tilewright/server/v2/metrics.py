"""Metrics of ordinary models for /metrics, by model and version."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tilewright.host.host import Host

__all__ = ["HostMetrics"]

LABELS = ("model", "version")


class HostMetrics(Collector):
    """Metrics of one host. They are read from it when Prometheus collects them."""

    def __init__(self, host: Host):
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus to collect the metrics."""
        versions = [(name, str(n), v) for name, m in self._host.models.items() for n, v in m.versions.items()]
        counters = {
            "model_inferences": ("Rows that were answered", lambda v: v.stats.inferences),
            "model_requests": ("Requests that were answered", lambda v: v.stats.times["success"].count),
            "model_requests_failed": ("Requests that had no answer", lambda v: v.stats.times["fail"].count),
            "model_requests_refused": ("Requests that found the queue full", lambda v: v.stats.refused),
            "model_requests_expired": ("Requests whose timeout passed before they were started", lambda v: v.stats.expired),
            "model_batches": ("Batches that were computed", lambda v: v.stats.executions),
            "model_restarts": ("Processes of the model that were lost and replaced", lambda v: v.stats.restarts),
            "model_circuit_opened": ("How often requests were kept from a broken model", lambda v: v.circuit.opened),
            "model_request_seconds": (
                "Time from arrival to answer, of all requests",
                lambda v: v.stats.times["success"].ns / 1e9,
            ),
            "model_queue_seconds": ("Time in the queue, of all requests", lambda v: v.stats.times["queue"].ns / 1e9),
            "model_compute_seconds": ("Time in the model, of all requests", lambda v: v.stats.times["compute_infer"].ns / 1e9),
            "model_cache_hits": ("Requests that were answered from the cache", lambda v: v.stats.times["cache_hit"].count),
            "model_shared_bytes_direct": (
                "Bytes of inputs that a GPU copied from clients' shared memory",
                lambda v: v.stats.traffic.direct,
            ),
            "model_shared_bytes_read": (
                "Bytes of inputs that a processor read from clients' shared memory",
                lambda v: v.stats.traffic.read,
            ),
            "model_shadow_compared": ("Answers of a shadow version that were compared", lambda v: v.stats.shadow.compared),
            "model_shadow_different": ("Those that had another byte", lambda v: v.stats.shadow.different),
            "model_shadow_failed": ("Requests that a shadow version had no answer for", lambda v: v.stats.shadow.failed),
        }
        gauges = {
            "model_ready": ("Whether the version takes requests", lambda v: int(v.ready)),
            "model_waiting": ("Requests in the queue", lambda v: v.waiting),
            "model_running": ("Requests that are being computed", lambda v: v.running),
            "model_shared_bytes_locked": (
                "Bytes of clients' shared memory that the process of the last batch had page-locked",
                lambda v: v.stats.traffic.locked,
            ),
            "model_shadow_largest_difference": (
                "Of a number of a shadow version, relative to the largest of the answer",
                lambda v: v.stats.shadow.largest_difference,
            ),
        }
        for kind, table in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, (words, read) in table.items():
                family = kind(f"tilewright_{name}", words, labels=LABELS)
                for model, number, version in versions:
                    family.add_metric((model, number), read(version))
                yield family
