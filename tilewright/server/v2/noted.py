"""Log lines and counts for requests that a shortcut answers."""

import time

from tilewright.server.access import note, request_id_from
from tilewright.server.metrics import HttpCounts
from tilewright.server.shortcut import Short
from tilewright.server.spans import RequestSpan
from tilewright.server.v2.heading import Head

__all__ = ["Noted"]


class Noted:
    """A request of a connection of this process, from its arrival to its answer."""

    __slots__ = ("_client", "_counts", "_head", "_started_s", "id")

    def __init__(self, counts: HttpCounts, head: Head, client: str):
        self._counts, self._head, self._client = counts, head, client
        self._started_s, self.id = time.perf_counter(), request_id_from(head.request_id or "")

    def answer(self, status: int, headers: bytes, body: bytes, span: RequestSpan | None = None) -> Short:
        """The answer, with the request's id in its headers. Also counts it, writes the log line and ends the span."""
        note(
            self._counts,
            method="POST",
            path=self._head.path,
            status=status,
            seconds=time.perf_counter() - self._started_s,
            request_id=self.id,
            client=self._client,
            span=span,
        )
        return Short(status, b"%bx-request-id: %b\r\n" % (headers, self.id.encode()), body)
