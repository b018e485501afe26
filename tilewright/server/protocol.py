"""What a client may ask for: a request body becomes a `Job`, or an `ApiError` that names the field.

The fields are OpenAI's (`/v1/completions`, `/v1/chat/completions`), with the extensions that open-source servers share: top_k,
min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids. Three rules:

- A field that we do not know, or that has no effect here (user, metadata, store ...), is ignored and named in the response
  header `x-tilewright-ignored`.
- A field that would change the result and is not supported (tools, response_format, suffix ...) is refused with a 400.
- Every size that a client names has a cap, in `ServerConfig`. Ranges of sampling parameters are `SamplingParams`' own.

Not here: tools and function calls, images and audio, structured output, best_of beyond n, suffix.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from tilewright.engine.request import SamplingParams
from tilewright.server.config import ServerConfig
from tilewright.server.errors import bad_request, not_supported
from tilewright.server.prompts import Served, chat_prompt, read_prompts

__all__ = ["ChatBody", "CompletionBody", "Job", "chat_job", "completion_job", "parse"]

DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions generates when max_tokens is not given; OpenAI's number."""

# Fields that would change the result -> the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "web_search_options": (),
}

MAX_IGNORED_NAMES = 20
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Body):
    """`stream_options`: only include_usage has an effect."""

    include_usage: bool | None = None


class CompletionBody(_Body):
    """Fields of /v1/completions, before any rule that looks at more than one of them."""

    model: str | None = None
    prompt: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(CompletionBody):
    """Fields of /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    top_logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked request: what to run and how to answer."""

    chat: bool
    prompts: tuple[list[int], ...]
    """Token ids, one list for each prompt."""
    params: tuple[SamplingParams, ...]
    """One for each prompt: they differ only in max_tokens, where the client left it open."""
    echo: tuple[str, ...] = ()
    """The text to put before each answer; empty when echo is off."""
    only_echo: bool = False
    """max_tokens 0: the prompt is scored and nothing is generated."""
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    """Names of fields without effect."""

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
    """A JSON body as `body`. Raises `ApiError` (400) naming the field, what it got and what was wanted."""
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
    where = ".".join(str(part) for part in first["loc"])
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    raise bad_request(f"{where} is {_short(first['input'])}, wanted {wanted}", param=where)


def _short(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else words[:57] + "..."


def completion_job(raw: bytes, served: Served, config: ServerConfig) -> Job:
    """The job that a /v1/completions body asks for. Raises `ApiError`."""
    body = parse(raw, CompletionBody)
    served.check_name(body.model)
    ignored = _unknown(body)
    prompts = read_prompts(body.prompt, served, config.max_prompts)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise not_supported("best_of", f"wanted {body.n or 1}, the value of n, got {body.best_of}")
    fields = _sampling_fields(body, served, config)
    if body.logprobs is not None:
        fields["logprobs"] = _at_most("logprobs", body.logprobs, config.max_logprobs)
        if body.echo:
            fields["prompt_logprobs"] = body.logprobs
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
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ignored=ignored,
    )


def chat_job(raw: bytes, served: Served, config: ServerConfig) -> Job:
    """The job that a /v1/chat/completions body asks for. Raises `ApiError`."""
    body = parse(raw, ChatBody)
    served.check_name(body.model)
    unused = ("prompt", "echo", "best_of")
    ignored = (*(name for name in unused if getattr(body, name) is not None), *_unknown(body))
    prompts = [chat_prompt(body.messages, served, config.max_messages)]
    fields = _sampling_fields(body, served, config)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is set, wanted logprobs: true with it", "top_logprobs")
    if body.logprobs:
        fields["logprobs"] = _at_most("top_logprobs", body.top_logprobs or 0, config.max_logprobs)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Job(
        chat=True,
        prompts=tuple(prompts),
        params=_params(fields, prompts, asked, None, served),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ignored=ignored,
    )


def _unknown(body: CompletionBody) -> tuple[str, ...]:
    """Names of the fields that have no effect. Raises `ApiError` for those that would change the result."""
    extra = body.model_extra or {}
    for name, harmless in REFUSED.items():
        value = extra.get(name)
        if value is not None and value not in harmless:
            wanted = " or ".join(["no such field", *(_short(v) for v in harmless)])
            raise not_supported(name, f"got {_short(value)}, wanted {wanted}")
    return tuple(name for name, value in extra.items() if value is not None and name not in REFUSED)


# Fields that SamplingParams knows by the same name and checks.
_SAME = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos", "seed", "n"),
)


def _sampling_fields(body: CompletionBody, served: Served, config: ServerConfig) -> dict[str, Any]:
    """Arguments of SamplingParams that do not depend on the prompt."""
    fields = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    _at_most("n", body.n or 1, config.max_n)
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
        raise bad_request(f"{name} is {_short(value)} {unit}".rstrip() + f", wanted at most {cap}", param=name)
    return value


def _stop(stop: Any, config: ServerConfig) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise bad_request(f"stop is {_short(stop)}, wanted a string or a list of strings, none of them empty", "stop")
    _at_most("stop", len(strings), config.max_stop, "strings")
    for string in strings:
        _at_most("stop", len(string), config.max_stop_chars, "characters")
    return tuple(strings)


def _logit_bias(bias: dict[str, float], served: Served) -> dict[int, float]:
    if not all(re.fullmatch(r"[0-9]{1,10}", key) for key in bias):
        wrong = next(key for key in bias if not re.fullmatch(r"[0-9]{1,10}", key))
        raise bad_request(f"logit_bias has the key {_short(wrong)}, wanted token ids", "logit_bias")
    served.check_ids([int(key) for key in bias], "logit_bias")
    return {int(key): value for key, value in bias.items()}


def _params(
    fields: dict[str, Any], prompts: list[list[int]], max_tokens: int | None, default: int | None, served: Served
) -> tuple[SamplingParams, ...]:
    """SamplingParams for each prompt. Where the client left max_tokens open it is `default`, or all that fits."""
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
        # Its first word is the name of the field.
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        known = {field.name for field in dataclasses.fields(SamplingParams)}
        raise bad_request(str(error), param=name if name in known else None) from None
