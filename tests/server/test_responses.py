"""/v1/responses through OpenAI's own client and without it: items, events, calls, thoughts, refusals."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_engine import Running, fake_engine, running
from tests.server.scripted import ScriptRunner, scripted
from tests.server.test_structured_api import CALL, SCHEMA, WEATHER

pytestmark = pytest.mark.usefixtures("shape")

Server = tuple[Running, ScriptRunner]
TOOL = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def server(shape: str) -> Iterator[Server]:
    with scripted() as pair:
        yield pair


@pytest.fixture(scope="module")
def letters(shape: str) -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0].url}/v1", api_key="x", max_retries=0) as client:
        yield client


def events_of(server: Running, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names and numbers are checked."""
    response = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", "stream": True, **body}, timeout=30)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as somebody who only follows the deltas has it; every summing-up event must say the same."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            items[event["output_index"]] = event["item"]
        elif kind == "response.content_part.added":
            assert len(items[event["output_index"]]["content"]) == event["content_index"] == 0
            items[event["output_index"]]["content"].append(event["part"])
        elif kind.endswith(".delta"):
            item = items[event["output_index"]]
            assert event["item_id"] == item["id"]
            if item["type"] == "function_call":
                item["arguments"] += event["delta"]
            else:
                item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind.endswith("arguments.done"):
            assert event["arguments"] == items[event["output_index"]]["arguments"]
        elif kind.endswith("text.done"):
            assert event["text"] == items[event["output_index"]]["content"][0]["text"]
        elif kind == "response.output_item.done":
            items[event["output_index"]]["status"] = event["item"]["status"]
            assert event["item"] == items[event["output_index"]]
    return [items[index] for index in range(len(items))]


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


CASES: tuple[tuple[str, dict[str, Any], list[str], str], ...] = (
    ("Fine.", {}, ["message"], "completed"),
    ("<think>\nHm.\n</think>\n\nFine.", {}, ["reasoning", "message"], "completed"),
    (f"Let me see.\n{CALL}\n{CALL}", {"tools": [TOOL]}, ["message", "function_call", "function_call"], "completed"),
    (f"<think>Hm.</think>{CALL}", {"tools": [TOOL]}, ["reasoning", "function_call"], "completed"),
    (CALL, {"tools": [TOOL], "max_output_tokens": 50}, ["function_call"], "incomplete"),
    ("<think>Hm, so", {"max_output_tokens": 10}, ["reasoning"], "incomplete"),
    ("", {}, [], "completed"),
)


@pytest.mark.parametrize(("script", "fields", "kinds", "status"), CASES)
def test_a_stream_and_a_whole_answer_have_the_same_items(
    server: Server, script: str, fields: dict[str, Any], kinds: list[str], status: str
) -> None:
    server[1].script = script.encode()
    events = events_of(server[0], **fields)
    streamed, output = events[-1]["response"], rebuilt(events)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{status}"
    assert streamed["output"] == output
    response = httpx.post(f"{server[0].url}/v1/responses", json={"input": "hi", **fields}, timeout=30)
    assert response.status_code == 200, response.text
    whole = response.json()
    assert [item["type"] for item in output] == kinds
    assert without_ids(whole["output"]) == without_ids(output)
    assert whole["status"] == streamed["status"] == status
    assert [item["status"] for item in output] == ["completed"] * (len(output) - 1) + [status] * bool(output)
    assert (whole["incomplete_details"] is not None) == (status == "incomplete")
    # The second prompt is in the cache.
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] > 0
    assert whole["usage"]["output_tokens_details"] == streamed["usage"]["output_tokens_details"]
    assert (whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == ("reasoning" in kinds)


def test_the_clients_own_stream_puts_the_answer_together(server: Server, client: openai.OpenAI) -> None:
    server[1].script = f"<think>Hm.</think>Let me see.\n{CALL}".encode()
    with client.responses.stream(model="letters", input="hi", tools=[TOOL]) as stream:  # type: ignore[list-item]
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 20, "arguments are streamed as they come"
    assert final.output_text == "Let me see."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    call = final.output[2]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bern", "days": 2})  # type: ignore[union-attr]
    assert call.parsed_arguments == {"city": "Bern", "days": 2} or call.parsed_arguments is None  # type: ignore[union-attr]
    assert final.usage is not None
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens


def test_an_answer_can_be_handed_back_with_the_results_of_its_calls(server: Server, client: openai.OpenAI) -> None:
    server[1].script = f"<think>Hm.</think>Let me see.\n{CALL}".encode()
    first = client.responses.create(model="letters", input="hi", tools=[TOOL], instructions="Be brief.")  # type: ignore[list-item]
    call = first.output[-1]
    assert call.type == "function_call"
    asked: list[Any] = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output)]
    asked += [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]
    asked += [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and then?"}]}]
    server[1].script = b"Fine."
    seen: list[str] = []
    submit = server[0].engine.submit

    def spy(prompt: list[int], *args: Any, **kwargs: Any) -> str:
        seen.append(server[0].engine.tokenizer.spelled(prompt))  # type: ignore[union-attr]
        return submit(prompt, *args, **kwargs)

    server[0].engine.submit = spy  # type: ignore[method-assign]
    try:
        second = client.responses.create(model="letters", input=asked, instructions="Be brief.", store=False)
    finally:
        server[0].engine.submit = submit  # type: ignore[method-assign]
    assert second.output_text == "Fine."
    call_text = '<tool_call>{"name": "weather", "arguments": {"city": "Bern", "days": 2}}</tool_call>'
    wanted = f"[system]Be brief.[user]hi[assistant]Let me see.{call_text}[tool]noon({call.call_id})[user]and then?[assistant]"
    assert seen == [wanted]


def test_a_schema_and_a_choice_of_tools(server: Server, client: openai.OpenAI) -> None:
    server[1].script = b'{"a": 1}'
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(model="letters", input="hi", text=text)
    assert json.loads(answer.output_text) == {"a": 1}
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    server[1].script = b"I would rather not say"
    choices: tuple[Any, ...] = (
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    )
    now = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    for choice in choices:
        body: Any = {"model": "letters", "input": "hi", "tools": [TOOL, now], "tool_choice": choice, "max_output_tokens": 900}
        found = client.responses.create(**body, parallel_tool_calls=False)
        assert [item.type for item in found.output] == ["function_call"]
        assert found.output[0].name in (("weather", "now") if choice == "required" else ("weather",))  # type: ignore[union-attr]
        assert isinstance(json.loads(found.output[0].arguments), dict)  # type: ignore[union-attr]


def test_plain_text_and_log_probabilities(letters: Running) -> None:
    with openai.OpenAI(base_url=f"{letters.url}/v1", api_key="x", max_retries=0) as client:
        body: dict[str, Any] = {"model": "letters", "input": "hi", "max_output_tokens": 5, "temperature": 0}
        answer = client.responses.create(**body, metadata={"who": "me"})
        assert (answer.output_text, answer.status) == ("uvwxy", "incomplete")
        assert answer.metadata == {"who": "me"}
        assert answer.usage is not None
        assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (5, 0)
        told = client.responses.create(**body, include=["message.output_text.logprobs"], top_logprobs=2)
        part = told.output[0].content[0]  # type: ignore[union-attr,index]
        assert [entry.token for entry in part.logprobs or ()] == list("uvwxy")  # type: ignore[union-attr]
        assert len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr,index]
        raw = client.responses.with_raw_response.create(**body, user="me", reasoning={"effort": "low", "summary": "auto"})
        assert raw.headers["x-tilewright-ignored"] == "user,reasoning.summary"
    streamed = events_of(letters, max_output_tokens=5, temperature=0, include=["message.output_text.logprobs"])
    deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == list("uvwxy")
    letters.until_idle()


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"store": True}, "store", "does not store answers"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "does not store answers"),
    ({"conversation": "c"}, "conversation", "does not store answers"),
    ({"background": True}, "background", "wanted"),
    ({"truncation": "auto"}, "truncation", "wanted"),
    ({"prompt": {"id": "p"}}, "prompt", "no such field"),
    ({"n": 2}, "n", "no such field"),
    ({"include": ["file_search_call.results"]}, "include", "logprobs"),
    ({"input": None}, "input", "wanted a text or a list"),
    ({"input": []}, "input", "wanted a text or a list"),
    ({"input": [3]}, "input.0", "wanted a message"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "does not store items"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0", "input_text"),
    ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": None}]}, "input.1.content", "wanted text"),
    ({"input": [{"role": "judge", "content": "a"}], "instructions": "b"}, "input.0.role", "wanted one of"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input.0.tool_calls.0.function.arguments", "JSON"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content", "reasoning encrypted"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": 100_000}, "max_output_tokens", "context length"),
    ({"input": "a" * 100_000}, "input", "context length"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "wanted type"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "what"}}}}, "text.format", "valid"),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "wanted 'function'"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "wanted"),
    ({"tools": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tools", "wanted a list"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice", "wanted function"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort", "a word"),
    ({"include": ["message.output_text.logprobs"]}, "include", "plain text"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
)  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_honoured_is_one_sentence(server: Server, fields: dict[str, Any], param: str, words: str) -> None:
    response = httpx.post(f"{server[0].url}/v1/responses", json={"input": "hi", **fields}, timeout=30)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert words in error["message"], error


def test_a_step_that_fails_in_the_middle_ends_the_stream_as_failed() -> None:
    engine = fake_engine(delay_s=0.05)
    collect, steps = engine.runner.collect, itertools.count()

    def broken(ticket: Any) -> Any:
        if next(steps) == 20:
            raise RuntimeError("the device is on fire")
        return collect(ticket)

    engine.runner.collect = broken  # type: ignore[method-assign]
    with running(engine) as server:
        events = events_of(server, max_output_tokens=60)
    assert events[-2]["type"] == "response.output_text.delta"
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "on fire" in events[-1]["response"]["error"]["message"]
