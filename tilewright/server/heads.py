"""Strictly parses the plain request heads that a `Shortcut` may answer. Requests with an unusual head are left to uvicorn."""

import re
from typing import NamedTuple

__all__ = ["MAX_HEAD_BYTES", "PlainHead", "plain_head"]

MAX_HEAD_BYTES = 8 << 10
NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
UNUSUAL = {"transfer-encoding", "content-encoding", "expect", "upgrade", "origin", "te", "trailer", "http2-settings"}


class PlainHead(NamedTuple):
    """The content of a plain head."""

    target: bytes
    fields: dict[str, str]
    """Lower-case name -> value. Each field occurs only once."""
    body_bytes: int
    close: bool
    """Whether the client wants the connection to be closed after the answer."""


def plain_head(raw: bytes, most_body_bytes: int) -> PlainHead | None:
    """Parse the head of a request; `raw` does not include the empty line after it.

    Returns None in these cases: the request is not HTTP/1.1; it has no Host, or no Content-Length of at most `most_body_bytes`;
    a field occurs twice; a field may change how the request has to be read or answered; a line is not a valid field.
    """
    lines = raw.split(b"\r\n")
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] != b"HTTP/1.1":
        return None
    fields = dict[str, str]()
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        key = name.decode("latin-1").lower()
        if not colon or not NAME.fullmatch(name) or key in fields or key in UNUSUAL or not VALUE.fullmatch(value):
            return None
        fields[key] = value.decode("latin-1").strip(" \t")
    length, end = fields.get("content-length", ""), fields.get("connection", "keep-alive").lower()
    if not (length.isascii() and length.isdecimal()) or len(length) > 9 or int(length) > most_body_bytes:
        return None
    if end not in ("keep-alive", "close") or "host" not in fields:
        return None
    return PlainHead(words[1], fields, int(length), end == "close")
