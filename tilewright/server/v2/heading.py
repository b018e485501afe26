"""Heads of the inference requests that a shortcut answers: `POST /v2/models/NAME/infer` with a plain head (heads.py).

Parsed heads are cached, because clients send the same head over and over.
"""

import re
from collections import OrderedDict
from typing import NamedTuple

from starlette.datastructures import Headers

from tilewright.server.gate import Gate
from tilewright.server.heads import MAX_HEAD_BYTES, plain_head
from tilewright.server.metrics import HttpCounts
from tilewright.server.shortcut import PARTIAL

__all__ = ["MAX_BODY_BYTES", "START", "Head", "Heads", "Request"]

MAX_BODY_BYTES = 64 << 10
"""Most bytes of JSON in a body."""
MAX_HEADS = 1024
"""Most heads that are cached."""
START = b"POST /v2/models/"
PATH = re.compile(rb"/v2/models/([A-Za-z0-9][A-Za-z0-9._-]{0,127})(?:/versions/([0-9]{1,9}))?/infer")


class Head(NamedTuple):
    """The content of a head."""

    path: str
    model: str
    version: str | None
    body_bytes: int
    json_bytes: str | None
    """The value of `Inference-Header-Content-Length`."""
    request_id: str | None
    trace: dict[str, str] | None = None
    """The headers that state to which trace the request belongs. None: traces are off."""


class Request(NamedTuple):
    """A request at the start of the data: its head, and where its body begins and ends."""

    head: Head
    begin: int
    end: int


class Heads:
    """Finds the requests that a shortcut answers.

    Args:
        gate: refuses requests that fail a check, as it does for requests to the web framework.
        counts: has the tracer, if there is one. The tracer needs some headers.
        most_bytes: limit for a body with tensors as bytes. The JSON in any body is limited to `MAX_BODY_BYTES`.
    """

    def __init__(self, gate: Gate, counts: HttpCounts, most_bytes: int):
        self._gate, self._counts, self._most = gate, counts, most_bytes
        self._heads: OrderedDict[bytes, Head] = OrderedDict()

    def find(self, data: bytes | bytearray) -> Request | object | None:
        """The request at the start of the data; `PARTIAL`: it is incomplete; None: the web framework has to handle it."""
        if not data.startswith(START):
            return PARTIAL if START.startswith(bytes(data[: len(START)])) else None
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            return PARTIAL if len(data) < MAX_HEAD_BYTES else None
        raw = bytes(data[:end])
        head = self._heads.get(raw) or self._read(raw)
        if head is None:
            return None
        whole = end + 4 + head.body_bytes
        return PARTIAL if len(data) < whole else Request(head, end + 4, whole)

    def _read(self, raw: bytes) -> Head | None:
        """Parse a head that is not cached; None: it is unusual, or the request is refused."""
        plain = plain_head(raw, self._most)
        path = None if plain is None or plain.close else PATH.fullmatch(plain.target)
        if plain is None or path is None:
            return None
        fields, where = plain.fields, plain.target.decode()
        if plain.body_bytes > MAX_BODY_BYTES and not _binary(fields.get("inference-header-content-length", "")):
            return None
        # Not counted: a refused request goes to the web framework, which checks and refuses it again, and counts a wrong key.
        if self._gate.refusal("POST", where, Headers(fields), counted=False) is not None:
            return None
        version = None if path[2] is None else path[2].decode()
        json_bytes, identity = fields.get("inference-header-content-length"), fields.get("x-request-id")
        trace = None
        if self._counts.tracer is not None:
            trace = {name: fields[name] for name in ("traceparent", "tracestate") if name in fields}
        head = Head(where, path[1].decode(), version, plain.body_bytes, json_bytes, identity, trace)
        if identity is None and not trace:
            self._heads[raw] = head
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        return head


def _binary(json_bytes: str) -> bool:
    """Whether the JSON before the tensors' bytes is short enough to be parsed on the event loop."""
    return json_bytes.isascii() and json_bytes.isdecimal() and len(json_bytes) <= 6 and int(json_bytes) <= MAX_BODY_BYTES
