"""A stream that must not feel what happens beside it, and a server process with both.

The victim asks the engine that says the alphabet, or any model whose answer is known, and keeps the time of every chunk.
"""

import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.awake import awake_s
from tests.server import fake_engine

MAX_GAP_S = 1.0
BOOKWORM = ("tilewright.cli", "serve", "bookworm", "--device", "cpu", "--port", "0")
"""For `server_process`: the embedded model, served with defaults."""


def fronts(*command: str) -> list[str]:
    """What is added to a server's command for the shape that is tested now."""
    if any("fronts" in word for word in command):
        return []
    count = 0 if fake_engine.shape_now == "thread" else 2
    return ["--fronts", str(count)] if "serve" in command else [f"fronts={count}"]


class ServerProcess:
    """A running server: its process, its port, and the lines it logs."""

    def __init__(self, process: subprocess.Popen[str], port: int):
        self.process = process
        self.port = port
        self.lines: list[str] = []
        self.reader: threading.Thread | None = None

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str = "/v1/completions", **fields: object) -> tuple[int, dict[str, str], bytes]:
        """The same with a JSON body."""
        return self.request("POST", path, json.dumps(fields).encode(), content_type="application/json")

    def metric(self, name: str) -> float:
        """A number of /metrics, with its labels as they are written there; 0 if it is not there."""
        text = self.request("GET", "/metrics")[2].decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def cpu_s(self) -> float:
        """Processor time so far."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server_process(*command: str, start_s: float = 120.0, shaped: bool = True) -> Iterator[ServerProcess]:
    """Start `python -m COMMAND`, wait until it says where it serves; ends it with the context.

    With `shaped` it has the front processes of the shape that is tested now, else those that its command gives or defaults to.
    """
    words = [*command, *(fronts(*command) if shaped else ())]
    with subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            end_s, said = time.monotonic() + start_s, ""
            while (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)) is None:
                line = process.stderr.readline()
                said += line
                assert line, f"no address in {said!r}"
                assert time.monotonic() < end_s, said
            server = ServerProcess(process, int(found[1]))
            server.reader = threading.Thread(target=_collect, args=(server,), daemon=True)
            server.reader.start()
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            if server.reader is not None:
                server.reader.join(5)


def _collect(server: ServerProcess) -> None:
    assert server.process.stderr is not None
    server.lines += iter(server.process.stderr.readline, "")


class Victim(threading.Thread):
    """Reads one stream from start to `stop()`, and notes text and times, by the clock that stands still with the machine."""

    def __init__(self, port: int, body: dict[str, object], expected: str):
        super().__init__(daemon=True)
        self._port = port
        self._body = json.dumps({**body, "stream": True}).encode()
        self._expected = expected
        self._stopping = threading.Event()
        self.started = threading.Event()
        self.text = ""
        self.times: list[float] = []
        self.ended = ""
        """What the stream ended with: "stopped" if it was stopped here."""

    def run(self) -> None:
        """Read until stopped."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("POST", "/v1/completions", self._body, {"content-type": "application/json"})
            response = connection.getresponse()
            while not self._stopping.is_set():
                line = response.readline()
                if not line.startswith(b"data: {"):
                    if line.startswith(b"data: ") or not line:
                        self.ended = line.decode() or "closed"
                        return
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.ended = str(event["error"])
                    return
                self.text += event["choices"][0]["text"] if event["choices"] else ""
                self.times.append(awake_s())
                self.started.set()
            self.ended = "stopped"
        except OSError as error:
            self.ended = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def stop(self) -> None:
        """End the stream."""
        self._stopping.set()
        self.join(60)

    def check(self) -> None:
        """End the stream; raises AssertionError if its text is another than expected, or came too slowly."""
        now_s = awake_s()
        self.stop()
        assert self.ended in ("stopped", "data: [DONE]\n"), f"the victim's stream ended with {self.ended}"
        assert self.text, "the victim has got nothing"
        assert self._expected.startswith(self.text), f"the victim's text is {self.text!r}"
        times = [*self.times, max(now_s, self.times[-1])] if self.ended == "stopped" else self.times
        gap_s = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
        assert gap_s < MAX_GAP_S, f"the victim waited {gap_s:.2f} s"


@contextmanager
def victim(port: int, body: dict[str, object], expected: str) -> Iterator[Victim]:
    """A victim that runs while the context is open, and is looked at when it closes without an error."""
    one = Victim(port, body, expected)
    one.start()
    assert one.started.wait(60), f"the victim does not start: {one.ended}"
    try:
        yield one
        one.check()
    finally:
        one.stop()


ALPHABET = {"prompt": "ab", "max_tokens": 4000, "temperature": 0}
"""A request of the engine that says the alphabet, and what it answers:"""
ALPHABET_TEXT = "".join(chr(97 + (2 + k) % 26) for k in range(4000))
