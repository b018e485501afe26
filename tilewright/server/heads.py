"""The heads of requests that a `Shortcut` may answer: plain ones, read strictly. Whatever is unusual is left to uvicorn."""

import re
from typing import NamedTuple

__all__ = ["MAX_HEAD_BYTES", "PlainHead", "plain_head"]

MAX_HEAD_BYTES = 8 << 10
NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
UNUSUAL = {"transfer-encoding", "content-encoding", "expect", "upgrade", "origin", "te", "trailer", "http2-settings"}


class PlainHead(NamedTuple):
    """What a plain head says."""

    target: bytes
    fields: dict[str, str]
    """By their names in lower case; each is there once."""
    body_bytes: int
    close: bool
    """Whether the client wants the connection to be closed after the answer."""


def plain_head(raw: bytes, most_body_bytes: int) -> PlainHead | None:
    """The head of a request, without the empty line behind it.

    None: it is not HTTP/1.1 with a Host and a Content-Length of at most `most_body_bytes`, has a field twice or one that may
    change how the request is to be read or answered, or a line that is no field.
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
