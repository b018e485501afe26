"""Clients that go away, servers that end, engines that fail."""

import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.awake import until
from tests.server.fake_engine import LetterRunner, Running, events, fake_engine, running
from tests.server.victim import fronts
from tilewright.engine.deltas import StepDeltas
from tilewright.server.config import ServerConfig
from tilewright.server.serve import bind

STEP_S = 0.05
END_S = 60
"""A process that hangs is told from one that ends on a busy machine, where Python's own end takes seconds."""


@contextmanager
def raw_post(server: Running, **body: object) -> Iterator[socket.socket]:
    """A request written by hand, so that the connection can be dropped at any moment."""
    raw = json.dumps({"prompt": "abcdefgh", "max_tokens": 100, **body}).encode()
    headers = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}".encode() + raw)
        yield connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "wait"])
@pytest.mark.parametrize("body", [{}, {"n": 3}, {"prompt": ["abcdefgh", "xy"]}], ids=["one", "samples", "prompts"])
@pytest.mark.usefixtures("shape")
def test_a_client_that_goes_away_frees_its_pages_within_a_step(stream: bool, body: dict[str, object]) -> None:
    engine = fake_engine(delay_s=STEP_S)
    runner = engine.runner
    assert isinstance(runner, LetterRunner)
    with running(engine) as server:
        with raw_post(server, stream=stream, **body) as connection:
            if stream:
                seen = b""
                while seen.count(b"data: ") < 4:
                    seen += connection.recv(4096)
            until(lambda: engine.stats().running > 0 and engine.stats().generated_tokens > 2)
            assert engine.stats().pages_used > 0
        steps = runner.steps
        until(lambda: engine.stats().pages_used == 0)
        # The step that is running, one that was queued already; and a busy machine may notice a closed socket late.
        assert runner.steps - steps <= 4
        server.until_idle()
        assert engine.stats().aborted > 0
        assert engine.stats().finished == 0
        assert server.server.worker.open_channels == 0


@pytest.mark.usefixtures("shape")
def test_a_client_that_goes_away_while_it_waits_leaves_the_queue() -> None:
    engine = fake_engine(delay_s=0.04, max_seqs=1)
    with running(engine) as server:
        with raw_post(server, stream=True, max_tokens=100):  # four seconds
            until(lambda: engine.stats().running == 1)
            with raw_post(server):
                until(lambda: engine.stats().waiting == 1)
            until(lambda: engine.stats().waiting == 0)
            assert engine.stats().running == 1, "the other one goes on"
        server.until_idle()


@pytest.mark.usefixtures("shape")
def test_a_client_that_goes_away_before_its_request_is_taken() -> None:
    engine = fake_engine(delay_s=0.3)
    with running(engine) as server, raw_post(server):
        until(lambda: engine.stats().running == 1)
        with raw_post(server):
            time.sleep(0.05)  # the step of the first is running: the submission waits behind it, and its client leaves
        until(lambda: server.server.worker.open_channels == 1)
        # It was aborted; or its client had gone before anything was submitted, and steps pass without it.
        until(lambda: engine.stats().aborted == 1 or engine.stats().generated_tokens > 2)
        until(lambda: engine.stats().running + engine.stats().waiting == 1)


@pytest.mark.usefixtures("shape")
def test_one_slow_reader_does_not_hold_up_the_others() -> None:
    engine = fake_engine(max_model_len=2000, pages=2000)
    with running(engine, max_wait_s=60.0) as server:
        with raw_post(server, stream=True, n=8, max_tokens=1900, logprobs=20):
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "ab", "max_tokens": 5, "temperature": 0}, timeout=60
            )
            assert answer.json()["choices"][0]["text"] == "cdefg"
        server.until_idle(20)


@pytest.mark.usefixtures("shape")
def test_many_clients_at_once() -> None:
    engine = fake_engine(max_seqs=8, max_waiting=64, pages=64)
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=30) as client, ThreadPoolExecutor(24) as pool:

        def ask(i: int) -> bool:
            body = {"prompt": "a" * (i % 7 + 1), "max_tokens": 30, "temperature": 0, "stream": i % 2 == 0}
            response = client.post("/v1/completions", json=body)
            if body["stream"]:
                text = "".join(e["choices"][0]["text"] for e in events(response.text)[:-1])
            else:
                text = response.json()["choices"][0]["text"]
            return text == "".join(chr(97 + (i % 7 + 1 + k) % 26) for k in range(30))

        assert all(pool.map(ask, range(48)))
        server.until_idle()


@pytest.mark.usefixtures("shape")
def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    engine = fake_engine(delay_s=0.02)
    with running(engine) as server, httpx.Client(base_url=server.url) as client:
        body = {"prompt": "ab", "max_tokens": 20, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.server.draining = True
            assert httpx.get(f"{server.url}/ready").status_code == 503
            assert httpx.get(f"{server.url}/health").status_code == 200
            refused = httpx.post(f"{server.url}/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert "retry-after" in refused.headers
            assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.usefixtures("shape")
def test_a_broken_engine_answers_everybody(caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_engine(delay_s=0.02)
    with running(engine) as server, httpx.Client(base_url=server.url) as client:
        body = {"prompt": "ab", "max_tokens": 90, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            advance = engine.advance

            def broken() -> StepDeltas:
                advance()
                raise KeyError("a bug")

            engine.advance = broken  # type: ignore[method-assign]
            assert "the engine failed: KeyError" in [line for line in lines if line][-1]
        for path in ("/health", "/ready", "/metrics", "/live"):
            assert client.get(path).status_code == 503
        assert client.post("/v1/completions", json={"prompt": "ab"}).status_code == 503
    assert "a bug" in caplog.text


# Processes ------------------------------------------------------------------------------------------------------------


@contextmanager
def process(delay_s: float = 0.0, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its URL."""
    command = [sys.executable, "-m", "tests.server.fake_server", str(delay_s), *options, *fronts()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            said = ""
            while (found := re.search(r"http://127\.0\.0\.1:\d+", said)) is None:  # behind what it says of its loading
                line = server.stderr.readline()
                said += line
                assert line, f"no address in {said!r}"
            yield server, found[0]
        finally:
            if server.poll() is None:
                server.kill()


@contextmanager
def streaming(url: str, tokens: int) -> Iterator[Iterator[str]]:
    body = {"prompt": "ab", "max_tokens": tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def drains(url: str) -> bool:
    """Whether it says that it ends. Of several fronts one that has nothing to do ends at once, whoever it has just let in."""
    try:
        return httpx.get(f"{url}/ready").status_code == 503
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("long_shape")
def test_a_signal_drains_then_exits_with_0(sig: signal.Signals) -> None:
    with process(delay_s=0.02) as (server, url):
        with streaming(url, 40) as lines:
            server.send_signal(sig)
            until(lambda: drains(url), END_S)
            assert list(lines)[-1] == "data: [DONE]"
        assert server.wait(END_S) == 0
        assert "Finishing 1 running request" in server.stderr.read()


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.usefixtures("long_shape")
def test_a_second_signal_aborts(sig: signal.Signals, code: int) -> None:
    with process(delay_s=0.05) as (server, url):
        with streaming(url, 100) as lines:
            server.send_signal(sig)
            until(lambda: drains(url), END_S)
            server.send_signal(sig)
            assert "told to stop" in list(lines)[-1]
        assert server.wait(END_S) == code
        assert "Traceback" not in server.stderr.read()


def test_a_broken_engine_ends_the_process_with_1() -> None:
    with process(0.0, "broken") as (server, url):
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert "the engine failed: KeyError" in response.json()["error"]["message"]
        assert server.wait(END_S) == 1
        assert "popitem" in server.stderr.read(), "its log has the traceback"


@pytest.mark.usefixtures("long_shape")
def test_an_idle_server_ends_at_once() -> None:
    with process() as (server, url):
        with httpx.Client(base_url=url) as client:  # a kept-alive connection does not hold it up
            client.get("/health")
            server.send_signal(signal.SIGINT)
            assert server.wait(END_S) == 0
        assert server.stderr.read() == ""


# Sockets --------------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1 port {port}: it is in use; .* --port"):
            bind(ServerConfig(port=port))


@pytest.mark.parametrize(
    ("host", "words"), [("no.such.host.invalid", "is not known"), ("192.0.2.1", "does not have that address")]
)
def test_a_host_that_is_not_ours(host: str, words: str) -> None:
    with pytest.raises(OSError, match=words):
        bind(ServerConfig(host=host, port=0))


@pytest.mark.usefixtures("shape")
def test_answers_are_not_delayed_by_the_network_stack() -> None:
    """Without TCP_NODELAY every answer takes 40 ms: its head and its body are two writes."""
    with running() as server, httpx.Client(base_url=server.url) as client:
        client.get("/health")
        times = []
        for _ in range(20):
            start_s = time.perf_counter()
            client.get("/health")
            times.append(time.perf_counter() - start_s)
        assert statistics.median(times) < 0.03, "a machine that halts now and then delays one, not half of them"


@pytest.mark.usefixtures("shape")
def test_threads_end_with_their_server() -> None:
    before = set(threading.enumerate())  # of servers that other tests have left
    with running():
        pass
    threads = [thread for thread in threading.enumerate() if "tilewright" in thread.name and thread not in before]
    for thread in threads:  # none is waited for by the server itself: one may be at its last lines
        thread.join(timeout=60)
    assert not [thread for thread in threads if thread.is_alive()]
