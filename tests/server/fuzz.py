"""Random requests to a real server, beside streams that must not feel them.

`python -m tests.server.fuzz --count 10000 --seed 0`. Every answer must come, be below 500 (429 is fine), be valid JSON where it
says so, and an error must be an OpenAI error object. The victims' texts must stay what they are alone, without a gap of a
second; the log must stay free of tracebacks; and in the end the server is idle, healthy, and ends with 0. `--only NUMBER` sends
one request again; `--model` takes another than a tiny one.
"""

import argparse
import http.client
import json
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tests.server.requests import Request, make_request
from tests.server.tiny_model import write_tiny_model
from tests.server.victim import ServerProcess, Victim, server_process

ADDRESS = re.compile(rb" (object )?at 0x[0-9a-f]+")
"""What Python writes of an object, where a message should say what is wrong."""
TIMEOUT_S = 30.0
CLIENTS = 4
MAX_FINDINGS = 30
VICTIMS = (
    {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True},
    {"prompt": "Call me", "max_tokens": 100, "temperature": 1, "seed": 7, "ignore_eos": True},
)


class Findings:
    """What was wrong, and what was seen."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.statuses: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def enough(self) -> bool:
        """Whether there are so many that a reader stops anyway."""
        return len(self.wrong) >= MAX_FINDINGS

    def add(self, words: str) -> None:
        """Note and say that something was wrong."""
        with self._lock:
            self.wrong.append(words)
        print(words, file=sys.stderr, flush=True)


def send(connection: http.client.HTTPConnection, request: Request) -> tuple[int, str, bytes]:
    """(status, content type, body)."""
    connection.putrequest(request.method, request.path, skip_accept_encoding=True)
    for name, value in request.headers.items():
        connection.putheader(name, value.encode())
    if request.body is not None:
        connection.putheader("content-length", str(len(request.body)))
    connection.endheaders(request.body)
    response = connection.getresponse()
    return response.status, response.getheader("content-type") or "", response.read()


def fault_of(request: Request, status: int, kind: str, body: bytes) -> str | None:
    """What is wrong with an answer."""
    if status >= 500:
        return f"status {status}"
    if request.method == "HEAD":
        return None
    try:
        if kind.startswith("text/event-stream"):
            return _stream_fault(body)
        if kind.startswith("application/json"):
            value = json.loads(body, parse_constant=_no_constant)
            if status >= 400 and set(value["error"]) != {"message", "type", "param", "code"}:
                return "an error of another shape"
            if status >= 400 and not value["error"]["message"].strip():
                return "an error without words"
            if status >= 400 and ADDRESS.search(body):
                return "an error with the address of an object"
        elif status >= 400 and request.method != "OPTIONS":
            return f"an error as {kind!r}"
    except (ValueError, KeyError, TypeError) as error:
        return f"no valid answer: {error!r}"
    return None


def _response_fault(events: list[str]) -> str | None:
    """Of /v1/responses: events with names and numbers, of which the last says how it ended."""
    told = [json.loads(event.partition("\ndata: ")[2], parse_constant=_no_constant) for event in events]
    if [event["sequence_number"] for event in told] != list(range(len(events))):
        return "events whose numbers do not follow each other"
    if told[-1]["type"] not in ("response.completed", "response.incomplete"):
        return f"a response that ends with {told[-1]['type']}"
    return None


def _stream_fault(body: bytes) -> str | None:
    events = [event for event in body.decode().split("\n\n") if event]
    if events and events[0].startswith("event: "):
        return _response_fault(events)
    data = [event.removeprefix("data: ") for event in events]
    if not data or data[-1] != "[DONE]":
        return f"a stream that ends with {data[-1:]}"
    for one in data[:-1]:
        json.loads(one, parse_constant=_no_constant)
    return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def ask_all(server: ServerProcess, description: dict[str, Any], seed: int, numbers: Iterator[int], found: Findings) -> None:
    """Send requests on one kept connection until there are none left."""
    connection = None
    for number in numbers:
        if found.enough or server.process.poll() is not None:
            return  # what follows would be about the same
        request = make_request(description, seed, number)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
        started_s = time.monotonic()
        try:
            status, kind, body = send(connection, request)
        except (http.client.HTTPException, OSError) as error:
            found.add(f"{error!r} after {time.monotonic() - started_s:.1f} s: {request}")
            connection.close()
            connection = None
            continue
        found.statuses[status] += 1
        if fault := fault_of(request, status, kind, body):
            found.add(f"{fault}: {request} -> {body[-300:]!r}")


def victims(server: ServerProcess, body: dict[str, object], expected: str, done: threading.Event, found: Findings) -> None:
    """Run one victim after the other until `done`."""
    while not done.is_set() and not found.enough and server.process.poll() is None:
        one = Victim(server.port, body, expected)
        one.start()
        one.join(TIMEOUT_S)
        try:
            one.check()
            assert one.text == expected, f"the victim's text is {one.text!r}, expected {expected!r}"
        except AssertionError as error:
            found.add(str(error))


def alone(server: ServerProcess, body: dict[str, object]) -> str:
    """The text of a victim when nobody else is there."""
    status, _, answer = server.post(**body)
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["text"]


@contextmanager
def serving(model: str | None) -> Iterator[ServerProcess]:
    """A server with a tiny model, or with the named one."""
    with tempfile.TemporaryDirectory() as folder:
        named = model or str(write_tiny_model(Path(folder) / "tiny"))
        options = ("--device", "cpu", "--port", "0", "--max-seqs", "16", "--log-level", "warning")
        with server_process("tilewright.cli", "serve", named, *options, start_s=120) as server:
            yield server


def fuzz(count: int, seed: int, *, model: str | None = None, first: int = 0) -> Findings:
    """Send `count` requests; what was found."""
    found = Findings()
    with serving(model) as server:
        description = json.loads(server.request("GET", "/openapi.json")[2])
        expected = [alone(server, body) for body in VICTIMS]
        done, lock = threading.Event(), threading.Lock()
        numbers = iter(range(first, first + count))

        def next_number() -> Iterator[int]:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                yield number

        beside = [
            threading.Thread(target=victims, args=(server, body, text, done, found))
            for body, text in zip(VICTIMS, expected, strict=True)
        ]
        clients = [
            threading.Thread(target=ask_all, args=(server, description, seed, next_number(), found)) for _ in range(CLIENTS)
        ]
        for thread in (*beside, *clients):
            thread.start()
        for thread in clients:
            thread.join()
        done.set()
        for thread in beside:
            thread.join()
        _look_at_the_end(server, expected, found)
    return found


def _look_at_the_end(server: ServerProcess, expected: list[str], found: Findings) -> None:
    if server.process.poll() is not None:
        found.add(f"the server has ended with {server.process.returncode}:\n" + "".join(server.lines)[-6000:])
        return
    if server.request("GET", "/health")[0] != 200:
        found.add("the server is not healthy in the end")
    if (after := [alone(server, body) for body in VICTIMS]) != expected:
        found.add(f"victims alone say {after} in the end, {expected} at the start")
    end_s = time.monotonic() + 10
    while server.metric("tilewright_requests_running") or server.metric("tilewright_kv_pages_used"):
        if time.monotonic() > end_s:
            found.add("requests or pages are left in the end")
            break
        time.sleep(0.1)
    server.process.send_signal(signal.SIGTERM)
    if (code := server.process.wait(20)) != 0:
        found.add(f"the server ends with {code}")
    if server.reader is not None:
        server.reader.join(5)
    if any("Traceback" in line for line in server.lines):
        found.add("tracebacks in the log:\n" + "".join(server.lines)[-6000:])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="send the request of this number alone")
    parser.add_argument("--model", help="a model to serve; default: a tiny one")
    given = parser.parse_args()
    first, count = (0, given.count) if given.only is None else (given.only, 1)
    started_s = time.monotonic()
    found = fuzz(count, given.seed, model=given.model, first=first)
    print(f"{count} requests in {time.monotonic() - started_s:.0f} s, statuses {dict(sorted(found.statuses.items()))}")
    print(f"{len(found.wrong)} findings")
    sys.exit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()
