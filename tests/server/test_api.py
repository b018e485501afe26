"""The endpoints over HTTP, around an engine that says the alphabet."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from triton import knobs

from tests.server.fake_engine import BOS, Running, events, fake_engine, running
from tilewright.server.live import LiveView

pytestmark = pytest.mark.usefixtures("shape")

GREEDY = {"temperature": 0, "max_tokens": 5}


@pytest.fixture(scope="module")
def server(shape: str) -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def post(client: httpx.Client, path: str = "/v1/completions", **body: object) -> dict[str, object]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, path: str = "/v1/completions", **body: object) -> list[dict]:
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return chunks


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, object]:
    whole = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**whole, "prompt_tokens_details": {"cached_tokens": cached}}


def test_a_completion(client: httpx.Client) -> None:
    answer = post(client, prompt="ab", **GREEDY)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "letters"
    assert answer["choices"] == [
        {"index": 0, "text": "cdefg", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == usage(2, 5)


def test_a_chat(client: httpx.Client) -> None:
    answer = post(client, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **GREEDY)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "uvwxy", "refusal": None}  # 20 tokens come before
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "fields", "text", "finish", "reason"),
    [
        ("ab", {}, "cdefg", "length", None),
        ("ab", {"max_tokens": 1}, "c", "length", None),
        ("ab!", {"max_tokens": 20}, "defgh", "stop", None),
        ("ab!", {"max_tokens": 8, "ignore_eos": True}, "defghjk", "length", None),
        ("ab", {"stop": "ef"}, "cd", "stop", "ef"),
        ("ab", {"stop": ["x", "gh", "d"]}, "c", "stop", "d"),
        ("ab", {"stop": ["gz"]}, "cdefg", "length", None),
        ("ab", {"stop_token_ids": [ord("e")]}, "cd", "stop", ord("e")),
        ("ab", {"stop_token_ids": [ord("e")], "min_tokens": 4}, "cdefg", "length", None),
        ("ab@", {"max_tokens": 4}, "éé", "length", None),
        ("ab@", {"max_tokens": 3}, "é\ufffd", "length", None),
        ([97, 98], {}, "cdefg", "length", None),
        ("", {}, "bcdef", "length", None),
    ],
)
def test_how_a_text_ends_whole_and_streamed(
    client: httpx.Client, prompt: object, fields: dict[str, object], text: str, finish: str, reason: object
) -> None:
    body = {"prompt": prompt, **GREEDY, **fields}
    (whole,) = post(client, **body)["choices"]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (text, finish, reason)
    choices = [chunk["choices"][0] for chunk in stream(client, **body)]
    assert "".join(choice["text"] for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [finish]
    assert choices[-1]["stop_reason"] == reason


def test_stream_chunks(client: httpx.Client) -> None:
    chunks = stream(client, prompt="ab", **GREEDY)
    # Steps that were made while the one before was being sent come in one chunk.
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "cdefg"
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    chunks = stream(client, prompt="ab", stream_options={"include_usage": True}, **GREEDY)
    assert {chunk["usage"] for chunk in chunks[:-1]} == {None}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage(2, 5)


def test_chat_chunks(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chunks = stream(client, "/v1/chat/completions", messages=messages, **GREEDY)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": deltas[0]["content"]}
    assert all(set(delta) == {"content"} for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == "uvwxy"


def test_the_usage_says_what_the_prefix_cache_had() -> None:
    """A page has 4 tokens; the last token of a prompt is always computed."""
    first, second = "0123456789", "01234567"
    body = {"temperature": 0, "max_tokens": 2, "n": 2}
    with running() as server, httpx.Client(base_url=server.url) as client:
        assert post(client, prompt=first, **body)["usage"] == usage(10, 4), "its second sample hits, the prompt has not"
        assert post(client, prompt=first, **body)["usage"] == usage(10, 4, cached=8)
        assert post(client, prompt=[second, "x", first], **body)["usage"] == usage(19, 12, cached=7 + 8)
        chunks = stream(client, prompt=first, **body, stream_options={"include_usage": True})
        assert chunks[-1]["usage"] == usage(10, 4, cached=8)
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        counts = [post(client, "/v1/chat/completions", **chat)["usage"] for _ in range(2)]
        assert counts == [usage(23, 2), usage(23, 2, cached=20)]
        scored = post(client, prompt=first, max_tokens=0, echo=True, logprobs=0)
        assert scored["usage"] == usage(10, 0), "the logits of the whole prompt are wanted, so it was computed"


def test_many_prompts_and_samples_keep_their_order(client: httpx.Client) -> None:
    body = {"prompt": ["a", "bb", "ccc"], "n": 2, "temperature": 1, "seed": 3, "max_tokens": 4}
    answer = post(client, **body)
    texts = [choice["text"] for choice in answer["choices"]]
    # The token at position p of sample i is letter p + seed + i.
    assert texts == ["efgh", "fghi", "fghi", "ghij", "ghij", "hijk"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"] == usage(6, 24)
    streamed = dict.fromkeys(range(6), "")
    for chunk in stream(client, **body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts


def test_echo(client: httpx.Client) -> None:
    assert post(client, prompt="ab", echo=True, **GREEDY)["choices"][0]["text"] == "abcdefg"
    assert [c["text"] for c in post(client, prompt=[[97], [98, 98]], echo=True, n=2, **GREEDY)["choices"]] == [
        *("abcdef", "abcdef", "bbcdefg", "bbcdefg")
    ]
    assert "".join(c["choices"][0]["text"] for c in stream(client, prompt="ab", echo=True, **GREEDY)) == "abcdefg"


def test_completion_logprobs(client: httpx.Client) -> None:
    body = {"prompt": "ab", "logprobs": 2, "temperature": 0, "max_tokens": 2}
    expected = {
        "tokens": ["c", "d"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"c": -0.5, "A": -1.5}, {"d": -0.5, "A": -1.5}],
        "text_offset": [0, 1],
    }
    assert post(client, **body)["choices"][0]["logprobs"] == expected
    assert joined_logprobs(stream(client, **body)) == expected
    only_chosen = post(client, **{**body, "logprobs": 0})["choices"][0]["logprobs"]
    assert only_chosen["top_logprobs"] == [{"c": -0.5}, {"d": -0.5}]


def joined_logprobs(chunks: list[dict]) -> dict[str, list]:
    joined: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks:
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    return joined


def test_echo_with_logprobs_scores_the_prompt(client: httpx.Client) -> None:
    body = {"prompt": [BOS, 97, 0xC3, 0xA9, 98], "logprobs": 1, "echo": True, "temperature": 0}
    scored = post(client, **body, max_tokens=0)
    (choice,) = scored["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("aéb", "length")
    assert scored["usage"] == usage(5, 0)
    half = "\ufffd"
    assert choice["logprobs"] == {
        "tokens": ["<bos>", "a", half, half, "b"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"a": -0.5}, {half: -0.5}, {half: -0.5}, {"b": -0.5}],
        "text_offset": [0, 0, 1, 1, 2],
    }
    more = post(client, **body, max_tokens=2)["choices"][0]
    assert more["text"] == "aébfg"
    assert more["logprobs"]["tokens"][-3:] == ["b", "f", "g"]
    assert more["logprobs"]["text_offset"][-3:] == [2, 3, 4]
    assert joined_logprobs(stream(client, **body, max_tokens=2)) == more["logprobs"]
    alone = post(client, prompt=[97], logprobs=1, echo=True, max_tokens=0)["choices"][0]["logprobs"]
    assert alone["token_logprobs"] == [None]


def test_chat_logprobs(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "@"}], "temperature": 0, "max_tokens": 2, "logprobs": True}
    answer = post(client, "/v1/chat/completions", top_logprobs=2, **body)["choices"][0]
    first, second = answer["logprobs"]["content"]
    assert bytes(first["bytes"] + second["bytes"]).decode() == answer["message"]["content"] == "é"
    assert first["token"] == "\ufffd"
    assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.5, -1.5]
    assert first["top_logprobs"][1] == {"token": "A", "logprob": -1.5, "bytes": [65]}
    bare = post(client, "/v1/chat/completions", **body)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[], []]
    tokens = [
        entry["bytes"]
        for chunk in stream(client, "/v1/chat/completions", **body)
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert tokens == [first["bytes"], second["bytes"]]


def test_seeds(client: httpx.Client) -> None:
    def text(**fields: object) -> str:
        return post(client, prompt="a", max_tokens=9, **fields)["choices"][0]["text"]

    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert len({text() for _ in range(12)}) > 1


def test_models(client: httpx.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("letters", "model", 128)
    assert client.get("/v1/models/letters").json() == model
    assert client.get("/v1/models/org/other").status_code == 404


def test_tokenize_and_back(client: httpx.Client) -> None:
    answer = post(client, "/tokenize", prompt="hé")
    assert answer == {"count": 3, "max_model_len": 128, "tokens": [104, 195, 169]}
    assert post(client, "/detokenize", tokens=answer["tokens"]) == {"prompt": "hé"}
    assert post(client, "/tokenize", prompt="")["tokens"] == []
    assert post(client, "/detokenize", tokens=[]) == {"prompt": ""}
    assert client.post("/detokenize", json={"tokens": [999]}).status_code == 400
    assert client.post("/tokenize", json={}).status_code == 400


def test_the_tokens_of_a_chat_are_those_that_its_answer_begins_with(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi <eos>"}]
    for fields in ({}, {"allow_special_tokens": True}, {"chat_template_kwargs": {"bos_token": "x"}}):
        tokens = post(client, "/tokenize", messages=messages, **fields)["tokens"]
        chat = post(client, "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True, **fields)
        assert tokens == chat["choices"][0]["prompt_token_ids"]
    assert ord("!") not in post(client, "/tokenize", messages=messages)["tokens"]
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"prompt": "a", "messages": messages}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": messages, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    )
    for fields, param in bad:
        response = client.post("/tokenize", json=fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_metrics_count_what_happened(server: Running) -> None:
    with running() as fresh, httpx.Client(base_url=fresh.url) as client:
        for _ in range(2):
            post(client, prompt="abcdefghi", temperature=0, max_tokens=5)
        values = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    wanted = {
        "tilewright_requests_running": 0,
        "tilewright_requests_waiting": 0,
        "tilewright_kv_pages_used": 0,
        "tilewright_kv_pages_total": 256,
        "tilewright_prompt_tokens_total": 18,
        "tilewright_generation_tokens_total": 10,
        "tilewright_prefix_hit_tokens_total": 8,
        "tilewright_preemptions_total": 0,
        "tilewright_requests_finished_total": 2,
        "tilewright_jit_compiles_after_ready_total": 0,
        "tilewright_time_to_first_token_seconds_count": 2,
        "tilewright_inter_token_latency_seconds_count": 8,
    }
    assert {name: float(values[name]) for name in wanted} == wanted


def test_metrics_count_kernels_compiled_after_ready() -> None:
    def late() -> float:
        text = httpx.get(f"{server.url}/metrics").text
        (line,) = [line for line in text.splitlines() if line.startswith("tilewright_jit_compiles_after_ready_total ")]
        return float(line.split()[1])

    source, target = SimpleNamespace(name="kernel"), SimpleNamespace(arch=90)
    with running() as server:
        for from_disk, count in ((True, 0), (False, 1)):
            knobs.compilation.listener(
                src=source, metadata={"target": target}, metadata_group={}, times=None, cache_hit=from_disk
            )
            assert late() == count


def test_live_view_while_requests_run() -> None:
    with running(fake_engine(delay_s=0.02, max_seqs=2)) as server, httpx.Client(base_url=server.url) as client:
        body = {"prompt": "abcdefgh", "max_tokens": 60, "n": 3, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            seen = response.iter_lines()
            for _ in range(12):
                next(seen)
            view = httpx.get(f"{server.url}/live").json()
            assert [r["slot"] is None for r in view["running"] + view["waiting"]] == [False, False, True]
            assert view["running"][0]["prompt"] == 8
            runs = view["pages"]["runs"]
            assert sum(count for _, _, count in runs) == 256
            assert any(owners == 2 for _, owners, _ in runs), "the prompt's page is shared"
            assert view["stats"]["generated_tokens"] > 0


def test_ignored_fields_are_named_in_a_header(client: httpx.Client) -> None:
    for stream_it in (False, True):
        response = client.post("/v1/completions", json={"prompt": "a", "user": "me", "store": True, "stream": stream_it})
        assert response.headers["x-tilewright-ignored"] == "user,store"
    assert "x-tilewright-ignored" not in client.post("/v1/completions", json={"prompt": "a"}).headers


def test_the_live_view_of_a_large_pool_is_bounded_and_rarely_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map that takes 10 ms of the processor is made again after a second, not before."""
    engine = fake_engine(pages=100_000)
    page_map = engine.scheduler.page_map
    now = SimpleNamespace(wall_s=100.0, thread_s=0.0)
    monkeypatch.setattr(
        "tilewright.server.live.time",
        SimpleNamespace(perf_counter=lambda: now.wall_s, thread_time=lambda: now.thread_s),
    )

    def ten_milliseconds(per_cell: int) -> list[tuple[str | int, int]]:
        now.thread_s += 0.01
        return page_map(per_cell)

    monkeypatch.setattr(engine.scheduler, "page_map", ten_milliseconds)
    view, made = LiveView(engine), []
    for _ in range(10):
        pages = json.loads(view.snapshot())["pages"]
        made.append(round(now.thread_s / 0.01))
        now.wall_s += 0.3
    assert pages["per_cell"] == 49
    assert sum(count for _, _, count in pages["runs"]) == 2041
    assert made == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
