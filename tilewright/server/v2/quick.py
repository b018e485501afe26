"""The short way of small inference requests: from the connection's bytes to the model's queue, and back.

A request for a batched tensor of a few hundred bytes costs the model some microseconds, and a web framework half a
millisecond. So `POST /v2/models/NAME/infer` is read here where it is plain: HTTP/1.1, a Content-Length of at most
`MAX_BODY_BYTES`, no transfer or content encoding, nobody's Origin, nothing that gate.py refuses. Everything else goes the
usual way, and is answered or refused there: this file never refuses a request for the form of its head.

A head that came before is not read again: clients send the same one over and over.
"""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from starlette.datastructures import Headers

from tilewright.host.errors import HostError
from tilewright.host.host import Answer, Host
from tilewright.server.access import note, request_id_from
from tilewright.server.gate import Gate
from tilewright.server.metrics import HttpCounts
from tilewright.server.shortcut import PARTIAL, Done, Short, Taken
from tilewright.server.spans import RequestSpan
from tilewright.server.v2.codec import InferRequest, answer_body, parse_infer
from tilewright.server.v2.http import failure, noted

__all__ = ["Quick"]

MAX_BODY_BYTES = 64 << 10
MAX_HEAD_BYTES = 8 << 10
MAX_HEADS = 1024
"""Heads that are remembered."""
START = b"POST /v2/models/"
PATH = re.compile(rb"/v2/models/([A-Za-z0-9][A-Za-z0-9._-]{0,127})(?:/versions/([0-9]{1,9}))?/infer")
NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
UNUSUAL = {"transfer-encoding", "content-encoding", "expect", "upgrade", "origin", "te", "trailer", "http2-settings"}


class _Head(NamedTuple):
    """What a head says."""

    path: str
    model: str
    version: str | None
    body_bytes: int
    json_bytes: str | None
    request_id: str | None
    trace: dict[str, str] | None = None
    """Headers that say whose trace it belongs to."""


class Quick:
    """The shortcut of one server's connections.

    Args:
        host: the models.
        gate: refuses who may not come in, as on the usual way.
        counts: of requests.
        draining: whether new requests are refused.
    """

    def __init__(self, host: Host, gate: Gate, counts: HttpCounts, draining: Callable[[], bool]):
        self._host, self._gate, self._counts, self._draining = host, gate, counts, draining
        self._heads: OrderedDict[bytes, _Head] = OrderedDict()

    def take(self, data: bytes, client: str) -> Taken | object | None:
        """The request that the data begins with, `PARTIAL`, or None: the usual way."""
        if not data.startswith(START):
            return PARTIAL if START.startswith(data) else None
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            return PARTIAL if len(data) < MAX_HEAD_BYTES else None
        raw = data[:end]
        head = self._heads.get(raw) or self._read(raw)
        if head is None or self._draining():
            return None
        whole = end + 4 + head.body_bytes
        if len(data) < whole:
            return PARTIAL
        return Taken(whole, partial(self._begin, head, data[end + 4 : whole], client))

    def _read(self, raw: bytes) -> _Head | None:
        """A head that was not seen before; None: it is unusual."""
        lines = raw.split(b"\r\n")
        words = lines[0].split(b" ")
        if len(words) != 3 or words[2] != b"HTTP/1.1" or raw.count(b"\n") != len(lines) - 1 or b"\0" in raw:
            return None
        path, fields = PATH.fullmatch(words[1]), dict[str, str]()
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            key = name.decode("latin-1").lower()
            if not colon or not NAME.fullmatch(name) or key in fields or key in UNUSUAL or b"\r" in value:
                return None
            fields[key] = value.decode("latin-1").strip(" \t")
        length = fields.get("content-length", "")
        if path is None or not (length.isascii() and length.isdecimal()) or int(length[:9]) > MAX_BODY_BYTES:
            return None
        if fields.get("connection", "keep-alive").lower() != "keep-alive" or "host" not in fields:
            return None
        where = words[1].decode()
        # Asked last: a wrong key is counted, and what is refused is asked again on the usual way.
        if self._gate.refusal("POST", where, Headers(fields), counted=False) is not None:
            return None
        version = None if path[2] is None else path[2].decode()
        json_bytes, identity = fields.get("inference-header-content-length"), fields.get("x-request-id")
        trace = None
        if self._counts.tracer is not None:
            trace = {name: fields[name] for name in ("traceparent", "tracestate") if name in fields}
        head = _Head(where, path[1].decode(), version, int(length), json_bytes, identity, trace)
        if identity is None and not trace:
            self._heads[raw] = head
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        return head

    def _begin(self, head: _Head, body: bytes, client: str, done: Done) -> Callable[[], object]:
        """Answer a request: through the model's queue at once where that is all, else in a task."""
        started_s, request_id = time.perf_counter(), request_id_from(head.request_id or "")
        tracer, span = self._counts.tracer, None
        if tracer is not None:
            span = tracer.begin("POST", self._counts.route(head.path), head.trace or {}, request_id)
        about = _About(head.path, client, request_id, started_s, span)
        try:
            request = parse_infer(body, head.json_bytes)
            if span is None:
                inputs, ask = request.inputs, request.ask
                begun = self._host.begin(
                    head.model, head.version, inputs, ask, lambda found: done(partial(self._short, about, request, found))
                )
                if begun is not None:
                    return begun
        except HostError as error:
            done(partial(self._short, about, None, error))
            return _nothing
        task = asyncio.get_running_loop().create_task(
            self._host.infer(head.model, head.version, request.inputs, noted(request.ask, span))
        )

        def ended(task: "asyncio.Task[Answer]") -> None:
            if not task.cancelled():
                done(partial(self._short, about, request, task))

        task.add_done_callback(ended)
        return task.cancel

    def _short(
        self, about: "_About", request: InferRequest | None, found: "Answer | HostError | asyncio.Task[Answer]"
    ) -> Short:
        """The answer to a request, noted in log and counts."""
        try:
            answer = found.result() if isinstance(found, asyncio.Task) else found
            if isinstance(answer, HostError):
                raise answer
            assert request is not None
            body, json_bytes = answer_body(answer, request)
            status, headers = 200, {"content-type": "application/json"}
            if json_bytes is not None:
                headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(json_bytes)}
        except HostError as error:
            status, headers, body = failure(error)
        headers["x-request-id"] = about.request_id
        note(
            self._counts,
            method="POST",
            path=about.path,
            status=status,
            seconds=time.perf_counter() - about.started_s,
            request_id=about.request_id,
            client=about.client,
            span=about.span,
        )
        return Short(status, headers, body)


class _About(NamedTuple):
    """What the log says of a request."""

    path: str
    client: str
    request_id: str
    started_s: float
    span: RequestSpan | None


def _nothing() -> None:
    """Gives up nothing."""
