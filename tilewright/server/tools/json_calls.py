"""Parsers for tool calls in JSON: Hermes (also Qwen 2.5 and 3), Llama 3, Mistral, DeepSeek V3 and V3.1, and the calls that
tilewright's own grammars enforce.

Arguments are passed on exactly as the model wrote them, even if they are cut off or not valid JSON. An object that turns out
not to be a call becomes content, unchanged.
"""

import json
from collections.abc import Callable, Collection

from tilewright.server.tools.reader import Out, Parse, Reader, Take

__all__ = ["deepseek_v3", "deepseek_v31", "hermes", "llama3_json", "mistral", "named_call", "required_calls"]

MAX_NAME = 256
"""Most characters in a function's name."""


def _nothing(text: str) -> None:
    """Drops a text."""


def call_object(reader: Reader, out: Out, *, before: str = "", known: Collection[str] | None = None) -> Parse[bool]:
    """Parse {"name": ..., "arguments" or "parameters": ...} with keys in any order. Returns whether it was a call.

    Args:
        before: text before the object that belongs to the content if the object is not a call.
        known: if given, the object is a call only if it has one of these names and also arguments; otherwise all of it is
            content. None: any name makes it a call.
    """
    raw = [before]
    waiting: list[str] = []  # arguments that came before the name
    name: str | None = None
    to: Take | None = None
    given = closed = False
    if (yield from reader.space(raw.append)) == "{":
        raw.append(reader.take(1))
        while (yield from reader.space(raw.append)) == '"':
            key = yield from _string(reader, raw)
            if (yield from reader.space(raw.append)) != ":":
                break
            raw.append(reader.take(1))
            yield from reader.space(raw.append)
            if key == "name" and name is None:
                name = yield from _string(reader, raw) if (yield from reader.ahead(1)) == '"' else _none(reader)
                if not name or len(name) > MAX_NAME or (known is not None and name not in known):
                    break
                if given or known is None:
                    to = out.call(name)
                    to("".join(waiting))
            elif key in ("arguments", "parameters"):
                given = True
                if name is not None and to is None:
                    to = out.call(name)
                yield from _arguments(reader, to or (lambda text: (raw.append(text), waiting.append(text))))
            else:
                yield from reader.json_value(raw.append if to is None else _nothing)
            if (yield from reader.space(raw.append)) != ",":
                break
            raw.append(reader.take(1))
        closed = (yield from reader.comes("}")) if (yield from reader.ahead(1)) == "}" else False
        if closed:
            raw.append("}")
    if to is None:
        out.content("".join(raw))
        if known is not None and not closed and len(raw) > 1:
            yield from reader.json_value(out.content, depth=1)
        return False
    if closed and not given:
        to("{}")
    return True


def _arguments(reader: Reader, to: Take) -> Parse[None]:
    """Pass on a JSON value as it is written. A string is decoded first, because some models put the arguments into a string."""
    if (yield from reader.space()) != '"':
        yield from reader.json_value(to)
        return
    parts: list[str] = []
    yield from reader.json_string(parts.append)
    text = _read("".join(parts))
    to("".join(parts) if text is None else text)


def _string(reader: Reader, raw: list[str]) -> Parse[str | None]:
    """The text of a JSON string; None if the string is invalid."""
    parts: list[str] = []
    yield from reader.json_string(parts.append)
    raw += parts
    return _read("".join(parts))


def _read(written: str) -> str | None:
    """The text of a JSON string. None if it is invalid or contains a lone surrogate, which no answer can contain."""
    try:
        text = str(json.loads(written))
        text.encode()
    except ValueError:
        return None
    return text


def _none(reader: Reader) -> Parse[str | None]:
    yield from ()
    return None


def hermes(known: Collection[str]) -> Callable[[Reader, Out], Parse[None]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, with text between."""

    def read(reader: Reader, out: Out) -> Parse[None]:
        while (yield from reader.until("<tool_call>", to=out.content)) is not None:
            if (yield from call_object(reader, out, before="<tool_call>")):
                yield from reader.until("</tool_call>", to=_nothing)

    return read


def llama3_json(known: Collection[str]) -> Callable[[Reader, Out], Parse[None]]:
    """{"name": ..., "parameters": {...}}, several separated by ";"; <|python_tag|> or text may come first.

    If the name is not that of a tool, the object is content: the answer itself may be JSON.
    """

    def read(reader: Reader, out: Out) -> Parse[None]:
        while (mark := (yield from reader.until("<|python_tag|>", "{", to=out.content, stay=True))) is not None:
            if mark == "{":
                yield from calls(reader, out)
            else:
                yield from reader.comes(mark)

    def calls(reader: Reader, out: Out) -> Parse[None]:
        while (yield from reader.ahead(1)) == "{" and (yield from call_object(reader, out, known=known)):
            if (yield from reader.space()) in (";", ","):
                reader.take(1)
                yield from reader.space()

    return read


def call_array(reader: Reader, out: Out, *, before: str = "") -> Parse[None]:
    """[{"name": ..., "arguments": {...}}, ...]. The next character must be the opening bracket."""
    reader.take(1)
    before += "["
    while (yield from reader.space()) == "{":
        if not (yield from call_object(reader, out, before=before)):
            return
        before = ""
        if (yield from reader.space()) == ",":
            reader.take(1)
    if (yield from reader.comes("]")) and before:
        out.content(before + "]")


def mistral(known: Collection[str]) -> Callable[[Reader, Out], Parse[None]]:
    """[TOOL_CALLS][{...}, ...]; since version 11 of the tokenizer [TOOL_CALLS]name[ARGS]{...}, with the marks for each call."""

    def read(reader: Reader, out: Out) -> Parse[None]:
        while (yield from reader.until("[TOOL_CALLS]", to=out.content)) is not None:
            first = yield from reader.space()
            if first == "[":
                yield from call_array(reader, out, before="[TOOL_CALLS]")
            elif first == "{":
                yield from call_object(reader, out, before="[TOOL_CALLS]")
            elif first:
                yield from named(reader, out)

    def named(reader: Reader, out: Out) -> Parse[None]:
        name: list[str] = []
        mark = yield from reader.until("{", "[ARGS]", "[CALL_ID]", to=name.append)
        to = out.call("".join(name).strip()[:MAX_NAME])
        if mark == "[CALL_ID]":
            mark = yield from reader.until("{", "[ARGS]", to=_nothing)
        if mark == "{":
            reader.back("{")
        yield from reader.json_value(to)

    return read


BEGIN, SEPARATOR = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>"
END, ALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
ALL_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"


def _deepseek(one: Callable[[Reader, Out], Parse[None]]) -> Callable[[Reader, Out], Parse[None]]:
    def read(reader: Reader, out: Out) -> Parse[None]:
        while (yield from reader.until(ALL_BEGIN, to=out.content)) is not None:
            while (yield from reader.until(BEGIN, ALL_END, to=_nothing)) == BEGIN:
                yield from one(reader, out)

    return read


def deepseek_v3(known: Collection[str]) -> Callable[[Reader, Out], Parse[None]]:
    """The type, a separator, the name, and the arguments in a fenced block of JSON. DeepSeek R1 uses this format too."""

    def one(reader: Reader, out: Out) -> Parse[None]:
        if (yield from reader.until(SEPARATOR, END, to=_nothing)) != SEPARATOR:
            return
        name: list[str] = []
        mark = yield from reader.until("\n", END, to=name.append)
        if mark == "\n":
            to = out.call("".join(name).strip()[:MAX_NAME])
            yield from reader.until("```json\n", to=_nothing)
            # A JSON string contains no raw line break, so this is the end of the block.
            if (yield from reader.until("\n```", END, to=to)) == "\n```":
                yield from reader.until(END, to=_nothing)

    return _deepseek(one)


def deepseek_v31(known: Collection[str]) -> Callable[[Reader, Out], Parse[None]]:
    """The name, a separator and the arguments, between a begin and an end mark."""

    def one(reader: Reader, out: Out) -> Parse[None]:
        name: list[str] = []
        if (yield from reader.until(SEPARATOR, END, to=name.append)) == SEPARATOR:
            yield from reader.until(END, to=out.call("".join(name).strip()[:MAX_NAME]))

    return _deepseek(one)


def named_call(name: str) -> Callable[[Reader, Out], Parse[None]]:
    """The answer consists of the arguments of one function: `tool_choice` names it, and the grammar enforces the format."""

    def read(reader: Reader, out: Out) -> Parse[None]:
        if (yield from reader.space()):
            yield from reader.json_value(out.call(name))

    return read


def required_calls() -> Callable[[Reader, Out], Parse[None]]:
    """The answer is a list of calls: `tool_choice` is "required", and the grammar enforces the format."""

    def read(reader: Reader, out: Out) -> Parse[None]:
        if (yield from reader.space()) == "[":
            yield from call_array(reader, out)

    return read
