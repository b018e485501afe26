"""Random requests to a server of models, beside a client that must not feel them.

`python -m tests.server.v2.fuzz --count 20000 --seed 0 --fronts 0`. Requests are right ones that were changed: JSON, bytes,
heads, what is cut off, and how it is sent; some have tensors in shared memory, whose file grows and shrinks meanwhile. With
fronts, each is sent over a connection that a front has. Every answer is HTTP; below 500, but where the model itself raises;
errors are one sentence. The victims' answers stay right, none of their requests fails, and in the end nothing is left in the
queue. Some victims repeat the same bytes about tensors in shared memory, so that they are answered in groups.
"""

import argparse
import http.client
import json
import os
import random
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.awake import until
from tests.server.v2.running import Server, serving
from tilewright.host.config import ModelConfig
from tilewright.server.v2.fronts import MOVES_AFTER

ADDRESS = re.compile(rb" (object )?at 0x[0-9a-f]+")
"""What Python writes of an object, where a message should say what is wrong."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 4, 64, 65, 1 << 31, 1 << 62, 1 << 64, -(1 << 63), 1.5, 1e400, float("nan"), "", "x", "y"),
    *(
        [],
        {},
        [[]],
        [1, 4],
        [2, 4],
        [-1, 4],
        [1 << 40, 4],
        [0, 4],
        [[1, 2], [3]],
        "FP32",
        "FP16",
        "BYTES",
        "a" * 5000,
        {"a": {}},
    ),
)
OBJECT = f"tilewright-fuzz-{os.getpid()}"
FILE = Path("/dev/shm") / OBJECT
VICTIMS_FILE, VICTIMS = FILE.with_name(f"{OBJECT}-victims"), 6
PLACE = {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": 0}
SHARED = ("region/r/register",) * 5 + ("region/s/register", "region/r/unregister", "unregister", "region/r/x")
KEYS = (
    "name",
    "datatype",
    "shape",
    "data",
    "parameters",
    "binary_data_size",
    "inputs",
    "outputs",
    "id",
    "priority",
    "timeout",
    "key",
    "offset",
    "byte_size",
)
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
PLAIN = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
HEADS = (
    *(b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Content-Encoding: gzip", b"X: \xff"),
    *(b"Inference-Header-Content-Length: 7", b"Inference-Header-Content-Length: -7", b"Origin: http://evil.example", b": x"),
    *(b"Host: evil.example", b"Connection: close", b"Connection: upgrade", b'X-Request-Id: "><', b"nonsense", b" folded"),
)
WAITS = (b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Expect: 100-continue")
"""Heads after which a body may end elsewhere than it does."""
SAFE = (500, 501)
"""Of a model that raises, and of a method that nobody knows."""


@dataclass
class Found:
    """What was wrong, and what was seen."""

    wrong: list[str] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)


def request(rng: random.Random) -> tuple[bytes, bool]:
    """(a request, changed here and there; whether it is whole, so that it has to be answered)."""
    one: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [rng.choice((1, 2)), 4]}
    array = np.ones(one["shape"], np.float32) * rng.choice((1.0, 1.0, -1.0, np.nan))
    blob, inside = b"", rng.random()
    if inside < 0.2:
        one["parameters"] = {**PLACE, "shared_memory_byte_size": array.nbytes, "shared_memory_offset": rng.choice((0, 16, 48))}
    elif inside < 0.7:
        blob = array.tobytes()
        one["parameters"] = {"binary_data_size": len(blob)}
    else:
        one["data"] = array.ravel().tolist()
    said: Any = {"inputs": [one]}
    if rng.random() < 0.2:
        said["outputs"] = [{"name": "y", "parameters": dict(PLACE)}]
    path = rng.choice(
        ("/v2/models/m/infer",) * 6 + ("/predict/m", "/v2/repository/index", "/v2/models/m/versions/9/infer", "/v2/x")
    )
    if rng.random() < 0.1:
        said, one, blob = {"key": OBJECT, "offset": 0, "byte_size": 64}, {}, b""
        path = f"/v2/systemsharedmemory/{rng.choice(SHARED)}"
    places = [of for of in (one, *said.get("outputs", ())) if isinstance(of.get("parameters"), dict)]
    for of in places:
        if rng.random() < 0.3:
            of["parameters"][rng.choice(tuple(PLACE))] = rng.choice(VALUES)
    for _ in range(rng.choice((0, 1, 1, 2))):
        of = rng.choice((said, one))
        of[rng.choice(KEYS)] = rng.choice(VALUES)
    head = json.dumps(said).encode()
    body = head + blob
    lines = [f"POST {path} HTTP/1.1".encode(), b"Host: 127.0.0.1", b"Content-Length: %d" % len(body)]
    if blob or rng.random() < 0.3:
        lines.append(b"Inference-Header-Content-Length: %d" % len(head))
    if rng.random() < 0.3:
        lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(HEADS))
    raw = bytearray(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    whole = rng.random() < 0.8
    if not whole:
        for _ in range(3):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        del raw[rng.randrange(1, len(raw) + 1) :]
    return bytes(raw), whole and not any(line in lines for line in WAITS)


def send(port: int, raw: bytes, whole: bool, rng: random.Random, found: Found, before: int = 0) -> None:
    """Send a request in pieces, and judge the answer; `before`: right ones that are sent first."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), 20) as one:
        for _ in range(before):
            one.sendall(PLAIN)
            while not _complete(answer):
                answer += one.recv(1 << 16)
            if not answer.startswith(b"HTTP/1.1 200"):
                found.wrong.append(f"the request before it got {answer!r}")
            answer = b""
        one.settimeout(20 if whole else 0.05)
        cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
        try:
            for a, b in zip((0, *cuts), (*cuts, len(raw)), strict=True):
                one.sendall(raw[a:b])
            while not _complete(answer) and (piece := one.recv(1 << 16)):
                answer += piece
        except ConnectionError:
            return  # what is no HTTP may be cut off
        except TimeoutError:
            if whole:
                found.wrong.append(f"no answer to {raw!r}: {answer!r}")
    for status in map(int, re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)):
        found.statuses[status] = found.statuses.get(status, 0) + 1
        if status >= 500 and not (status in SAFE and (b"poisoned" in answer or status == 501)):
            found.wrong.append(f"{status} to {raw!r}: {answer[-300:]!r}")
        elif status >= 400 and ADDRESS.search(answer):
            found.wrong.append(f"the address of an object in the answer to {raw!r}: {answer[-300:]!r}")
    if answer and not answer.startswith(b"HTTP/1.1 "):
        found.wrong.append(f"no HTTP to {raw!r}: {answer[:100]!r}")


def _complete(answer: bytes) -> bool:
    """Whether an answer that is no "go on" is there."""
    head, end, body = answer.removeprefix(b"HTTP/1.1 100 \r\n\r\n").partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return bool(end) and length is not None and len(body) >= int(length[1])


def victim(server: Server, found: Found, ends: threading.Event) -> int:
    """Ask for what is known until told to end; how often."""
    asked = 0
    while not ends.is_set():
        value = float(asked % 7)
        status, said = server.post("/v2/models/m/infer", {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}]
        })  # fmt: skip
        if status != 200 or said["outputs"][0]["data"] != [2 * value] * 4:
            found.wrong.append(f"the victim got {status}: {str(said)[:200]}")
        asked += 1
    return asked


def repeating_victim(server: Server, number: int, found: Found, ends: threading.Event) -> None:
    """The same bytes again and again, about other values in a region that nobody else names, on one connection."""
    name, at = f"v{number}", 32 * number
    memory = np.memmap(VICTIMS_FILE, np.float32, "r+")[at // 4 : at // 4 + 8]
    region = json.dumps({"key": VICTIMS_FILE.name, "offset": at, "byte_size": 32}).encode()
    place = {"shared_memory_region": name, "shared_memory_byte_size": 16}
    tensors = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": place}],
        "outputs": [{"name": "y", "parameters": {**place, "shared_memory_offset": 16}}],
    }
    body, headers, asked = json.dumps(tensors).encode(), {"content-type": "application/json"}, 0
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    while not ends.is_set():
        asked += 1
        memory[:4], memory[4:] = asked % 1000, 0
        connection.request("POST", "/v2/models/m/infer", body, headers)
        with connection.getresponse() as response:
            status, said = response.status, response.read()
        if b"register it first" in said:  # somebody has unregistered all regions
            connection.request("POST", f"/v2/systemsharedmemory/region/{name}/register", region, headers)
            connection.getresponse().read()
        elif status != 200 or not (memory[4:] == 2 * (asked % 1000)).all():
            found.wrong.append(f"repeating victim {number}, request {asked}: {status}, {memory.tolist()}, {said[:200]!r}")
            break
    connection.close()


def run(count: int, seed: int, fronts: int = 0) -> Found:
    """Send so many requests, to a server with so many fronts."""
    found, ends, rng = Found(), threading.Event(), random.Random(seed)
    FILE.write_bytes(bytes(64))
    VICTIMS_FILE.write_bytes(bytes(32 * VICTIMS))
    with serving({"m": ModelConfig(source="a:b")}, max_body_bytes=1 << 16, shared_memory=True, fronts=fronts) as server:
        until(lambda: sum(link.ready for link in server.state.fronts._links) == fronts if fronts else True, 30)
        beside = [threading.Thread(target=victim, args=(server, found, ends))]
        beside += [threading.Thread(target=repeating_victim, args=(server, i, found, ends)) for i in range(VICTIMS)]
        for thread in beside:
            thread.start()
        for _ in range(count):
            if len(found.wrong) > 10:
                break
            if rng.random() < 0.2:
                os.truncate(FILE, rng.choice((0, 15, 16, 63, 64, 64, 64, 1 << 40)))
            send(server.port, *request(rng), rng, found, before=MOVES_AFTER + 1 if fronts else 0)
        ends.set()
        for thread in beside:
            thread.join()
        end_s = time.monotonic() + 10
        while server.host.running and time.monotonic() < end_s:
            time.sleep(0.01)
        if server.host.running:
            found.wrong.append(f"{server.host.running} requests are left")
    FILE.unlink()
    VICTIMS_FILE.unlink()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fronts", type=int, default=0)
    asked = parser.parse_args()
    seen = run(asked.count, asked.seed, asked.fronts)
    print(*seen.wrong, dict(sorted(seen.statuses.items())), sep="\n")
    raise SystemExit(bool(seen.wrong))
