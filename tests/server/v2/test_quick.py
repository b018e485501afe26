"""Small requests that do not go through the web framework: cut, one behind the other, left, failing; and models that change."""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.awake import until
from tests.host.fakes import Makes
from tests.server.v2.running import Server, double, serving
from tilewright.host.config import ModelConfig
from tilewright.server import connections, shortcut
from tilewright.server.v2 import quick

HEAD = json.dumps(
    {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}],
        "parameters": {"binary_data_output": True},
    }
).encode()
MODELS = {"m": ModelConfig(source="a:b")}


def infer(value: float, model: str = "m", head: bytes = HEAD) -> bytes:
    """A request for four numbers."""
    body = head + np.full(4, value, np.float32).tobytes()
    fields = f"host: localhost\r\ncontent-length: {len(body)}\r\ninference-header-content-length: {len(head)}\r\n\r\n"
    return f"POST /v2/models/{model}/infer HTTP/1.1\r\n{fields}".encode() + body


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def answer(one: socket.socket, held: bytearray) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the next answer; what comes behind it stays in `held`."""
    while b"\r\n\r\n" not in held or len(held) < _end(held):
        data = one.recv(1 << 16)
        assert data, "the server closed the connection"
        held += data
    end = _end(held)
    head, _, body = bytes(held[:end]).partition(b"\r\n\r\n")
    del held[:end]
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def _end(held: bytearray) -> int:
    head, mark, _ = bytes(held).partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return len(head) + len(mark) + length


def value(found: tuple[int, dict[str, str], bytes]) -> float:
    """The number that all four of an answer's are."""
    status, headers, body = found
    assert status == 200, body
    numbers = np.frombuffer(body[int(headers["inference-header-content-length"]) :], np.float32)
    assert len(numbers) == 4
    assert len(set(numbers.tolist())) == 1
    return float(numbers[0])


@pytest.mark.parametrize("size", [1, 37, 10_000])
def test_requests_one_behind_the_other_are_answered_in_order_however_they_are_cut(size: int) -> None:
    with serving(MODELS) as server, connected(server) as one:
        index = b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n\r\n"
        data = infer(1) + infer(2) + index + infer(3) + infer(4, head=HEAD.replace(b"[1, 4]", b"[1, 5]")) + infer(5)
        for at in range(0, len(data), size):
            one.sendall(data[at : at + size])
        held = bytearray()
        assert [value(answer(one, held)) for _ in range(2)] == [2, 4]
        assert answer(one, held)[0] == 200
        assert value(answer(one, held)) == 6
        status, _, body = answer(one, held)
        assert (status, b"has shape [1, 5]" in body) == (400, True)
        assert value(answer(one, held)) == 10


def large(value: float, rows: int = 40_000, *, binary: bool = True) -> bytes:
    """A request for 640 kB of numbers, all of them one."""
    one: dict[str, object] = {"name": "x", "datatype": "FP32", "shape": [rows, 4]}
    if not binary:
        body = json.dumps(
            {"inputs": [{**one, "data": [value] * (4 * rows)}], "parameters": {"binary_data_output": True}}
        ).encode()
        fields = f"host: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        return f"POST /v2/models/m/infer HTTP/1.1\r\n{fields}".encode() + body
    said = {"inputs": [{**one, "parameters": {"binary_data_size": 16 * rows}}], "parameters": {"binary_data_output": True}}
    head = json.dumps(said).encode()
    body = head + np.full(4 * rows, value, np.float32).tobytes()
    fields = f"host: localhost\r\ncontent-length: {len(body)}\r\ninference-header-content-length: {len(head)}\r\n\r\n"
    return f"POST /v2/models/m/infer HTTP/1.1\r\n{fields}".encode() + body


def doubled(found: tuple[int, dict[str, str], bytes], value: float) -> bool:
    """Whether an answer to `large` is right."""
    status, headers, body = found
    assert status == 200, body[:300]
    numbers = np.frombuffer(body[int(headers["inference-header-content-length"]) :], np.float32)
    return len(numbers) == 160_000 and bool((numbers == 2 * value).all())


LARGE = {"m": ModelConfig(source="a:b", max_batch=40_000)}


@pytest.mark.parametrize("most", [shortcut.MAX_ALL_HELD_BYTES, 100_000])
def test_large_tensors_in_pieces_beside_one_another(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Whether there is room to keep what has come of them, or uvicorn has to."""
    monkeypatch.setattr(shortcut, "MAX_ALL_HELD_BYTES", most)
    made = [shortcut.Outbox()]
    monkeypatch.setattr(connections, "Outbox", lambda: made[0])
    with serving(LARGE) as server, connected(server) as one, connected(server) as other:
        held, others = bytearray(), bytearray()
        data = [large(number) + infer(number) for number in (1, 2)]
        for at in range(0, len(data[0]), 30_011):
            one.sendall(data[0][at : at + 30_011])
            other.sendall(data[1][at : at + 30_011])
        assert doubled(answer(one, held), 1)
        assert doubled(answer(other, others), 2)
        assert (value(answer(one, held)), value(answer(other, others))) == (2, 4)
        one.sendall(large(3, binary=False))
        assert doubled(answer(one, held), 3)
        (outbox,) = made
        assert outbox.held_bytes == 0
        other.sendall(large(4)[:90_000])
        until(lambda: outbox.held_bytes == 90_000)
        other.close()
        until(lambda: outbox.held_bytes == 0)


class Connection:
    """What an outbox knows of a connection; `log` is what becomes of all."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, log: list[str]):
        self.name, self.loop, self.log = name, loop, log
        self.holds = False

    def made(self, make: Callable[[], bytes | None]) -> bytes | None:
        return make()

    def send(self, data: bytes) -> None:
        self.log.append(f"{self.name} {data.decode()}")

    def sent(self) -> None:
        self.log.append(f"{self.name} goes on")

    def failed(self) -> None:
        self.log.append(f"{self.name} failed")


def test_answers_that_come_one_by_one_are_sent_at_once_and_others_together() -> None:
    log, said, errors = list[str](), list[str](), list[object]()

    async def turns() -> None:
        loop, outbox = asyncio.get_running_loop(), shortcut.Outbox()
        loop.set_exception_handler(lambda loop, context: errors.append(context["exception"]))
        a, b, c = (Connection(name, loop, log) for name in "abc")

        def wrong() -> bytes:
            raise LookupError("a mistake of the server's")

        async def turn(*adds: tuple[Connection, Callable[[], bytes | None], bool]) -> None:
            for connection, make, alone in adds:
                with suppress(LookupError):
                    outbox.add(connection, make, alone=alone)  # type: ignore[arg-type]
            said.append(", ".join(log))
            log.append("turn")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            said.append(", ".join(log[log.index("turn") + 1 :]))
            log.clear()

        await turn((a, lambda: b"1", True))
        await turn((a, lambda: b"2", False))
        await turn((a, lambda: None, True))
        await turn((a, wrong, True))
        await turn((a, wrong, False))
        b.holds = True
        await turn((b, lambda: b"3", True))
        await turn((a, lambda: b"4", True), (b, lambda: b"5", True), (c, lambda: b"6", True))
        await turn((a, lambda: b"7", True), (b, lambda: b"8", True))
        await turn((a, lambda: b"9", True))
        await turn((a, lambda: b"10", True))

    asyncio.run(turns())
    assert list(zip(said[::2], said[1::2], strict=True)) == [
        ("a 1, a goes on", ""),
        ("", "a 2, a goes on"),
        ("", ""),  # its client has left
        ("a failed", ""),
        ("", "a failed"),
        ("b 3", "b goes on"),
        ("a 4, a goes on", "b 5, c 6, b goes on, c goes on"),
        ("", "a 7, b 8, a goes on, b goes on"),
        ("", "a 9, a goes on"),
        ("a 10, a goes on", ""),
    ]
    assert [type(error) for error in errors] == [LookupError]


def test_who_leaves_is_not_computed() -> None:
    makes = Makes(double, seconds=0.3)
    with serving({"m": ModelConfig(source="a:b", max_batch=8)}, makes=makes) as server:
        first, gone, last = (connected(server) for _ in range(3))
        first.sendall(infer(1))
        until(lambda: makes.made[0].busy)
        gone.sendall(infer(-1))  # which the model would refuse, and its batch would be computed again
        version = server.host.models["m"].versions[1]
        until(lambda: version.waiting == 1)
        gone.close()
        until(lambda: version.waiting == 0)
        last.sendall(infer(3))
        assert [value(answer(one, bytearray())) for one in (first, last)] == [2, 6]
        assert makes.made[0].batches == [[1], [1]]
        first.close()
        last.close()


def test_an_answer_that_cannot_be_made_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = quick.answer_body

    def broken(found: quick.Answer, asked: quick.InferRequest) -> tuple[bytes, int | None]:
        if next(iter(found.outputs.values())).data[:4] == np.float32(14).tobytes():
            raise RuntimeError("a mistake of the server's")
        return made(found, asked)

    monkeypatch.setattr(quick, "answer_body", broken)
    with serving({"m": ModelConfig(source="a:b", max_delay_ms=200, max_batch=3)}) as server:
        ones = [connected(server) for _ in range(3)]
        for number, one in zip((6, 7, 8), ones, strict=True):
            one.sendall(infer(number))
        found = [answer(one, bytearray()) for one in ones]
        assert [status for status, _, _ in found] == [200, 500, 200]
        assert (value(found[0]), value(found[2])) == (12, 16)
        assert b"the server failed on this request" in found[1][2]
        for one in ones:
            one.close()


def test_equal_requests_to_other_models_and_versions(tmp_path: Path) -> None:
    """What is remembered of a request's JSON is no model's and no version's."""
    for name, factor in (("a", "1"), ("b", "10")):
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True)
        (folder / "factor.txt").write_text(factor)
    with serving(repository=tmp_path) as server, connected(server) as one:
        held = bytearray()

        def asked(model: str) -> float:
            one.sendall(infer(1, model))
            return value(answer(one, held))

        assert [asked(model) for model in "abab"] == [2, 20, 2, 20]
        (tmp_path / "a" / "1" / "factor.txt").write_text("100")
        server.makes.signature = server.makes.signature._replace(
            outputs=(server.makes.signature.outputs[0]._replace(name="z"),)
        )
        assert server.post("/v2/repository/models/a/load", {})[0] == 200
        one.sendall(infer(1, "a"))
        found = answer(one, held)
        assert value(found) == 200
        assert b'"name":"z"' in found[2]
        assert asked("b") == 20
