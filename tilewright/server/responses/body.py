"""The fields of /v1/responses: types and ranges. Fields that need stored answers are refused, as this server stores none."""

from typing import Annotated, Any

from pydantic import Field

from tilewright.engine.request import RANGES, shown
from tilewright.server.errors import bad_request, not_supported
from tilewright.server.fields import SamplingBody, ignored_names

__all__ = ["ResponsesBody", "ignored_in"]

NO_STORE = "this server does not store answers"
INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
"""The accepted values of `include`. The second has no effect here, because reasoning is plain text."""
MAX_METADATA = 16

IGNORED = {
    *("max_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "stream_options", "user"),
}
NOTHING: dict[str, tuple[Any, ...]] = {"background": (False,), "modalities": (["text"],), "truncation": ("disabled",)}
"""Fields that would change an answer -> the values that have no effect."""


class ResponsesBody(SamplingBody):
    """Fields of /v1/responses, before any rule that looks at more than one of them."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=RANGES["max_tokens"][1])] = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=RANGES["logprobs"][1])] = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


def ignored_in(body: ResponsesBody) -> tuple[str, ...]:
    """Names of given fields that have no effect. Raises `ApiError` for fields and values that are not supported."""
    if body.store:
        raise not_supported("store", f"got true, wanted false: {NO_STORE}")
    if body.previous_response_id is not None:
        raise not_supported("previous_response_id", f"{NO_STORE}; give the earlier items in input instead")
    if body.conversation is not None:
        raise not_supported("conversation", f"{NO_STORE}; give the earlier items in input instead")
    for name in body.include or ():
        if name not in INCLUDES:
            raise not_supported("include", f"got {shown(name, 60)}, wanted {' or '.join(INCLUDES)}")
    if body.metadata is not None and len(body.metadata) > MAX_METADATA:
        raise bad_request(f"metadata has {len(body.metadata)} keys, wanted at most {MAX_METADATA}", "metadata")
    summary = [f"reasoning.{name}" for name in ("summary", "generate_summary") if (body.reasoning or {}).get(name) is not None]
    verbosity = ["text.verbosity"] if (body.text or {}).get("verbosity") is not None else []
    return (*ignored_names(body, IGNORED, NOTHING), *summary, *verbosity)
