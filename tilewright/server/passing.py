"""Code shared by the fronts of replicas: the requests in flight, common errors, and merging the metrics of several replicas."""

import asyncio
import json
from collections.abc import Coroutine, Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive

from tilewright.server.errors import ApiError, unavailable
from tilewright.server.stream import unless_gone

__all__ = ["BUSY", "Running", "labelled", "lost_event", "nobody"]

BUSY = (429, 503)
"""Statuses after which another replica is tried."""


class Running:
    """The requests in flight; the shutdown of the server waits for them or ends them."""

    def __init__(self) -> None:
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.stopped: str | None = None

    @property
    def open_channels(self) -> int:
        """The number of requests in flight."""
        return len(self.tasks)

    def stop_all(self, reason: str) -> None:
        """End the requests with an error."""
        self.stopped = reason
        for task in self.tasks:
            task.cancel()

    async def pass_on(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which answers a request, until it ends or the client leaves. Raises `ApiError` if `stop_all` ended it."""
        task = asyncio.ensure_future(work)
        self.tasks[task] = None
        try:
            await unless_gone(receive, _awaited(task))
        except asyncio.CancelledError:
            if self.stopped is None:
                raise
            raise unavailable(self.stopped) from None
        finally:
            task.cancel()
            del self.tasks[task]


async def _awaited(task: "asyncio.Task[None]") -> None:
    await task


def nobody() -> ApiError:
    """The error for a request while no replica accepts requests."""
    return unavailable("no replica is ready, because they are starting or restarting; try again soon", code="no_replica")


def lost_event() -> bytes:
    """The last event of a stream whose replica was lost."""
    lost = ApiError(
        500, "the replica that wrote this answer was lost; send the request again", type="server_error", code="replica_lost"
    )
    return b"data: " + json.dumps(lost.body).encode() + b"\n\n"


def labelled(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Merge the Prometheus expositions of several replicas into lines of one. Each sample gets the label `replica`."""
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
