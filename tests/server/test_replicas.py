"""Several replicas behind one front, in processes of their own around the engine that says the alphabet."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.awake import until
from tilewright.server.config import ServerConfig
from tilewright.server.fleet import Fleet
from tilewright.server.forward import Front, digests_of, front_of
from tilewright.server.passing import labelled
from tilewright.server.prompts import Served
from tilewright.server.serve import _Draining, bind, url_of

ROOT = Path(__file__).resolve().parents[2]
FAKE = (sys.executable, "-m", "tests.server.fake_replica")
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
LONG = 240
"""Tokens of an answer that is still being written when a replica is killed."""


@contextmanager
def serving(delay_s: float = 0.03, **config: object) -> Iterator[tuple[str, Fleet, Front]]:
    """Two replicas and their front, in a thread."""
    settings = ServerConfig(port=0, replicas=2, **config)  # type: ignore[arg-type]
    fleet = Fleet({"model": str(delay_s), "name": "letters", "engine": {}}, settings, lambda line: None, FAKE)
    fleet.start_all()
    app = front_of(fleet, Served.described(fleet.hello["served"]), settings)
    listener = bind(settings)
    said: list[str] = []
    server = _Draining(app, listener, said.append, None)  # as `run_server` does it
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: len(fleet.ready) == 2 and said and said[-1].startswith("Serving"))
        assert said[-1] == f"Serving letters at {url_of(listener)}  (API: {url_of(listener)}/v1, Ctrl-C ends)"
        assert all(line.startswith("loading the first replica of letters, ") for line in said[:-1])
        yield url_of(listener), fleet, app.state.server
    finally:
        server.should_exit = True
        thread.join()
        fleet.end()
        listener.close()


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[str, Fleet, Front]]:
    with serving() as found:
        yield found


def ask(url: str, prompt: str, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 10, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def answer_of(prompt: str, tokens: int) -> str:
    """What the engine says behind a prompt."""
    return "".join(ALPHABET[(len(prompt) + i) % 26] for i in range(tokens))


def test_answers_are_those_of_one_server(two: tuple[str, Fleet, Front]) -> None:
    url, fleet, _ = two
    prompts = [f"prompt number {i} " * (1 + i % 3) for i in range(24)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda prompt: ask(url, prompt).json()["choices"][0]["text"], prompts))
    assert answers == [answer_of(prompt, 10) for prompt in prompts]
    used = {index for index, _ in fleet.router.decisions}
    assert used == {0, 1}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 5, "temperature": 0, "stream": True}
    ) as stream:
        events = [line for line in stream.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]) == answer_of("abc", 5)


def test_who_begins_alike_goes_to_the_same(two: tuple[str, Fleet, Front]) -> None:
    url, fleet, _ = two
    cached = []

    def known() -> int:
        return fleet.router.pages_known(0) + fleet.router.pages_known(1)

    for turn in range(6):
        before = known()
        prompt = "a long conversation that goes on and on, " * 4 + "and on " * turn
        usage = ask(url, prompt).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        # The router hears of new pages of 4 tokens a moment after the answer: of the whole first prompt, then of what is added.
        until(lambda before=before, new=1 if turn else 40: known() >= before + new)
    assert cached[0] == 0
    assert all(tokens >= 160 for tokens in cached[1:]), cached
    assert known() > 40


def test_bad_input_and_other_paths(two: tuple[str, Fleet, Front]) -> None:
    url, _, _ = two
    assert ask(url, "x", temperature=-1).status_code == 400
    assert httpx.post(f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert httpx.post(f"{url}/tokenize", json={"prompt": "abc"}).json()["count"] == 3
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "letters"
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert "tilewright" in httpx.get(url).text
    chat = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
    assert len(chat.json()["choices"][0]["message"]["content"]) == 3


def test_nobody_gets_around_the_front(two: tuple[str, Fleet, Front]) -> None:
    _, fleet, _ = two
    assert ask(fleet.replicas[0].url, "x").status_code == 401
    assert fleet.replicas[0].process is not None
    assert fleet.key not in " ".join(map(str, fleet.replicas[0].process.args))


def test_metrics_are_of_all(two: tuple[str, Fleet, Front]) -> None:
    url, _, _ = two
    text = httpx.get(f"{url}/metrics").text
    assert "tilewright_router_replicas_ready 2" in text
    for replica in (0, 1):
        assert f'tilewright_kv_pages_total{{replica="{replica}"}} 512.0' in text
    assert text.count("# TYPE tilewright_kv_pages_total gauge") == 1
    assert labelled([(0, text), (1, text)]), "it is an exposition itself"


def test_a_killed_replica_costs_no_answer_that_had_not_begun(two: tuple[str, Fleet, Front]) -> None:
    url, fleet, front = two
    begun: list[str] = []
    with ThreadPoolExecutor(16) as threads:
        # Answers of seven seconds: on a busy machine 16 clients take one or two of them to begin. One replica has room for all.
        whole = [threads.submit(ask, url, f"whole {i} {i * 'x'}", max_tokens=LONG) for i in range(8)]
        streams = [threads.submit(_read_stream, url, f"stream {i} {i * 'y'}", begun) for i in range(8)]
        until(lambda: len(begun) == len(streams) and min(fleet.router.load_of(i)[1] for i in (0, 1)) >= 1)
        victim = fleet.replicas[0]
        assert victim.process is not None
        victim.process.send_signal(signal.SIGKILL)
        for number, future in enumerate(whole):
            response = future.result()
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["text"] == answer_of(f"whole {number} {number * 'x'}", LONG)
        ends = [future.result() for future in streams]
        for number, (text, error) in enumerate(ends):
            wanted = answer_of(f"stream {number} {number * 'y'}", LONG)
            assert wanted.startswith(text)
            assert text == wanted or error == "replica_lost"
        assert any(error for _, error in ends), "the victim was writing to nobody: the test shows nothing"
        assert front.retries["lost"] > 0
        until(lambda: len(fleet.ready) == 2)
        assert (victim.restarts, fleet.router.pages_known(0)) == (1, 0)
        with ThreadPoolExecutor(8) as again:
            list(again.map(lambda i: ask(url, f"again {i}").raise_for_status(), range(8)))


def _read_stream(url: str, prompt: str, begun: list[str]) -> tuple[str, str | None]:
    """(text, error) of a stream, which is noted in `begun` when its first text is there."""
    body = {"prompt": prompt, "max_tokens": LONG, "temperature": 0, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                said = json.loads(line[6:])
                if "error" in said:
                    return text, said["error"]["code"]
                if not text:
                    begun.append(prompt)
                text += said["choices"][0]["text"]
    return text, None


def test_a_replica_that_does_not_start_is_one_sentence() -> None:
    fleet = Fleet({"model": "broken", "name": "x", "engine": {}}, ServerConfig(port=0, replicas=2), lambda line: None, FAKE)
    with pytest.raises(ValueError, match="ended with exit code 3 while loading the model"):
        fleet.start_all()
    assert all(replica.process is not None and replica.process.poll() == 3 for replica in fleet.replicas)


def test_digests_are_those_of_the_engine() -> None:
    from tilewright.engine.blocks import page_digest

    first = page_digest(b"", [1, 2, 3, 4])
    assert digests_of([1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == [first[:8], page_digest(first, [5, 6, 7, 8])[:8]]
    assert digests_of([1, 2, 3], 4) == []


@pytest.mark.long
def test_the_embedded_model_twice(tmp_path: Path) -> None:
    """`tilewright serve bookworm --replicas 2`: the same text from both, one killed under load, and an end by SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sizes = "max_seqs = 8\nmax_wait = 120\n"  # nobody is refused for waiting, however busy the machine is
    (tmp_path / "serve.toml").write_text(f'model = "bookworm"\nreplicas = 2\nport = {port}\ndevice = "cpu"\n{sizes}')
    command = [sys.executable, "-m", "tilewright.cli", "serve", "--config", str(tmp_path / "serve.toml")]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        try:

            def both() -> bool:
                assert process.poll() is None, "the server has ended"
                try:
                    replicas = httpx.get(f"{url}/health").json().get("replicas")  # none while they load
                    return bool(replicas) and all(one["ready"] for one in replicas)
                except httpx.TransportError:
                    return False

            until(both, 120)

            async def load() -> list[httpx.Response]:
                async with httpx.AsyncClient(timeout=120) as client:
                    body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
                    prompts = [f"Chapter {i}. The captain looked at the sea and" for i in range(16)] * 2
                    asked = [client.post(f"{url}/v1/completions", json={**body, "prompt": prompt}) for prompt in prompts]
                    tasks = [asyncio.ensure_future(one) for one in asked]
                    await asyncio.sleep(0.5)
                    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
                    rows = [line.split(None, 2) for line in listed.splitlines()]
                    victim = next(int(pid) for pid, parent, _ in rows[1:] if parent == str(process.pid))
                    os.kill(victim, signal.SIGKILL)
                    return await asyncio.gather(*tasks)

            answers = asyncio.run(load())
            assert [answer.status_code for answer in answers] == [200] * 32
            texts = [answer.json()["choices"][0]["text"] for answer in answers]
            assert texts[:16] == texts[16:], "the same prompt gives the same text, whichever replica writes it"
            until(both, 120)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    assert code == 0
