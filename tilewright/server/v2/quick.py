"""A shortcut for small inference requests, from the bytes of the connection to the queue of the model, and back.

A request for a batched tensor of a few hundred bytes takes the model some microseconds, and a web framework half a millisecond.
For an image, the framework doubles the time. So this file answers `POST /v2/models/NAME/infer` without the framework if the
request is plain (heading.py), gate.py does not refuse it, and its body has at most `MAX_BODY_BYTES`, or `MAX_BINARY_BYTES` with
tensors as bytes. The web framework answers or refuses all other requests: this file never refuses a request because of the form
of its head.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from tilewright.host.errors import HostError
from tilewright.host.host import Answer, Host
from tilewright.host.regions import INLINE_BYTES, Regions
from tilewright.host.tensors import Wire
from tilewright.host.version import Version
from tilewright.host.waiting import WithCallback
from tilewright.server.gate import Gate
from tilewright.server.metrics import HttpCounts
from tilewright.server.shortcut import Done, Short, Taken
from tilewright.server.spans import RequestSpan
from tilewright.server.v2.codec import InferRequest, answer_body, parse_infer, placed
from tilewright.server.v2.heading import Head, Heads, Request
from tilewright.server.v2.http import answered, failure
from tilewright.server.v2.noted import Noted
from tilewright.server.v2.placing import Placing

__all__ = ["JSON", "Pending", "Quick", "begin", "refused"]

JSON = b"content-type: application/json\r\n"

MAX_PLACINGS = 4
"""Most versions whose answers to one request are kept."""
MAX_BINARY_BYTES = 4 << 20
"""Most bytes of a body with tensors as bytes."""


class Quick:
    """The shortcut for inference requests on the connections of one server.

    Args:
        host: the models.
        gate: refuses requests that fail a check, as it does for requests to the web framework.
        counts: counts the requests.
        draining: returns whether new requests are refused.
        most_bytes: limit for a body.
        regions: clients' shared memory; None: it is off.
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
        """The request at the start of the data; `PARTIAL`: it is incomplete; None: the web framework has to handle it."""
        found = self._heads.find(data)
        if not isinstance(found, Request):
            return found
        if self._draining():
            return None
        body = data[found.begin : found.end] if isinstance(data, bytes) else memoryview(data)[found.begin : found.end]
        return Taken(found.end, partial(self._begin, found.head, body, client))

    def _begin(self, head: Head, body: bytes | memoryview, client: str, done: Done) -> Callable[[], object]:
        one = _Request(self._counts, head, client, done)
        begin(self._host, self._regions, head, body, one)
        return one.give_up


def begin(host: Host, regions: Regions | None, head: Head, body: bytes | memoryview, one: "Pending") -> None:
    """Begin to answer a request: put it into the model's queue at once if nothing else is needed, otherwise start a task."""
    try:
        asked = one.asked = parse_infer(body, head.json_bytes, regions)
        if one.span is None and (asked.placings is not None or sum(map(len, asked.places.values())) <= INLINE_BYTES):
            version = one.version = host.chosen(head.model, head.version)
            if version is not None:
                version.begin(asked.inputs, asked.ask, one)
                return
    except HostError as error:
        one.deliver(error)
        return
    one.task = asyncio.get_running_loop().create_task(answered(host, head.model, head.version, asked, one.span))
    one.task.add_done_callback(one.ended)


def refused(error: HostError) -> Short:
    """The answer for an error."""
    status, said, body = failure(error)
    return Short(status, "".join(f"{name}: {value}\r\n" for name, value in said.items()).encode(), body)


class Pending(WithCallback):
    """A request that is being answered."""

    __slots__ = ("asked", "found", "task", "version")
    span: RequestSpan | None = None

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple[Wire, ...] | HostError | asyncio.Task[Answer] = ()
        self.asked: InferRequest | None = None
        self.version: Version | None = None
        """The version that answers if there is no task."""
        self.task: asyncio.Task[Answer] | None = None

    def ready(self, *, alone: bool) -> None:
        """Called when `made` can be called: now if the answer is `alone`, without others at the same time; otherwise soon."""
        raise NotImplementedError

    def deliver(self, found: tuple[Wire, ...] | HostError) -> None:
        """Called with the outputs, or with the error that is the answer instead."""
        self.found = found
        self.ready(alone=isinstance(found, tuple) and self.version is not None and self.version.answers_one)

    def ended(self, task: "asyncio.Task[Answer]") -> None:
        """Called when the task has ended."""
        if not task.cancelled():
            self.found = task
            self.ready(alone=False)

    def give_up(self) -> None:
        """Called when nobody waits for the answer any more."""
        if self.task is None:
            super().give_up()
        else:
            self.task.cancel()

    def _answer(self) -> Answer:
        found = self.found
        if isinstance(found, tuple):
            assert self.version is not None
            answer = Answer(self.version.name, self.version.number, dict(zip(self.version.output_names, found, strict=True)))
            if self.asked is not None and self.asked.places:
                placed(answer, self.asked.places)
            return answer
        if isinstance(found, HostError):
            raise found
        return found.result()

    def again(self) -> bytes | None:
        """Write the outputs, and return the body of an earlier answer to the same bytes. None: call `made` instead."""
        asked, found, version = self.asked, self.found, self.version
        if asked is None or asked.placings is None or version is None or not isinstance(found, tuple):
            return None
        placing = asked.placings.get(version.serial)
        return placing.body if placing is not None and placing.placed(found) else None

    def _keep(self, body: bytes) -> None:
        """Keep the body of an answer for `again`."""
        asked, found, version = self.asked, self.found, self.version
        if asked is not None and asked.placings is not None and version is not None and isinstance(found, tuple):
            if len(asked.placings) >= MAX_PLACINGS:
                asked.placings.clear()
            asked.placings[version.serial] = Placing.of(version.output_names, asked.places, found, body)

    def made(self) -> Short:
        """Create the answer, and write the outputs that the request wants in shared memory."""
        try:
            answer = self._answer()
            assert self.asked is not None
            body, json_bytes = answer_body(answer, self.asked)
        except HostError as error:
            return refused(error)
        if json_bytes is None:
            self._keep(body)
            return Short(200, JSON, body)
        headers = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n" % json_bytes
        return Short(200, headers, body)


class _Request(Pending):
    """A request on a connection of this process."""

    __slots__ = ("_done", "_noted", "span")

    def __init__(self, counts: HttpCounts, head: Head, client: str, done: Done):
        super().__init__()
        self._noted, self._done = Noted(counts, head, client), done
        tracer = counts.tracer
        self.span = tracer and tracer.begin("POST", counts.route(head.path), head.trace or {}, self._noted.id)

    def ready(self, *, alone: bool) -> None:
        self._done(self._short, alone=alone)

    def _short(self) -> Short:
        """Create the answer, and record it in the log and the counts."""
        again = self.again()
        status, headers, body = self.made() if again is None else (200, JSON, again)
        return self._noted.answer(status, headers, body, self.span)
