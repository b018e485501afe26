"""Archives, whole and damaged: every readable record, no crash, bounded bombs. Oracles: fastwarc, and what was written."""

import base64
import gzip
import hashlib
import io
import json
import lzma
import random
import zlib
from collections import Counter
from pathlib import Path

import pytest
from fastwarc.warc import ArchiveIterator
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sets import folder, prose
from tilewright.data.compressed import Break, Limits, Piece, pieces
from tilewright.data.document import Document
from tilewright.data.read import documents, format_of
from tilewright.data.warc import Record, http_page, records

LIMITS = Limits()


def record(number: int, body: bytes, kind: str = "response") -> bytes:
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + body if kind == "response" else body
    digest = base64.b32encode(hashlib.sha1(block).digest()).decode()
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number}>\r\nWARC-Target-URI: http://site/{number}\r\n"
        f"WARC-Date: 2024-01-01T00:00:00Z\r\nWARC-Block-Digest: sha1:{digest}\r\nContent-Length: {len(block)}\r\n\r\n"
    )
    return head.encode() + block + b"\r\n\r\n"


def bodies(count: int, seed: int = 0) -> list[bytes]:
    draw = random.Random(seed)
    return [f"<p>{prose(draw, draw.randint(20, 300))}</p>".encode() for _ in range(count)]


def read(data: bytes, path: Path, limits: Limits = LIMITS) -> tuple[list[Record], Counter[str]]:
    path.write_bytes(data)
    damage: Counter[str] = Counter()
    return list(records(pieces(path, limits), limits, damage)), damage


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.warc.gz"


@pytest.mark.parametrize(
    "pack", [lambda parts: b"".join(map(gzip.compress, parts)), b"".join, lambda p: gzip.compress(b"".join(p))]
)
def test_whole_archives_read_as_fastwarc_reads_them(pack, file: Path) -> None:
    data = pack([record(i, body) for i, body in enumerate(bodies(30))])
    ours, damage = read(data, file)
    theirs = [
        (r.headers["WARC-Target-URI"], r.reader.read()) for r in ArchiveIterator(io.BytesIO(data), parse_http=False)
    ]  # fmt: skip
    assert [(r.headers["warc-target-uri"], r.block) for r in ours] == theirs
    assert len(theirs) == 30
    assert not damage


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_stretch_costs_the_records_it_touches(seed: int, file: Path) -> None:
    parts = [gzip.compress(record(i, body)) for i, body in enumerate(bodies(30))]
    draw = random.Random(seed)
    data = bytearray(b"".join(parts))
    at = draw.randrange(len(data))
    length = draw.choice([1, 3, 50, 2000])
    for i in range(at, min(len(data), at + length)):
        data[i] ^= draw.randrange(1, 256)
    ends = [sum(map(len, parts[: i + 1])) for i in range(len(parts))]
    untouched = {f"http://site/{i}" for i, end in enumerate(ends) if end <= at or end - len(parts[i]) >= at + length}
    found, damage = read(bytes(data), file)
    names = [r.headers["warc-target-uri"] for r in found]
    assert untouched <= set(names)
    assert len(names) == len(set(names))
    wrote = {f"http://site/{i}": body for i, body in enumerate(bodies(30))}
    assert all(r.block.endswith(wrote[r.headers["warc-target-uri"]]) for r in found), "a damaged record was handed on as whole"
    assert len(untouched) == 30 or damage or len(found) == 30  # a flipped bit of a header that nobody reads


@pytest.mark.parametrize("seed", range(12))
def test_a_plain_archive_that_is_cut_and_overwritten(seed: int, file: Path) -> None:
    draw = random.Random(seed)
    parts = [record(i, body) for i, body in enumerate(bodies(20))]
    gone = draw.randrange(20)
    cut = parts[gone][: draw.randrange(20, len(parts[gone]))]
    found, damage = read(b"".join([*parts[:gone], cut, *parts[gone + 1 :]]), file)
    names = {r.headers["warc-target-uri"] for r in found if not r.damage}
    assert {f"http://site/{i}" for i in range(20) if i != gone} <= names
    assert damage or len(cut) >= len(parts[gone]) - 4  # without its empty lines a record is still whole


def test_a_truncated_archive_gives_what_there_is(file: Path) -> None:
    parts = [gzip.compress(record(i, body)) for i, body in enumerate(bodies(10))]
    data = b"".join(parts)
    for cut in (len(data) - 3, len(data) - len(parts[-1]) // 2, len(data) - len(parts[-1]) + 1):
        found, damage = read(data[:cut], file)
        assert sum(not r.damage for r in found) in (9, 10)
        assert damage


def test_a_record_without_digest_in_a_damaged_member_is_dropped(file: Path) -> None:
    plain = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 5\r\n\r\nhello\r\n\r\n"
    member = bytearray(gzip.compress(plain))
    member[-6] ^= 1  # its checksum
    found, damage = read(bytes(member) + gzip.compress(plain), file)
    assert len(found) == 1
    assert damage == {"gzip: checksum": 1, "warc: checksum failed and no matching digest": 1}


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=600), st.integers(0, 3))
def test_no_bytes_crash_the_readers(tmp_path_factory: pytest.TempPathFactory, noise: bytes, form: int) -> None:
    path = tmp_path_factory.getbasetemp() / "noise"
    good = record(0, b"<p>good</p>")
    data = [noise, good[:200] + noise, gzip.compress(good)[:40] + noise, b"\xfd7zXZ\x00" + noise][form]
    path.write_bytes(data)
    for kind in ("warc", "jsonl", "html", "text", "parquet"):
        list(documents(path, kind, LIMITS, Counter()))


@pytest.mark.parametrize(("suffix", "squeeze"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_a_bomb_is_bounded(suffix: str, squeeze, tmp_path: Path) -> None:
    path = tmp_path / f"bomb.jsonl.{suffix}"
    path.write_bytes(squeeze(b"\0" * (64 << 20)))
    limits = Limits(free_bytes=1 << 20, expansion=100, record_bytes=1 << 20)
    given_bytes = 0
    for part in pieces(path, limits):
        given_bytes += len(part.data) if isinstance(part, Piece) else 0
        last = part
    assert isinstance(last, Break)
    assert "bomb" in last.reason
    assert given_bytes <= 100 * path.stat().st_size + (2 << 20) + (1 << 20)
    damage: Counter[str] = Counter()
    assert not list(documents(path, "jsonl", limits, damage))
    assert damage


def test_a_bomb_inside_a_page_is_bounded() -> None:
    block = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b" " * (32 << 20))
    damage: Counter[str] = Counter()
    assert http_page(block, Limits(record_bytes=1 << 20), damage) is None
    assert damage == {"http: page too large": 1}


@pytest.mark.parametrize(
    ("headers", "body", "want"),
    [
        (b"", b"plain", b"plain"),
        (b"Content-Encoding: gzip\r\n", gzip.compress(b"zipped"), b"zipped"),
        (b"Content-Encoding: gzip\r\n", b"was decoded before", b"was decoded before"),
        (b"Content-Encoding: deflate\r\n", zlib.compress(b"deflated"), b"deflated"),
        (b"Content-Encoding: deflate\r\n", zlib.compress(b"raw")[2:-4], b"raw"),
        (b"Transfer-Encoding: chunked\r\n", b"4\r\nab\ncd"[:7] + b"\r\n3;x=y\r\nefg\r\n0\r\n\r\n", b"ab\ncefg"),
        (b"Transfer-Encoding: chunked\r\n", b"not chunked", b"not chunked"),
        (b"Transfer-Encoding: chunked\r\n", b"4\r\nabcd\r\nzz\r\n", b"abcd"),
        (b"Transfer-Encoding: chunked\r\n", b"9\r\nabcd", b"abcd"),
    ],
)
def test_http_codings(headers: bytes, body: bytes, want: bytes) -> None:
    page = http_page(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n" + body, LIMITS, Counter())
    assert page is not None
    assert page.body == want


def test_json_lines_that_are_none_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [b'{"text": "one", "n": 3}', b"{", b"[1]", b'{"text": 5}', b"", b'{"text": "\\ud800 lone"}', b'{"text": "two"}']
    path.write_bytes(b"\n".join(rows))
    damage: Counter[str] = Counter()
    found = list(documents(path, "jsonl", LIMITS, damage))
    assert [d.text for d in found] == ["one", "? lone", "two"]
    assert found[0].metadata == {"n": 3}
    assert [json.loads(path.read_bytes()[d.origin["offset"] :].split(b"\n")[0])["text"][-3:] for d in found] == [
        "one",
        "one",
        "two",
    ]
    assert damage == {"json: not a value": 1, "json: not an object": 1, "json: no text in field 'text'": 1}


def test_parquet_is_read_and_damage_counted(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["one", None, "two"], "url": ["http://a", "http://b", None]}), path)
    damage: Counter[str] = Counter()
    found: list[Document] = list(documents(path, "parquet", LIMITS, damage))
    assert [(d.text, d.url) for d in found] == [("one", "http://a"), ("two", "")]
    assert damage == {"parquet: no text in field 'text'": 1}
    path.write_bytes(path.read_bytes()[:-9])
    assert not list(documents(path, "parquet", LIMITS, damage))
    assert len(damage) == 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.warc.gz", "warc"), ("a.warc.wet.gz", "warc"), ("x.jsonl.xz", "jsonl"), ("page.html", "html"), ("a.b.txt.gz", "text")],
)
def test_formats_by_name(name: str, kind: str) -> None:
    assert format_of(Path(name)) == kind
    with pytest.raises(ValueError, match="set format in the recipe to one of html, jsonl"):
        format_of(Path("unknown.bin"))


@pytest.mark.long
def test_the_public_samples() -> None:
    want = {
        "example-bad.warc.gz.bad": 6, "example-iana.org-chunked.warc": 3, "example-trunc.warc": 4,
        "example-wrong-chunks.warc.gz": 2, "example.warc.gz": 6,
        "sample-0000.warc.gz": 48, "whirlwind.warc.gz": 4, "whirlwind.warc.wet.gz": 2,
    }  # fmt: skip
    for name, count in want.items():
        damage: Counter[str] = Counter()
        assert len(list(records(pieces(folder("web") / name, LIMITS), LIMITS, damage))) == count, (name, damage)


@pytest.mark.long
def test_a_megabyte_that_holds_ten_gigabytes(tmp_path: Path) -> None:
    """xz packs zeros 7,000 times: 1.5 MB hold 10 GB, here in 80 streams one behind the other."""
    path = tmp_path / "bomb.jsonl.xz"
    path.write_bytes(80 * lzma.compress(b"\0" * (128 << 20), preset=1))
    assert path.stat().st_size < 3 << 20
    damage: Counter[str] = Counter()
    assert not list(documents(path, "jsonl", LIMITS, damage))
    assert damage["xz: bomb"] == 1
