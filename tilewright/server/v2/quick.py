"""The short way of small inference requests: from the connection's bytes to the model's queue, and back.

A request for a batched tensor of a few hundred bytes costs the model some microseconds, and a web framework half a
millisecond; an image goes through the framework in twice the time. So `POST /v2/models/NAME/infer` is read here where it is
plain (heading.py), has at most `MAX_BODY_BYTES`, or `MAX_BINARY_BYTES` with tensors as bytes, and gate.py refuses nothing.
Everything else goes the usual way, and is answered or refused there: this file never refuses a request for its head's form.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from tilewright.host.errors import HostError
from tilewright.host.host import Answer, Host
from tilewright.host.regions import INLINE_BYTES, Regions
from tilewright.host.tensors import Wire
from tilewright.host.version import Version
from tilewright.server.access import note, request_id_from
from tilewright.server.gate import Gate
from tilewright.server.metrics import HttpCounts
from tilewright.server.shortcut import Done, Short, Taken
from tilewright.server.spans import RequestSpan
from tilewright.server.v2.codec import InferRequest, answer_body, parse_infer, placed
from tilewright.server.v2.heading import Head, Heads, Request
from tilewright.server.v2.http import answered, failure

__all__ = ["Pending", "Quick", "begin"]

MAX_BINARY_BYTES = 4 << 20
"""Of a body whose tensors are bytes."""


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
        self._host, self._counts, self._draining, self._regions = host, counts, draining, regions
        self._heads = Heads(gate, counts, min(MAX_BINARY_BYTES, most_bytes))

    def take(self, data: bytes | bytearray, client: str) -> Taken | object | None:
        """The request that the data begins with, `PARTIAL`, or None: the usual way."""
        found = self._heads.find(data)
        if not isinstance(found, Request):
            return found
        if self._draining():
            return None
        body = memoryview(data)[found.begin : found.end]
        return Taken(found.end, partial(self._begin, found.head, body, client))

    def _begin(self, head: Head, body: memoryview, client: str, done: Done) -> Callable[[], object]:
        return begin(self._host, self._regions, head, body, _Request(self._counts, head, client, done))


def begin(host: Host, regions: Regions | None, head: Head, body: bytes | memoryview, one: "Pending") -> Callable[[], object]:
    """Have a request answered, by the model's queue at once where that is all, or in a task; returns what gives it up."""
    try:
        asked = one.asked = parse_infer(body, head.json_bytes, regions)
        if one.span is None and sum(map(len, asked.places.values())) <= INLINE_BYTES:
            begun = host.begin(head.model, head.version, asked.inputs, asked.ask, one.deliver)
            if begun is not None:
                one.version, give_up = begun
                return give_up
    except HostError as error:
        one.deliver(error)
        return _nothing
    task = asyncio.get_running_loop().create_task(answered(host, head.model, head.version, asked, one.span))
    task.add_done_callback(one.ended)
    return task.cancel


class Pending:
    """A request that is being answered."""

    span: RequestSpan | None = None

    def __init__(self) -> None:
        self._found: tuple[Wire, ...] | HostError | asyncio.Task[Answer] = ()
        self.asked: InferRequest | None = None
        self.version: Version | None = None
        """Who answers, where there is no task."""

    def ready(self, *, alone: bool) -> None:
        """`made` can be called: soon, or now where it is `alone`, beside no other answer."""
        raise NotImplementedError

    def deliver(self, found: tuple[Wire, ...] | HostError) -> None:
        """The outputs are there, or the reason why there are none."""
        self._found = found
        self.ready(alone=isinstance(found, tuple) and self.version is not None and self.version.answers_one)

    def ended(self, task: "asyncio.Task[Answer]") -> None:
        """The task has its answer."""
        if not task.cancelled():
            self._found = task
            self.ready(alone=False)

    def _answer(self) -> Answer:
        found = self._found
        if isinstance(found, tuple):
            assert self.version is not None
            answer = Answer(self.version.name, self.version.number, dict(zip(self.version.output_names, found, strict=True)))
            if self.asked is not None and self.asked.places:
                placed(answer, self.asked.places)
            return answer
        if isinstance(found, HostError):
            raise found
        return found.result()

    def made(self) -> Short:
        """The answer, with its outputs where they are wanted in shared memory."""
        try:
            answer = self._answer()
            assert self.asked is not None
            body, json_bytes = answer_body(answer, self.asked)
        except HostError as error:
            status, said, body = failure(error)
            return Short(status, "".join(f"{name}: {value}\r\n" for name, value in said.items()).encode(), body)
        if json_bytes is None:
            return Short(200, b"content-type: application/json\r\n", body)
        headers = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n" % json_bytes
        return Short(200, headers, body)


class _Request(Pending):
    """A request of a connection of this process."""

    def __init__(self, counts: HttpCounts, head: Head, client: str, done: Done):
        super().__init__()
        self._counts, self._head, self._client, self._done = counts, head, client, done
        self._started_s, self._id = time.perf_counter(), request_id_from(head.request_id or "")
        tracer = counts.tracer
        self.span = tracer and tracer.begin("POST", counts.route(head.path), head.trace or {}, self._id)

    def ready(self, *, alone: bool) -> None:
        self._done(self._noted, alone=alone)

    def _noted(self) -> Short:
        """The answer, noted in log and counts."""
        status, headers, body = self.made()
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
        return Short(status, b"%bx-request-id: %b\r\n" % (headers, self._id.encode()), body)


def _nothing() -> None:
    """Gives up nothing."""
