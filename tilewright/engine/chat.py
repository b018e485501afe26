"""Chat templates: a list of messages -> text in the format that the model was trained on.

A template comes with a model's files and runs in Jinja's immutable sandbox, without access to the disk or to Python. It can use
the same names as in the Hugging Face libraries: messages, tools, special tokens, `raise_exception`, `strftime_now`, `tojson`,
`break` and `continue`; `generation` blocks only mark generated text and change nothing. The size and running time of a
template, the texts that it joins and its result are bounded. Filters are not bounded. Therefore a template is tried once in a
separate process when a model is loaded (trial.py).
"""

import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatTemplate", "ChatTemplateError", "ChatTemplateExhausted"]

MAX_TEMPLATE_CHARS = 1 << 20
"""The longest templates in use have about 30 thousand characters."""
MAX_TEXT_CHARS = 1 << 26
MAX_SECONDS = 2.0
"""Time limit for one conversation; thousands of messages take milliseconds."""
MAX_PRODUCT = 1 << 20
"""Most items of a repeated text or list, and most bits of a number."""
_WIDE = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")


class ChatTemplateError(ValueError):
    """There is no chat template, it is not valid, it refuses these messages, or it takes too long."""


class ChatTemplateExhausted(ChatTemplateError):
    """The template exceeds its time or memory limit; it has not refused the messages."""


class _TooLarge(SecurityError):
    """A result beyond the sandbox's bounds."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: renders the content of the block unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """The nodes of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with bounded results; otherwise Python would really compute `"a" * 10**12`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """left operator right. Raises _TooLarge if the result would be too large."""
        sequences = [value for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
        numbers = [abs(value) for value in (left, right) if isinstance(value, int)]
        if operator == "+" and sum(map(len, sequences)) > MAX_TEXT_CHARS:
            raise _TooLarge(f"a text or list of more than {MAX_TEXT_CHARS} items")
        if operator == "*" and sequences and numbers and len(sequences[0]) * numbers[0] > MAX_PRODUCT:
            raise _TooLarge(f"a repeated text or list of more than {MAX_PRODUCT} items")
        if operator == "*" and len(numbers) == 2 and sum(number.bit_length() for number in numbers) > MAX_PRODUCT:
            raise _TooLarge(f"a product of more than {MAX_PRODUCT} bits")
        if operator == "**" and len(numbers) == 2 and numbers[0].bit_length() * numbers[1] > MAX_PRODUCT:
            raise _TooLarge(f"a power of more than {MAX_PRODUCT} bits")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise _TooLarge("a format with a width that is not written out, or of more than 4 digits")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled template. `special_tokens`: the variables bos_token, eos_token ... of the template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(f"the chat template has {len(source)} characters, wanted at most {MAX_TEMPLATE_CHARS}")
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        environment.filters["tojson"] = _to_json
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is not valid: {_words(error)}") from error
        except (RecursionError, MemoryError, OverflowError, SyntaxError, ValueError) as error:
            # Jinja compiles it to Python, which fails for code that is nested too deeply or has numbers of a million digits.
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {type(error).__name__}") from error

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, tools: Any = None, **variables: Any
    ) -> str:
        """The text of a conversation, including special tokens; encode it with `add_special=False`.

        Raises:
            ChatTemplateError: the template refuses the messages, fails on them, or takes too long.
        """
        values = {**self._special_tokens, **variables, "messages": messages, "tools": tools}
        try:
            with _Deadline(MAX_SECONDS):
                return _joined(self._template.generate(values, add_generation_prompt=add_generation_prompt))
        except TemplateError as error:
            kind = ChatTemplateExhausted if isinstance(error, _TooLarge) else ChatTemplateError
            raise kind(f"the chat template refuses these messages: {_words(error)}") from error
        except ChatTemplateError:
            raise
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
            # A template that expects other fields in the messages may raise any of these Python errors.
            words = f"{type(error).__name__}: {_words(error)}"
            kind = ChatTemplateExhausted if isinstance(error, MemoryError) else ChatTemplateError
            raise kind(f"the chat template fails on these messages: {words}") from error


class _Deadline:
    """Ends a template that runs too long, with an exception at a line of its own code, in its own thread.

    Python offers no other way to end code in a thread. If a debugger or coverage tool already traces this thread, there is no
    deadline.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._end_s = time.monotonic() + seconds
        self._own = sys.gettrace() is None

    def __enter__(self) -> None:
        if self._own:
            sys.settrace(self._enter_frame)

    def __exit__(self, *_: object) -> None:
        if self._own:
            sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._at_line if frame.f_code.co_filename == "<template>" else None

    def _at_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > self._end_s:
            raise ChatTemplateExhausted(f"the chat template was not done with these messages after {self._seconds:g} s")
        return self._at_line


def _words(error: BaseException) -> str:
    words = str(error)
    return words if len(words) <= 300 else words[:297] + "..."


def _joined(pieces: Iterable[str]) -> str:
    text: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_TEXT_CHARS:
            raise ChatTemplateExhausted(f"the chat template makes more than {MAX_TEXT_CHARS} characters, wanted fewer")
        text.append(piece)
    return "".join(text)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes text for HTML, but models were not trained on escaped text.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
