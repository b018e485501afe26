"""Runs a `Job` and sends its answer as one JSON object or as server-sent events.

`Answer` is an HTTP response that does the work while it is being sent, because only then does it own the connection. If the
client disconnects, it leaves the engine's channel at once; this works both for streams and for whole answers.

A stream begins with its first token. An error before that, also in the queue, is sent as an HTTP status. A later error is the
last event of the stream. Long answers are written in pieces, and other requests run between two pieces.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from secrets import token_hex
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.core import GRAMMAR_FAILED
from tilewright.engine.request import Delta, QueueFull
from tilewright.server.connections import CONNECTION
from tilewright.server.direct import Direct
from tilewright.server.errors import ApiError, bad_request, overloaded, unavailable
from tilewright.server.link import Channel, EngineLink, EngineStopped
from tilewright.server.prompts import Served
from tilewright.server.protocol import Job
from tilewright.server.reply import Reply, Writer
from tilewright.server.spans import RequestSpan, span_of

__all__ = ["Answer", "unless_gone"]

EVENT_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

WRITE_BYTES = 1 << 14

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`. If the client disconnects, cancels `work` and returns None. The body must have been read before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _together(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Join small chunks into writes of about `WRITE_BYTES`."""
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        if len(waiting) >= WRITE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


class Answer(Response):
    """The response to a job, which runs while the response is sent. `writer` creates the object that writes the answer."""

    def __init__(self, job: Job, served: Served, worker: EngineLink, writer: Callable[..., Writer] = Reply):
        super().__init__()
        self._job = job
        self._worker, self._served = worker, served
        self._taken = 0
        self._first_s: float | None = None
        """The time of the first token."""
        self._direct: Direct | None = None
        self._channel: Channel | None = None
        self._reply = writer(f"{job.prefix}{token_hex(12)}", int(time.time()), job, served)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, for the access log."""
        untaken = 0 if self._channel is None else self._channel.untaken
        return self._taken + untaken + (0 if self._direct is None else self._direct.tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and send its answer. Raises `ApiError` if the job fails before anything has been sent."""
        await unless_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self._noted, span_of(scope), time.perf_counter())
            try:
                opening = self._worker.open(self._reply.id, self._job.prompts, self._job.params)
                channel = await stack.enter_async_context(opening)
            except QueueFull as error:
                raise overloaded(str(error), error.retry_after_s) from None
            except UnknownAdapter as error:
                raise self._served.no_model(self._job.params[0].adapter or "", str(error)) from None
            except ValueError as error:
                raise bad_request(str(error)) from None
            except EngineStopped as error:
                raise unavailable(str(error)) from None
            if self._job.stream:
                await self._stream(channel, scope, send)
                return
            body = await self._whole(channel)
        await Response(body, media_type="application/json", headers=self._job.headers)(scope, receive, send)

    def _noted(self, span: RequestSpan | None, began_s: float) -> None:
        """Record in the request's span the time until the first token and the time of the other tokens."""
        if span is None or self._first_s is None:
            return
        prompts = sum(map(len, self._job.prompts))
        span.child("first token", began_s, self._first_s, prompt_tokens=prompts, prompts=len(self._job.prompts))
        span.child("decode", self._first_s, time.perf_counter(), tokens=self.completion_tokens)

    async def _whole(self, channel: Channel) -> bytes:
        channel.whole, self._channel = True, channel
        while deltas := await self._take(channel):
            for _ in self._reply.add(deltas):
                await asyncio.sleep(0)
        return self._reply.whole()

    async def _take(self, channel: Channel) -> list[Delta]:
        try:
            deltas = await channel.take()
        except EngineStopped as error:
            raise unavailable(str(error)) from None
        if self._first_s is None:
            self._first_s = time.perf_counter()
        self._taken += sum(len(delta.token_ids) for delta in deltas)
        failed = next((delta for delta in deltas if delta.finish_reason in ("abort", "error", "expired")), None)
        if failed is not None and failed.finish_reason == "expired":
            raise overloaded(failed.error or "the request waited too long", failed.retry_after_s or 1.0)
        if failed is not None and (failed.error or "").startswith(GRAMMAR_FAILED):
            raise bad_request(f"the request could not be finished: {failed.error}", self._job.grammar_field)
        if failed is not None:
            why = "the server aborted it" if failed.finish_reason == "abort" else failed.error or "the model runner failed"
            raise ApiError(500, f"the request could not be finished: {why}", type="server_error", code="engine_error")
        return deltas

    def _take_short_way(self, channel: Channel, scope: Scope) -> None:
        connection = scope.get(CONNECTION)
        if connection is None or not connection.chunked or not self._reply.plain:
            return
        last_s, samples = channel.last_token_s, channel.samples
        self._direct = Direct(connection, self._worker.batch, channel, last_s, self._reply.frame, samples)
        self._worker.attach(channel, self._direct)

    async def _stream(self, channel: Channel, scope: Scope, send: Send) -> None:
        deltas = await self._take(channel)
        headers = {**EVENT_HEADERS, **self._job.headers}
        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
        self._take_short_way(channel, scope)
        try:
            while deltas:
                for chunks in _together(self._reply.chunks(deltas)):
                    await send({"type": "http.response.body", "body": chunks, "more_body": True})
                    await asyncio.sleep(0)
                deltas = await self._take(channel)
            if self._direct is not None:
                self._reply.count(self._direct.tokens)
            end = self._reply.end()
        except ApiError as error:
            end = self._reply.failed(error)
        await send({"type": "http.response.body", "body": end})
