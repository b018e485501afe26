"""Measure how much processor time a request costs each process of a server of images, while the server is busy.

    python scripts/measure_fronts.py --fronts 3 --seconds 6

The model returns the first 1,000 numbers of an image, as with `measure_images.py --model first`. One client with many
connections sends one image at a time over each of them, in shared memory. It sends prepared bytes and looks only at the status
of an answer, so that it takes little of the processor, and the server's processes get requests as fast as they can answer them.
`tilewright load`, which measure_images.py uses, needs several times as long for a request as the server.

The result is a line of JSON: requests/s, rows of a batch, and for each kind of process the microseconds of processor time for a
request, as user, system and both.
"""

import argparse
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import measure_images as images

from tilewright.bench.cpu_time import PROC, ROLES, descendants, fields, rows_and_batches

TICKS = os.sysconf("SC_CLK_TCK")
WARM_UP_S = 1.5
OUTPUTS = 1000


def used(server: int, client: int) -> dict[str, list[int]]:
    """What processes do -> their user and system time since they began, in ticks."""
    found = dict[str, list[int]]()
    for pid in (server, *descendants(server), client):
        try:
            command = (PROC / str(pid) / "cmdline").read_text()
            role = next((role for part, role in ROLES.items() if part in command), "others")
            role = {server: "server", client: "client"}.get(pid, role)
            times = found.setdefault(role, [0, 0])
            for kind, ticks in enumerate(fields(pid)[11:13]):
                times[kind] += int(ticks)
        except OSError:  # it has just ended
            continue
    return found


# ---- the client


def post(connection: http.client.HTTPConnection, path: str, said: dict[str, Any]) -> None:
    """Send a JSON object. Raises RuntimeError if the answer is an error."""
    connection.request("POST", path, json.dumps(said))
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: status {answer.status}: {text[:200]!r}")


def requests(port: int, size: int, count: int) -> tuple[list[bytes], list[SharedMemory]]:
    """A request for each connection, and the memory that they name."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", f"/v2/models/{images.NAME}")
    about = json.loads(connection.getresponse().read())
    shape = [1, 3, size, size]
    given, wanted = 2 * 3 * size * size, 2 * min(OUTPUTS, 3 * size * size)
    made, memories = list[bytes](), list[SharedMemory]()
    for number in range(count):
        name = f"tilewright-fronts-{os.getpid()}-{number}"
        memories.append(SharedMemory(name, create=True, size=given + wanted))
        memory = memories[-1].buf
        assert memory is not None
        memory[:given] = bytes(given)
        region = {"key": f"/{name}", "offset": 0, "byte_size": given + wanted}
        post(connection, f"/v2/systemsharedmemory/region/{name}/register", region)
        inputs, outputs = (
            {"shared_memory_region": name, "shared_memory_offset": at, "shared_memory_byte_size": length}
            for at, length in ((0, given), (given, wanted))
        )
        said = {
            "inputs": [{"name": about["inputs"][0]["name"], "datatype": "FP16", "shape": shape, "parameters": inputs}],
            "outputs": [{"name": about["outputs"][0]["name"], "parameters": outputs}],
        }
        body = json.dumps(said, separators=(",", ":")).encode()
        head = f"POST /v2/models/{images.NAME}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        made.append(head.encode() + body)
    return made, memories


def send(port: int, size: int, count: int, seconds: float) -> None:
    """Ask over all connections for some time; print a line when it begins. Raises RuntimeError if an answer is an error."""
    made, memories = requests(port, size, count)
    poll, by_file = select.epoll(), dict[int, tuple[socket.socket, bytes]]()
    for request in made:
        one = socket.create_connection(("127.0.0.1", port))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(one.fileno(), select.EPOLLIN)
        by_file[one.fileno()] = one, request
        one.sendall(request)
    print("begun", flush=True)
    end_s = time.monotonic() + seconds
    try:
        while time.monotonic() < end_s:
            for file, _ in poll.poll(1.0):
                one, request = by_file[file]
                if not (answer := one.recv(1 << 12)).startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"the answer is {answer[:300]!r}")
                one.sendall(request)
    finally:
        for memory in memories:
            memory.close()
            memory.unlink()


# ---- the measurement


def measured(run: images.Run, url: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What the requests of `asked.seconds` cost."""
    words = [sys.executable, __file__, "--client", url.rpartition(":")[2], "--size", str(asked.size)]
    words += ["--connections", str(asked.connections), "--seconds", str(asked.seconds + 2 * WARM_UP_S)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        if not client.stdout.readline():
            raise SystemExit("the client ended before it had sent a request")
        time.sleep(WARM_UP_S)
        before, (rows, batches), began_s = used(run.server, client.pid), rows_and_batches(url, images.NAME), time.monotonic()
        time.sleep(asked.seconds)
        after, (rows_then, batches_then) = used(run.server, client.pid), rows_and_batches(url, images.NAME)
        wall_s, rows, batches = time.monotonic() - began_s, rows_then - rows, batches_then - batches
    if client.returncode:
        raise SystemExit("the client failed")
    us = 1e6 / TICKS / max(1, rows)
    found: dict[str, Any] = {"requests_per_s": round(rows / wall_s), "rows_per_batch": round(rows / max(1, batches), 1)}
    for role, times in after.items():
        user, system = (us * (now - then) for now, then in zip(times, before.get(role, [0, 0]), strict=True))
        found[role] = {"user_us": round(user, 1), "system_us": round(system, 1), "us": round(user + system, 1)}
    return found


def main() -> None:
    """Serve, send, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images in pixels")
    parser.add_argument("--connections", type=int, default=256, help="connections of the client")
    parser.add_argument("--fronts", type=int, default=3, help="processes of the server that speak HTTP")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds for the measurement")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client is not None:
        send(asked.client, asked.size, asked.connections, asked.seconds)
        return
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        words = ["--out", text, "--model", images.FIRST, "--device", "cpu", "--sizes", "256", "--size", str(asked.size)]
        run = images.Run(images.arguments([*words, "--fronts", str(asked.fronts), "--offline-seconds", "0"]))
        run.say = lambda text: None
        env = images.written(run.asked, folder)
        with images.serving(run, folder, env) as url:
            if url:
                print(json.dumps(measured(run, url, asked)), flush=True)


if __name__ == "__main__":
    main()
