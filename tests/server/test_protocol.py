"""Bodies that are taken and bodies that are refused, and in which words. No HTTP."""

import json

import pytest

from tests.server.fake_engine import BOS, VOCAB, fake_engine
from tilewright.engine.request import SamplingParams
from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError
from tilewright.server.prompts import Served
from tilewright.server.protocol import Job, chat_job, completion_job

SERVED = Served.of(fake_engine(max_model_len=64), "letters")
NO_BOS = Served.of(fake_engine(bos=False, chat=False), "letters")
CONFIG = ServerConfig(max_prompts=4, max_n=8, max_logit_bias=3, max_messages=5)
HELLO = [{"role": "user", "content": "hi"}]


def complete(served: Served = SERVED, **body: object) -> Job:
    return completion_job(json.dumps({"prompt": "hi", **body}).encode(), served, CONFIG)


def chat(served: Served = SERVED, **body: object) -> Job:
    return chat_job(json.dumps({"messages": HELLO, **body}).encode(), served, CONFIG)


def refusal(make: object, *args: object, **body: object) -> dict[str, str]:
    with pytest.raises(ApiError) as caught:
        make(*args, **body)  # type: ignore[operator]
    error = caught.value.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return {**error, "status": caught.value.status}


# Fields of other servers that change or bound an answer there.
ELSEWHERE: dict[str, object] = {
    **dict.fromkeys(("ebnf", "stop_regex", "lora_path", "cache_salt"), "x"),
    "json_schema": {},
    "kv_transfer_params": {},
    "cache_salt": "x",
    **dict.fromkeys(("no_repeat_ngram_size", "mirostat", "mirostat_mode", "min_length", "top_a", "truncate_prompt_tokens"), 2),
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "typical_p", "length_penalty", "repeat_penalty", "tfs"), 0.5),
    **dict.fromkeys(("use_beam_search", "continue_final_message", "include_stop_str_in_output", "early_stopping"), True),
    "documents": [{"text": "x"}],
    "structural_tag": {},
    "bad_words": ["a"],
    "reasoning_effort": "low",
    "verbosity": "low",
    "skip_special_tokens": False,
    "logits_processors": ["x"],
    "n_predict": 3,
    "audio": {},
    "web_search_options": {},
}

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# (fields, the param named, words that the message must have)
REFUSED = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": 3}, "prompt", "of type int"),
    ({"prompt": []}, "prompt", "an empty list"),
    ({"prompt": [1, "a"]}, "prompt", "a list of int and str"),
    ({"prompt": [True]}, "prompt", "a list of bool"),
    ({"prompt": [[]]}, "prompt", "a list of list"),
    ({"prompt": [VOCAB]}, "prompt", f"token id {VOCAB}, wanted 0 to {VOCAB - 1}"),
    ({"prompt": [[1, 2], [-1]]}, "prompt", "token id -1"),
    ({"prompt": ["a"] * 5}, "prompt", "5 prompts, wanted at most 4"),
    ({"prompt": "\ud800"}, None, ""),
    ({"prompt": "a" * 64}, "prompt", "maximum context length is 64 tokens, but 65 were requested (64 in the prompt, 1"),
    ({"prompt": "a" * 60, "max_tokens": 5}, "max_tokens", "64 tokens, but 65 were requested (60 in the prompt, 5"),
    ({"prompt": ["a", "a" * 99]}, "prompt", "99 in the prompt"),
    ({"max_tokens": 0}, "max_tokens", "wanted at least 1"),
    ({"max_tokens": -4}, "max_tokens", "-4"),
    ({"max_tokens": 2.5}, "max_tokens", "2.5, wanted"),
    ({"max_tokens": "5"}, "max_tokens", "'5', wanted"),
    ({"max_tokens": True}, "max_tokens", "True, wanted"),
    ({"max_tokens": 10**30}, "max_tokens", "wanted at most 2147483647"),
    ({"max_tokens": 10**4299}, "max_tokens", "an integer of some 4299 digits, wanted at most"),
    ({"max_tokens": 2**31 - 1}, "max_tokens", "maximum context length"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "9, wanted 0 to 8"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": float("nan")}, "temperature", "wanted a finite number"),
    ({"temperature": float("inf")}, "temperature", "wanted a finite number"),
    ({"temperature": "hot"}, "temperature", "'hot', wanted"),
    ({"top_p": 0}, "top_p", "0, wanted above 0"),
    ({"top_p": 1.1}, "top_p", "1.1, wanted at most 1"),
    ({"top_k": -2}, "top_k", "-2, wanted at least -1"),
    ({"top_k": 2**31}, "top_k", "wanted at most 2147483647"),
    ({"temperature": 1e308}, "temperature", "wanted at most 100"),
    ({"min_p": 2}, "min_p", "2"),
    ({"presence_penalty": 3}, "presence_penalty", "wanted at most 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "wanted at least 0.01"),
    ({"repetition_penalty": 1e308}, "repetition_penalty", "wanted at most 100"),
    ({"n": 0}, "n", "0, wanted at least 1"),
    ({"n": 9}, "n", "9, wanted at most 8"),
    ({"n": 1_000_000}, "n", "1000000, wanted at most 65536"),
    ({"n": 1e6}, "n", "wanted"),
    ({"n": 8, "prompt": ["a", "b", "c"]}, "prompt", "24 samples (prompts times n), wanted at most 16"),
    ({"best_of": 1, "n": 2}, "best_of", "wanted at least n, 2"),
    ({"best_of": 9}, "best_of", "9, wanted at most 8"),
    ({"best_of": 3, "stream": True}, "best_of", "stream is true"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids", "wanted 0 to"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream: true"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "wanted stream: true as well"),
    ({"priority": -1}, "priority", "at least 0"),
    ({"frobnicate": 2}, "frobnicate", "got 2, wanted no such field"),
    ({"frob\r\n" * 100: 2}, None, "wanted no such field"),
    *(({name: value}, name, "not supported yet") for name, value in ELSEWHERE.items()),
    ({"seed": 2**63}, "seed", "wanted"),
    ({"seed": 10**400}, "seed", "wanted"),
    ({"logprobs": 21}, "logprobs", "21, wanted at most 20"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"stop": ["a"] * 5}, "stop", "5 strings, wanted at most 4"),
    ({"stop": ""}, "stop", "none of them empty"),
    ({"stop": [1]}, "stop", "[1], wanted a string"),
    ({"stop": "a" * 257}, "stop", "257 characters"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", "wanted 0 to"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "129 entries"),
    ({"logit_bias": {"1": 101}}, None, "101"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "the key 'a'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "the key '-1'"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "token id 9999"),
    ({"logit_bias": {str(i): 1 for i in range(4)}}, "logit_bias", "4 entries, wanted at most 3"),
    ({"suffix": "x"}, "suffix", "not supported yet"),
    ({"response_format": {"type": "xml"}}, "response_format", "wanted type text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "wanted a JSON schema"),
    ({"guided_regex": "a", "grammar": "b"}, "grammar", "wanted one of them"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs", "wanted one of json, regex"),
    ({"structured_outputs": []}, "structured_outputs", "must be an object"),
    ({"choice": []}, "choice", "none of them empty"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"regex": "a", "min_tokens": 1}, "min_tokens", "wanted one of them"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "1, wanted"),
    ({"model": "gpt-4"}, "model", "'gpt-4' does not exist here; this server has 'letters'"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_a_wrong_completion_names_the_field(fields: dict[str, object], param: str | None, words: str) -> None:
    error = refusal(complete, **fields)
    assert error["status"] == (404 if param == "model" else 400)
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert words in error["message"]


REFUSED_CHATS = [
    ({"messages": None}, "messages", "missing or empty"),
    ({"messages": []}, "messages", "missing or empty"),
    ({"messages": HELLO * 6}, "messages", "6 entries, wanted at most 5"),
    ({"messages": ["hi"]}, "messages.0", "of type str"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "'wizard', wanted one of"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "of type NoneType"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "tool calls"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages.1", "tool calls"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages.0.content.0",
        "'image_url', wanted text only",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0", "not a text part"),
    ({"messages": HELLO * 2}, "messages", "two user turns in a row"),
    ({"top_logprobs": 2}, "top_logprobs", "wanted logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"logprobs": 1}, "logprobs", "1, wanted"),
    ({"tools": [{"type": "function"}]}, "tools.0", "wanted {type: 'function'"),
    ({"tools": "f"}, "tools", "wanted a list"),
    ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools.0", "wanted 'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "letters, digits"),
    ({"tools": [F, F]}, "tools", "each name only once"),
    ({"tools": [F]}, "tools", "no known format of tool calls"),
    ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "one of the tools"),
    ({"tools": [F], "tool_choice": "required", "regex": "a"}, "regex", "wanted only one of them"),
    ({"functions": [{}]}, "functions", "not supported yet"),
    ({"tool_choice": "required"}, "tool_choice", "wanted tools as well"),
    ({"max_completion_tokens": 60}, "max_tokens", "maximum context length is 64"),
    ({"max_tokens": 0}, "max_tokens", "0, wanted 1 to 2147483647"),
    ({"prompt": "x"}, "prompt", "give only messages"),
    ({"echo": True}, "echo", "the last message is not one text of the assistant"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "a separate field of the request"),
    ({"add_special_tokens": True}, "add_special_tokens", "wanted false"),
    ({"messages": [{"role": "user", "content": "x" * 70_000}]}, "messages.0.content", "has far more"),
    *(({name: value}, name, "not supported yet") for name, value in ELSEWHERE.items()),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED_CHATS, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_a_wrong_chat_names_the_field(fields: dict[str, object], param: str, words: str) -> None:
    error = refusal(chat, **fields)
    assert (error["status"], error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a": 1} x'])
def test_what_is_no_json_object(raw: bytes) -> None:
    error = refusal(completion_job, raw, SERVED, CONFIG)
    assert (error["status"], error["code"]) == (400, "invalid_json")


def test_prompts_of_every_kind() -> None:
    one, two = [104, 105], [97]
    assert complete(prompt="hi").prompts == (one,)
    assert complete(prompt=["hi", "a"]).prompts == (one, two)
    assert complete(prompt=one).prompts == (one,)
    assert complete(prompt=[one, two]).prompts == (one, two)


def test_an_empty_prompt_is_the_bos_token_where_there_is_one() -> None:
    assert complete(prompt="").prompts == ([BOS],)
    assert "no BOS token" in refusal(complete, NO_BOS, prompt="")["message"]


def test_defaults_are_openais() -> None:
    assert complete().params == (SamplingParams(max_tokens=16, temperature=1.0, top_p=1.0, n=1),)
    assert complete(prompt="a" * 60).params[0].max_tokens == 4, "the default is cut to what fits; what is asked for never is"
    prompt = "<bos>[user]hi[assistant]"
    job = chat()
    assert SERVED.tokenizer.decode(job.prompts[0]) == prompt.removeprefix("<bos>")
    assert job.prompts[0][0] == BOS
    assert job.params[0].max_tokens == 64 - len(job.prompts[0]), "a chat may use all that fits"
    assert chat(min_tokens=20).params[0].min_tokens == 20


def test_all_fields_arrive() -> None:
    same = {"max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "n": 2}
    same |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "ignore_eos": True, "seed": -5}
    others = {
        "logit_bias": {"65": -100},
        "stop": ["x", "y"],
        "stop_token_ids": [66],
        "best_of": 2,
        "logprobs": 3,
    }
    same |= {"priority": 4}
    answer = {"echo": True, "stream": True, "stream_options": {"include_usage": True}, "model": "letters"}
    job = complete(**same, **others, **answer)
    expected = SamplingParams(
        **same, logit_bias={65: -100.0}, stop=("x", "y"), stop_token_ids=(66,), logprobs=3, prompt_logprobs=3
    )
    assert job.params == (expected,)
    assert (job.echo, job.stream, job.include_usage, job.ignored) == (("hi",), True, True, ())


def test_null_is_the_same_as_nothing() -> None:
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "logit_bias",
        "logprobs",
        "stream",
        "suffix",
        "tools",
        "x",
    )
    assert complete(**dict.fromkeys(names)) == complete()


def test_content_parts_are_lines_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    job = chat(messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}])
    assert SERVED.tokenizer.decode(job.prompts[0]) == "[system]be[user]one\ntwo[assistant]"


def test_a_model_without_a_chat_template_says_so() -> None:
    assert "no chat template" in refusal(chat, NO_BOS)["message"]


def test_fields_without_effect_are_named() -> None:
    job = complete(user="me", metadata={"a": 1}, store=None)
    assert job.headers == {"x-tilewright-ignored": "user,metadata"}
    assert chat(response_format={"type": "text"}, tools=[], store=False).ignored == ("store",)
    assert complete().headers == {}
