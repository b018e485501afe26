"""What a server says while its language model is loaded, and that nobody notices when the server itself takes over."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.server.fake_engine import fake_engine
from tests.server.test_replicas import FAKE
from tilewright.server.app import create_app
from tilewright.server.config import ServerConfig
from tilewright.server.fleet import Fleet
from tilewright.server.prompts import Served
from tilewright.server.serve import HttpServer, bind, url_of
from tilewright.server.starting import Starting

END_S = 120.0
"""How long a busy machine may take for anything here."""


def until(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + END_S
    while not true():
        assert time.monotonic() < end_s, "it does not come true"
        time.sleep(0.01)


def test_what_it_answers() -> None:
    said = list[str]()
    config = ServerConfig(port=0, api_key="k")
    with bind(config, listen=True) as listener, Starting(config, listener, said.append, "letters") as starting:
        starting.stage("loading weights 3/9")
        with httpx.Client(base_url=url_of(listener), timeout=END_S) as client:
            for path, status in (("/health", 200), ("/ready", 503)):
                answer = client.get(path)
                assert (answer.status_code, answer.json()["status"]) == (status, "loading")
                assert answer.json()["loading"].startswith("letters: loading weights 3/9, ")
            assert "version" in client.get("/version").json()
            key = {"authorization": "Bearer k"}
            assert client.get("/v2/health/live", headers=key).status_code == 200
            assert client.get("/v2/health/ready", headers=key).status_code == 503
            refused = client.post("/v1/completions", json={"prompt": "x"}, headers=key)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert refused.json()["error"]["code"] == "loading"
            words = "the server is not ready: letters is being loaded: loading weights 3/9, "
            assert refused.json()["error"]["message"].startswith(words)
            ordinary = client.post("/v2/models/m/infer", json={}, headers=key)
            assert (ordinary.status_code, ordinary.headers["retry-after"]) == (503, "2")
            assert ordinary.json()["error"].startswith(words)
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 401
            assert all(answer.headers["connection"] == "close" for answer in (refused, ordinary))
    assert any(line.startswith("loading letters") for line in said)


def test_the_memory_plan_goes_to_the_log_as_it_is() -> None:
    said = list[str]()
    config = ServerConfig(port=0)
    with bind(config, listen=True) as listener, Starting(config, listener, said.append, "letters") as starting:
        starting.stage("weights 1 GiB\ncache 2 GiB")
        assert said[-1] == "weights 1 GiB\ncache 2 GiB"
        assert starting.loading.stage == ""


def test_no_request_is_lost_when_the_server_takes_over() -> None:
    """Clients that ask without a pause, each time on a new connection, get an answer each time."""
    config, engine = ServerConfig(port=0), fake_engine()
    listener = bind(config, listen=True)
    url, found, stop = url_of(listener), list[int](), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            found.append(httpx.get(f"{url}/ready", timeout=END_S).status_code)

    errors = list[BaseException]()

    def asking() -> None:
        try:
            ask()
        except httpx.HTTPError as error:
            errors.append(error)

    clients = [threading.Thread(target=asking) for _ in range(4)]
    server = HttpServer(create_app(engine, Served.of(engine, "letters"), config), listener)
    running = threading.Thread(target=server.run)
    with Starting(config, listener, lambda line: None, "letters"):
        for client in clients:
            client.start()
        until(lambda: found.count(503) > 20)
    running.start()
    until(lambda: found.count(200) > 20 or errors)
    stop.set()
    for client in clients:
        client.join()
    server.should_exit = True
    running.join()
    assert not errors
    assert set(found) == {200, 503}


def test_a_client_that_connected_before_the_end_is_answered() -> None:
    config = ServerConfig(port=0)
    with bind(config, listen=True) as listener:
        starting = Starting(config, listener, lambda line: None, "letters")
        connections = starting.server_state.connections
        with starting, socket.create_connection(listener.getsockname()[:2], timeout=END_S) as one:
            until(lambda: connections)
            ending = threading.Thread(target=starting.__exit__, args=(None, None, None))
            ending.start()
            until(lambda: not any(server.is_serving() for server in starting.servers))
            one.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b""
            while part := one.recv(4096):
                answer += part
            ending.join()
        assert answer.startswith(b"HTTP/1.1 503 ")


def test_a_port_that_somebody_else_will_serve_on_is_taken() -> None:
    """Two sockets may be bound to a port as long as neither listens: then the second server would have loaded for nothing."""
    with bind(ServerConfig(port=0), listen=True) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: it is in use; .* with --port"):
            bind(ServerConfig(port=port), listen=True)
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: it is in use; .* with --grpc-port"):
            bind(ServerConfig(port=0, grpc_port=port), listen=True)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def loading(port: int) -> str:
    """What a server that is loading says of it."""
    answer = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=END_S)
    assert answer.status_code == 503
    return answer.json()["loading"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_server_of_several_processes_ends_while_its_engine_loads(number: int, code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tests.server.fake_server", "0", "loads", "fronts=1", f"port={port}"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while "is being made" not in process.stderr.readline():
                assert process.poll() is None
            stage = "letters in its engine process: loading weights 3/9, "
            until(lambda: loading(port).startswith(stage))  # the parent hears of it a moment later
            ready = httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=END_S)
            assert (ready.status_code, ready.json()["loading"][: len(stage)]) == (503, stage)
            until(lambda: len(children(process.pid)) == 2)  # an engine and a front
            started = children(process.pid)
            process.send_signal(number)
            assert process.wait(END_S) == code
            until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))
        finally:
            process.kill()


def test_replicas_say_how_far_they_are() -> None:
    heard = list[str]()
    fleet = Fleet({"model": "loads", "name": "letters", "engine": {}}, ServerConfig(port=0, replicas=2), heard.append, FAKE)

    class Enough(Exception):
        pass

    def note(stage: str) -> None:
        heard.append(stage)
        if stage == "replica 0, loading weights 3/9":
            raise Enough

    with pytest.raises(Enough):
        fleet.start_all(note)
    fleet.end()
    assert heard[0] == "replica 0, starting a process"


def test_replicas_that_load_end_with_their_router() -> None:
    said = list[str]()
    fleet = Fleet({"model": "loads", "name": "letters", "engine": {}}, ServerConfig(port=0, replicas=2), said.append, FAKE)
    for replica in fleet.replicas:
        fleet.start(replica)
    began_s = time.monotonic()
    fleet.end()
    assert all(replica.process is not None and replica.process.poll() is not None for replica in fleet.replicas)
    assert time.monotonic() - began_s < fleet._config.drain_timeout_s, "nobody waited for replicas that serve nobody"
