"""A client of a served model that needs little processor time for a request, so that the server is measured and not the client.

    python scripts/light_client.py http://127.0.0.1:8000 MODEL --rows 1 --connections 32 --seconds 4 --warmup 1

`tilewright load` needs several times as long for a request as the server. This client has its tensors in shared memory, and
sends the same prepared bytes over and over, one request at a time over each of its connections. It reads the status and the
length of an answer. The outputs of two answers on each connection, the first and the last, are compared with those of a request
that has the same inputs in its body.

The client prints `ready` when everything is prepared, and begins when it reads a line, so that several clients begin together.
Its last line is a JSON object with the names that `tilewright load --json` has.
"""

import argparse
import asyncio
import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from tilewright.bench.load.shared import Slot, Slots
from tilewright.bench.load.v2 import Asked, Tensor, describe
from tilewright.host.tensors import DATATYPES

__all__ = ["begin", "command"]

MOST_BYTES = 1 << 14
"""Most bytes of an answer that are received at once."""
GOOD = b"HTTP/1.1 200"
PATIENCE_S = 30.0
"""How long the last answers may take."""
TOLERANCE = {"FP16": 0.02}
"""Largest difference of an output from that of another batch, as a share of the largest number in it; others: 0.001."""


def command(url: str, model: str, rows: int, connections: int, seconds: float, warm_up_s: float) -> list[str]:
    """The command line of a client; `seconds` includes the warm-up."""
    words = [sys.executable, __file__, url, model, "--rows", str(rows), "--connections", str(connections)]
    return [*words, "--seconds", str(seconds), "--warmup", str(warm_up_s)]


def begin(clients: "Sequence[subprocess.Popen[str]]") -> None:
    """Wait until all these clients are prepared, and have them begin. One that has ended gets nothing."""
    for client in clients:
        assert client.stdout is not None
        client.stdout.readline()
    for client in clients:
        assert client.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            client.stdin.write("\n")
            client.stdin.flush()


class Line:
    """A connection, its request, and the outputs that are expected.

    Args:
        url: of the server.
        model: the model that is asked.
        asked: its inputs and outputs.
        slot: the memory of the inputs, with the outputs behind them, and the body of the request.
        expected: the bytes of these outputs.
    """

    def __init__(self, url: str, model: str, asked: Asked, slot: Slot, expected: bytes):
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self.address = address.hostname, address.port
        self.socket = socket.socket()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-length: {len(slot.body)}\r\n\r\n"
        self.request = head.encode() + slot.body
        self.sent_s = 0.0
        self.length = -1
        """Bytes of the last answer."""
        self.unchecked = True
        """Whether no answer has been compared yet."""
        assert slot.memory.buf is not None
        begin = sum(one.size or 0 for one in asked.inputs)
        self._outputs, self._expected, self._tensors = slot.memory.buf[begin : begin + len(expected)], expected, asked.outputs

    def connect(self) -> None:
        """Connect. Not before the first request, because the server closes connections over which none comes."""
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(self.address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def rest(self, data: bytes) -> bytes:
        """A whole answer, whose first bytes are given. Raises OSError or ValueError."""
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, body = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        while len(body) < int(fields[b"content-length"]):
            data, body = data + (more := self._more()), body + more
        return data

    def _more(self) -> bytes:
        data = self.socket.recv(MOST_BYTES)
        if not data:
            raise ConnectionError("the server has closed a connection")
        return data

    def wrong(self) -> str | None:
        """What is wrong with the outputs in memory, which are erased; None: they are as expected."""
        found, at = bytes(self._outputs), 0
        self._outputs[:] = bytes(len(found))
        for one in self._tensors:
            size = one.size or 0
            got, want = (numbers(one, data[at : at + size]) for data in (found, self._expected))
            if not np.abs(got - want).max() <= TOLERANCE.get(one.datatype, 0.001) * np.abs(want).max():
                return f"output {one.name!r} is not that of the same inputs in the body of a request"
            at += size
        return None

    def close(self) -> None:
        """Close the connection."""
        self._outputs.release()
        self.socket.close()


def numbers(one: Tensor, data: bytes) -> np.ndarray:
    """A tensor's numbers."""
    return np.frombuffer(data, str(DATATYPES[one.datatype].numpy)).astype(np.float64)


# ---- before


def drawn(one: Tensor, draw: np.random.Generator) -> bytes:
    """Random numbers from 0 to a limit, which is drawn, too: so outputs of different inputs differ."""
    kind = np.dtype(str(DATATYPES[one.datatype].numpy))
    most = 1.0 if kind.kind == "f" else min(255, np.iinfo(kind).max) if kind.kind in "iu" else 2.0
    values = draw.random(prod(one.shape), dtype=np.float32) * np.float32(most * draw.uniform(0.1, 1.0))
    return values.astype(kind).tobytes()


def slots_of(session: aiohttp.ClientSession, url: str, asked: Asked, draw: np.random.Generator) -> Slots:
    """Regions of shared memory for all tensors of a request."""

    def fill(name: str) -> tuple[bytes, bytes]:
        places, at = list[dict[str, Any]](), 0
        for one in (*asked.inputs, *asked.outputs):
            place = {"shared_memory_region": name, "shared_memory_offset": at, "shared_memory_byte_size": one.size}
            places.append(place)
            at += one.size or 0
        inputs = [one.said(parameters=place) for one, place in zip(asked.inputs, places, strict=False)]
        behind = places[len(inputs) :]
        outputs = [{"name": one.name, "parameters": place} for one, place in zip(asked.outputs, behind, strict=True)]
        body = json.dumps({"inputs": inputs, "outputs": outputs}, separators=(",", ":")).encode()
        return body, b"".join(drawn(one, draw) for one in asked.inputs)

    return Slots(session, url, sum(one.size or 0 for one in (*asked.inputs, *asked.outputs)), fill)


async def outputs_of(session: aiohttp.ClientSession, url: str, asked: Asked, data: bytes) -> bytes:
    """The outputs for these inputs, which are sent in the body of a request. Raises ValueError: it was refused."""
    inputs = [one.said(parameters={"binary_data_size": one.size}) for one in asked.inputs]
    outputs = [{"name": one.name, "parameters": {"binary_data": True}} for one in asked.outputs]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    async with session.post(f"{url}/v2/models/{asked.model}/infer", data=head + data, headers=headers) as answer:
        body = await answer.read()
        if answer.status != 200:
            raise ValueError(f"a request with its tensors in the body got {answer.status}: {body[:200]!r}")
        return body[int(answer.headers["inference-header-content-length"]) :]


# ---- the load


def driven(lines: Sequence[Line], seconds: float, warm_up_s: float) -> tuple[list[float], Counter[str]]:
    """Ask over all connections for some time.

    Returns:
        (seconds of each request that was answered after the warm-up, problem -> how many answers had it). Raises OSError.
    """
    poll, clock, latencies, problems = select.epoll(), time.monotonic, list[float](), Counter[str]()
    by_file = {line.socket.fileno(): line for line in lines}
    for line in lines:
        line.connect()
    begin_s = clock() + warm_up_s
    end_s = begin_s + seconds - warm_up_s
    for file, line in by_file.items():
        poll.register(file, select.EPOLLIN)
        line.sent_s = clock()
        line.socket.sendall(line.request)
    open_lines = len(lines)
    while open_lines:
        ready = poll.poll(PATIENCE_S)
        if not ready:
            raise TimeoutError(f"{open_lines} requests have no answer after {PATIENCE_S:g} s")
        for file, _ in ready:
            line = by_file[file]
            data = line.socket.recv(MOST_BYTES)
            if len(data) != line.length:
                data = line.rest(data or line._more())
                line.length = len(data)
            now_s = clock()
            if not data.startswith(GOOD):
                problems[f"status {data[9:12].decode()}"] += 1
            else:
                if begin_s <= now_s < end_s:
                    latencies.append(now_s - line.sent_s)
                if line.unchecked or now_s >= end_s:
                    line.unchecked = False
                    if (wrong := line.wrong()) is not None:
                        problems[wrong] += 1
            if now_s >= end_s:
                poll.unregister(file)
                open_lines -= 1
                continue
            line.sent_s = now_s
            line.socket.sendall(line.request)
    return latencies, problems


def summary(latencies: Sequence[float], problems: Counter[str], rows: int, seconds: float) -> dict[str, Any]:
    """What `tilewright load` says about a stage, as far as this client knows it."""
    refused = problems["status 429"]
    found = {f"p{share}": float(np.percentile(latencies, share)) for share in (50, 99)} if latencies else {}
    return {
        "row_rate": rows * len(latencies) / seconds,
        "latencies": {"e2e": found},
        "rejected": refused,
        "failed": sum(problems.values()) - refused,
        "problems": dict(problems.most_common(8)),
        "spread": None,
    }


async def ask(url: str, model: str, rows: int, connections: int, seconds: float, warm_up_s: float) -> dict[str, Any]:
    """Prepare, wait for a line, send. Nothing else runs on this event loop."""
    # The server closes idle connections, so none is kept for the end.
    connector, timeout = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        asked = await describe(session, url, model, rows)
        slots, lines = slots_of(session, url, asked, np.random.default_rng()), list[Line]()
        try:
            await slots.reserve(connections)
            size = sum(one.size or 0 for one in asked.inputs)
            for slot in [await slots.take() for _ in range(connections)]:
                assert slot.memory.buf is not None
                expected = await outputs_of(session, url, asked, bytes(slot.memory.buf[:size]))
                lines.append(Line(url, model, asked, slot, expected))
            print("ready", flush=True)
            sys.stdin.readline()
            stage = summary(*driven(lines, seconds, warm_up_s), rows, seconds - warm_up_s)
        finally:
            for line in lines:
                line.close()
            await slots.close()
    return {"tensors": "shared memory", "stages": [stage]}


def main() -> None:
    """Ask, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("model", help="name of the model")
    parser.add_argument("--rows", type=int, default=1, help="rows of a request")
    parser.add_argument("--connections", type=int, default=32, help="connections, each with one request at a time")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of the load, with the warm-up")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds at the beginning that do not count")
    asked = parser.parse_args()
    print(json.dumps(asyncio.run(ask(asked.url, asked.model, asked.rows, asked.connections, asked.seconds, asked.warmup))))


if __name__ == "__main__":
    main()
