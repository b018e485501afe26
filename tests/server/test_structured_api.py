"""Tools, reasoning and structured output over HTTP, through OpenAI's client and without it."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_engine import Running, events
from tests.server.scripted import ScriptRunner, scripted

pytestmark = pytest.mark.usefixtures("shape")

Server = tuple[Running, ScriptRunner]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
NOW: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(shape: str) -> Iterator[Server]:
    with scripted() as pair:
        yield pair


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0].url}/v1", api_key="x", max_retries=0) as client:
        yield client


def chat(server: Server, script: str, **body: Any) -> dict[str, Any]:
    """The first choice of an answer."""
    server[1].script = script.encode()
    response = httpx.post(f"{server[0].url}/v1/chat/completions", json={"messages": HI, **body}, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def refused(server: Server, path: str = "chat/completions", **body: Any) -> dict[str, Any]:
    base = {"prompt": "a"} if path == "completions" else {"messages": HI}
    response = httpx.post(f"{server[0].url}/v1/{path}", json={**base, **body}, timeout=30)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_a_call_whole_and_streamed(server: Server, client: openai.OpenAI) -> None:
    runner = server[1]
    runner.script = f"Let me see.\n{CALL}\n{CALL}".encode()
    asked: dict[str, Any] = {"model": "letters", "messages": HI, "tools": [WEATHER, NOW], "temperature": 0}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == ["weather", "weather"]
    assert calls[0].function.arguments == '{"city": "Bern", "days": 2}'
    assert len({call.id for call in calls}) == 2
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Let me see."
    assert [call.function.arguments for call in final.message.tool_calls or []] == [calls[0].function.arguments] * 2
    runner.hold_at = runner.script.index(b"ern")
    try:
        for chunk in client.chat.completions.create(**asked, stream=True):
            if any(part.function and part.function.arguments for part in chunk.choices[0].delta.tool_calls or []):
                runner.go.set()  # arguments are streamed as they come: the rest of them is not said before
    finally:
        runner.hold_at = -1
    assert runner.go.is_set()
    one = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls or []) == 1


def test_the_results_of_tools_reach_the_template(server: Server, client: openai.OpenAI) -> None:
    server[1].script = b"Fine."
    earlier: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "<bos>"}'}}
    messages = [*HI, {"role": "assistant", "tool_calls": [earlier]}, {"role": "tool", "tool_call_id": "c1", "content": "noon"}]
    raw = client.chat.completions.create(model="letters", messages=messages, tools=[NOW], extra_body={"return_token_ids": True})
    ids = raw.choices[0].model_extra["prompt_token_ids"]
    tokenizer = server[0].engine.tokenizer
    assert tokenizer is not None
    text = tokenizer.spelled(ids)
    assert '<tool_call>{"name": "now", "arguments": {"zone": "<bos>"}}</tool_call>' in text
    assert text.endswith("[tool]noon(c1)[assistant]")
    assert 256 not in ids, "control tokens in arguments are text"
    earlier["function"]["arguments"] = "{"
    assert "wanted a JSON object" in refused(server, messages=messages)["message"]


def test_reasoning(server: Server) -> None:
    thoughts = "<think>\nHm, so.\n</think>\n\nFine."
    message = chat(server, thoughts)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, so.", "Fine.")
    message = chat(server, "Hm.</think>Fine.", chat_template_kwargs={"thinking": True})["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Fine.")
    server[1].script = thoughts.encode()
    response = httpx.post(f"{server[0].url}/v1/chat/completions", json={"messages": HI, "stream": True}, timeout=30)
    deltas = [event["choices"][0]["delta"] for event in events(response.text)[:-1]]  # type: ignore[index]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, so."
    assert "".join(delta.get("content", "") for delta in deltas) == "Fine."


def test_a_call_that_is_cut_says_length(server: Server) -> None:
    choice = chat(server, CALL, tools=[WEATHER], max_tokens=50)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"cit'}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_required_and_named_calls_are_made_whatever_the_model_would_say(server: Server, thinking: bool, stream: bool) -> None:
    server[1].script = b"Why?</think>I would rather not say" if thinking else b"I would rather not say"
    body: dict[str, Any] = {"messages": HI, "tools": [NOW, WEATHER], "chat_template_kwargs": {"thinking": thinking}}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        with openai.OpenAI(base_url=f"{server[0].url}/v1", api_key="x", max_retries=0) as client:
            asked = {**body, "tool_choice": choice, "max_tokens": 900}
            extra = {"chat_template_kwargs": asked.pop("chat_template_kwargs")}
            if stream:
                with client.chat.completions.stream(model="letters", extra_body=extra, **asked) as run:
                    answer = run.get_final_completion().choices[0]
            else:
                answer = client.chat.completions.create(model="letters", extra_body=extra, **asked).choices[0]
        calls = answer.message.tool_calls or []
        assert calls
        for call in calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "now" or 1 <= arguments["days"] <= 9
        assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert (answer.message.model_extra or {}).get("reasoning_content") == ("Why?" if thinking else None)


def test_parameters_may_be_called_as_the_keywords_of_a_schema_are(server: Server) -> None:
    word: dict[str, Any] = {
        "type": "object",
        "properties": {"definitions": {"const": {"$ref": "x"}}, "$defs": {"$ref": "#/$defs/nine"}},
        "required": ["definitions", "$defs"],
        "additionalProperties": False,
        "$defs": {"nine": {"const": 9}},
    }
    tool = {"type": "function", "function": {"name": "word", "parameters": word}}
    for choice in ("required", {"type": "function", "function": {"name": "word"}}):
        call = chat(server, "Never", tools=[tool], tool_choice=choice, max_tokens=900)["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"definitions": {"$ref": "x"}, "$defs": 9}


def test_tools_that_make_too_long_a_grammar_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.engine.grammar.MAX_SOURCE_CHARS", 100)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        error = refused(server, tools=[WEATHER], tool_choice=choice)
        assert error["param"] == "tools"
        assert "wanted at most 100" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_in_a_call_ends_no_answer(server: Server, stream: bool) -> None:
    server[1].script = rb'<tool_call>{"name": "weather", "arguments": "\ud800"}</tool_call>'
    body = {"messages": HI, "tools": [WEATHER], "max_tokens": 90, "stream": stream}
    response = httpx.post(f"{server[0].url}/v1/chat/completions", json=body, timeout=30)
    assert response.status_code == 200, response.text
    if stream:
        parts = [event["choices"][0] for event in events(response.text) if isinstance(event, dict) and event["choices"]]
        calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
        written, reason = "".join(call["function"]["arguments"] for call in calls), parts[-1]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        written, reason = choice["message"]["tool_calls"][0]["function"]["arguments"], choice["finish_reason"]
    assert (written, reason) == (r'"\ud800"', "tool_calls")


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
GRAMMARS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json"),
    ({"response_format": {"type": "json_object"}}, "json"),
    ({"structured_outputs": {"json": SCHEMA}}, "json"),
    ({"guided_json": SCHEMA}, "json"),
    ({"regex": "[0-9]{3}"}, "123"),
    ({"guided_regex": "[0-9]{3}"}, "123"),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, "123"),
    ({"choice": ["123", "yes"]}, "123"),
    ({"guided_choice": ["123", "yes"]}, "123"),
    ({"grammar": 'start: "1" rest\nrest: "23"'}, "123"),
    ({"guided_grammar": 'root ::= "1" rest\nrest ::= "23"'}, "123"),
)


@pytest.mark.parametrize(("fields", "wanted"), GRAMMARS)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_answer_has_the_form_that_was_asked_for(server: Server, fields: dict[str, Any], wanted: str, path: str) -> None:
    server[1].script = b'{"a": 1}' if wanted == "json" else b"123 and more"
    base = {"prompt": "a"} if path == "completions" else {"messages": HI}
    response = httpx.post(f"{server[0].url}/v1/{path}", json={**base, "max_tokens": 100, **fields}, timeout=30)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(text) == {"a": 1} if wanted == "json" else text == wanted


def test_bad_grammars_are_refused_and_hurt_nobody(server: Server) -> None:
    bad: tuple[dict[str, Any], ...] = (
        {"regex": "(("},
        {"guided_grammar": "root ::= nothing"},
        {"guided_json": {"$ref": "http://example.com/"}},
        {"guided_json": {"$ref": "#/$defs/none"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}},
        {"regex": "a{100000}{100000}{100000}"},
        {"regex": "(\u00e9{1000}){1000}"},
        {"grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000},
    )
    for fields in bad * 2:
        error = refused(server, **fields)
        assert error["param"] == next(iter(fields))
        assert len(error["message"]) < 500
    assert chat(server, "Fine.")["message"]["content"] == "Fine."
    gate = server[0].server.grammars
    before = len(gate._refused)
    refused(server, regex="(" * 100_000)
    assert len(gate._refused) == before + 1
    assert all(len(key) == 32 and len(why) < 500 for key, why in gate._refused.items()), "long grammars are kept"


def test_a_grammar_that_takes_its_child_down_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(server, "1", regex="[1-3]")["message"]["content"] == "1"
    trial = server[0].compiler._trial
    assert trial is not None
    assert trial._child is not None
    trial._child.send_signal(signal.SIGSTOP)  # it will never answer
    monkeypatch.setattr("tilewright.engine.grammar_trial.TRIAL_S", 0.2)
    assert "too complex" in refused(server, regex="abc[de]")["message"]
    monkeypatch.undo()
    assert "too complex" in refused(server, regex="abc[de]")["message"], "a refusal is remembered"
    assert chat(server, "abcd", regex="abc[df]")["message"]["content"] == "abcd"


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with scripted() as server:
        assert "pip install 'tilewright[structured]'" in refused(server, regex="a")["message"]
