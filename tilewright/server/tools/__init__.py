"""Tool calls and reasoning in generated text: formats by name, and which one a model's chat template speaks."""

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
"""Name -> of the tools (function name -> schema of its parameters) what reads an answer."""

# What only templates of one format have, the most telling first.
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
    """The format of calls that a chat template asks for, None if it knows none."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)


def reasons(template: str) -> bool:
    """Whether a chat template speaks of `</think>`."""
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
        tools: function name -> schema of its parameters; none: nothing is read as a call (but harmony has its channels).
        required: the answer is a list of calls, because its grammar asks for one.
        named: it is the arguments of this function.
        reasoning: `<think>` begins a chain of thought; `open_already`: the prompt has begun it.
        most_calls: calls after so many are dropped.
    """
    if required or named is not None:
        read: Read = required_calls() if named is None else named_call(named)
    elif format == "harmony":
        return Parser(harmony, most_calls=most_calls)
    else:
        read = FORMATS[format](tools) if format is not None and tools else plain
    if reasoning:
        read = thinking(read, open_already=open_already)
    return Parser(read, most_calls=most_calls)
