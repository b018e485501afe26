"""The short way of plain events: the same bytes as the long way, in the same order, whoever is slow."""

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import Running, fake_engine, running
from tests.server.victim import ALPHABET_TEXT
from tilewright.engine.request import Delta, SamplingParams
from tilewright.server.direct import Batch, Direct
from tilewright.server.link import Channel
from tilewright.server.metrics import Latencies
from tilewright.server.prompts import Served
from tilewright.server.protocol import Job
from tilewright.server.reply import Reply

TEXTS = ("a", " word", 'quote " and \\', "\n\t\x00", "é🌍\u2028", "</script>", "\ue000")
SHAPES_OF_JOBS: dict[str, dict[str, Any]] = {
    "completion": {"chat": False},
    "chat": {"chat": True},
    "usage": {"chat": True, "include_usage": True},
    "samples": {"chat": False, "params": (SamplingParams(n=3),)},
    "echo": {"chat": False, "echo": ("before ",)},
}


class Sink:
    """A connection, and the channel of its request."""

    def __init__(self) -> None:
        self.data = b""
        self.blocked = False
        self.waiting = True
        self.woken = 0

    def wake(self) -> None:
        self.waiting = False
        self.woken += 1

    def write_chunk(self, data: bytes) -> None:
        self.data += data


def reply_to(**fields: Any) -> Reply:
    engine = fake_engine()
    job = Job(**{"prompts": ([97],), "params": (SamplingParams(),), "stream": True, **fields})
    return Reply("r", 5, job, Served.of(engine, "letters"))


@pytest.mark.parametrize("fields", SHAPES_OF_JOBS.values(), ids=SHAPES_OF_JOBS)
def test_the_same_bytes_as_the_long_way(fields: dict[str, Any]) -> None:
    long, short = reply_to(**fields), reply_to(**fields)
    assert short.plain
    samples = fields.get("params", (SamplingParams(),))[0].n
    sink, batch = Sink(), Batch(Latencies())
    direct = Direct(sink, batch, sink, dict.fromkeys(range(samples), 0.0), short.frame, samples)
    first = [Delta("r", index, (97,), "x") for index in range(samples)]
    assert not any(lane.take("x", 1) for lane in direct.lanes), "the first event goes the long way"
    sink.data = b"".join(short.chunks(first))
    wanted = b"".join(long.chunks(first))
    for text in TEXTS:
        batch.begin(1.0)
        for lane in direct.lanes:
            assert lane.take(text, 2)
        batch.end()
        wanted += b"".join(long.chunks([Delta("r", index, (97, 98), text) for index in range(samples)]))
    assert sink.data == wanted
    assert direct.tokens == 2 * samples * len(TEXTS)
    assert sum(batch._latencies.histograms[1].buckets) == direct.tokens


def test_tokens_without_a_text_are_counted_and_no_event() -> None:
    reply, sink, batch = reply_to(chat=False), Sink(), Batch(Latencies())
    direct = Direct(sink, batch, sink, {0: 0.0}, reply.frame)
    list(reply.chunks([Delta("r", 0, (97,), "x")]))
    assert direct.lanes[0].take("", 1)
    batch.end()
    assert (sink.data, direct.tokens) == (b"", 1)


def begun(sink: Sink) -> tuple[Direct, Batch, Reply]:
    """The short way of a stream that has had its first event, and a reply to compare with."""
    long, short, batch = reply_to(chat=False), reply_to(chat=False), Batch(Latencies())
    direct = Direct(sink, batch, sink, {0: 0.0}, short.frame)
    first = [Delta("r", 0, (97,), "x")]
    assert b"".join(short.chunks(first)) == b"".join(long.chunks(first))
    return direct, batch, long


def test_what_several_steps_bring_at_once_is_one_event_of_a_sample() -> None:
    sink = Sink()
    direct, batch, long = begun(sink)
    batch.begin(3.0)
    assert all(direct.lanes[0].take(text, 1) for text in ("a", "", '"b'))
    batch.end()
    assert sink.data == b"".join(long.chunks([Delta("r", 0, (97, 98, 99), 'a"b')]))
    assert direct.tokens == 3
    histogram = batch._latencies.histograms[1]
    assert (sum(histogram.buckets), histogram.sum_s) == (3, 3.0), "tokens that come together share the time"


def test_what_waits_for_the_task_is_written_by_it() -> None:
    sink = Sink()
    direct, batch, long = begun(sink)
    sink.waiting = False
    for now_s in (1.0, 2.0):
        batch.begin(now_s)
        assert direct.lanes[0].take("a", 1)
        batch.end()
    assert (sink.data, sink.woken, direct.tokens) == (b"", 0, 2)
    direct.write()
    assert sink.data == b"".join(long.chunks([Delta("r", 0, (97, 98), "aa")]))
    assert not direct.pending
    assert not direct.left()


def test_what_waits_for_the_client_wakes_the_task() -> None:
    sink = Sink()
    direct, batch, _ = begun(sink)
    sink.blocked = True
    for now_s in (1.0, 2.0):
        batch.begin(now_s)
        assert direct.lanes[0].take("a", 1)
        batch.end()
    assert (sink.data, sink.woken) == (b"", 1)
    assert direct.left() == [(0, "aa")]
    assert not direct.left()


@pytest.mark.parametrize("blocked", [False, True], ids=["free", "blocked"])
def test_a_channel_gives_its_task_all_in_order(blocked: bool) -> None:
    """The text of the short way before the delta that came behind it; alone it is written past the task if it can be."""

    async def scene() -> tuple[list[str], list[str]]:
        sink, batch, channel = Sink(), Batch(Latencies()), Channel(["r-0", "r-1"], 2)
        direct = channel.direct = Direct(sink, batch, channel, dict.fromkeys(range(4), 0.0), lambda _: (b"<", b">"), 4)
        sink.blocked = blocked
        direct.lanes[3].take("a", 1)
        direct.lanes[1].take("b", 1)
        batch.end()
        channel.push(Delta("r-1", 1, (97,), "c"))
        direct.lanes[3].take("d", 1)
        batch.end()
        first = [f"{channel.choice(delta)}{delta.text}" for delta in await channel.take()]
        task = asyncio.create_task(channel.take())
        await asyncio.sleep(0)
        if not blocked:
            assert not task.done()
            channel.push(Delta("r-1", 1, (97,), "e"))
        rest = [f"{channel.choice(delta)}{delta.text}" for delta in await task]
        return first, [*rest, sink.data.decode()]

    wanted = ["3d", ""] if blocked else ["3e", '<"d">']
    assert asyncio.run(scene()) == (["3a", "1b", "3c"], wanted)


LONG: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True}, "token ids": {"token_ids": True}, "usage in each": {"continuous_usage": True},
    "only echo": {"only_echo": True},
}  # fmt: skip


@pytest.mark.parametrize("fields", LONG.values(), ids=LONG)
def test_events_with_more_than_a_text_go_the_long_way(fields: dict[str, Any]) -> None:
    assert not reply_to(chat=False, **fields).plain


@pytest.mark.usefixtures("shape")
def test_a_client_that_pauses_gets_everything_in_order() -> None:
    """Its kernel buffers are small, so that the way changes again and again."""
    engine = fake_engine(max_model_len=3000, pages=3000)
    with running(engine, max_wait_s=60.0) as server:
        raw = read_slowly(server, {"prompt": "ab", "max_tokens": 2900, "temperature": 0, "stream": True, "n": 2})
        server.until_idle()
    texts = ["", ""]
    for line in raw.split(b"\n"):
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            texts[choice["index"]] += choice["text"]
    assert texts == [ALPHABET_TEXT[:2900]] * 2
    assert raw.rstrip().endswith(b"data: [DONE]")


def read_slowly(server: Running, body: dict[str, Any]) -> bytes:
    """The answer's body, without its chunks' lengths."""
    raw = json.dumps(body).encode()
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with one:
        one.settimeout(30)
        one.connect(("127.0.0.1", server.port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        one.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        found = b""
        for turn in range(10_000):
            if turn % 40 == 0:
                time.sleep(0.05)
            piece = one.recv(1 << 14)
            if not piece:
                break
            found += piece
    body_of = found.partition(b"\r\n\r\n")[2]
    parts = b""
    while body_of:
        size, _, rest = body_of.partition(b"\r\n")
        parts, body_of = parts + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return parts


def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    body = b'{"prompt": "ab", "max_tokens": 50, "temperature": 0, "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with running() as server, socket.create_connection(("127.0.0.1", server.port), timeout=20) as one:
        one.sendall(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        found = b""
        while piece := one.recv(1 << 16):
            found += piece
    _, _, events = found.partition(b"\r\n\r\n")
    assert all(line.startswith(b"data: ") for line in events.split(b"\n\n") if line)
    text = "".join(json.loads(e[6:])["choices"][0]["text"] for e in events.split(b"\n\n") if e.startswith(b"data: {"))
    assert text == ALPHABET_TEXT[:50]


@pytest.mark.parametrize("stream", [False, True])
def test_the_head_of_an_answer_goes_out_with_what_follows_it(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the socket instead of two, for an answer as a whole and for the first event of a stream."""
    written, send = list[bytes](), socket.socket.send

    def counted(one: socket.socket, data: bytes) -> int:
        if bytes(data[:5]) == b"HTTP/":
            written.append(bytes(data))
        return send(one, data)

    monkeypatch.setattr(socket.socket, "send", counted)
    fields = {"prompt": "ab", "max_tokens": 3, "temperature": 0, "stream": stream}
    with running() as server:
        assert httpx.post(f"{server.url}/v1/completions", json=fields).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
    first = b'data: {"' if stream else b'"choices": [{'
    assert len(written) == 2
    assert first in written[0]
    assert written[1].endswith(b'{"status":"ready"}')
