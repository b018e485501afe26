"""Chat templates: a list of messages -> the text that the model was trained on.

A template comes with a model's files and is run in Jinja's immutable sandbox: it reaches neither the disk nor Python, and what
it may see is what the Hugging Face libraries show to it (messages, tools, special tokens, `raise_exception`, `strftime_now`,
`tojson`, `break` and `continue`). Its size and that of its result are bounded; that it comes to an end is tried once when a
model is loaded (trial.py).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatTemplate", "ChatTemplateError"]

MAX_TEMPLATE_CHARS = 1 << 20
"""The longest templates in use have some 30 thousand characters."""
MAX_TEXT_CHARS = 1 << 26


class ChatTemplateError(ValueError):
    """There is no chat template, it is not valid, or it refuses these messages."""


class ChatTemplate:
    """A compiled template. `special_tokens`: the variables bos_token, eos_token ... that it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(f"the chat template has {len(source)} characters, wanted at most {MAX_TEMPLATE_CHARS}")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        environment.filters["tojson"] = _to_json
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is not valid: {error}") from error
        except (RecursionError, MemoryError, OverflowError, SyntaxError, ValueError) as error:
            # Jinja makes Python of it; what is nested too deeply or holds numbers of a million digits fails there.
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {type(error).__name__}") from error

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, tools: Any = None, **variables: Any
    ) -> str:
        """The text of a conversation, special tokens in it; encode it with `add_special=False`."""
        values = {**self._special_tokens, **variables, "messages": messages, "tools": tools}
        try:
            return _joined(self._template.generate(values, add_generation_prompt=add_generation_prompt))
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            # A template that expects other fields in the messages fails with whatever Python raises.
            raise ChatTemplateError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error


def _joined(pieces: Iterable[str]) -> str:
    text: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_TEXT_CHARS:
            raise ChatTemplateError(f"the chat template makes more than {MAX_TEXT_CHARS} characters, wanted fewer")
        text.append(piece)
    return "".join(text)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
