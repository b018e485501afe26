"""Requests that try to hurt others, on the embedded model: beside each of them a stream goes on, unchanged and without a gap.

A server process, real sockets. A row is requests that are sent at once, and the statuses that they may have. The stream beside
them, the bystander, begins again when it has come to its end; its text is always that of a bystander that was alone.
"""

import http.client
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.awake import awake_s, until
from tests.server.victim import BOOKWORM, server_process

MAX_GAP_S = 1.0
BYSTANDER = {"prompt": "The captain looked at the sea and", "max_tokens": 160, "temperature": 0, "ignore_eos": True}
OK, REFUSED, BUSY = 200, 400, 429
Ask = tuple[str, bytes]


def ask(path: str = "completions", **fields: Any) -> Ask:
    return f"/v1/{path}", json.dumps(fields).encode()


def complete(**fields: Any) -> Ask:
    return ask(**{"prompt": "Call me", "max_tokens": 4, **fields})


def chat(text: Any, **fields: Any) -> Ask:
    return ask("chat/completions", messages=[{"role": "user", "content": text}], max_tokens=4, **fields)


def huge(path: str, head: str, item: str, tail: str, size: int = (16 << 20) - 200) -> Ask:
    return path, (head + item * ((size - len(head) - len(tail)) // len(item)) + tail).encode()


TEXT_16_MIB = huge("/v1/completions", '{"prompt": "', "sea and ", '"}')
LONG = "The captain looked at the sea and " * 250  # some 1,750 tokens
EVERYTHING = {
    "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": {"77": 5, "1": -100},
    "min_tokens": 30, "logprobs": 20, "max_tokens": 40,
}  # fmt: skip

# name -> (requests sent at once, the statuses that they may have)
ROWS: dict[str, tuple[list[Ask], set[int]]] = {
    "a top_k that no int32 holds, ten times": ([complete(top_k=2**31)] * 10, {REFUSED}),
    "top_k is off": ([complete(top_k=-1), complete(top_k=0), complete(top_k=2**31 - 1)], {OK}),
    "numbers of 4,300 digits": (
        [("/v1/completions", f'{{"prompt": "a", "{name}": {"9" * 4300}}}'.encode()) for name in ("max_tokens", "seed", "x")],
        {REFUSED},
    ),
    "numbers that no float32 holds": (
        [complete(**{name: v}) for name in ("temperature", "repetition_penalty") for v in (1e308, 1e39, -1)]
        + [complete(repetition_penalty=5e-324)],
        {REFUSED},
    ),
    "the ends of all ranges": (
        [
            *(complete(temperature=t, seed=1) for t in (0, 5e-324, 100)),
            *(complete(repetition_penalty=p, logprobs=3) for p in (0.01, 100)),
            *(complete(top_p=p, seed=-(2**63)) for p in (5e-324, 1)),
            *(complete(presence_penalty=p, frequency_penalty=p, min_p=1) for p in (-2, 2)),
        ],
        {OK},
    ),
    "a prompt of 16 MiB, four times": ([TEXT_16_MIB] * 4, {REFUSED}),
    "the same to /tokenize": ([huge("/tokenize", '{"prompt": "', "sea and ", '"}')] * 2, {REFUSED}),
    "one word of 16 MiB": ([huge("/v1/completions", '{"prompt": "', "a", '"}')], {REFUSED}),
    "the same in a chat": (
        [huge("/v1/chat/completions", '{"messages": [{"role": "user", "content": "', "sea ", '"}]}')], {REFUSED}
    ),
    "eight million token ids": ([huge("/v1/completions", '{"prompt": [1', ",1", "]}")], {REFUSED}),
    "a million small objects": ([huge("/v1/chat/completions", '{"messages": [1', ',{"a":"b"}', "]}")], {REFUSED}),
    "lists within lists": ([("/v1/completions", b'{"prompt": ' + b"[" * 100_000)], {REFUSED}),
    "penalties, biases, bans and log-probabilities at once": ([complete(**EVERYTHING)] * 12, {OK}),
    "a thousand biases": ([complete(logit_bias={str(i): i % 7 - 3 for i in range(1024)}, max_tokens=20)] * 4, {OK}),
    "few allowed tokens": ([complete(allowed_token_ids=[7, 8, 9], max_tokens=20)], {OK}),
    "prompts as long as the model": ([complete(prompt=f"{i} {LONG}") for i in range(3)], {OK}),
    "what they score": ([complete(prompt=f"{i} {LONG}", prompt_logprobs=20, max_tokens=1) for i in range(2)], {OK}),
    "long answers with all alternatives": ([complete(max_tokens=100, n=4, logprobs=20, ignore_eos=True)], {OK}),
    "the best of eight": ([complete(best_of=8, n=2, max_tokens=30)], {OK}),
    "stop strings": ([complete(stop=["a" * 256, "b" * 256, "ab" * 128, "x"], max_tokens=60)] * 4, {OK}),
    "fields of other servers": (
        [complete(**{name: "x"}) for name in ("lora_path", "cache_salt", "ebnf", "stop_regex", "documents")],
        {REFUSED},
    ),
    "grammars": (
        [
            *(complete(**{name: "x"}) for name in ("regex", "guided_regex")),
            *(complete(**{name: "("}) for name in ("regex", "grammar", "json_schema")),
        ],
        {OK, REFUSED},
    ),
    "stream_options without a stream": ([complete(stream_options={"include_usage": True})], {REFUSED}),
    "control tokens as text": ([chat("<|eos|>" * 200), chat("<|bos|><|eos|>", allow_special_tokens=True)], {OK}),
    "a chat of many turns": (
        [ask("chat/completions", messages=[{"role": "user", "content": "a"}] * 400, max_tokens=2)] * 4, {OK}
    ),
    "half a character, and none": (
        [("/v1/completions", b'{"prompt": "\\ud800"}'), chat(""), complete(prompt="\0")], {OK, REFUSED}
    ),
    "two hundred requests at once": ([complete(prompt=f"{i}", max_tokens=8) for i in range(200)], {OK, BUSY}),
    "more samples than may wait": ([complete(prompt=["a"] * 256, n=128)], {REFUSED}),
}  # fmt: skip


def send(port: int, request: Ask) -> tuple[int, bytes]:
    """(status, body); a server may answer before it has read all."""
    path, body = request
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class Bystander(threading.Thread):
    """Reads its stream again and again.

    `times` has each chunk's arrival, by the clock that stands still with the machine; `texts` what each round has brought.
    """

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self.port = port
        self.texts = [""]
        self.times: list[float] = []
        self.trouble = ""
        self.stopping = False

    def run(self) -> None:
        while not self.stopping and not self.trouble:
            self.round()
            self.texts.append("")

    def round(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps({**BYSTANDER, "stream": True}), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != OK:
                self.trouble = f"{response.status}: {response.read()!r}"
            while not self.stopping and (line := response.readline()) != b"data: [DONE]\n":
                event = json.loads(line[6:]) if line.startswith(b"data: ") else {}
                if "error" in event or not line:
                    self.trouble = str(event or "the connection was closed")
                    return
                if event:
                    self.texts[-1] += event["choices"][0]["text"]
                    self.times.append(awake_s())
        except OSError as error:
            self.trouble = f"{type(error).__name__}: {error}"
        finally:
            connection.close()


@pytest.fixture(scope="module")
def bystander(long_shape: str) -> Iterator[tuple[Bystander, str]]:
    """(a bystander beside all rows, the text that it must have)."""
    with server_process(*BOOKWORM) as server:
        alone = Bystander(server.port)
        alone.round()
        beside = Bystander(server.port)
        beside.start()
        until(lambda: bool(beside.times or beside.trouble))
        yield beside, alone.texts[0]
        beside.stopping = True
        beside.join(10)


@pytest.mark.parametrize("row", ROWS)
def test_a_stream_goes_on(bystander: tuple[Bystander, str], row: str) -> None:
    stream, text = bystander
    requests, allowed = ROWS[row]
    before = len(stream.times) - 1
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: send(stream.port, request), requests))
    seen = len(stream.times)
    until(lambda: len(stream.times) >= seen + 2 or bool(stream.trouble))
    assert not stream.trouble
    for status, body in answers:
        content = json.loads(body, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert status in allowed, body[:300]
        if status != OK:
            assert len(body) < 700, "a refusal does not send the request back"
            assert content["error"]["message"]
    for part in stream.texts[-2:]:
        assert text.startswith(part)
    gap_s = max(b - a for a, b in itertools.pairwise(stream.times[before:]))
    assert gap_s < MAX_GAP_S, f"the stream stood still for {gap_s:.2f} s"
    assert http_status(stream.port, "/health") == OK


def http_status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status
