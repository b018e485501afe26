"""Refuses requests for text with a 429 directly at the connection, without uvicorn and the web framework, under overload.

At twice the load that an engine can handle there is one refusal for every answer. A refusal through the web framework needs the
interpreter for as long as a few steps of a small model. So while the expected wait in the queue is known to be too long
(`EngineLink.full`), a plain POST (heads.py) to an endpoint that generates text is refused here once its body has arrived.
Status, body, headers, log line and counts are the same as through the framework. Requests that `Gate` refuses, and unusual
requests, go through the framework.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from starlette.datastructures import Headers

from tilewright.engine.request import QueueFull
from tilewright.server.access import note, request_id_from
from tilewright.server.config import ServerConfig
from tilewright.server.errors import overloaded
from tilewright.server.gate import Gate
from tilewright.server.heads import MAX_HEAD_BYTES, PlainHead, plain_head
from tilewright.server.metrics import HttpCounts
from tilewright.server.shortcut import PARTIAL, Done, Short, Taken

__all__ = ["Refusals"]

MAX_BODY_BYTES = 64 << 10
START = b"POST /v1/"
PATHS = (b"/v1/completions", b"/v1/chat/completions", b"/v1/responses")


class _Said(NamedTuple):
    """An encoded refusal."""

    why: QueueFull
    headers: bytes
    body: bytes


class Refusals:
    """A shortcut that refuses requests while the expected wait in the server's queue is too long.

    Args:
        full: returns why any request would be refused now, or None.
        gate: the server's checks. A request that fails one of them is left to the web framework.
        counts: counts of requests.
        config: only its limit on the size of a body is used.
    """

    def __init__(self, full: Callable[[], QueueFull | None], gate: Gate, counts: HttpCounts, config: ServerConfig):
        self._full, self._gate, self._counts = full, gate, counts
        self._most = min(MAX_BODY_BYTES, config.max_body_bytes)
        self._said: _Said | None = None

    def take(self, data: bytes | bytearray, client: str) -> Taken | object | None:
        """The request at the beginning of the data, `PARTIAL`, or None: it goes through the web framework."""
        why = self._full()
        if why is None:
            return None
        if not data.startswith(START):
            return PARTIAL if START.startswith(bytes(data[: len(START)])) else None
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            return PARTIAL if len(data) < MAX_HEAD_BYTES else None
        head = self._read(bytes(data[:end]))
        if head is None:
            return None
        whole = end + 4 + head.body_bytes
        return PARTIAL if len(data) < whole else Taken(whole, partial(self._refuse, why, head, client), head.close)

    def _read(self, raw: bytes) -> PlainHead | None:
        """Parse a head. Returns None if the request would be refused for another reason than the queue."""
        head = plain_head(raw, self._most)
        if head is None or head.target not in PATHS:
            return None
        if head.fields.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return None
        # A wrong key is not counted here: the web framework checks and counts it.
        return head if self._gate.refusal("POST", head.target.decode(), Headers(head.fields), counted=False) is None else None

    def _refuse(self, why: QueueFull, head: PlainHead, client: str, done: Done) -> Callable[[], object]:
        started_s, identity = time.perf_counter(), request_id_from(head.fields.get("x-request-id", ""))
        path, tracer = head.target.decode(), self._counts.tracer
        span = tracer and tracer.begin("POST", self._counts.route(path), head.fields, identity)

        def answer() -> Short:
            said, seconds = self._written(why), time.perf_counter() - started_s
            note(
                self._counts,
                method="POST",
                path=path,
                status=429,
                seconds=seconds,
                request_id=identity,
                client=client,
                first_s=round(seconds, 4),
                span=span,
            )
            end = b"connection: close\r\n" if head.close else b""
            return Short(429, b"%bx-request-id: %b\r\n%b" % (said.headers, identity.encode(), end), said.body)

        done(answer)
        return _nothing

    def _written(self, why: QueueFull) -> _Said:
        """The encoded refusal. It is encoded once for all requests that get it."""
        if self._said is None or self._said.why is not why:
            usual = overloaded(str(why), why.retry_after_s).response()
            fields = [(name, value) for name, value in usual.raw_headers if name != b"content-length"]
            self._said = _Said(why, b"".join(b"%b: %b\r\n" % field for field in fields), bytes(usual.body))
        return self._said


def _nothing() -> None:
    """Does nothing: the answer is already there, so there is nothing to give up."""
