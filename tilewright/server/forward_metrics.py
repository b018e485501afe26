"""The router's part of /metrics: which replicas it has chosen, and why."""

from collections.abc import Mapping

from tilewright.server.fleet import Fleet

__all__ = ["router_metrics"]


def router_metrics(fleet: Fleet, retries: Mapping[str, int]) -> list[str]:
    """The router's own numbers as lines of the Prometheus format."""
    router = fleet.router
    lines = ["# TYPE tilewright_router_replicas_ready gauge", f"tilewright_router_replicas_ready {len(fleet.ready)}"]
    lines.append("# TYPE tilewright_router_requests_total counter")
    for (index, reason), count in sorted(router.decisions.items()):
        lines.append(f'tilewright_router_requests_total{{replica="{index}",reason="{reason}"}} {count}')
    lines.append("# TYPE tilewright_router_retries_total counter")
    lines += [f'tilewright_router_retries_total{{reason="{why}"}} {count}' for why, count in sorted(retries.items())]
    lines.append("# TYPE tilewright_router_restarts_total counter")
    lines += [f'tilewright_router_restarts_total{{replica="{r.index}"}} {r.restarts}' for r in fleet.replicas]
    lines.append("# TYPE tilewright_router_pages_known gauge")
    for replica in fleet.replicas:
        lines.append(f'tilewright_router_pages_known{{replica="{replica.index}"}} {router.pages_known(replica.index)}')
    return lines
