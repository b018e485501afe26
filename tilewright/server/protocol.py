"""Parses and checks a request body: the result is a `Job`, or an `ApiError` that names the wrong field.

fields.py defines the fields and their ranges. In addition, `ServerConfig` limits every size that a client can choose.

Not supported: images and audio, suffix, and the function calls that OpenAI's API had before tools.
"""

import dataclasses
import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from tilewright.engine.grammar import Grammar
from tilewright.engine.request import SamplingParams, shown
from tilewright.server.config import ServerConfig
from tilewright.server.errors import bad_request, not_supported
from tilewright.server.fields import ChatBody, CompletionBody, ignored_names
from tilewright.server.prompts import RESERVED_VARIABLES, Served, chat_prompt, read_prompts
from tilewright.server.structured import grammar_of
from tilewright.server.tools.asked import Answering, Asked, answering
from tilewright.server.tools.channels import CLOSE, FINAL

__all__ = ["ChatBody", "CompletionBody", "Job", "chat_ids_of", "chat_job", "chat_job_of", "completion_job", "parse"]

DEFAULT_COMPLETION_TOKENS = 16
"""Tokens that /v1/completions generates if max_tokens is not given; OpenAI's number."""
MAX_MARKS = 1 << 20
"""Most commas, colons and brackets in a body. Parsing so many values takes 0.3 s, in which Python runs nothing else."""

MAX_IGNORED_NAMES = 20
_BOUNDS = {"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "above"}
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked request: what to run and how to answer."""

    chat: bool
    prompts: tuple[list[int], ...]
    """Token ids, one list for each prompt."""
    params: tuple[SamplingParams, ...]
    """One for each prompt. They differ only in max_tokens, and only if the client did not set it."""
    echo: tuple[str, ...] = ()
    """The text to put before each answer, one per prompt; empty if echo is off."""
    only_echo: bool = False
    """max_tokens is 0: the prompt is scored and nothing is generated."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Every chunk of a stream contains the usage so far."""
    best: int | None = None
    """The answer contains only this many samples of each prompt, the most likely ones; None: all samples."""
    logprobs: bool = False
    """The answer contains the log-probabilities of its tokens and, with echo, those of the prompt."""
    prompt_logprobs: bool = False
    """The answer contains the log-probabilities of the prompt, in a field of their own."""
    token_ids: bool = False
    """The answer contains the token ids of prompt and answer."""
    ignored: tuple[str, ...] = ()
    """Names of fields without effect."""
    grammar_field: str | None = None
    """The name of the field that requested a grammar, if there is one."""
    answering: Answering | None = None
    """How to parse the answers of a chat, if they may contain more than text (tool calls, reasoning)."""

    @property
    def prefix(self) -> str:
        """The prefix of the answer's id."""
        return "chatcmpl-" if self.chat else "cmpl-"

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def n(self) -> int:
        """Samples for each prompt."""
        return self.params[0].n

    @property
    def headers(self) -> dict[str, str]:
        """Response headers: the note on ignored fields."""
        if not self.ignored:
            return {}
        names = [name for name in self.ignored if _HEADER_NAME.fullmatch(name)][:MAX_IGNORED_NAMES]
        hidden = len(self.ignored) - len(names)
        return {"x-tilewright-ignored": ",".join([*names, *([f"+{hidden}"] if hidden else [])])}


B = TypeVar("B", bound=BaseModel)


def parse(raw: bytes, body: type[B]) -> B:
    """Parse a JSON body as `body`. Raises `ApiError` (400) with the field, its value and what is allowed."""
    if sum(map(raw.count, (b",", b":", b"[", b"{"))) > MAX_MARKS:
        raise bad_request(f"the body has more than {MAX_MARKS} commas, colons and brackets, wanted fewer", code="invalid_json")
    try:
        fields = pydantic_core.from_json(raw, allow_inf_nan=True)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request(f"the body is a JSON {type(fields).__name__}, wanted an object", code="invalid_json")
    try:
        return body.model_validate(fields)
    except ValidationError as error:
        _refuse_field(error)


def _refuse_field(error: ValidationError) -> NoReturn:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(shown(part, 60).strip("'") for part in first["loc"])
    if first["type"] == "missing":
        raise bad_request(f"{where} is missing", param=where)
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    for words, short in _BOUNDS.items():
        wanted = wanted.replace(words, short)
    raise bad_request(f"{where} is {shown(first['input'], 60)}, wanted {wanted}", param=where)


def completion_job(raw: bytes, served: Served, config: ServerConfig) -> Job:
    """The job of a /v1/completions body. Raises `ApiError`."""
    body = parse(raw, CompletionBody)
    ignored = ignored_names(body)
    fields = _sampling_fields(body, served, config)
    if body.logprobs is not None:
        fields["logprobs"] = _at_most("logprobs", body.logprobs, config.max_logprobs)
        if body.echo:
            fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    grammar_field = _add_grammar(fields, grammar_of(body))
    prompts = read_prompts(body.prompt, served, config.max_prompts, add_special=body.add_special_tokens is not False)
    only_echo = body.max_tokens == 0
    if only_echo and not body.echo:
        raise bad_request("max_tokens is 0, wanted at least 1 (0 is allowed with echo, to score a prompt)", "max_tokens")
    asked = 1 if only_echo else body.max_tokens
    return Job(
        chat=False,
        prompts=tuple(prompts),
        params=_params(fields, prompts, asked, DEFAULT_COMPLETION_TOKENS, served),
        echo=tuple(served.tokenizer.decode(ids) for ids in prompts) if body.echo else (),
        only_echo=only_echo,
        logprobs=body.logprobs is not None,
        ignored=ignored,
        grammar_field=grammar_field,
        **_answer_fields(body),
    )


def chat_job(raw: bytes, served: Served, config: ServerConfig) -> Job:
    """The job of a /v1/chat/completions body. Raises `ApiError`."""
    return chat_job_of(parse(raw, ChatBody), served, config)


def chat_job_of(body: ChatBody, served: Served, config: ServerConfig) -> Job:
    """The job of a parsed chat body. Raises `ApiError`."""
    if body.prompt is not None:
        raise bad_request("prompt is not a field of a chat; give only messages", "prompt")
    ignored = ignored_names(body)
    fields = _sampling_fields(body, served, config)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is set without logprobs, wanted logprobs: true as well", "top_logprobs")
    if body.logprobs:
        fields["logprobs"] = _at_most("top_logprobs", body.top_logprobs or 0, config.max_logprobs)
    asked_tools = Asked.of(body)
    prompts = [_chat_ids(body, asked_tools, served, config)]
    reading, grammar_field = _chat_grammar(fields, body, asked_tools, prompts[0], served, config)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Job(
        chat=True,
        prompts=tuple(prompts),
        params=_params(fields, prompts, asked, None, served),
        echo=_chat_echo(body),
        logprobs=bool(body.logprobs),
        ignored=ignored,
        grammar_field=grammar_field,
        answering=reading,
        **_answer_fields(body),
    )


def chat_ids_of(body: ChatBody, served: Served, config: ServerConfig) -> list[int]:
    """The token ids of a chat alone. Raises `ApiError`."""
    return _chat_ids(body, Asked.of(body), served, config)


def _chat_ids(body: ChatBody, asked: Asked, served: Served, config: ServerConfig) -> list[int]:
    if body.add_special_tokens:
        raise not_supported("add_special_tokens", "got true, wanted false, because the chat template adds the special tokens")
    return chat_prompt(
        body.messages,
        served,
        config.max_messages,
        allow_special=bool(body.allow_special_tokens),
        variables=_template_variables(body) | ({"tools": list(asked.tools)} if asked.tools else {}),
    )


def _add_grammar(fields: dict[str, Any], found: tuple[Grammar, str] | None) -> str | None:
    if found is None:
        return None
    fields["grammar"], name = found
    return name


def _chat_grammar(
    fields: dict[str, Any], body: ChatBody, asked: Asked, prompt: list[int], served: Served, config: ServerConfig
) -> tuple[Answering | None, str | None]:
    """Put the grammar of a chat into `fields`. Returns how to parse the answer, and the field that requested the grammar."""
    found = grammar_of(body)
    try:
        forced = asked.grammar()
    except ValueError as error:
        raise bad_request(f"tools: {error}", "tools") from None
    if found is not None and forced is not None:
        raise bad_request(
            f"{found[1]} and tool_choice both determine the form of the answer, wanted only one of them", found[1]
        )
    if forced is not None:
        found = (forced, "tools")
    tokenizer = served.tokenizer
    reading = answering(asked, tokenizer.chat_template or "", tokenizer.spelled(prompt[-16:]), config.tool_format)
    if reading is not None:
        fields["special_tokens"] = True
    if found is not None and reading is not None:
        # The reasoning comes first, and the grammar does not apply to it. Without reasoning, the output begins with the answer.
        mark = FINAL if reading.format == "harmony" else CLOSE if reading.reasoning and reading.open_already else None
        if mark is not None:
            found = (replace(found[0], after=(tuple(tokenizer.encode(mark, add_special=False)),)), found[1])
    return reading, _add_grammar(fields, found)


def _template_variables(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    for name in RESERVED_VARIABLES:
        if name in variables:
            raise bad_request(
                f"chat_template_kwargs has {name}, which is a separate field of the request", "chat_template_kwargs"
            )
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return variables


def _chat_echo(body: ChatBody) -> tuple[str, ...]:
    """The last turn, which must be the assistant's and which the answer continues. Raises `ApiError` if there is none."""
    if not body.echo:
        return ()
    last = body.messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        raise bad_request("echo is set, but the last message is not one text of the assistant, which echo repeats", "echo")
    return (last["content"],)


def _answer_fields(body: CompletionBody) -> dict[str, Any]:
    """The fields of a `Job` that define the format of the answer. Raises `ApiError`."""
    stream, options = bool(body.stream), body.stream_options
    if options is not None and not stream:
        raise bad_request("stream_options is set without stream, wanted stream: true as well", "stream_options")
    if stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs and stream: true are both set, wanted only one of them", "prompt_logprobs")
    several = body.best_of is not None and body.best_of != (body.n or 1)
    if stream and several:
        raise bad_request("best_of is above n and stream is true, wanted only one of them", "best_of")
    return {
        "stream": stream,
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.include_usage and options.continuous_usage_stats),
        "best": (body.n or 1) if several else None,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "token_ids": bool(body.return_token_ids),
    }


# Fields that have the same name in SamplingParams, which checks them.
_SAME = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos", "speculate", "seed", "n", "priority"),
)


def _sampling_fields(body: CompletionBody, served: Served, config: ServerConfig) -> dict[str, Any]:
    """Arguments of SamplingParams that do not depend on the prompt."""
    adapter = served.adapter_of(body.model)
    fields = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    fields |= {} if adapter is None else {"adapter": adapter}
    _at_most("n", body.n or 1, config.max_n)
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise bad_request(f"best_of is {body.best_of}, wanted at least n, {body.n}", "best_of")
        fields["n"] = _at_most("best_of", body.best_of, config.max_n)
        if body.best_of > (body.n or 1):
            fields["logprobs"] = 0  # needed to rank the samples
    if body.prompt_logprobs is not None:
        fields["prompt_logprobs"] = _at_most("prompt_logprobs", body.prompt_logprobs, config.max_logprobs)
    if body.allowed_token_ids is not None:
        if not body.allowed_token_ids:
            raise bad_request("allowed_token_ids is empty, wanted at least one token id", "allowed_token_ids")
        fields["allowed_token_ids"] = tuple(served.check_ids(body.allowed_token_ids, "allowed_token_ids"))
    if body.stop is not None:
        fields["stop"] = _stop(body.stop, config)
    if body.stop_token_ids is not None:
        _at_most("stop_token_ids", len(body.stop_token_ids), config.max_stop_token_ids, "entries")
        fields["stop_token_ids"] = tuple(served.check_ids(body.stop_token_ids, "stop_token_ids"))
    if body.logit_bias is not None:
        _at_most("logit_bias", len(body.logit_bias), config.max_logit_bias, "entries")
        fields["logit_bias"] = _logit_bias(body.logit_bias, served)
    return fields


def _at_most(name: str, value: int, cap: int, unit: str = "") -> int:
    if value > cap:
        raise bad_request(f"{name} is {shown(value, 60)} {unit}".rstrip() + f", wanted at most {cap}", param=name)
    return value


def _stop(stop: Any, config: ServerConfig) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise bad_request(f"stop is {shown(stop, 60)}, wanted a string or a list of strings, none of them empty", "stop")
    _at_most("stop", len(strings), config.max_stop, "strings")
    for string in strings:
        _at_most("stop", len(string), config.max_stop_chars, "characters")
    return tuple(strings)


def _logit_bias(bias: dict[str, float], served: Served) -> dict[int, float]:
    if not all(re.fullmatch(r"[0-9]{1,10}", key) for key in bias):
        wrong = next(key for key in bias if not re.fullmatch(r"[0-9]{1,10}", key))
        raise bad_request(f"logit_bias has the key {shown(wrong, 60)}, wanted token ids as keys", "logit_bias")
    served.check_ids([int(key) for key in bias], "logit_bias")
    return {int(key): value for key, value in bias.items()}


def _params(
    fields: dict[str, Any], prompts: list[list[int]], max_tokens: int | None, default: int | None, served: Served
) -> tuple[SamplingParams, ...]:
    """SamplingParams for each prompt. If the client did not set max_tokens, it is `default`, or as many tokens as fit."""
    samples = len(prompts) * fields.get("n", 1)
    _at_most("prompt", samples, served.max_samples, "samples (prompts times n)")
    made: dict[int, SamplingParams] = {}
    params: list[SamplingParams] = []
    for ids in prompts:
        room = served.check_fit(len(ids), max_tokens)
        tokens = max_tokens if max_tokens is not None else min(default or room, room)
        if tokens not in made:
            made[tokens] = _sampling_params({**fields, "max_tokens": tokens})
        params.append(made[tokens])
    return tuple(params)


def _sampling_params(fields: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        # The message of the error begins with the name of the field.
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        known = {field.name for field in dataclasses.fields(SamplingParams)}
        raise bad_request(str(error), param=name if name in known else None) from None
