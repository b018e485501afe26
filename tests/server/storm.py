"""Everything at once that clients and surroundings do to a server: `python -m tests.server.storm`. Loopback only, a minute.

2,000 idle connections, 100 slow heads, 300 clients that vanish, clients that are killed or stopped in the middle of a stream, a
reader of the log that goes away, SIGTERM with a client that does not read, kill -9 and a start on the same port. Two victims'
streams run beside it all; each step prints what it did, and what the server was like after it.
"""

import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack

from tests.server.victim import ALPHABET, ALPHABET_TEXT, ServerProcess, Victim, victim

IDLE, SLOW, VANISHING, CHILDREN = 2000, 100, 300, 10
OPTIONS = (
    "0.01",
    "head_timeout_s=3.0",
    "write_timeout_s=3.0",
    "drain_timeout_s=3.0",
    "max_connections=1000",
    "log_level='info'",
)
CHILD = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
one.sendall(sys.stdin.buffer.read())
print(one.recv(12).decode(), flush=True)
while one.recv(4096):
    pass
"""


def request(**fields: object) -> bytes:
    """A streaming request as bytes."""
    body = json.dumps({"prompt": "ab", "max_tokens": 4000, "stream": True, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + f"content-length: {len(body)}\r\n\r\n".encode() + body


def start(port: int = 0) -> ServerProcess:
    """A server whose log is a pipe that the caller may close."""
    command = [sys.executable, "-m", "tests.server.fake_server", *OPTIONS, f"port={port}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while (found := re.search(r"127\.0\.0\.1:(\d+)", said)) is None:
        line = process.stderr.readline()
        assert line, said
        said += line
    return ServerProcess(process, int(found[1]))


def connect(server: ServerProcess) -> socket.socket:
    """A client's connection."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def say(server: ServerProcess, words: str, since_s: float) -> None:
    """A line of the report: what happened, how long it took, and the server's state."""
    assert server.request("GET", "/health")[0] == 200
    started_s = time.monotonic()
    assert server.post(prompt="ab", max_tokens=3)[0] == 200
    took_s = time.monotonic() - started_s
    held = f"{server.metric('tilewright_http_connections'):.0f} connections, {server.metric('process_open_fds'):.0f} files"
    memory = server.metric("process_resident_memory_bytes") / 2**20
    print(f"{words:<60} {time.monotonic() - since_s:5.1f} s   a request {took_s:.2f} s, {held}, {memory:.0f} MiB", flush=True)


def idle(server: ServerProcess, stack: ExitStack) -> None:
    """Connections that say nothing."""
    for _ in range(IDLE):
        stack.enter_context(connect(server))


def slow(server: ServerProcess, stack: ExitStack) -> None:
    """Heads that come letter by letter."""
    clients = [stack.enter_context(connect(server)) for _ in range(SLOW)]
    for letter in b"GET /health HTTP/1.1\r\n":
        for one in clients:
            one.sendall(bytes([letter]))
        time.sleep(0.05)
    assert all(one.recv(12) == b"HTTP/1.1 408" for one in clients)


def vanishing(server: ServerProcess, stack: ExitStack) -> None:
    """Clients that leave in the head, in the body, in the stream, politely or not."""
    whole = request()
    for number in range(VANISHING):
        with connect(server) as one:
            one.sendall(whole[: (30, len(whole) - 10, None)[number % 3]])
            if number % 2:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def children(server: ServerProcess, stack: ExitStack) -> None:
    """Client processes in the middle of a stream: half of them killed, half of them stopped."""
    started = []
    for _ in range(CHILDREN):
        command = [sys.executable, "-c", CHILD, str(server.port)]
        child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(child.kill)
        assert child.stdin is not None
        child.stdin.write(request(n=6, logprobs=20))
        child.stdin.close()
        started.append(child)
    for number, child in enumerate(started):
        assert child.stdout is not None
        assert child.stdout.readline().startswith(b"HTTP/1.1 200")
        child.send_signal(signal.SIGKILL if number % 2 else signal.SIGSTOP)
    end_s = time.monotonic() + 60
    while server.metric("tilewright_requests_running") + server.metric("tilewright_requests_waiting") > 2:
        assert time.monotonic() < end_s, "requests of clients that are stopped or dead still run"
        time.sleep(0.2)


def log_reader(server: ServerProcess, stack: ExitStack) -> None:
    """Nobody reads the log any more."""
    assert server.process.stderr is not None
    server.process.stderr.close()
    for _ in range(50):
        server.request("GET", "/version")


def main() -> None:
    """The script."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, IDLE + 500)), hard))
    server = start()
    try:
        for attack in (idle, slow, vanishing, children, log_reader):
            with (
                victim(server.port, ALPHABET, ALPHABET_TEXT),
                victim(server.port, ALPHABET, ALPHABET_TEXT),
                ExitStack() as stack,
            ):
                since_s = time.monotonic()
                attack(server, stack)
                say(server, (attack.__doc__ or "").rstrip("."), since_s)
        with connect(server) as one:
            one.sendall(request(n=32, logprobs=5))  # and is never read
            last = Victim(server.port, {**ALPHABET, "max_tokens": 120}, ALPHABET_TEXT[:120])
            last.start()
            assert last.started.wait(20)
            since_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            last.join(20)
            last.check()
            assert last.text == ALPHABET_TEXT[:120]
            code = server.process.wait(20)
            print(f"SIGTERM with a client that does not read: exit code {code} after {time.monotonic() - since_s:.1f} s")
            assert code == 128 + signal.SIGTERM
        server = start(server.port)
        since_s = time.monotonic()
        with connect(server) as one:
            one.sendall(request())
            one.recv(100)
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait(10)
            server = start(server.port)
            say(server, "killed with -9, started again on the same port", since_s)
        print("the server went on, or ended within its deadline, each time")
    finally:
        server.process.kill()


if __name__ == "__main__":
    main()
