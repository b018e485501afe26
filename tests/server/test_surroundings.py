"""What clients can do to a server process while a stream runs: nothing that the stream would feel.

Each row of HOSTILE is one thing to do to a real server over real sockets; a victim's stream runs beside it, and may neither
change nor wait. What ends the server is in test_ends.py.
"""

import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.awake import until
from tests.server.victim import ALPHABET, ALPHABET_TEXT, ServerProcess, server_process, victim

MANY = 40
"""Connections that the table's server takes."""
OPTIONS = (
    f"max_connections={MANY}", "head_timeout_s=1.0", "write_timeout_s=1.0", "body_timeout_s=1.0", "drain_timeout_s=1.5",
    "max_body_bytes=100_000", "log_level='info'",
)  # fmt: skip
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def server(long_shape: str) -> Iterator[ServerProcess]:
    with server_process("tests.server.fake_server", "0.005", *OPTIONS) as server:
        yield server


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


def with_length(body: bytes) -> bytes:
    return POST + f"content-length: {len(body)}\r\n\r\n".encode() + body


def generation(**fields: object) -> bytes:
    return with_length(json.dumps({"prompt": "ab", "max_tokens": 3000, "stream": True, **fields}).encode())


# Rows -----------------------------------------------------------------------------------------------------------------


def idle_connections(server: ServerProcess, stack: ExitStack) -> None:
    before = server.metric('tilewright_http_connections_ended_total{reason="evicted"}')
    for _ in range(5 * MANY):
        stack.enter_context(connect(server))
    assert server.post(prompt="ab", max_tokens=3)[0] == 200
    assert server.metric('tilewright_http_connections_ended_total{reason="evicted"}') > before + 3 * MANY
    assert server.metric("tilewright_http_connections") <= MANY + 1


def busy_connections(server: ServerProcess, stack: ExitStack) -> None:
    """All connections have a request: the next is told so."""
    for _ in range(MANY - 1):  # and the victim's
        one = stack.enter_context(connect(server))
        one.sendall(generation())
        assert one.recv(12) == b"HTTP/1.1 200"
    one = stack.enter_context(connect(server))
    one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    refused = answer(one)
    assert b"503 Service Unavailable" in refused
    assert b"too_many_connections" in refused


def slow_heads(server: ServerProcess, stack: ExitStack) -> None:
    slow = [stack.enter_context(connect(server)) for _ in range(MANY // 4)]  # one of two fronts may get them all
    silent = stack.enter_context(connect(server))
    for letter in b"GET / HTTP/1":
        for one in slow:
            one.sendall(bytes([letter]))
        time.sleep(0.02)
    assert all(b"408 Request Timeout" in answer(one) for one in slow)
    assert answer(silent) == b""


def clients_that_vanish(server: ServerProcess, stack: ExitStack) -> None:
    for number in range(300):
        with connect(server) as one:
            one.sendall(generation()[: None if number % 2 else -10])
            if number % 3 == 0:  # a reset instead of an end
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: server.metric("tilewright_requests_running") + server.metric("tilewright_requests_waiting") <= 1, 10)


def a_client_that_does_not_read(server: ServerProcess, stack: ExitStack) -> None:
    name = 'tilewright_http_connections_ended_total{reason="write_timeout"}'
    before = server.metric(name)
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    stack.enter_context(one).connect(("127.0.0.1", server.port))
    one.sendall(generation(n=32, logprobs=5, max_tokens=4000))
    until(lambda: server.metric(name) > before, 30)
    until(lambda: server.metric("tilewright_requests_running") <= 1, 10)


def two_lengths(server: ServerProcess, stack: ExitStack) -> None:
    one = stack.enter_context(connect(server))
    smuggled = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    one.sendall(POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled)
    found = answer(one)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1 ") == 1, "what was smuggled is not answered"


def too_large_while_writing(server: ServerProcess, stack: ExitStack) -> None:
    body = b" " * 20_000_000
    status, _, said = server.request("POST", "/v1/completions", body, content_type="application/json")
    assert (status, b"larger than 100000 bytes" in said) == (413, True)


def chunks_that_are_none(server: ServerProcess, stack: ExitStack) -> None:
    one = stack.enter_context(connect(server))
    one.sendall(POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + b"x" * 100_000)
    assert b"invalid_http" in answer(one)


def no_http(server: ServerProcess, stack: ExitStack) -> None:
    tls = b"\x16\x03\x01\x02\x00\x01\x00" * 50
    for words in (tls, b"GET / HTTP/1.1\r\nhost : x\r\n\r\n", b"A" * 100_000, b"GET /\r\n\r\n"):
        one = stack.enter_context(connect(server))
        one.sendall(words)
        assert b'"code": "invalid_http"' in answer(one)


def a_body_without_end(server: ServerProcess, stack: ExitStack) -> None:
    """Of a request that is answered already: it is dropped, not kept."""
    one = stack.enter_context(connect(server))
    one.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n")
    assert one.recv(1000).startswith(b"HTTP/1.1 200")
    for _ in range(100):
        one.sendall(b"x" * 100_000)


def a_body_that_does_not_come(server: ServerProcess, stack: ExitStack) -> None:
    one = stack.enter_context(connect(server))
    one.sendall(POST + b"content-length: 500\r\n\r\n{")
    assert one.recv(1000).startswith(b"HTTP/1.1 408")


def pipelined_requests(server: ServerProcess, stack: ExitStack) -> None:
    one = stack.enter_context(connect(server))
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    one.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500 + last)
    assert answer(one).count(b"HTTP/1.1 200") == 501


def websockets(server: ServerProcess, stack: ExitStack) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec_websocket_key": "x", "sec_websocket_version": "13"}
    assert server.request("GET", "/live", **upgrade)[0] == 200


def refusals(server: ServerProcess, stack: ExitStack) -> None:
    """Requests whose answer is a status."""
    assert server.request("GET", f"/page/{'a' * 300}.js")[0] == 404
    assert server.request("GET", "/page/..%2f..%2fapp.py")[0] == 404
    assert server.request("GET", f"/v1/models/{'m' * 3000}")[0] == 404
    body = b'{"prompt": "ab", "max_tokens": 2}'
    for origin, status in (("https://evil.example", 403), ("null", 403), ("http://localhost:1", 403), ("http://[", 403)):
        assert server.request("POST", "/v1/completions", body, content_type="application/json", origin=origin)[0] == status
    own = f"http://127.0.0.1:{server.port}"
    assert server.request("POST", "/v1/completions", body, content_type="application/json", origin=own)[0] == 200
    assert server.request("DELETE", "/v1/models")[0] == 405


HOSTILE: tuple[Callable[[ServerProcess, ExitStack], None], ...] = (
    a_body_that_does_not_come,
    a_body_without_end,
    a_client_that_does_not_read,
    busy_connections,
    chunks_that_are_none,
    clients_that_vanish,
    idle_connections,
    no_http,
    pipelined_requests,
    refusals,
    slow_heads,
    too_large_while_writing,
    two_lengths,
    websockets,
)


@pytest.mark.parametrize("attack", HOSTILE, ids=lambda attack: attack.__name__)
def test_nobody_beside_it_feels_it(
    attack: Callable[[ServerProcess, ExitStack], None], server: ServerProcess, long_shape: str
) -> None:
    if long_shape == "process" and attack in (idle_connections, busy_connections):
        pytest.skip("each front has a cap of its own, and this row counts the server's")
    until(lambda: server.metric("tilewright_requests_running") == 0)
    errors = len([line for line in server.lines if "Traceback" in line or " ERROR " in line])
    with victim(server.port, ALPHABET, ALPHABET_TEXT), ExitStack() as stack:
        attack(server, stack)
    status = server.request("GET", "/health")[0]
    assert status == 200
    assert len([line for line in server.lines if "Traceback" in line or " ERROR " in line]) == errors, server.lines[-20:]


# The log and the metrics ----------------------------------------------------------------------------------------------


def test_every_request_is_a_line_with_its_id_and_without_its_text(server: ServerProcess) -> None:
    secret = "attackatdawn"
    asked = json.dumps({"prompt": secret, "max_tokens": 4}).encode()
    headers = {"content_type": "application/json", "x_request_id": "my-id-1"}
    status, got, _ = server.request("POST", f"/v1/completions?{secret}", asked, **headers)
    assert (status, got["x-request-id"]) == (200, "my-id-1")
    until(lambda: any("my-id-1" in line for line in server.lines))
    line = next(line for line in server.lines if "my-id-1" in line)
    assert re.match(r"\S+Z INFO POST /v1/completions 200 \d+\.\d+s  12\+4 tokens, first byte \S+s  my-id-1 127\.0\.0\.1$", line)
    for bad in ("two words", "x" * 200, ""):
        assert re.fullmatch(r"req-[0-9a-f]{24}", server.request("GET", "/health", x_request_id=bad)[1]["x-request-id"])
    assert not any(secret in line for line in server.lines)


def test_metrics_count_statuses_and_the_process(server: ServerProcess) -> None:
    name = 'tilewright_http_requests_total{path="/tokenize",status="200"}'
    before = server.metric(name)
    assert server.post("/tokenize", prompt="abc")[0] == 200
    until(lambda: server.metric(name) == before + 1)  # the other front's numbers come twice a second
    other = server.metric('tilewright_http_requests_total{path="other",status="404"}')
    for number in range(3):
        server.request("GET", f"/nothing/{number}")
    until(lambda: server.metric('tilewright_http_requests_total{path="other",status="404"}') == other + 3)
    assert server.metric("process_open_fds") > 3
    assert server.metric("process_resident_memory_bytes") > 1e6


def test_json_lines_keys_and_origins() -> None:
    options = ("api_key='k'", "log_level='info'", "log_format='json'", "cors_origins=('https://chat.example',)")
    with server_process("tests.server.fake_server", "0.0", *options) as server:
        allowed = {"authorization": "Bearer k", "content_type": "application/json", "origin": "https://chat.example"}
        status, headers, _ = server.request("POST", "/v1/completions", b'{"prompt": "ab", "max_tokens": 3}', **allowed)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
        asked = {"origin": "https://chat.example", "access_control_request_method": "POST"}
        preflight = server.request("OPTIONS", "/v1/completions", access_control_request_headers="authorization", **asked)
        assert preflight[0] == 200, "a preflight brings no key"
        wrong = {**allowed, "origin": "https://evil.example"}
        assert server.request("POST", "/v1/completions", b"{}", **wrong)[0] == 403
        for key in ("", "Bearer x", "Bearer k2"):
            assert server.request("GET", "/v1/models", authorization=key)[0] == 401
        text = server.request("GET", "/metrics", authorization="Bearer k")[2].decode()
        assert "tilewright_http_wrong_keys_total 3.0" in text
        until(lambda: len(server.lines) >= 6)
        entries = [json.loads(line) for line in server.lines]
        fields = {"time", "level", "logger", "message", "request_id", "method", "path", "status", "duration_s", "client"}
        assert fields <= set(entries[0])
        assert (entries[0]["prompt_tokens"], entries[0]["completion_tokens"]) == (2, 3)
        description = json.loads(server.request("GET", "/openapi.json", authorization="Bearer k")[2])
        assert "temperature" in description["components"]["schemas"]["CompletionBody"]["properties"]
        assert description["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
