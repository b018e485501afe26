"""/metrics of several replicas: their expositions as one, and the numbers of the router."""

import json
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from tilewright.server.fleet import Fleet

__all__ = ["labelled", "router_metrics"]


def router_metrics(fleet: Fleet, retries: Mapping[str, int]) -> list[str]:
    """The router's own numbers, a line each."""
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


def labelled(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Expositions of several replicas as one, each sample with the label `replica`."""
    kinds: dict[str, str] = {}
    lines: dict[str, list[str]] = {}
    for index, text in texts:
        for family in text_string_to_metric_families(text):
            kinds.setdefault(family.name, family.type)
            for sample in family.samples:
                labels = ",".join(
                    f"{name}={json.dumps(value)}" for name, value in {**sample.labels, "replica": str(index)}.items()
                )
                lines.setdefault(family.name, []).append(f"{sample.name}{{{labels}}} {sample.value}")
    total = {name: f"{name}_total" if kind == "counter" else name for name, kind in kinds.items()}
    return [line for name, found in lines.items() for line in (f"# TYPE {total[name]} {kinds[name]}", *found)]
