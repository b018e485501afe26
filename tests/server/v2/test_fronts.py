"""Fronts of ordinary models: which connections they get and give back, answers, limits, and what happens when somebody ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest

from tests.awake import until
from tests.host.fakes import Makes
from tests.server.v2.running import Server, double, serving
from tests.server.v2.test_quick import HEAD, answer, connected, doubled, infer, large, value
from tilewright.host.config import ModelConfig
from tilewright.server.connections import Connections
from tilewright.server.v2 import quick
from tilewright.server.v2.fronts import MOVES_AFTER
from tilewright.server.v2.relay import MAX_MOVED_BYTES, Arrivals, Frames, frame, move

MODELS = {"m": ModelConfig(source="a:b", max_batch=40_000)}


@contextmanager
def fronted(makes: Makes | None = None, models: dict[str, ModelConfig] = MODELS, **config: Any) -> Iterator[Server]:
    """A server whose two fronts are ready."""
    with serving(models, makes=makes, **{"fronts": 2, **config}) as server:
        until(lambda: ready(server) == server.state.server.config.fronts, 30)
        yield server


def ready(server: Server) -> int:
    return sum(link.ready for link in server.state.fronts._links)


def pool(server: Server) -> Connections:
    return server.state.server.connections


def moved(server: Server, request: bytes = infer(1)) -> socket.socket:
    """A connection that a front has."""
    one, before = connected(server), pool(server).elsewhere
    for _ in range(MOVES_AFTER + 1):
        one.sendall(request)
        assert value(answer(one, bytearray())) == 2
    assert pool(server).elsewhere == before + 1
    return one


@pytest.mark.parametrize("module", ["tilewright.server.v2.front", "tilewright.server.v2.app", "tilewright.server.front"])
def test_a_process_without_a_model_starts_without_torch(module: str) -> None:
    """Most of its time and memory would be torch's."""
    script = f"import sys, {module}; print(sorted({{'torch', 'triton'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout == "[]\n"


@pytest.mark.parametrize("size", [1, 37, 10_000])
def test_requests_are_answered_in_order_on_their_way_there_and_back(size: int) -> None:
    with fronted() as server, connected(server) as one:
        index = b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n\r\n"
        wrong = infer(4, head=HEAD.replace(b"[1, 4]", b"[1, 5]"))
        data = b"".join(infer(number) for number in range(1, 9)) + wrong + index + infer(9) + infer(10)
        held = bytearray()
        for number in range(1, MOVES_AFTER + 2):
            one.sendall(infer(-1 - number))
            assert value(answer(one, held)) == 2 * (-1 - number)
        assert pool(server).elsewhere == 1
        for at in range(0, len(data), size):
            one.sendall(data[at : at + size])
        assert [value(answer(one, held)) for _ in range(8)] == [2 * number for number in range(1, 9)]
        status, headers, body = answer(one, held)
        assert (status, b"has shape [1, 5]" in body, headers["content-type"]) == (400, True, "application/json")
        assert b"extensions" in answer(one, held)[2]
        assert [value(answer(one, held)) for _ in range(2)] == [18, 20]
        assert pool(server).elsewhere == 0, "a connection that came back stays"
        assert not held


def test_answers_have_the_same_head_and_bytes_with_and_without_fronts() -> None:
    requests = [infer(3), infer(3, model="nobody"), infer(-1), infer(3, head=HEAD.replace(b"FP32", b"FP64"))]
    found = []
    for fronts in (0, 2):
        with serving(MODELS, fronts=fronts) as server:
            if fronts:
                until(lambda server=server: ready(server) == 2, 30)
            with moved(server) if fronts else connected(server) as one:
                held, answers = bytearray(), list[Any]()
                for request in requests:
                    one.sendall(request)
                    status, headers, body = answer(one, held)
                    assert headers.pop("x-request-id").startswith("req-")
                    headers.pop("date")
                    answers.append((status, headers, body))
                found.append(answers)
                assert pool(server).elsewhere == bool(fronts)
    assert found[0] == found[1]
    assert [status for status, _, _ in found[0]] == [200, 404, 500, 400]


def test_connections_are_spread_and_counted_and_limited() -> None:
    with fronted(max_connections=4) as server:
        ones = [moved(server) for _ in range(4)]
        assert sorted(link.connections for link in server.state.fronts._links) == [2, 2]
        ones.pop().close()
        until(lambda: pool(server).elsewhere == 3)
        status, _, body = server.request("GET", "/metrics")
        assert status == 200
        requests = 'tilewright_http_requests_total{path="/v2/models/*",status="200"} '
        assert f"{requests}{4.0 * (MOVES_AFTER + 1)}" in body.decode()
        assert "tilewright_http_connections 4.0" in body.decode()
        for one in ones:
            one.close()


def test_the_longest_idle_connection_makes_room_wherever_it_is() -> None:
    def asks(one: socket.socket) -> None:
        one.sendall(infer(5))
        assert value(answer(one, bytearray())) == 10

    with fronted(max_connections=3) as server, moved(server) as first, moved(server) as second, connected(server) as own:
        time.sleep(0.3)  # a front notes that a connection is idle just after its client has the answer
        asks(own)
        asks(first)
        with connected(server) as new:  # a front has the longest idle one
            asks(new)
            assert second.recv(1) == b""
            asks(own)
            asks(first)
        until(lambda: len(pool(server).open) + pool(server).elsewhere == 2)
        with moved(server), connected(server) as new:  # the server's process has it
            asks(new)
            assert own.recv(1) == b""
            asks(first)
        assert pool(server).ended["evicted"] == 2


def test_a_new_connection_is_refused_if_all_are_busy() -> None:
    makes = Makes(double)
    with fronted(makes, max_connections=2) as server:
        with moved(server) as one, moved(server) as two:
            makes.made[0].seconds = 1.0
            for busy in (one, two):
                busy.sendall(infer(3))
            until(lambda: server.host.running == 2)
            with connected(server) as third:
                assert third.recv(1 << 12).startswith(b"HTTP/1.1 503")
            assert [value(answer(busy, bytearray())) for busy in (one, two)] == [6, 6]
        assert pool(server).ended["refused"] == 1


def test_large_requests_stay_in_the_server() -> None:
    with fronted() as server, moved(server) as one, connected(server) as other:
        for sender, elsewhere in ((other, 1), (one, 0)):
            for number in range(MOVES_AFTER + 2):
                sender.sendall(large(number))
                assert doubled(answer(sender, bytearray()), number)
            assert pool(server).elsewhere == elsewhere


def test_a_wrong_key_is_refused_there_too() -> None:
    def with_key(key: str) -> bytes:
        return infer(1).replace(b"host:", f"authorization: Bearer {key}\r\nhost:".encode(), 1)

    with fronted(api_key="right") as server, moved(server, with_key("right")) as one:
        one.sendall(with_key("wrong"))
        assert answer(one, bytearray())[0] == 401
        one.sendall(with_key("right"))
        assert value(answer(one, bytearray())) == 2


def test_a_part_of_a_request_is_answered_by_the_server_in_time() -> None:
    with fronted(head_timeout_s=1.0) as server, moved(server) as one:
        one.sendall(infer(1)[:40])
        assert answer(one, bytearray())[0] == 408
    with fronted(head_timeout_s=1.0) as server, moved(server) as one:
        assert one.recv(1) == b"", "an idle connection is closed"
        until(lambda: pool(server).ended["head_timeout"] == 1)


def test_who_leaves_is_not_computed() -> None:
    makes = Makes(double, seconds=0.3)
    with fronted(makes) as server:
        first, gone, last = (moved(server) for _ in range(3))
        batches = len(makes.made[0].batches)
        first.sendall(infer(1))
        until(lambda: makes.made[0].busy)
        gone.sendall(infer(-1))
        version = server.host.models["m"].versions[1]
        until(lambda: version.waiting == 1)
        gone.close()
        until(lambda: version.waiting == 0)
        last.sendall(infer(3))
        assert [value(answer(one, bytearray())) for one in (first, last)] == [2, 6]
        assert makes.made[0].batches[batches:] == [[1], [1]]
        first.close()
        last.close()


def test_an_answer_that_cannot_be_made_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = quick.answer_body

    def broken(found: quick.Answer, asked: quick.InferRequest) -> tuple[bytes, int | None]:
        if next(iter(found.outputs.values())).data[:4] == np.float32(14).tobytes():
            raise RuntimeError("a mistake of the server's")
        return made(found, asked)

    monkeypatch.setattr(quick, "answer_body", broken)
    models = {"m": ModelConfig(source="a:b", max_delay_ms=200, max_batch=3, preferred=(1, 3))}
    with fronted(models=models) as server:
        ones = [moved(server) for _ in range(3)]
        for number, one in zip((6, 7, 8), ones, strict=True):
            one.sendall(infer(number))
        found = [answer(one, bytearray()) for one in ones]
        assert [status for status, _, _ in found] == [200, 500, 200]
        assert (value(found[0]), value(found[2])) == (12, 16)
        assert b"the server failed on this request" in found[1][2]
        for one in ones:
            one.close()


def test_a_front_that_ends_is_started_again_and_its_requests_are_given_up() -> None:
    makes = Makes(double, seconds=0.3)
    with fronted(makes, fronts=1) as server, moved(server) as one:
        one.sendall(infer(1))
        version = server.host.models["m"].versions[1]
        until(lambda: makes.made[0].busy)
        [link] = server.state.fronts._links
        os.kill(link.process.pid, signal.SIGKILL)
        assert one.recv(1) == b""
        until(lambda: pool(server).elsewhere == 0)
        until(lambda: ready(server) == 1 and link not in server.state.fronts._links, 30)
        until(lambda: version.running == 0)
        moved(server).close()


def test_a_server_that_ends_answers_what_is_under_way() -> None:
    makes = Makes(double, seconds=0.5)
    with fronted(makes) as server:
        one, idle = moved(server), moved(server)
        processes = [link.process for link in server.state.fronts._links]
        one.sendall(infer(5))
        until(lambda: makes.made[0].busy)
        began_s = time.monotonic()
    assert value(answer(one, bytearray())) == 10
    assert (one.recv(1), idle.recv(1)) == (b"", b"")
    assert [process.returncode for process in processes] == [0, 0]
    assert time.monotonic() - began_s < 10


def test_shared_memory_whose_region_another_connection_registers() -> None:
    memory = SharedMemory(f"tilewright-{uuid.uuid4().hex}", create=True, size=64)
    try:
        with fronted(shared_memory=True) as server, moved(server) as one:
            numbers = np.ndarray((2, 4), np.float32, memory.buf)
            numbers[:] = [[3] * 4, [0] * 4]
            region = {"key": f"/{memory.name}", "offset": 0, "byte_size": 64}
            place = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
            asked = {
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": place}],
                "outputs": [{"name": "y", "parameters": {**place, "shared_memory_offset": 16}}],
            }
            body = json.dumps(asked).encode()
            request = f"POST /v2/models/m/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            for number in (3, 4, 5):
                status = server.post("/v2/systemsharedmemory/region/r/register", region)[0]
                assert status == 200
                for _ in range(2):  # the second one came before
                    numbers[:] = [[number] * 4, [0] * 4]
                    one.sendall(request + body)
                    assert answer(one, bytearray())[0] == 200
                    assert numbers.tolist() == [[number] * 4, [2 * number] * 4]
                assert server.post("/v2/systemsharedmemory/region/r/unregister", {})[0] == 200
                one.sendall(request + body)
                status, _, said = answer(one, bytearray())
                assert (status, b"no shared memory region 'r'" in said) == (404, True)
            assert pool(server).elsewhere == 1
            del numbers
    finally:
        memory.close()
        memory.unlink()


def test_the_command_drains_its_fronts(tmp_path: Any) -> None:
    code = "import torch\ndef build():\n    return torch.nn.Identity(), torch.zeros(1, 4)\n"
    (tmp_path / "fronted_model.py").write_text(code)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "fronted_model:build", "--fronts", "2", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tilewright.cli", *words]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:

        def answers() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as found:
                    return found.status == 200
            except OSError:
                return False

        until(answers, 120)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        log = process.communicate(timeout=60)[1]
        assert process.returncode == 0, log
        assert "Traceback" not in log
    finally:
        process.kill()


# ---- messages


def test_messages_are_found_however_they_are_cut() -> None:
    said = [(4, 1, b"a", b"body"), (200, (1 << 32) - 1, b"", b""), (0, 7, b"x" * 1000, bytes(100_000))]
    data = b"".join(frame(kind, number, text, body) for kind, number, text, body in said)
    for size in (1, 7, 13, 65536, len(data)):
        if len(data) // size > 20_000:
            size = 11
        end, found = Frames(), []
        for at in range(0, len(data), size):
            found += end.messages(data[at : at + size])
        assert found == said


def test_a_connection_with_more_bytes_than_a_packet_takes() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        arrivals = Arrivals(theirs)
        for size in (0, 1, MAX_MOVED_BYTES, 2 * MAX_MOVED_BYTES + 5):
            near, far = socket.socketpair()
            data = os.urandom(size)
            move(ours, near, data)
            near.close()
            found = None
            while found is None:
                found = arrivals.next()
            with found[0] as connection, far:
                assert found[1] == data
                connection.sendall(b"here")
                assert far.recv(4) == b"here"
        ours.close()
        with pytest.raises(EOFError):
            arrivals.next()
