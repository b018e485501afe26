"""Tool calls and reasoning in generated text: the formats by name, and detection of a model's format from its chat template."""

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.server.tools.channels import harmony, plain, thinking
from tilewright.server.tools.json_calls import (
    deepseek_v3,
    deepseek_v31,
    hermes,
    llama3_json,
    mistral,
    named_call,
    required_calls,
)
from tilewright.server.tools.reader import Event, Out, Parse, Parser, Reader
from tilewright.server.tools.written_calls import pythonic, qwen3_coder

__all__ = ["FORMATS", "Event", "Parser", "format_of", "parser_of", "reasons"]

Read = Callable[[Reader, Out], Parse[None]]
FORMATS: dict[str, Callable[[Mapping[str, Any]], Read]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "harmony": lambda tools: harmony,
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
}
"""Name of a format -> function that creates a parser from the tools (function name -> schema of its parameters)."""

_CALLS = {"hermes": "{", "qwen3_coder": "<function="}
"""The text of a call directly after `<tool_call>`."""

# Strings that occur only in templates of one format. The first match counts, so specific formats come first.
_SIGNS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json")),
    ("deepseek_v31", ("<\uff5ctool\u2581call\u2581begin\uff5c>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("func_name1(params_name1=",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
    ("llama3_json", ("<|python_tag|>",)),
)


def format_of(template: str) -> str | None:
    """The format of tool calls that a chat template uses; None if it has none of the known ones."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)


def reasons(template: str) -> bool:
    """Whether a chat template contains `</think>`."""
    return "</think>" in template


def parser_of(
    format: str | None,
    tools: Mapping[str, Any],
    *,
    required: bool = False,
    named: str | None = None,
    reasoning: bool = False,
    open_already: bool = False,
    most_calls: int | None = None,
) -> Parser:
    """A parser for one answer.

    Args:
        format: one of `FORMATS`; None: no calls.
        tools: function name -> schema of its parameters. If empty, nothing is parsed as a call, except in harmony's channels.
        required: the answer is a list of calls, because its grammar enforces that.
        named: the answer consists of the arguments of this function.
        reasoning: `<think>` begins the reasoning. `open_already`: the prompt already contains `<think>`.
        most_calls: calls after this number are dropped.
    """
    if required or named is not None:
        read: Read = required_calls() if named is None else named_call(named)
    elif format == "harmony":
        return Parser(harmony, most_calls=most_calls)
    else:
        read = FORMATS[format](tools) if format is not None and tools else plain
    if reasoning:
        read = thinking(read, open_already=open_already, call=_CALLS.get(format) if tools and format else None)
    return Parser(read, most_calls=most_calls)
