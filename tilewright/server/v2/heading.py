"""Heads of the inference requests that a shortcut answers: `POST /v2/models/NAME/infer` with a plain head (heads.py).

A head that came before is not read again: clients send the same one over and over.
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
"""Of JSON."""
MAX_HEADS = 1024
"""Heads that are remembered."""
START = b"POST /v2/models/"
PATH = re.compile(rb"/v2/models/([A-Za-z0-9][A-Za-z0-9._-]{0,127})(?:/versions/([0-9]{1,9}))?/infer")


class Head(NamedTuple):
    """What a head says."""

    path: str
    model: str
    version: str | None
    body_bytes: int
    json_bytes: str | None
    request_id: str | None
    trace: dict[str, str] | None = None
    """Headers that say whose trace it belongs to."""


class Request(NamedTuple):
    """A request that data begins with: its head, where its body begins and where it ends."""

    head: Head
    begin: int
    end: int


class Heads:
    """Finds the requests of a shortcut.

    Args:
        gate: refuses who may not come in, as on the usual way.
        counts: whose tracer, if there is one, wants headers.
        most_bytes: of a body with tensors as bytes; there are at most `MAX_BODY_BYTES` of JSON.
    """

    def __init__(self, gate: Gate, counts: HttpCounts, most_bytes: int):
        self._gate, self._counts, self._most = gate, counts, most_bytes
        self._heads: OrderedDict[bytes, Head] = OrderedDict()

    def find(self, data: bytes | bytearray) -> Request | object | None:
        """The request that the data begins with, `PARTIAL`, or None: the usual way."""
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
        head = Head(where, path[1].decode(), version, plain.body_bytes, json_bytes, identity, trace)
        if identity is None and not trace:
            self._heads[raw] = head
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        return head


def _binary(json_bytes: str) -> bool:
    """Whether what stands before the tensors' bytes is short enough to be read where it arrives."""
    return json_bytes.isascii() and json_bytes.isdecimal() and len(json_bytes) <= 6 and int(json_bytes) <= MAX_BODY_BYTES
