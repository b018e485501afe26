"""The fields of request bodies, with types and ranges, and the handling of unknown fields.

The fields are OpenAI's (`/v1/completions`, `/v1/chat/completions`), with the extensions that open-source servers share. A field
that is not defined here is handled as follows:

- A field in `IGNORED` would have no effect on any answer. It is listed in the response header `x-tilewright-ignored`.
- Any other field is refused with a 400, unless its value is null or has no effect (`NOTHING`).

The schema of /openapi.json is generated from these models, so every number needs a lower and an upper bound here.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tilewright.engine.request import RANGES, shown
from tilewright.server.errors import not_supported

__all__ = ["ChatBody", "CompletionBody", "SamplingBody", "StreamOptions", "ignored_names"]

IGNORED = {
    *(
        "guided_decoding_backend",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
    ),
    *("safety_identifier", "service_tier", "store", "user"),
}

# Fields of other servers -> the values that have no effect there.
NOTHING: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "chat_template_kwargs": ({},),  # of completions
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "early_stopping": (False,),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "min_length": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "modalities": (["text"],),
    "no_repeat_ngram_size": (0,),
    "repeat_penalty": (1, 1.0),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tfs": (1, 1.0),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0, 0.0),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "xtc_probability": (0, 0.0),
}


def _within(name: str, **more: Any) -> Any:
    low, high = RANGES[name]
    return Field(ge=low, le=high, **more)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(_Body):
    """Fields of every body that asks for text."""

    model: str | None = None
    stream: bool | None = None
    min_tokens: Annotated[int | None, _within("min_tokens")] = None
    temperature: Annotated[float | None, _within("temperature")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, _within("top_k")] = None
    min_p: Annotated[float | None, _within("min_p")] = None
    presence_penalty: Annotated[float | None, _within("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, _within("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, _within("repetition_penalty")] = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None
    seed: Annotated[int | None, _within("seed")] = None
    priority: Annotated[int | None, _within("priority")] = None


class CompletionBody(SamplingBody):
    """Fields of /v1/completions, before any rule that looks at more than one of them."""

    prompt: Any = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=0, le=RANGES["max_tokens"][1])] = None
    n: Annotated[int | None, _within("n")] = None
    best_of: Annotated[int | None, _within("n")] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, _within("logprobs")] = None
    prompt_logprobs: Annotated[int | None, _within("prompt_logprobs")] = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ChatBody(CompletionBody):
    """Fields of /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: Annotated[int | None, _within("max_tokens")] = None
    logprobs: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    top_logprobs: Annotated[int | None, _within("logprobs")] = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    allow_special_tokens: bool | None = None
    """Control tokens spelled out in the messages are these tokens; otherwise they are text."""


def ignored_names(
    body: SamplingBody, ignored: Collection[str] = IGNORED, nothing: Mapping[str, tuple[Any, ...]] = NOTHING
) -> tuple[str, ...]:
    """Names of given fields that have no effect here. Raises `ApiError` for an unknown field that has an effect elsewhere."""
    extra = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name, value in extra.items():
        harmless = nothing.get(name, ())
        if name not in ignored and not any(value == one and type(value) is type(one) for one in harmless):
            wanted = " or ".join(["no such field", *(shown(value) for value in harmless)])
            raise not_supported(shown(name).strip("'\""), f"got {shown(value, 60)}, wanted {wanted}")
    return tuple(name for name in extra if name in ignored)
