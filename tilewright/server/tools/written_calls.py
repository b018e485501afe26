"""Parsers for tool calls that are not JSON: Qwen3-Coder's XML, and calls in Python syntax. Their arguments become JSON.

In the XML format the type of a parameter comes from the function's schema, because its text alone does not determine the type.
A text that does not fit the type becomes a string.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.server.tools.reader import Out, Parse, Reader, Take

__all__ = ["kinds_of", "pythonic", "qwen3_coder"]

MAX_NAME = 256
_SPOKEN = {"float": "number", "double": "number", "int": "integer", "bool": "boolean", "str": "string", "dict": "object"}
"""Type names that are not part of JSON schema but occur in schemas -> the types of JSON schema."""
_QUOTED = json.JSONEncoder(ensure_ascii=False).encode
_CALL = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_MAY_CALL = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*)?")


def kinds_of(schema: Any) -> frozenset[str]:
    """The JSON types that the schema of a parameter allows; {"any"} if the schema does not restrict them."""
    if not isinstance(schema, Mapping):
        return frozenset({"any"})
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({_SPOKEN.get(kind, kind)})
    if isinstance(kind, list):
        return frozenset(_SPOKEN.get(item, item) for item in kind if isinstance(item, str))
    if isinstance(schema.get("enum"), list) and all(isinstance(item, str) for item in schema["enum"]):
        return frozenset({"string"})
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return frozenset().union(*(kinds_of(item) for item in schema[name]))
    return frozenset({"any"})


def _typed(text: str, kinds: frozenset[str]) -> str:
    """A parameter's text as a JSON value of one of the kinds, or as a JSON string if it fits none of them."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            if read is ast.literal_eval:
                written.encode()  # fails for a lone surrogate, which cannot be sent
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if "any" in kinds or _kind(value) & kinds:
            # Valid JSON keeps the model's spelling: 1e3 stays 1e3.
            return text.strip() if read is json.loads else written
    lowered = text.strip().lower()
    if "boolean" in kinds and lowered in ("true", "false"):
        return lowered
    return "null" if "null" in kinds and lowered in ("null", "none") else _QUOTED(text)


def _kind(value: Any) -> set[str]:
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"string"} if isinstance(value, str) else {"array" if isinstance(value, (list, tuple)) else "object"}


def qwen3_coder(tools: Mapping[str, Any]) -> Callable[[Reader, Out], Parse[None]]:
    """<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>; the outer tags may be missing.

    tools: function name -> schema of its parameters.
    """

    def read(reader: Reader, out: Out) -> Parse[None]:
        while (mark := (yield from reader.until("<tool_call>", "<function=", to=out.content))) is not None:
            if mark == "<tool_call>":
                space: list[str] = []
                yield from reader.space(space.append)
                if not (yield from reader.comes("<function=")):
                    out.content(mark + "".join(space))
                    continue
            name: list[str] = []
            end = yield from reader.until(">", "\n", to=name.append)
            if end != ">":
                out.content("<function=" + "".join(name) + (end or ""))
                continue
            yield from function(reader, out, "".join(name).strip()[:MAX_NAME])
            yield from reader.space()
            yield from reader.comes("</tool_call>")

    def function(reader: Reader, out: Out, name: str) -> Parse[None]:
        to = out.call(name)
        schema = tools.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        properties = properties if isinstance(properties, Mapping) else {}
        missing = [key for key in properties if isinstance(key, str)]
        first, mark = True, (yield from reader.until("<parameter=", "</function>", to=_nothing))
        while mark not in (None, "</function>"):
            if mark == "<parameter=":
                parts: list[str] = []
                if (yield from reader.until(">", to=parts.append)) is None:
                    return
                key = "".join(parts)
            else:
                key = str(mark).removeprefix(_NEXT)
            missing = [one for one in missing if one != key]
            to(("{" if first else ", ") + _QUOTED(key) + ": ")
            first = False
            mark = yield from _parameter(reader, to, kinds_of(properties.get(key)), missing)
            if mark == CLOSE:
                mark = yield from reader.until("<parameter=", "</function>", to=_nothing)
        if mark is not None:
            to("{}" if first else "}")

    return read


CLOSE, _NEXT, _END = "</parameter>", "\n<parameter=", "\n</function>\n</tool_call>"


def _nothing(text: str) -> None:
    """Drops a text."""


def _parameter(reader: Reader, to: Take, kinds: frozenset[str], missing: Sequence[str]) -> Parse[str | None]:
    """Parse the value after <parameter=KEY>. One line break at each end belongs to the tags. Returns the tag that ended it.

    Models sometimes omit </parameter>. Then the value ends at a line that begins another parameter which is still `missing`
    (returned without its ">"), or at the end of the call as the template writes it (returned as "</function>").
    """
    held, text = "", list[str]()
    quoted = kinds == {"string"}

    def take(part: str) -> None:
        nonlocal held
        part = held + part
        held = "\n" if part.endswith("\n") else ""
        part = part.removesuffix("\n")
        if quoted:
            to(_QUOTED(part)[1:-1])
        else:
            text.append(part)

    yield from reader.comes("\n")
    if quoted:
        to('"')
    while (mark := (yield from reader.until(CLOSE, _NEXT, _END, to=take))) == _NEXT:
        for key in missing:
            if (yield from reader.comes(key + ">")):
                mark = _NEXT + key
                break
        else:
            take(_NEXT)
            continue
        break
    value = "".join(text)
    if mark is not None:
        to('"' if quoted else _typed(value, kinds))
    elif quoted:
        to("\\n" if held else "")
    else:
        to(value + held)
    return "</function>" if mark == _END else mark


def pythonic(tools: Mapping[str, Any]) -> Callable[[Reader, Out], Parse[None]]:
    """The whole answer is [name(key=value, ...), ...] with Python literals. Llama 3.2 and 4 use this format."""

    def read(reader: Reader, out: Out) -> Parse[None]:
        space: list[str] = []
        yield from reader.space(space.append)
        yield from reader.comes("<|python_start|>")
        yield from reader.space(space.append)
        if not (yield from _begins_call(reader)):
            out.content("".join(space))
            yield from reader.until("<|python_end|>", to=out.content)
            return
        reader.take(1)
        while (yield from reader.space()) not in ("", "]"):
            yield from _python_call(reader, out)
            if (yield from reader.space()) == ",":
                reader.take(1)
            elif (yield from reader.ahead(1)) != "]":
                break
        yield from reader.comes("]")
        yield from reader.comes("<|python_end|>")
        yield from reader.until("<|python_end|>", to=out.content)

    return read


def _begins_call(reader: Reader) -> Parse[bool]:
    """Whether "[name(" comes next."""
    count = 1
    while True:
        seen = yield from reader.ahead(count)
        if _CALL.fullmatch(seen):
            return True
        if len(seen) < count or count > MAX_NAME or not _MAY_CALL.fullmatch(seen):
            return False
        count += 1


def _python_call(reader: Reader, out: Out) -> Parse[None]:
    name: list[str] = []
    if (yield from reader.until("(", "]", to=name.append)) != "(":
        out.content("".join(name))
        return
    to, first = out.call("".join(name).strip()[:MAX_NAME]), True
    while (char := (yield from reader.space())) not in ("", ")"):
        if char == ",":
            reader.take(1)
            continue
        key: list[str] = []
        mark = yield from reader.until("=", ")", to=key.append)
        if mark != "=":
            if mark == ")":
                reader.back(")")
            break
        to(("{" if first else ", ") + _QUOTED("".join(key).strip()) + ": ")
        first = False
        value: list[str] = []
        closed = yield from _python_value(reader, value.append)
        text = "".join(value)
        to(_typed(text.strip(), frozenset({"any"})) if closed else text)
        if not closed:
            return
    if (yield from reader.comes(")")):
        to("{}" if first else "}")


def _python_value(reader: Reader, to: Take) -> Parse[bool]:
    """Consume a literal, up to the comma or closing bracket after it. Returns whether there is one."""
    depth = 0
    while True:
        part: list[str] = []
        found = yield from reader.until(*"\"'()[]{},", to=part.append)
        to("".join(part))
        if found is None:
            return False
        if depth == 0 and found in (",", ")"):
            reader.back(found)
            return True
        to(found)
        if found in ("'", '"'):
            if not (yield from _python_string(reader, found, to)):
                return False
        elif found != ",":
            depth += 1 if found in "([{" else -1


def _python_string(reader: Reader, quote: str, to: Take) -> Parse[bool]:
    while (found := (yield from reader.until(quote, "\\", to=to))) is not None:
        to(found)
        if found == quote:
            return True
        escaped = yield from reader.ahead(1)
        to(reader.take(len(escaped)))
    return False
