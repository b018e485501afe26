"""Requests that are refused over HTTP: with which status, in OpenAI's error shape, and what the server is like afterwards."""

import json
import re
import time
from collections.abc import Iterator

import httpx
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from tests.awake import until
from tests.server.fake_engine import Running, fake_engine, running
from tilewright.engine.request import QueueFull
from tilewright.engine.step import DeviceLost
from tilewright.engine.waiting import Room
from tilewright.server import link
from tilewright.server.worker import EngineWorker

pytestmark = pytest.mark.usefixtures("shape")


@pytest.fixture(scope="module")
def server(shape: str) -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


def test_too_long_is_refused_before_a_stream_starts(client: httpx.Client) -> None:
    for stream_it in (False, True):
        response = client.post("/v1/completions", json={"prompt": "a" * 128, "stream": stream_it})
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert "128" in error["message"]
        assert "129" in error["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
    ],
)
def test_content_types(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    response = client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == status
    if status != 200:
        assert "application/json" in error_of(response, status)["message"]


def test_bodies_over_the_limit() -> None:
    with running(max_body_bytes=1000) as server, httpx.Client(base_url=server.url) as client:
        body = json.dumps({"prompt": "a", "pad": "x" * 2000}).encode()
        json_type = {"content-type": "application/json"}
        assert "1000 bytes" in error_of(client.post("/v1/completions", content=body, headers=json_type), 413)["message"]
        pieces = (body[i : i + 100] for i in range(0, len(body), 100))  # chunked: no content-length
        error_of(client.post("/v1/completions", content=pieces, headers=json_type), 413)
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_body_that_does_not_arrive() -> None:
    with running(body_timeout_s=0.1) as server, httpx.Client(base_url=server.url) as client:

        def slow() -> Iterator[bytes]:
            yield b'{"prompt"'
            time.sleep(0.4)
            yield b': "a"}'

        headers = {"content-type": "application/json"}
        error_of(client.post("/v1/completions", content=slow(), headers=headers), 408)


def test_a_tokenizer_that_gives_up_on_a_text_refuses_that_text_alone() -> None:
    """A model's regular expression that runs into its library's limit: a panic there, one sentence here."""
    engine = fake_engine()
    assert engine.tokenizer is not None
    split = pre_tokenizers.Split(tokenizers.Regex("(?:x+x+)+y"), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.tokenizer._backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path in ("/v1/completions", "/tokenize"):
            error = error_of(client.post(path, json={"prompt": "x" * 60}), 400)
            assert "the tokenizer fails on this text" in error["message"]
        assert client.post("/v1/completions", json={"prompt": "ab"}).status_code == 200


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert "/v1/nothing" in error_of(client.get("/v1/nothing"), 404)["message"]
    error_of(client.get("/v1/completions"), 405)
    error_of(client.get("/page/../app.py"), 404)
    error_of(client.get("/page/..%2fapp.py"), 404)
    error_of(client.post("/v1/completions", json={"prompt": "a", "model": "x"}), 404)


def test_a_full_queue_is_429_and_takes_nothing() -> None:
    engine = fake_engine(delay_s=0.01, max_seqs=1, max_waiting=2)
    with running(engine) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 99, "n": 2, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)  # one runs, one waits
            waiting = engine.stats().waiting
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 1})
            error = error_of(response, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert int(response.headers["retry-after"]) >= 1
            assert engine.stats().waiting == waiting, "the first of the two prompts was taken out again"
        server.until_idle()
        error = error_of(client.post("/v1/completions", json={"prompt": "x", "n": 3}), 400)
        assert "wanted at most 2" in error["message"], "what never fits is not told to come again"


def raised(error: Exception) -> None:
    raise error


def test_while_the_queue_takes_too_long_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "REFUSAL_S", 60.0)
    late = QueueFull("it takes too long", 2.0, by_time=True)
    engine, over = fake_engine(), list[bool]()
    submit, refusals = engine.submit, [late, QueueFull("no room", 1.0)]
    monkeypatch.setattr(engine, "submit", lambda *args, **named: raised(refusals.pop()) if refusals else submit(*args, **named))
    monkeypatch.setattr(engine.scheduler.waiting, "room", lambda most_s: None if refusals or over else Room(0, late))
    no_json = {"content": b"{", "headers": {"content-type": "application/json"}}
    with running(engine) as server, httpx.Client(base_url=server.url) as client:
        url, whole = "/v1/completions", {"prompt": "x", "max_tokens": 1}
        assert error_of(client.post(url, json=whole), 429)["message"] == "no room"
        error_of(client.post(url, **no_json), 400)
        assert error_of(client.post(url, json=whole), 429)["message"] == "it takes too long"
        refused = client.post(url, **no_json)
        assert error_of(refused, 429)["message"] == "it takes too long"
        assert refused.headers["retry-after"] == "2"
        monkeypatch.setattr(link, "REFUSAL_S", 0.0)
        over.append(True)
        if isinstance(server.server.worker, EngineWorker):
            server.server.worker._keep_stepping()  # a step has ended
        error_of(client.post(url, **no_json), 400)
        assert client.post(url, json=whole).status_code == 200


def test_a_failing_step_ends_its_requests_and_no_others(client: httpx.Client, server: Running) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": "a#"}), 500)
    assert "the device is on fire" in error["message"]
    error = error_of(client.post("/v1/completions", json={"prompt": "a#", "stream": True}), 500)
    assert "on fire" in error["message"], "a stream that fails before its first token has a status"
    answer = client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 5, "temperature": 0}).json()
    assert answer["choices"][0]["text"] == "cdefg"
    server.until_idle()


def test_a_device_that_fails_everything_is_unhealthy_until_it_works_again() -> None:
    with running() as server, httpx.Client(base_url=server.url) as client:
        for _ in range(9):
            client.post("/v1/completions", json={"prompt": "a#"})
        assert client.get("/health").status_code == 200
        client.post("/v1/completions", json={"prompt": "a#"})
        for path in ("/health", "/ready"):
            assert (client.get(path).status_code, client.get(path).json()["status"]) == (503, "failing")
        client.post("/v1/completions", json={"prompt": "a"})
        assert client.get("/health").status_code == 200


def test_a_lost_device_ends_what_runs_and_the_engine() -> None:
    engine = fake_engine(delay_s=0.02)
    with running(engine) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 99, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)

            def lost(step: object) -> None:
                raise DeviceLost("cuda:0 answers no more: an illegal address")

            engine.runner.launch = lost  # type: ignore[method-assign]
            assert "cuda:0 answers no more" in list(lines)[-1]
        # The stream is told by the engine's last step, a moment before its thread has ended.
        until(lambda: client.get("/health").status_code == 503)
        assert "answers no more" in error_of(client.post("/v1/completions", json={"prompt": "a"}), 503)["message"]


def test_one_who_has_waited_too_long_is_told_when_to_come_again() -> None:
    engine = fake_engine(delay_s=0.02, max_seqs=1, max_waiting=50)
    with running(engine, max_wait_s=0.3) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 99, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            start_s = time.monotonic()
            for stream in (False, True):
                response = httpx.post(f"{server.url}/v1/completions", json={"prompt": ["x", "y"], "n": 2, "stream": stream})
                error = error_of(response, 429)
                assert "has waited for 0." in error["message"]
                assert int(response.headers["retry-after"]) >= 1
            assert time.monotonic() - start_s >= 0.6
            until(lambda: engine.stats().waiting == 0)  # the other prompts and samples go with it
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.until_idle()
        expired = re.search(r"^tilewright_requests_expired_total (\S+)$", client.get("/metrics").text, re.MULTILINE)
        assert expired is not None
        assert float(expired[1]) == engine.stats().expired >= 2


# Who may ask ----------------------------------------------------------------------------------------------------------


def test_api_key() -> None:
    with running(api_key="sesame") as server, httpx.Client(base_url=server.url) as client:
        for path in ("/v1/models", "/metrics", "/live"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}, {"authorization": "Bearer é"}):
                raw = {name: value.encode() for name, value in headers.items()}
                assert error_of(client.get(path, headers=raw), 401)["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200
        error_of(client.post("/v1/completions", json={"prompt": "a"}), 401)
        for path in ("/", "/page/style.css", "/health", "/ready", "/version"):
            assert client.get(path).status_code == 200


def test_a_local_server_answers_to_local_names_only(client: httpx.Client) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
        assert error_of(client.get("/v1/models", headers={"host": host}), 403)["code"] == "wrong_host"
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1:9", "[::1]:80"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200
    with running(api_key="k") as keyed:
        headers = {"host": "models.example", "authorization": "Bearer k"}
        assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 200


def test_the_page_is_served_with_a_strict_policy(client: httpx.Client) -> None:
    response = client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for name in ("style.css", "main.js", "icon.svg"):
        assert client.get(f"/page/{name}").status_code == 200
    assert "http://" not in response.text
    assert "https://" not in response.text
