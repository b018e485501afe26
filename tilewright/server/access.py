"""Records every request: its id, one line in the log, and the counts of /metrics. It never records the text.

The request id is the client's `x-request-id` if that is a plain word, otherwise a new one. Every answer contains it. The log
line contains method, path (without the query), status, seconds, seconds to the first byte of the body, tokens of prompt and
answer, request id and client. The status is 499 if the client left before its answer was complete.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewright.server.logs import request_line
from tilewright.server.metrics import HttpCounts
from tilewright.server.spans import RequestSpan, put_span, span_of

__all__ = ["CLIENT_GONE", "Access", "Tokens", "note", "request_id_from", "request_id_of", "tokens_of"]

CLIENT_GONE = 499
"""The status that proxies use for a request whose client left. It is only logged and counted, never sent."""
MAX_PATH_CHARS = 200
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")
_RANDOM = Random()
"""Of ids, which have to differ and need not be secret: the system's random numbers cost a system call each."""

logger = logging.getLogger(__name__)


@dataclass
class Tokens:
    """Token counts of a request. The code that answers the request fills them in."""

    prompt: int | None = None
    completion: Callable[[], int] = int
    """Returns the number of tokens of the answer so far."""


def request_id_of(scope: Scope) -> str:
    """The id that `Access` gave to a request."""
    return scope["request_id"]


def tokens_of(scope: Scope) -> Tokens:
    """The token counts of a request."""
    return scope["tokens"]


class Access:
    """ASGI middleware that records requests. It is the outermost one of this package."""

    def __init__(self, app: ASGIApp, counts: HttpCounts):
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and record its result."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["request_id"] = request_id_from(headers.get("x-request-id", ""))
        tracer = self._counts.tracer
        if tracer is not None:
            route = self._counts.route(scope["path"])
            put_span(scope, tracer.begin(scope["method"], route, headers, scope["request_id"]))
        scope["tokens"] = Tokens()
        watched = _Watched(scope, receive, send)
        try:
            await self._app(scope, watched.receive, watched.send)
        except ClientDisconnect:
            watched.gone = True  # the client left while its body was read, so no answer is possible
        except Exception:
            watched.status = watched.status or 500  # an outer layer answers and logs the traceback
            raise
        finally:
            self._note(scope, watched)

    def _note(self, scope: Scope, watched: "_Watched") -> None:
        status = CLIENT_GONE if watched.status is None or (watched.gone and not watched.whole) else watched.status
        first_s = None if watched.first_s is None else round(watched.first_s - watched.started_s, 4)
        note(
            self._counts,
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=time.perf_counter() - watched.started_s,
            request_id=request_id_of(scope),
            client=(scope.get("client") or ("-",))[0],
            first_s=first_s,
            tokens=tokens_of(scope),
            span=span_of(scope),
        )


def note(
    counts: HttpCounts,
    *,
    method: str,
    path: str,
    status: int,
    seconds: float,
    request_id: str,
    client: str,
    first_s: float | None = None,
    tokens: Tokens | None = None,
    span: RequestSpan | None = None,
) -> None:
    """Count a request, write its line, and end its span."""
    counts.count(path, status)
    if span is not None:
        span.end(status)
    level = logging.ERROR if status >= 500 and status != 503 else logging.INFO
    if not logger.isEnabledFor(level):
        return
    tokens = tokens or Tokens()
    fields: dict[str, Any] = {
        "request_id": request_id,
        "method": method,
        "path": _shown(path[:MAX_PATH_CHARS]),
        "status": status,
        "duration_s": round(seconds, 4),
        "first_byte_s": first_s,
        "prompt_tokens": tokens.prompt,
        "completion_tokens": None if tokens.prompt is None else tokens.completion(),
        "client": client,
    }
    if span is not None:
        fields["trace_id"] = span.trace_id
    words = [f"{fields['method']} {fields['path']} {status} {seconds:.3f}s"]
    if tokens.prompt is not None:
        first = "" if first_s is None else f", first byte {first_s:.3f}s"
        words.append(f"{tokens.prompt}+{tokens.completion()} tokens{first}")
    words.append(f"{fields['request_id']} {fields['client']}")
    request_line(logger, level, "  ".join(words), fields)


@lru_cache(maxsize=256)
def _shown(path: str) -> str:
    """A path without what cannot be printed."""
    return _UNPRINTABLE.sub("?", path)


def request_id_from(given: str) -> str:
    """The client's request id if it is a plain word, otherwise a new one."""
    return given if given and _ID.fullmatch(given) else f"req-{_RANDOM.getrandbits(96):024x}"


class _Watched:
    """Wraps `receive` and `send` of a request, and records what passes through them."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self._scope, self._receive, self._send = scope, receive, send
        self.started_s = time.perf_counter()
        self.first_s: float | None = None
        self.status: int | None = None
        self.gone = self.whole = False

    async def receive(self) -> Message:
        message = await self._receive()
        self.gone = self.gone or (message["type"] == "http.disconnect" and not self.whole)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = request_id_of(self._scope)
        elif message["type"] == "http.response.body":
            if self.first_s is None and message.get("body"):
                self.first_s = time.perf_counter()
            await self._send(message)
            self.whole = not message.get("more_body", False)
            return
        await self._send(message)
