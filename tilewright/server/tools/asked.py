"""The tools of a chat request: checks the client's fields, and provides the template's tools and the grammar of the answer."""

import re
from dataclasses import dataclass
from secrets import choice, token_hex
from string import ascii_letters, digits
from typing import Any

from tilewright.engine.grammar import Grammar
from tilewright.engine.request import shown
from tilewright.server.errors import bad_request, not_supported
from tilewright.server.fields import ChatBody
from tilewright.server.tools import Parser, format_of, parser_of, reasons

__all__ = ["Answering", "Asked", "answering"]

MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
"""JSON schema keywords whose value is a mapping of user-defined names to schemas."""
_DATA = ("const", "enum", "default", "examples")
"""Keywords whose value is not a schema."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Checked tools."""

    tools: tuple[dict[str, Any], ...] = ()
    """The tools for the template; empty if the answer may not contain calls."""
    choice: str = "auto"
    """auto, none, required, or the name of a function (then `named` is true)."""
    named: bool = False
    parallel: bool = True

    @classmethod
    def of(cls, body: ChatBody) -> "Asked":
        """The checked tools of a body. Raises `ApiError` with the name of the wrong field."""
        tools = _tools(body.tools)
        names = [tool["function"]["name"] for tool in tools]
        word, named = _choice(body.tool_choice, names)
        parallel = body.parallel_tool_calls is not False
        return cls(tools=() if word == "none" and not named else tools, choice=word, named=named, parallel=parallel)

    @property
    def schemas(self) -> dict[str, Any]:
        """Function name -> schema of its parameters."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}

    def grammar(self) -> Grammar | None:
        """The grammar that forces the requested calls; None if the model may choose whether to call a function."""
        if not self.tools or (self.choice == "auto" and not self.named):
            return None
        schemas = {name: schema if isinstance(schema, dict) else {"type": "object"} for name, schema in self.schemas.items()}
        if self.named:
            return Grammar.json_schema({"type": "object", **schemas[self.choice]})
        # References to definitions start at the root of a schema. So the functions' definitions move there, with unique names.
        defs: dict[str, Any] = {}
        calls = []
        for at, (name, schema) in enumerate(schemas.items()):
            moved = _moved(schema, f"{at}_", defs)
            properties = {"name": {"const": name}, "parameters": {"type": "object", **moved}}
            calls.append(
                {"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False}
            )
        whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            whole["maxItems"] = 1
        return Grammar.json_schema({**whole, **({"$defs": defs} if defs else {})})


def _moved(schema: Any, prefix: str, defs: dict[str, Any]) -> Any:
    """A schema whose definitions are moved into `defs`, with prefixed names. Raises `ApiError` for other kinds of reference."""
    if isinstance(schema, list):
        return [_moved(item, prefix, defs) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("$defs", "definitions") and isinstance(value, dict):
            for name, item in value.items():
                defs[prefix + name] = _moved(item, prefix, defs)
        elif key in _BY_NAME and isinstance(value, dict):
            made[key] = {name: _moved(item, prefix, defs) for name, item in value.items()}
        elif key == "$ref" and isinstance(value, str):
            found = re.fullmatch(r"#/(?:\$defs|definitions)/([^/]+)", value)
            if found is None:
                raise bad_request(f"tools contains the reference {shown(value, 60)}, wanted #/$defs/...", "tools")
            made[key] = f"#/$defs/{prefix}{found[1]}"
        else:
            made[key] = value if key in _DATA else _moved(value, prefix, defs)
    return made


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise bad_request(f"tools is {shown(tools, 60)}, wanted a list of at most {MAX_TOOLS} functions", "tools")
    for at, tool in enumerate(tools):
        where = f"tools.{at}"
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            raise bad_request(f"{where} is {shown(tool, 60)}, wanted {{type: 'function', function: {{name, ...}}}}", where)
        if tool.get("type") != "function":
            raise not_supported(where, f"got type {shown(tool.get('type'), 60)}, wanted 'function'")
        function = tool["function"]
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            wanted = "wanted up to 64 letters, digits, underscores, dots and dashes"
            raise bad_request(f"{where}.function.name is {shown(name, 60)}, {wanted}", f"{where}.function.name")
        if schema is not None and not isinstance(schema, dict):
            raise bad_request(
                f"{where}.function.parameters is not a JSON schema, wanted an object", f"{where}.function.parameters"
            )
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("tools contains a function twice, wanted each name only once", "tools")
    return tuple(tools)


def _choice(choice: Any, names: list[str]) -> tuple[str, bool]:
    if choice is None or choice in ("auto", "none"):
        return choice or "auto", False
    if not names:
        raise bad_request("tool_choice is set without tools, wanted tools as well", "tool_choice")
    if choice == "required":
        return "required", False
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        wanted = "auto, none, required, or {type: 'function', function: {name}} with the name of one of the tools"
        raise bad_request(f"tool_choice is {shown(choice, 100)}, wanted {wanted}", "tool_choice")
    return str(name), True


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How the answers of one chat are parsed."""

    asked: Asked
    format: str | None
    reasoning: bool
    open_already: bool

    def parser(self) -> Parser:
        """A parser for one sample."""
        asked = self.asked
        return parser_of(
            self.format,
            asked.schemas,
            required=asked.choice == "required" and not asked.named,
            named=asked.choice if asked.named else None,
            reasoning=self.reasoning,
            open_already=self.open_already,
            most_calls=None if asked.parallel else 1,
        )

    def call_id(self) -> str:
        """A new id for a call. Mistral's templates need nine letters and digits."""
        if self.format == "mistral":
            return "".join(choice(ascii_letters + digits) for _ in range(9))
        return f"call_{token_hex(12)}"

    def finish_reason(self, reason: str | None, calls: int) -> str | None:
        """As in OpenAI's API: "tool_calls" replaces "stop" if there are calls, unless the request named the function."""
        return "tool_calls" if reason == "stop" and calls and not self.asked.named else reason


def answering(asked: Asked, template: str, prompt_end: str, chosen: str = "auto") -> Answering | None:
    """How to parse the answers of a chat; None if they are plain text.

    Args:
        template: the source of the chat template.
        prompt_end: the end of the prompt's text, including special tokens.
        chosen: the format of calls, "auto" (found from the template) or "none".

    Raises:
        ApiError: 400; the model does not support the requested calls.
    """
    format = format_of(template) if chosen == "auto" else None if chosen == "none" else chosen
    forced = asked.named or asked.choice == "required"
    if asked.tools and not forced and format is None:
        wanted = "use a model with tools in its template, the option --tool-format, or a tool_choice other than auto"
        raise not_supported("tools", f"this model's chat template has no known format of tool calls; {wanted}")
    if forced and format == "harmony":
        raise not_supported(
            "tool_choice", "this model's answers are divided into channels, for which tool_choice must be auto or none"
        )
    reasoning = reasons(template) and format != "harmony"
    if format != "harmony" and not reasoning and not asked.tools:
        return None
    return Answering(asked=asked, format=format, reasoning=reasoning, open_already=prompt_end.rstrip().endswith("<think>"))
