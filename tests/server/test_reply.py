"""Answers, written whole and in pieces: new fields of their choices, and time that grows with what is in them."""

import json
import math
import time
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import fake_engine, letter, logprob, running
from tilewright.engine.outputs import Transcript
from tilewright.engine.request import Delta, TokenLogprobs
from tilewright.server.config import ServerConfig
from tilewright.server.logprobs import NO_LOGPROB, finite
from tilewright.server.prompts import Served
from tilewright.server.protocol import chat_job, completion_job
from tilewright.server.reply import Reply

CONFIG = ServerConfig()
SERVED = Served.of(fake_engine(max_model_len=100_000, pages=50_000), "letters")
GREEDY = {"temperature": 0, "max_tokens": 3}


def deltas(count: int, **fields: Any) -> list[Delta]:
    made = [Delta("r", 0, (letter(i),), chr(letter(i)), (logprob(letter(i), 2),), **fields) for i in range(count - 1)]
    return [*made, Delta("r", 0, (letter(count - 1),), chr(letter(count - 1)), (logprob(97, 2),), finish_reason="length")]


def seconds(count: int, chat: bool) -> float:
    """The best of three times of a whole answer with log-probabilities, each token a delta of its own."""
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2} if chat else {"prompt": "a"}
    body |= {} if chat else {"logprobs": 2}
    best = math.inf
    made = deltas(count)
    for _ in range(3):
        job = (chat_job if chat else completion_job)(json.dumps({**body, "max_tokens": count}).encode(), SERVED, CONFIG)
        reply = Reply("r", 0, job, SERVED)
        start_s = time.thread_time()
        for delta in made:
            for _ in reply.add([delta]):
                pass
        answer = json.loads(reply.whole())
        best = min(best, time.thread_time() - start_s)
        (choice,) = answer["choices"]
        assert len(choice["logprobs"]["content" if chat else "tokens"]) == count
        assert answer["usage"]["completion_tokens"] == count
    return best


@pytest.mark.parametrize("chat", [False, True])
def test_a_whole_answer_takes_time_by_its_length(chat: bool) -> None:
    assert seconds(8000, chat) < 12 * seconds(1000, chat)


def test_a_transcript_takes_time_by_its_length() -> None:
    """Of 16 times the length: 16 times as long where it is linear, 256 times where each delta copies what was before it."""
    made = {count: deltas(count) for count in (4000, 64_000)}
    best = dict.fromkeys(made, math.inf)
    for _ in range(5):  # in turns, so that a busy moment meets both
        for count in made:
            start_s = time.thread_time()
            transcript = Transcript([1], 1)
            for delta in made[count]:
                transcript.add(delta)
            output = transcript.completion().outputs[0]
            best[count] = min(best[count], time.thread_time() - start_s)
            assert (len(output.text), len(output.token_ids), len(output.logprobs or ())) == (count, count, count)
    assert best[64_000] < 64 * best[4000]


def test_what_a_slow_reader_has_not_had_comes_in_pieces() -> None:
    body = {"prompt": "a", "logprobs": 2, "stream": True, "max_tokens": 1000}
    reply = Reply("r", 0, completion_job(json.dumps(body).encode(), SERVED, CONFIG), SERVED)
    chunks = [json.loads(chunk[6:])["choices"][0] for chunk in reply.chunks(deltas(1000))]
    assert len(chunks) > 10
    assert "".join(chunk["text"] for chunk in chunks) == "".join(chr(letter(i)) for i in range(1000))
    assert [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]] == list(range(1000))
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize(("value", "wanted"), [(math.nan, NO_LOGPROB), (-math.inf, NO_LOGPROB), (-1.5, -1.5)])
def test_numbers_are_json(value: float, wanted: float) -> None:
    assert finite(value) == wanted


def test_fields_of_answers() -> None:
    with running() as server, httpx.Client(base_url=server.url, timeout=30) as client:

        def post(path: str = "/v1/completions", **fields: object) -> dict[str, Any]:
            response = client.post(path, json={**GREEDY, **fields})
            assert response.status_code == 200, response.text
            return response.json()

        def chat(*messages: tuple[str, str], **fields: object) -> dict[str, Any]:
            turns = [{"role": role, "content": content} for role, content in messages]
            return post("/v1/chat/completions", messages=turns, **fields)["choices"][0]

        (choice,) = post(prompt="ab", return_token_ids=True, prompt_logprobs=1)["choices"]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == ([*b"cde"], [*b"ab"])
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert second == {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}
        assert choice["logprobs"] is None
        assert chat(("user", "a"))["message"]["refusal"] is None
        echoed = chat(("user", "a"), ("assistant", "so "), echo=True)["message"]["content"]
        assert echoed.startswith("so ")
        assert len(echoed) == 6
        plain = chat(("user", "hi"), chat_template_kwargs={"x": 1}, add_generation_prompt=True)
        assert plain["message"]["content"] == chat(("user", "hi"))["message"]["content"]
        best = post(prompt="ab", best_of=4, n=2, temperature=1, seed=3)
        assert [c["index"] for c in best["choices"]] == [0, 1]
        assert best["choices"][0]["logprobs"] is None
        assert best["usage"]["completion_tokens"] == 12, "what was generated, not what was chosen"
        options = {"include_usage": True, "continuous_usage_stats": True}
        text = client.post("/v1/completions", json={"prompt": "ab", **GREEDY, "stream": True, "stream_options": options}).text
        usages = [
            json.loads(line[6:])["usage"]["completion_tokens"] for line in text.splitlines() if line.startswith("data: {")
        ]
        assert usages == sorted(usages)
        assert usages[0] >= 1
        assert usages[-1] == 3


def test_the_best_are_the_likeliest_by_token() -> None:
    body = {"prompt": "a", "best_of": 3, "n": 2, "max_tokens": 4}
    reply = Reply("r", 0, completion_job(json.dumps(body).encode(), SERVED, CONFIG), SERVED)
    for index, (logprobs, text) in enumerate([((-3.0, -3.0), "worst"), ((-1.0,) * 4, "long"), ((-0.9, -1.0), "best")]):
        entries = tuple(TokenLogprobs(97, value, 1, ()) for value in logprobs)
        delta = Delta("r", index, (97,) * len(entries), text, entries, finish_reason="length")
        assert list(reply.add([delta])) == [None]
    assert [choice["text"] for choice in json.loads(reply.whole())["choices"]] == ["best", "long"]
