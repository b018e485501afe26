"""Reads records of WARC and WET archives, also of damaged ones. Unreadable parts are counted by reason.

Format: ISO 28500 (WARC 1.1), RFC 9112 (HTTP/1.1 messages, chunked transfer). A truncated record, or one whose
`WARC-Block-Digest` does not match, is returned with its `damage` set. If the checksum of a gzip member failed, only records
with a matching digest are returned. After damage, the next line `WARC/1.x` that is followed by a header is taken as the next
record.
"""

import base64
import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tilewright.data.compressed import Break, Limits, Piece
from tilewright.extras import needed

__all__ = ["Page", "Record", "http_page", "records"]

_START = re.compile(rb"WARC/[01]\.\d+\r?\n(?=[A-Za-z-]{1,40}:)")
_HEADER_BYTES = 1 << 16


class Record(NamedTuple):
    """One record: headers with lower-case names, and the block as stored in the archive."""

    headers: dict[str, str]
    block: bytes
    offset: int
    number: int
    damage: str = ""
    """"" for a complete record, else "truncated" or "digest does not match"."""


class Page(NamedTuple):
    """The response of a web server: status, headers with lower-case names, the body without transfer and content coding."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Broken(Exception):
    """The stream ended or was interrupted inside a record, or there is no record here."""


class _Stream:
    """A buffer over pieces. It does not read across a break."""

    def __init__(self, parts: Iterable[Piece | Break], damage: Counter[str]) -> None:
        self._parts = iter(parts)
        self._damage = damage
        self._unsound_to = 0
        self._at = 0  # decompressed position of the buffer's first byte
        self._starts: list[tuple[int, int]] = [(0, 0)]  # decompressed position -> offset in the file
        self.buffer = bytearray()
        self.broken = False
        self.ended = False
        self.cut = False  # whether the last break was an early end, not damage

    @property
    def offset(self) -> int:
        """Offset in the file of the buffer's first byte; for gzip the offset of its member."""
        while len(self._starts) > 1 and self._starts[1][0] <= self._at:
            self._starts.pop(0)
        return self._starts[0][1]

    @property
    def sound(self) -> bool:
        """Whether no checksum failed for the data at the buffer's first byte."""
        return self._at >= self._unsound_to

    def fill(self, size: int) -> bool:
        """Whether the buffer now holds `size` bytes; False if a break or the end comes before that."""
        while len(self.buffer) < size and not self.broken:
            part = next(self._parts, None)
            if part is None:
                self.ended = self.broken = True
                self.cut = True
            elif isinstance(part, Break):
                self._damage[part.reason] += 1
                self.broken = True
                self.cut = part.reason.endswith("truncated")
            else:
                self._starts.append((self._at + len(self.buffer), part.offset))
                self.buffer += part.data
                if not part.sound:
                    self._unsound_to = self._at + len(self.buffer)
        return len(self.buffer) >= size

    def drop(self, size: int) -> None:
        """Remove the first `size` bytes of the buffer."""
        del self.buffer[:size]
        self._at += size

    def skip(self, size: int) -> None:
        """Skip bytes without storing them."""
        while size:
            if not self.buffer and not self.fill(1):
                raise _Broken("truncated record")
            step = min(size, len(self.buffer))
            self.drop(step)
            size -= step

    def resync(self) -> bool:
        """Skip to the next start of a record; False if there is none before the end."""
        while True:
            found = _START.search(self.buffer)
            if found:
                self.drop(found.start())
                return True
            if self.broken:
                self.drop(len(self.buffer))
                if self.ended:
                    return False
                self.broken = False
            self.drop(max(0, len(self.buffer) - 64))
            self.fill(len(self.buffer) + 1)


def records(parts: Iterable[Piece | Break], limits: Limits, damage: Counter[str]) -> Iterator[Record]:
    """Every readable record in order; `damage` counts what could not be read, by reason."""
    stream = _Stream(parts, damage)
    number = 0
    while True:
        try:
            while stream.fill(1) and stream.buffer[:1] in b"\r\n":
                stream.drop(1)
            if not stream.fill(1):
                if stream.ended:
                    return
                stream.broken = False
                continue
            record = _record(stream, limits, number)
            number += 1
            if record.damage:
                damage[f"warc: {record.damage}, kept"] += 1
            yield record
        except _Broken as why:
            if str(why) != "truncated record" or stream.ended:  # otherwise the break has been counted already
                damage[f"warc: {why}"] += 1
            if not stream.resync():
                return


def _record(stream: _Stream, limits: Limits, number: int) -> Record:
    stream.fill(64)
    if not _START.match(stream.buffer):
        raise _Broken("not a record")
    offset = stream.offset
    headers = _headers(stream)
    try:
        length = int(headers["content-length"])
    except (KeyError, ValueError):
        raise _Broken("no length") from None
    if length < 0:
        raise _Broken("no length")
    if length > limits.record_bytes:
        stream.skip(length)
        raise _Broken(f"record over {limits.record_bytes} bytes")
    return _block(stream, headers, length, Record(headers, b"", offset, number))


def _block(stream: _Stream, headers: dict[str, str], length: int, record: Record) -> Record:
    sound = stream.sound
    whole = stream.fill(length + 4)
    block, after = bytes(stream.buffer[:length]), bytes(stream.buffer[length : length + 4])
    matches = _digest_matches(headers.get("warc-block-digest", ""), block)
    damage = "" if matches is not False else "digest does not match"
    if len(block) < length or (after[:1] not in (b"\r", b"\n", b"") and not matches):
        # The record is truncated or its length is wrong, so the next record may begin inside this block.
        following = _START.search(stream.buffer, 1)
        if following:
            block, damage = bytes(stream.buffer[: following.start()]).removesuffix(b"\r\n\r\n"), "truncated"
            stream.drop(following.start())
        elif len(block) < length and stream.cut:
            damage = "truncated"
            stream.drop(len(block))
        elif len(block) < length:
            raise _Broken("truncated record")
        else:
            raise _Broken("wrong length")
    else:
        stream.drop(length + (4 if whole and after == b"\r\n\r\n" else 0))
    if not matches and not (sound and stream.sound):
        raise _Broken("checksum failed and no matching digest")
    return record._replace(block=block, damage=damage)


def _headers(stream: _Stream) -> dict[str, str]:
    end = None
    while end is None:
        end = re.search(rb"\r?\n\r?\n", stream.buffer[:_HEADER_BYTES])
        if end is None and (len(stream.buffer) >= _HEADER_BYTES or not stream.fill(len(stream.buffer) + 1)):
            stream.drop(1)
            raise _Broken("truncated record" if stream.broken else "header without end")
    head = bytes(stream.buffer[: end.start()])
    if following := _START.search(head, 1):  # truncated in its header
        stream.drop(following.start())
        raise _Broken("truncated header")
    stream.drop(end.end())
    return _fields(head)


def _fields(head: bytes) -> dict[str, str]:
    """Header lines after the first as a dict, names in lower case; continuation lines are joined."""
    found: dict[str, str] = {}
    name = ""
    for line in head.decode("utf-8", "replace").splitlines()[1:]:
        if line[:1] in " \t" and name:
            found[name] += " " + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            found[name] = value.strip()
    return found


def _digest_matches(digest: str, block: bytes) -> bool | None:
    """Whether the block matches its digest; None if there is no digest that can be checked."""
    method, _, value = digest.partition(":")
    if method.lower() not in ("sha1", "sha256", "md5") or not value:
        return None
    found = hashlib.new(method.lower(), block, usedforsecurity=False)
    if len(value) == len(found.hexdigest()):
        return value.lower() == found.hexdigest()
    return value.upper().rstrip("=") == base64.b32encode(found.digest()).decode().rstrip("=")


def http_page(block: bytes, limits: Limits, damage: Counter[str]) -> Page | None:
    """The response in the block of a response record. None if it cannot be read; `damage` then counts the reason."""
    end = re.search(rb"\r?\n\r?\n", block[:_HEADER_BYTES])
    first = re.match(rb"HTTP/\d(?:\.\d)?\s+(\d{3})", block)
    if not end or not first:
        damage["http: no header"] += 1
        return None
    headers = _fields(block[: end.start()])
    body = block[end.end() :]
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _unchunked(body, damage)
    for coding in reversed(headers.get("content-encoding", "").lower().replace(" ", "").split(",")):
        decoded = _decoded(body, coding, limits, damage)
        if decoded is None:
            return None
        body = decoded
    return Page(int(first.group(1)), headers, body)


def _unchunked(body: bytes, damage: Counter[str]) -> bytes:
    """The body without chunked transfer coding. Archives often have bodies that are declared as chunked but stored plain; these
    are returned unchanged."""
    parts, at = [], 0
    while True:
        size = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n").match(body, at)
        if not size:
            if at == 0:
                return body
            damage["http: chunk damaged"] += 1
            break
        length = int(size.group(1), 16)
        if length == 0:
            break
        parts.append(body[size.end() : size.end() + length])
        at = size.end() + length
        if at > len(body):
            damage["http: chunk truncated"] += 1
            break
        at += 2 if body[at : at + 2] == b"\r\n" else body[at : at + 1] == b"\n"
    return b"".join(parts)


def _decoded(body: bytes, coding: str, limits: Limits, damage: Counter[str]) -> bytes | None:
    """The body with one content coding undone; at most `record_bytes` of it."""
    try:
        if coding in ("gzip", "x-gzip"):
            if body[:2] != b"\x1f\x8b":
                return body  # the crawler has decoded the body but kept the header
            return _bounded(zlib.decompressobj(31), body, limits, damage)
        if coding == "deflate":
            return _bounded(zlib.decompressobj(15 if body[:1] == b"\x78" else -15), body, limits, damage)
        if coding == "br":
            return _brotli(body, limits, damage)
    except zlib.error:
        damage[f"http: {coding} damaged"] += 1
        return None
    return body


def _bounded(unpack: "zlib._Decompress", body: bytes, limits: Limits, damage: Counter[str]) -> bytes | None:
    page = unpack.decompress(body, limits.record_bytes + 1)
    if len(page) > limits.record_bytes:
        damage["http: page too large"] += 1
        return None
    if not unpack.eof:
        damage["http: body truncated"] += 1
    return page


def _brotli(body: bytes, limits: Limits, damage: Counter[str]) -> bytes | None:
    brotli = needed("brotli", "data")
    unpack, parts, size = brotli.Decompressor(), [], 0
    try:
        for at in range(0, len(body), 1 << 12):
            parts.append(unpack.process(body[at : at + (1 << 12)], output_buffer_limit=limits.record_bytes + 1))
            size += len(parts[-1])
            if size > limits.record_bytes:
                damage["http: page too large"] += 1
                return None
    except brotli.error:
        damage["http: br damaged"] += 1
        return None
    return b"".join(parts)
