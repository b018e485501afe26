"""Converts a /v1/responses body to the job of a chat, with the fields of the request that the answer repeats."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from tilewright.engine.request import shown
from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError, bad_request, not_supported
from tilewright.server.fields import ChatBody, SamplingBody
from tilewright.server.prompts import Served
from tilewright.server.protocol import Job, chat_job_of, parse
from tilewright.server.responses.body import ResponsesBody, ignored_in
from tilewright.server.responses.items import messages_of

__all__ = ["ResponsesJob", "responses_job"]

NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input", "prompt": "input"}
"""Fields of a chat -> the fields of a response, for error messages."""


@dataclass(frozen=True, kw_only=True)
class ResponsesJob(Job):
    """A job. `repeated`: the fields of the request that the answer repeats."""

    repeated: dict[str, Any]

    @property
    def prefix(self) -> str:
        """The prefix of the answer's id."""
        return "resp_"

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return "/v1/responses"


def responses_job(raw: bytes, served: Served, config: ServerConfig) -> ResponsesJob:
    """The job of a /v1/responses body. Raises `ApiError`."""
    body = parse(raw, ResponsesBody)
    ignored = ignored_in(body)
    messages, places = messages_of(body.input, body.instructions, config.max_messages)
    tools, choice = _tools(body)
    fields = {name: getattr(body, name) for name in SamplingBody.model_fields}
    fields |= {"messages": messages, "tools": tools, "tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls}
    fields |= {"max_completion_tokens": body.max_output_tokens, "response_format": _format(body.text)}
    fields |= {"chat_template_kwargs": _variables(body)}
    wants_logprobs = "message.output_text.logprobs" in (body.include or ())
    if wants_logprobs or body.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    try:
        job = chat_job_of(ChatBody.model_validate(fields), served, config)
    except ApiError as error:
        raise _renamed(error, places) from None
    if job.logprobs and job.answering is not None:
        wanted = "request them only for a model that writes plain text, without tools"
        raise not_supported(
            "include", f"log-probabilities of an answer from which reasoning and tool calls are parsed; {wanted}"
        )
    values: dict[str, Any] = {field.name: getattr(job, field.name) for field in dataclasses.fields(Job)}
    values |= {"ignored": ignored, "grammar_field": NAMES.get(job.grammar_field or "", job.grammar_field)}
    return ResponsesJob(**values, repeated=_repeated(body, job))


def _renamed(error: ApiError, places: list[str]) -> ApiError:
    """An error of the chat, with the chat's field names replaced by those of this body."""

    def place(found: re.Match[str]) -> str:
        return places[int(found[1])] if int(found[1]) < len(places) else found[0]

    told = error.body["error"]
    param, message = told["param"] or "", told["message"]
    for old, new in NAMES.items():
        if param == old:
            param, message = new, re.sub(rf"\b{old}\b", new, message)
    param, message = (re.sub(r"\bmessages\.(\d+)", place, text) for text in (param, message))
    param, message = (re.sub(r"\b(input|instructions)\.content", r"\1", text) for text in (param, message))
    if param.startswith("tools."):
        param, message = (re.sub(r"\b(tools\.\d+)\.function\b", r"\1", text) for text in (param, message))
    return ApiError(error.status, message, type=told["type"], param=param or None, code=told["code"], headers=error.headers)


def _tools(body: ResponsesBody) -> tuple[Any, Any]:
    """(tools, tool_choice) in the format of a chat."""
    tools, choice = body.tools, body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed, choice = choice.get("tools"), choice.get("mode")
        if not isinstance(allowed, list) or not all(isinstance(one, dict) for one in allowed):
            raise bad_request("tool_choice.tools is not a list of tools, wanted a list of some of the tools", "tool_choice")
        names = [one.get("name") for one in allowed]
        if isinstance(tools, list):  # otherwise the chat refuses them
            tools = [tool for tool in tools if not isinstance(tool, dict) or tool.get("name") in names]
    elif isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(choice, dict):
        raise not_supported("tool_choice", f"got type {shown(choice.get('type'), 60)}, wanted function or allowed_tools")
    return [_tool(tool) for tool in tools] if isinstance(tools, list) else tools, choice


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    kept = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": tool.get("type"), "function": kept}


def _format(text: dict[str, Any] | None) -> Any:
    """The `response_format` of the chat."""
    value = (text or {}).get("format")
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {key: inner for key, inner in value.items() if key != "type"}}


def _variables(body: ResponsesBody) -> dict[str, Any] | None:
    """Variables for the chat template. `reasoning.effort` is passed under the names that templates use for it."""
    effort = (body.reasoning or {}).get("effort")
    if effort is None:
        return body.chat_template_kwargs
    if not isinstance(effort, str) or not re.fullmatch(r"[a-z]{1,16}", effort):
        raise bad_request(f"reasoning.effort is {shown(effort, 60)}, wanted a word such as low", "reasoning.effort")
    told: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        told |= {"enable_thinking": False, "thinking": False}
    return told | (body.chat_template_kwargs or {})


def _repeated(body: ResponsesBody, job: Job) -> dict[str, Any]:
    """The fields of the request that the answer repeats."""
    params = job.params[0]
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or () if isinstance(tool, dict)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }
