"""Reads the bytes of a file, decompressed piece by piece. Damage and decompression bombs end a piece, but raise no error.

A gzip file is a sequence of members. After a damaged member the reader searches for the next one, so one flipped byte costs one
member; the readers of Python and fastwarc stop at the first error. xz and zstd files cannot be read from the middle, so reading
ends at the first damage.

A member (for xz and zstd: the file) that unpacks to more than `Limits.free_bytes` and to more than `Limits.expansion` times its
own size is treated as a bomb: what has been unpacked so far is returned, and the rest is skipped.
"""

import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tilewright.extras import needed

__all__ = ["Break", "Limits", "Piece", "pieces"]

_READ = 1 << 16
_MAGIC = b"\x1f\x8b\x08"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the memory of a reader, and on the expansion of compressed data."""

    record_bytes: int = 64 << 20
    """A larger record, line or page is skipped and counted."""
    free_bytes: int = 16 << 20
    """Up to this size, expansion is not limited."""
    expansion: int = 300
    """Above `free_bytes`, the limit for unpacked over packed size. Text reaches 20, deflate at most 1032."""


class Piece(NamedTuple):
    """Decompressed bytes. offset: their position in the file (gzip: of their member). sound: False if a checksum failed."""

    offset: int
    data: bytes
    sound: bool = True


class Break(NamedTuple):
    """An interruption of the stream: the next piece does not continue the previous one."""

    offset: int
    reason: str


def pieces(path: Path, limits: Limits) -> Iterator[Piece | Break]:
    """The bytes of a file in order. The first bytes determine the format: gzip, xz, zstd, or not compressed.

    Raises OSError if the file cannot be opened.
    """
    with path.open("rb") as file:
        start = file.read(6)
        file.seek(0)
        if start[:2] == _MAGIC[:2]:
            yield from _gzip(file, limits)
        elif start == b"\xfd7zXZ\x00":
            yield from _whole(file, limits, lzma.LZMADecompressor(memlimit=256 << 20), "xz")
        elif start[:4] == b"\x28\xb5\x2f\xfd":
            yield from _zstd(file, path, limits)
        else:
            offset = 0
            while data := file.read(_READ):
                yield Piece(offset, data)
                offset += len(data)


def _gzip(file: BinaryIO, limits: Limits) -> Iterator[Piece | Break]:
    offset = 0
    while offset is not None:
        file.seek(offset)
        size, held, end = 0, [], _End(None, "gzip: truncated")
        for part in _member(file, limits):
            if isinstance(part, _End):
                end = part
                break
            size += len(part)
            held.append(part)
            if size > limits.free_bytes:  # too large to wait for its checksum
                yield Piece(offset, b"".join(held))
                held = []
        if held:
            yield Piece(offset, b"".join(held), end.reason in ("", "gzip: truncated", "gzip: bomb"))
        if end.reason:
            yield Break(offset, end.reason)
            at = end.at if end.at is not None else offset + 1
            offset = _next_member(file, max(at, offset + 1))
        else:
            offset = end.at


class _End(NamedTuple):
    """(offset of the next member, or None; why this member ended early, or "" if it did not)."""

    at: int | None
    reason: str


def _member(file: BinaryIO, limits: Limits) -> Iterator[bytes | _End]:
    start = file.tell()
    unpack = zlib.decompressobj(31)
    taken = given = 0
    pending = b""
    while True:
        if not pending:
            pending = file.read(_READ)
            taken += len(pending)
            if not pending:
                # With a damaged length, the following members can seem to belong to this one, so search from its start.
                yield _End(start + 1, "gzip: truncated")
                return
        before = unpack.copy()
        try:
            data = unpack.decompress(pending, 1 << 20)
        except zlib.error as error:
            yield _up_to_damage(before, pending)
            # zlib does not say at which byte it failed, so search again from the start of this member.
            yield _End(start + 1, "gzip: checksum" if "check" in str(error) else "gzip: damaged data")
            return
        pending = unpack.unconsumed_tail
        given += len(data)
        if data:
            yield data
        if unpack.eof:
            rest = unpack.unused_data
            at = start + taken - len(rest)
            yield _after(file, at)
            return
        if given > limits.free_bytes and given > limits.expansion * taken:
            yield _End(start + taken, "gzip: bomb")
            return


def _up_to_damage(unpack: "zlib._Decompress", data: bytes) -> bytes:
    """Unpack damaged bytes up to the damage: one byte at a time, because zlib returns nothing from a call that fails."""
    found = bytearray()
    try:
        for at in range(len(data)):
            found += unpack.decompress(data[at : at + 1])
    except zlib.error:
        pass
    return bytes(found)


def _after(file: BinaryIO, at: int) -> _End:
    """The end of a complete member: another member follows, or nothing, or something else. Zeros are padding."""
    file.seek(at)
    following = file.read(_READ)
    if following[:3] == _MAGIC:
        return _End(at, "")
    if not following.strip(b"\0") and len(following) < _READ:
        return _End(None, "")
    return _End(at, "gzip: bytes between members")


def _next_member(file: BinaryIO, at: int) -> int | None:
    """The offset of the next bytes that look like the start of a member and of which a first part can be unpacked."""
    file.seek(at)
    tail = b""
    while data := file.read(_READ):
        window = tail + data
        base = file.tell() - len(window)
        found = -1
        while (found := window.find(_MAGIC, found + 1)) >= 0:
            if _unpacks(file, base + found):
                return base + found
        tail = window[-2:]
        file.seek(base + len(window))
    return None


def _unpacks(file: BinaryIO, at: int) -> bool:
    position = file.tell()
    file.seek(at)
    try:
        unpack = zlib.decompressobj(31)
        return bool(unpack.decompress(file.read(4096), 4096)) or unpack.eof
    except zlib.error:
        return False
    finally:
        file.seek(position)


def _whole(file: BinaryIO, limits: Limits, unpack: lzma.LZMADecompressor, name: str) -> Iterator[Piece | Break]:
    taken = given = 0
    try:
        while True:
            data = b""
            if unpack.eof:  # another stream may follow
                rest = unpack.unused_data or file.read(_READ)
                if not rest.strip(b"\0"):
                    return
                unpack = lzma.LZMADecompressor(memlimit=256 << 20)
                data = unpack.decompress(rest, 1 << 20)
            elif unpack.needs_input:
                read = file.read(_READ)
                taken += len(read)
                if not read:
                    yield Break(taken, f"{name}: truncated")
                    return
                data = unpack.decompress(read, 1 << 20)
            else:
                data = unpack.decompress(b"", 1 << 20)
            if data:
                yield Piece(given, data)
            given += len(data)
            if given > limits.free_bytes and given > limits.expansion * max(taken, 1):
                yield Break(taken, f"{name}: bomb")
                return
    except lzma.LZMAError:
        yield Break(taken, f"{name}: damaged data")


def _zstd(file: BinaryIO, path: Path, limits: Limits) -> Iterator[Piece | Break]:
    pa = needed("pyarrow", "data")
    size, given = max(path.stat().st_size, 1), 0
    try:
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd") as stream:
            while data := stream.read(1 << 20):
                yield Piece(given, data)
                given += len(data)
                if given > limits.free_bytes and given > limits.expansion * size:
                    yield Break(size, "zstd: bomb")
                    return
    except OSError as error:
        yield Break(given, "zstd: truncated" if "truncated" in str(error).lower() else "zstd: damaged data")
