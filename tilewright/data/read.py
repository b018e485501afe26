"""Reads documents from files: WARC, WET, HTML, JSON lines, parquet and plain text, compressed or not.

Files are not trusted: every part that cannot be read is counted by reason, and reading continues after it.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewright.data.compressed import Break, Limits, pieces
from tilewright.data.document import Document
from tilewright.data.warc import http_page, records
from tilewright.extras import needed

__all__ = ["FORMATS", "documents", "format_of"]

_COMPRESSED = (".gz", ".xz", ".zst", ".bad")
_SUFFIXES = {
    ".warc": "warc", ".wet": "warc", ".html": "html", ".htm": "html", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".json": "jsonl", ".parquet": "parquet", ".txt": "text",
}  # fmt: skip
FORMATS = tuple(sorted(set(_SUFFIXES.values())))
_HTML_TYPES = ("text/html", "application/xhtml+xml")


def format_of(path: Path) -> str:
    """The format according to a file's name; raises ValueError if the name does not determine it."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    for suffix in reversed(suffixes):
        if suffix in _SUFFIXES:
            return _SUFFIXES[suffix]
    raise ValueError(
        f"{path}: the format cannot be told from the file's name; set format in the recipe to one of {', '.join(FORMATS)}"
    )


def documents(
    path: Path, kind: str, limits: Limits, damage: Counter[str], *, name: str = "", text_field: str = "text"
) -> Iterator[Document]:
    """Every readable document of a file, in order.

    kind: one of FORMATS. name: the name of the file in `origin`, by default its path. text_field: the field that contains the
    text in JSON lines and parquet; other fields become metadata. damage: counts the parts that could not be read, by reason.
    """
    name = name or str(path)
    readers = {"warc": _warc, "html": _html, "text": _plain, "parquet": _parquet, "jsonl": _json_lines}
    if kind in ("parquet", "jsonl"):
        yield from readers[kind](path, name, limits, damage, text_field)
    else:
        yield from readers[kind](path, name, limits, damage)


def _warc(path: Path, name: str, limits: Limits, damage: Counter[str]) -> Iterator[Document]:
    for record in records(pieces(path, limits), limits, damage):
        kind = record.headers.get("warc-type", "")
        origin = {"file": name, "record": record.number, "offset": record.offset}
        url = record.headers.get("warc-target-uri", "").strip("<>")
        metadata = {"date": record.headers["warc-date"]} if "warc-date" in record.headers else {}
        if record.damage:
            metadata["damage"] = record.damage
        if kind == "conversion":
            yield Document(record.block.decode("utf-8", "replace"), origin, url=url, metadata=metadata)
        elif kind == "response" and url.startswith(("http:", "https:")):
            page = http_page(record.block, limits, damage)
            if page is None:
                continue
            if page.status != 200:
                damage[f"http: status {page.status // 100}xx"] += 1
            elif page.headers.get("content-type", "text/html").partition(";")[0].strip().lower() not in _HTML_TYPES:
                damage["http: not HTML"] += 1
            elif not page.body.strip():
                damage["http: no body"] += 1
            else:
                yield Document("", origin, url=url, metadata=metadata, html=page.body)
        elif kind == "resource" and record.headers.get("content-type", "").startswith(_HTML_TYPES):
            yield Document("", origin, url=url, metadata=metadata, html=record.block)
        else:
            damage[f"warc: {kind or 'untyped'} record"] += 1


def _all_bytes(path: Path, limits: Limits, damage: Counter[str]) -> bytes | None:
    held = bytearray()
    for part in pieces(path, limits):
        if isinstance(part, Break):
            damage[part.reason] += 1
            continue
        held += part.data
        if len(held) > limits.record_bytes:
            damage[f"file over {limits.record_bytes} bytes"] += 1
            return None
    return bytes(held)


def _html(path: Path, name: str, limits: Limits, damage: Counter[str]) -> Iterator[Document]:
    page = _all_bytes(path, limits, damage)
    if page is not None:
        yield Document("", {"file": name, "record": 0, "offset": 0}, html=page)


def _plain(path: Path, name: str, limits: Limits, damage: Counter[str]) -> Iterator[Document]:
    text = _all_bytes(path, limits, damage)
    if text is not None:
        yield Document(text.decode("utf-8", "replace"), {"file": name, "record": 0, "offset": 0})


def _lines(path: Path, limits: Limits, damage: Counter[str]) -> Iterator[tuple[int, bytes]]:
    """(decompressed offset, line) of every complete line; lines above the limit are skipped and counted."""
    buffer, at, skipping = bytearray(), 0, False
    for part in pieces(path, limits):
        if isinstance(part, Break):
            damage[part.reason] += 1
            at += len(buffer)
            buffer.clear()
            skipping = True  # the following bytes begin within a line
            continue
        buffer += part.data
        start = 0
        while (end := buffer.find(b"\n", start)) >= 0:
            if not skipping:
                yield at + start, bytes(buffer[start:end])
            skipping = False
            start = end + 1
        del buffer[:start]
        at += start
        if len(buffer) > limits.record_bytes:
            if not skipping:
                damage[f"line over {limits.record_bytes} bytes"] += 1
            at += len(buffer)
            buffer.clear()
            skipping = True
    if buffer and not skipping:
        yield at, bytes(buffer)


def _json_lines(path: Path, name: str, limits: Limits, damage: Counter[str], text_field: str) -> Iterator[Document]:
    for number, (offset, line) in enumerate(_lines(path, limits, damage)):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            damage["json: not a value"] += 1
            continue
        if (
            document := _from_row(row, {"file": name, "record": number, "offset": offset}, damage, text_field, "json")
        ) is not None:
            yield document


def _parquet(path: Path, name: str, limits: Limits, damage: Counter[str], text_field: str) -> Iterator[Document]:
    parquet = needed("pyarrow.parquet", "data")
    try:
        with path.open("rb") as file, parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    origin = {"file": name, "record": number, "offset": number}
                    document = _from_row(row, origin, damage, text_field, "parquet")
                    number += 1
                    if document is not None and len(document.text) <= limits.record_bytes:
                        yield document
                    elif document is not None:
                        damage[f"row over {limits.record_bytes} bytes"] += 1
    except (OSError, ValueError) as error:  # includes pyarrow's own errors
        damage[f"parquet: {'truncated' if 'footer' in str(error) else 'damaged'}"] += 1


def _from_row(row: Any, origin: dict[str, Any], damage: Counter[str], text_field: str, kind: str) -> Document | None:
    if not isinstance(row, dict):
        damage[f"{kind}: not an object"] += 1
        return None
    text = row.get(text_field)
    if not isinstance(text, str):
        damage[f"{kind}: no text in field {text_field!r}"] += 1
        return None
    text = text.encode("utf-8", "replace").decode()  # lone surrogates cannot be encoded
    url = row.get("url")
    keep = {key: value for key, value in row.items() if key not in (text_field, "url") and _plain_value(value)}
    return Document(text, origin, url=url if isinstance(url, str) else "", metadata=keep)


def _plain_value(value: Any) -> bool:
    """Whether a value may be in the metadata: it must be short and valid in JSON (no NaN, no infinity)."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, str | int | float | bool) and len(str(value)) <= 1000
