"""Refusals at the connection: an overloaded server says there what it says on the usual way, and to the same requests."""

import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.awake import until
from tests.server.fake_engine import Running, fake_engine, running
from tilewright.engine.request import QueueFull
from tilewright.server.logs import FIELDS

pytestmark = pytest.mark.usefixtures("shape")

FULL = QueueFull("9 requests wait, and this one would wait some 4.2 s, wanted at most 2 s; try again in 3 s", 2.2, by_time=True)
BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
KEY = "a-key"


def post(
    path: str = "/v1/completions", body: bytes = BODY, without: tuple[str, ...] = (), first: str = "", **fields: str
) -> bytes:
    """A request. Fields' names have `_` for `-`; `first` stands before them."""
    usual = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    named = usual | {"authorization": f"Bearer {KEY}"} | {name.replace("_", "-"): value for name, value in fields.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items() if name not in without)
    return f"POST {path} HTTP/1.1\r\n{first}{head}\r\n".encode() + body


@dataclass
class Overloaded:
    """A server whose queue takes too long as long as `why` is set."""

    server: Running
    why: QueueFull | None = FULL

    def ask(self, data: bytes, *, cut: int = 0) -> tuple[bytes, dict[str, str], bytes]:
        """(status line, headers, body) of the first answer; the data in pieces of `cut` bytes."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as one:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(0, len(data), cut or len(data)):
                one.sendall(data[at : at + (cut or len(data))])
            return answer(one, bytearray())

    def usual(self, data: bytes) -> tuple[bytes, dict[str, str], bytes]:
        """The same past the shortcut."""
        shortcuts = self.server.server.connections.shortcuts
        kept = shortcuts[:]
        shortcuts.clear()
        try:
            return self.ask(data)
        finally:
            shortcuts[:] = kept

    def has_read(self) -> None:
        """Returns once the server has read what was sent before: it has taken and answered a later connection."""
        assert self.ask(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")[0][9:12] == b"200"

    def counted(self, number: int) -> "Counter[tuple[str, int]]":
        """The counts once so many requests are in them: the usual way counts behind its answer."""
        counts = self.server.server.metrics.http.requests
        until(lambda: counts.total() >= number)
        return counts.copy()


def answer(one: socket.socket, held: bytearray) -> tuple[bytes, dict[str, str], bytes]:
    """The next answer; what comes behind it stays in `held`."""
    while b"\r\n\r\n" not in held:
        held += received(one)
    head, _, rest = bytes(held).partition(b"\r\n\r\n")
    line, *fields = head.split(b"\r\n")
    headers = dict(field.decode().lower().split(": ", 1) for field in fields)
    while len(rest) < int(headers["content-length"]):
        rest += received(one)
    body, held[:] = rest[: int(headers["content-length"])], rest[int(headers["content-length"]) :]
    return line, headers, body


def received(one: socket.socket) -> bytes:
    data = one.recv(1 << 16)
    assert data, "the server closed the connection"
    return data


@pytest.fixture(scope="module")
def overloaded(shape: str) -> Iterator[Overloaded]:
    with (
        running(fake_engine(), api_key=KEY, max_body_bytes=1 << 20, head_timeout_s=0.5) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        found = Overloaded(server)
        worker = server.server.worker
        usual = type(worker).full.fget
        assert usual is not None
        patch.setattr(type(worker), "full", property(lambda link: found.why if link is worker else usual(link)))
        yield found


ALIKE = {
    "completions": post(),
    "chat": post("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}]}'),
    "responses": post("/v1/responses", b'{"input": "x"}'),
    "closing": post(connection="close"),
    "keeping": post(connection="keep-alive"),
    "a name": post(x_request_id="my.request-1"),
    "no name": post(x_request_id="a b"),
    "a long body": post(body=b'"' + b"x" * 60_000 + b'"'),
    "a type with words": post(content_type="Application/JSON; charset=utf-8"),
    "no json": post(body=b"{"),
    "empty": post(body=b""),
}
UNLIKE = {
    "no key": post(without=("authorization",)),
    "a wrong key": post(authorization="Bearer other"),
    "a foreign page": post(origin="https://evil.example"),
    "our own page": post(origin="http://localhost"),
    "text": post(content_type="text/plain"),
    "no type": post(without=("content-type",)),
    "two lengths": post(transfer_encoding="chunked"),
    "a field twice": post(first="host: other\r\n"),
    "a broken field": post(first="no field\r\n"),
    "a control character": post(x_word="a\x01b"),
    "no host": post(without=("host",)),
    "a long head": post(cookie="a" * 9000),
    "another path": post("/v1/embeddings", b'{"input": "x"}'),
    "a query": post("/v1/completions?x=1"),
    "an encoding": post(content_encoding="gzip"),
    "a larger body": post(body=b'"' + b"x" * 70_000 + b'"'),
    "too large a body": post(body=b" " * ((1 << 20) + 1)),
    "HTTP/1.0": post().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "another method": post().replace(b"POST", b"PUT", 1),
    "tokens": post("/tokenize", b'{"prompt": "x"}'),
}


def plain(found: tuple[bytes, dict[str, str], bytes]) -> tuple[bytes, dict[str, str], bytes]:
    """An answer without what differs each time."""
    line, headers, body = found
    name = headers.pop("x-request-id", "")
    return (
        line,
        {**headers, "date": "", "x-request-id": name if not name.startswith("req-") else f"{len(name)} characters"},
        body,
    )


@pytest.mark.parametrize("name", ALIKE)
def test_a_refusal_is_that_of_the_usual_way(overloaded: Overloaded, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tilewright.server.access")
    before = overloaded.counted(0)
    usual = overloaded.usual(ALIKE[name])
    between = overloaded.counted(before.total() + 1)
    short = overloaded.ask(ALIKE[name])
    after = overloaded.counted(between.total() + 1)
    assert plain(short) == plain(usual)
    assert usual[0] == b"HTTP/1.1 429 Too Many Requests"
    assert after - between == between - before != {}
    lines: list[dict[str, Any]] = [vars(record)[FIELDS] for record in caplog.records[-2:]]
    for line in lines:
        assert 0 <= line.pop("first_byte_s") <= line.pop("duration_s") + 1e-4
        line["request_id"] = line["request_id"] if not line["request_id"].startswith("req-") else ""
    assert lines[0] == lines[1]


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_unusual_goes_the_usual_way(overloaded: Overloaded, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_keys = overloaded.server.server.metrics.http.wrong_keys
    usual = plain(overloaded.usual(UNLIKE[name]))
    between = overloaded.server.server.metrics.http.wrong_keys
    taken = []
    shortcut = overloaded.server.server.connections.shortcuts[0]
    begun = shortcut._refuse  # type: ignore[attr-defined]
    monkeypatch.setattr(shortcut, "_refuse", lambda *args: taken.append(args) or begun(*args))
    assert plain(overloaded.ask(UNLIKE[name])) == usual
    assert not taken
    assert overloaded.server.server.metrics.http.wrong_keys - between == between - wrong_keys


@pytest.mark.parametrize("cut", [1, 50, 170])
def test_a_request_in_pieces(overloaded: Overloaded, cut: int) -> None:
    assert overloaded.ask(post(), cut=cut)[0] == b"HTTP/1.1 429 Too Many Requests"


def test_nothing_is_said_before_the_body_is_there(overloaded: Overloaded) -> None:
    """And whoever does not send it is told so on the usual way, in its time."""
    with socket.create_connection(("127.0.0.1", overloaded.server.port), timeout=60) as one:
        one.sendall(post()[:-1])
        one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.recv(1)
        one.settimeout(10)
        one.sendall(BODY[-1:])
        assert answer(one, bytearray())[0] == b"HTTP/1.1 429 Too Many Requests"
        one.sendall(post()[:20])
        held = bytearray()
        assert answer(one, held)[0] == b"HTTP/1.1 408 Request Timeout"
        assert one.recv(1) == b""


def test_requests_one_behind_the_other_and_a_queue_that_moves_on(overloaded: Overloaded) -> None:
    with socket.create_connection(("127.0.0.1", overloaded.server.port), timeout=60) as one:
        held = bytearray()
        one.sendall(post() + post() + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" + post())
        assert [answer(one, held)[0][9:12] for _ in range(4)] == [b"429", b"429", b"200", b"429"]
        try:
            overloaded.why = None
            one.sendall(post())
            assert answer(one, held)[0][9:12] == b"200"
            one.sendall(post()[:60])
            overloaded.has_read()
            overloaded.why = FULL  # the connection has it on the usual way by now, and stays there
            one.sendall(post()[60:])
            assert answer(one, held)[0][9:12] == b"429"
        finally:
            overloaded.why = FULL
        one.sendall(post()[:60])
        overloaded.has_read()
        try:
            overloaded.why = None  # what was held is uvicorn's now
            one.sendall(post()[60:])
            assert answer(one, held)[0][9:12] == b"200"
        finally:
            overloaded.why = FULL


@pytest.mark.parametrize("more", [b"", post(), b"x" * 200_000], ids=["nothing", "a request", "much"])
def test_a_closing_connection_gives_its_answer_and_ends(overloaded: Overloaded, more: bytes) -> None:
    """Also where the client sends on: no reset destroys the answer."""
    with socket.create_connection(("127.0.0.1", overloaded.server.port), timeout=60) as one:
        one.sendall(post(connection="close") + more)
        time.sleep(0.1)
        line, headers, body = answer(one, held := bytearray())
        assert (line[9:12], headers["connection"]) == (b"429", "close")
        assert json.loads(body)["error"]["code"] == "queue_full"
        assert (held, one.recv(1)) == (b"", b"")
    until(lambda: not overloaded.server.server.connections.open)


def test_a_draining_server_says_that_instead(overloaded: Overloaded) -> None:
    try:
        overloaded.server.server.draining = True
        assert json.loads(overloaded.ask(post())[2])["error"]["code"] == "draining"
    finally:
        overloaded.server.server.draining = False


def test_an_engine_that_is_too_slow_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real queue: once it takes too long, refusals reach neither the reader of bodies nor the engine, and it recovers."""
    engine = fake_engine(delay_s=0.05, max_seqs=1, max_waiting=1000)
    asked = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *args, **named: asked.append(args) or submit(*args, **named))
    data = post(body=json.dumps({"prompt": "x", "max_tokens": 4, "temperature": 0}).encode())
    with running(engine, api_key=KEY, max_wait_s=1.0) as server, ExitStack() as stack:
        ones = list[socket.socket]()
        for _ in range(60):  # four times what the engine can answer
            one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            one.sendall(data)
            ones.append(stack.enter_context(one))
            time.sleep(0.05)
        statuses = [answer(one, bytearray())[0][9:12] for one in ones]
        assert set(statuses) == {b"200", b"429"}
        assert statuses.count(b"429") > 20
        if server.process is None:  # a front looks again every tenth of a second
            assert len(asked) <= statuses.count(b"200") + engine.stats().expired + 2
        server.until_idle()
        assert Overloaded(server).ask(data)[0][9:12] == b"200"
