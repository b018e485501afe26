"""The short way of small inference requests: from the connection's bytes to the model's queue, and back.

A request for a batched tensor of a few hundred bytes costs the model some microseconds, and a web framework half a
millisecond; an image goes through the framework in twice the time. So `POST /v2/models/NAME/infer` is read here where it is
plain (heads.py), has at most `MAX_BODY_BYTES`, or `MAX_BINARY_BYTES` with tensors as bytes, and gate.py refuses nothing.
Everything else goes the usual way, and is answered or refused there: this file never refuses a request for its head's form.

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
from tilewright.host.regions import INLINE_BYTES, Regions
from tilewright.host.tensors import Wire
from tilewright.host.version import Version
from tilewright.server.access import note, request_id_from
from tilewright.server.gate import Gate
from tilewright.server.heads import MAX_HEAD_BYTES, plain_head
from tilewright.server.metrics import HttpCounts
from tilewright.server.shortcut import PARTIAL, Done, Short, Taken
from tilewright.server.v2.codec import InferRequest, answer_body, parse_infer, placed
from tilewright.server.v2.http import answered, failure

__all__ = ["Quick"]

MAX_BODY_BYTES = 64 << 10
"""Of JSON; ..."""
MAX_BINARY_BYTES = 4 << 20
"""... and of all where the tensors are bytes behind it."""
MAX_HEADS = 1024
"""Heads that are remembered."""
START = b"POST /v2/models/"
PATH = re.compile(rb"/v2/models/([A-Za-z0-9][A-Za-z0-9._-]{0,127})(?:/versions/([0-9]{1,9}))?/infer")


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
        most_bytes: of a body.
        regions: clients' memory; None: there is none.
    """

    def __init__(
        self,
        host: Host,
        gate: Gate,
        counts: HttpCounts,
        draining: Callable[[], bool],
        most_bytes: int,
        regions: Regions | None = None,
    ):
        self._host, self._gate, self._counts, self._draining, self._regions = host, gate, counts, draining, regions
        self._most = min(MAX_BINARY_BYTES, most_bytes)
        self._heads: OrderedDict[bytes, _Head] = OrderedDict()

    def take(self, data: bytes | bytearray, client: str) -> Taken | object | None:
        """The request that the data begins with, `PARTIAL`, or None: the usual way."""
        if not data.startswith(START):
            return PARTIAL if START.startswith(bytes(data[: len(START)])) else None
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            return PARTIAL if len(data) < MAX_HEAD_BYTES else None
        raw = bytes(data[:end])
        head = self._heads.get(raw) or self._read(raw)
        if head is None or self._draining():
            return None
        whole = end + 4 + head.body_bytes
        if len(data) < whole:
            return PARTIAL
        return Taken(whole, partial(self._begin, head, memoryview(data)[end + 4 : whole], client))

    def _read(self, raw: bytes) -> _Head | None:
        """A head that was not seen before; None: it is unusual."""
        plain = plain_head(raw, self._most)
        path = None if plain is None or plain.close else PATH.fullmatch(plain.target)
        if plain is None or path is None:
            return None
        fields, where = plain.fields, plain.target.decode()
        if plain.body_bytes > MAX_BODY_BYTES and not _binary(fields.get("inference-header-content-length", "")):
            return None
        # Asked last: a wrong key is counted, and what is refused is asked again on the usual way.
        if self._gate.refusal("POST", where, Headers(fields), counted=False) is not None:
            return None
        version = None if path[2] is None else path[2].decode()
        json_bytes, identity = fields.get("inference-header-content-length"), fields.get("x-request-id")
        trace = None
        if self._counts.tracer is not None:
            trace = {name: fields[name] for name in ("traceparent", "tracestate") if name in fields}
        head = _Head(where, path[1].decode(), version, plain.body_bytes, json_bytes, identity, trace)
        if identity is None and not trace:
            self._heads[raw] = head
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        return head

    def _begin(self, head: _Head, body: memoryview, client: str, done: Done) -> Callable[[], object]:
        """Answer a request: through the model's queue at once where that is all, else in a task."""
        one = _Request(self._counts, head, client, done)
        try:
            asked = one.asked = parse_infer(body, head.json_bytes, self._regions)
            if one.span is None and sum(map(len, asked.places.values())) <= INLINE_BYTES:
                begun = self._host.begin(head.model, head.version, asked.inputs, asked.ask, one.deliver)
                if begun is not None:
                    one.version, give_up = begun
                    return give_up
        except HostError as error:
            one.deliver(error)
            return _nothing
        answer = answered(self._host, head.model, head.version, asked, one.span)
        task = asyncio.get_running_loop().create_task(answer)
        task.add_done_callback(one.ended)
        return task.cancel


class _Request:
    """A request that is being answered."""

    def __init__(self, counts: HttpCounts, head: _Head, client: str, done: Done):
        self._counts, self._head, self._client, self._done = counts, head, client, done
        self._started_s, self._id = time.perf_counter(), request_id_from(head.request_id or "")
        self._found: tuple[Wire, ...] | HostError | asyncio.Task[Answer] = ()
        self.asked: InferRequest | None = None
        self.version: Version | None = None
        """Who answers, where there is no task."""
        tracer = counts.tracer
        self.span = tracer and tracer.begin("POST", counts.route(head.path), head.trace or {}, self._id)

    def deliver(self, found: tuple[Wire, ...] | HostError) -> None:
        """The outputs are there, or the reason why there are none."""
        self._found = found
        self._done(self._short, alone=isinstance(found, tuple) and self.version is not None and self.version.answers_one)

    def ended(self, task: "asyncio.Task[Answer]") -> None:
        """The task has its answer."""
        if not task.cancelled():
            self._found = task
            self._done(self._short)

    def _answer(self) -> Answer:
        found = self._found
        if isinstance(found, tuple):
            assert self.version is not None
            names = [spec.name for spec in self.version.signature.outputs]
            answer = Answer(self.version.name, self.version.number, dict(zip(names, found, strict=True)))
            if self.asked is not None and self.asked.places:
                placed(answer, self.asked.places)
            return answer
        if isinstance(found, HostError):
            raise found
        return found.result()

    def _short(self) -> Short:
        """The answer, noted in log and counts."""
        identity = self._id.encode()
        try:
            answer = self._answer()
            assert self.asked is not None
            body, json_bytes = answer_body(answer, self.asked)
            status, headers = 200, b"content-type: application/json\r\n"
            if json_bytes is not None:
                headers = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n" % json_bytes
        except HostError as error:
            status, said, body = failure(error)
            headers = "".join(f"{name}: {value}\r\n" for name, value in said.items()).encode()
        note(
            self._counts,
            method="POST",
            path=self._head.path,
            status=status,
            seconds=time.perf_counter() - self._started_s,
            request_id=self._id,
            client=self._client,
            span=self.span,
        )
        return Short(status, b"%bx-request-id: %b\r\n" % (headers, identity), body)


def _binary(json_bytes: str) -> bool:
    """Whether what stands before the tensors' bytes is short enough to be read where it arrives."""
    return json_bytes.isascii() and json_bytes.isdecimal() and len(json_bytes) <= 6 and int(json_bytes) <= MAX_BODY_BYTES


def _nothing() -> None:
    """Gives up nothing."""
