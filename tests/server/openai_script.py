"""What OpenAI's own client makes of the server: `python openai_script.py <base url> <url with a key>`.

For majors 2 and 3; test_openai_client.py runs it in a process of its own, once for each that is there.
"""

import asyncio
import sys
from typing import Any

import openai

HI: list[Any] = [{"role": "user", "content": "hi"}]


def raises(kind: type[openai.APIError], call: Any, **fields: Any) -> Any:
    """The error that a call must raise."""
    try:
        call(**fields)
    except kind as error:
        assert type(error) is kind, type(error)  # noqa: PT017
        return error
    raise AssertionError(f"no {kind.__name__}")


def completions(client: openai.OpenAI) -> None:
    """Whole, streamed, with logprobs and echo."""
    body: dict[str, Any] = {"model": "letters", "prompt": "ab", "max_tokens": 5, "temperature": 0}
    answer = client.completions.create(**body, logprobs=2, echo=True)
    choice = answer.choices[0]
    assert choice.text == "abcdefg"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list("abcdefg")
    assert choice.logprobs.text_offset == list(range(7))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "cdefg"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7
    several = client.completions.create(**{**body, "prompt": [[97], [98, 98]]}, n=2, stop=["e"], seed=1)
    assert [c.text for c in several.choices] == ["bcd", "bcd", "cd", "cd"]
    assert several.choices[0].finish_reason == "stop"


def chats(client: openai.OpenAI) -> None:
    """Whole, streamed, with logprobs, extensions through extra_body."""
    body: dict[str, Any] = {"model": "letters", "messages": HI, "max_completion_tokens": 5, "temperature": 0}
    answer = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "uvwxy")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[0].bytes == [ord("u")]
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "uvwxy"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 19, "of 20: the last one is computed for its logits"
    ending = {**body, "messages": [{"role": "user", "content": "!"}], "max_completion_tokens": 20}
    with client.chat.completions.stream(**ending) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == ("tuvwx", "stop")
    extra = {"ignore_eos": True, "min_tokens": 3, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [122]}
    assert client.chat.completions.create(**body, extra_body=extra).choices[0].finish_reason == "length"
    raw = client.chat.completions.with_raw_response.create(**body, user="me")
    assert raw.headers["x-tilewright-ignored"] == "user"


def responses(client: openai.OpenAI) -> None:
    """Whole, streamed event by event, and through the client's own stream, which puts the response together itself."""
    body: dict[str, Any] = {"model": "letters", "input": "hi", "temperature": 0, "max_output_tokens": 5}
    answer = client.responses.create(**body)
    assert (answer.output_text, answer.status) == ("uvwxy", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (20, 5, 25)
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "uvwxy"
    ending = {**body, "input": [{"role": "user", "content": "!"}], "max_output_tokens": 20}
    with client.responses.stream(**ending) as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status) == ("tuvwx", "completed")
    assert raises(openai.BadRequestError, client.responses.create, **body, store=True).param == "store"
    raises(openai.NotFoundError, client.responses.retrieve, response_id=answer.id)


def errors(client: openai.OpenAI, keyed_url: str) -> None:
    """Every refusal is the client's typed exception."""
    create = client.completions.create
    body: dict[str, Any] = {"model": "letters", "prompt": "ab"}
    long = raises(openai.BadRequestError, create, **{**body, "prompt": "a" * 500})
    assert long.code == "context_length_exceeded"
    assert raises(openai.BadRequestError, create, **{**body, "prompt": "a" * 500}, stream=True).param == "prompt"
    assert raises(openai.BadRequestError, create, **body, n=1_000_000).param == "n"
    tools = {"model": "letters", "messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert "not supported yet" in raises(openai.BadRequestError, client.chat.completions.create, **tools).message
    bad = {"model": "letters", "messages": HI, "extra_body": {"guided_regex": "(("}}
    assert raises(openai.BadRequestError, client.chat.completions.create, **bad).param == "guided_regex"
    assert raises(openai.NotFoundError, create, **{**body, "model": "gpt-4"}).code == "model_not_found"
    raises(openai.NotFoundError, client.models.retrieve, model="gpt-4")
    raises(openai.InternalServerError, create, **{**body, "prompt": "a#"})
    with openai.OpenAI(base_url=f"{keyed_url}/v1", api_key="wrong", max_retries=0) as wrong:
        raises(openai.AuthenticationError, wrong.models.list)
    with openai.OpenAI(base_url=f"{keyed_url}/v1", api_key="sesame", max_retries=0) as right:
        assert [model.id for model in right.models.list()] == ["letters"]
    assert "on fire" in raises(openai.InternalServerError, create, **{**body, "prompt": "a#"}, stream=True).message


async def together(base_url: str) -> None:
    """The asynchronous client, several streams at once."""

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="letters", prompt=prompt, max_tokens=6, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="x", max_retries=0) as client:
        assert await asyncio.gather(*(one(client, "a" * i) for i in (1, 2, 3))) == ["bcdefg", "cdefgh", "defghi"]


def main(base_url: str, keyed_url: str) -> None:
    """All of it."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="x", max_retries=0) as client:
        completions(client)
        chats(client)
        responses(client)
        errors(client, keyed_url)
    asyncio.run(together(base_url))
    print(openai.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
