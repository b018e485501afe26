"""Structured output: converts the fields of a request to a `Grammar`, and has the grammar compiled before the engine uses it.

    response_format      {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ...}}
    structured_outputs   {"json" | "regex" | "choice" | "grammar" | "json_object": ...}
    guided_json, guided_regex, guided_choice, guided_grammar, regex, choice, grammar

A request may use at most one of them. Not supported: structural tags, and `strict` of single functions (use `tool_choice`
instead).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tilewright.engine.grammar import Grammar
from tilewright.engine.grammar_masks import GrammarError
from tilewright.engine.request import shown
from tilewright.server.errors import bad_request, overloaded, unavailable
from tilewright.server.fields import CompletionBody
from tilewright.server.link import EngineLink, EngineStopped

__all__ = ["GrammarGate", "grammar_of"]

MAX_WAITING = 32
"""Most grammars that wait to be compiled at the same time."""
MAX_REFUSED = 1024
"""Most refusals that are remembered."""


def _json_object(value: Any) -> Grammar | None:
    return Grammar.json_object() if value is True else None


_MAKERS: dict[str, Callable[[Any], Grammar | None]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
    "json_object": _json_object,
}


def grammar_of(body: CompletionBody) -> tuple[Grammar, str] | None:
    """The grammar that a body requests, and the name of the field. Raises `ApiError`."""
    asked: list[tuple[str, str, Any]] = []
    for name, kind in (("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice")):
        asked.append((name, kind, getattr(body, name)))
    asked += [("guided_grammar", "grammar", body.guided_grammar), ("regex", "regex", body.regex)]
    asked += [("choice", "choice", body.choice), ("grammar", "grammar", body.grammar)]
    asked += _response_format(body.response_format)
    if body.structured_outputs is not None:
        if not isinstance(body.structured_outputs, dict):
            raise bad_request("structured_outputs must be an object such as {json: ...}", "structured_outputs")
        given = {key: value for key, value in body.structured_outputs.items() if value is not None}
        if unknown := sorted(set(given) - set(_MAKERS)):
            wanted = ", ".join(_MAKERS)
            raise bad_request(f"structured_outputs has {shown(unknown[0], 60)}, wanted one of {wanted}", "structured_outputs")
        asked += [("structured_outputs", kind, value) for kind, value in given.items()]
    found = [(name, kind, value) for name, kind, value in asked if value is not None]
    if len(found) > 1:
        names = " and ".join(name for name, *_ in found[:2])
        raise bad_request(f"{names} both say what the answer must look like, wanted one of them", found[1][0])
    for name, kind, value in found:
        try:
            grammar = _MAKERS[kind](value)
        except (TypeError, ValueError) as error:
            raise bad_request(f"{name}: {error}", name) from None
        return None if grammar is None else (grammar, name)
    return None


def _response_format(value: Any) -> list[tuple[str, str, Any]]:
    name = "response_format"
    if value is None:
        return []
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [(name, "json_object", True)]
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, (dict, bool)):
            raise bad_request("response_format.json_schema.schema is missing or no schema, wanted a JSON schema", name)
        return [(name, "json", schema)]
    raise bad_request(f"response_format is {shown(value, 60)}, wanted type text, json_object or json_schema", name)


class GrammarGate:
    """Has grammars compiled for the engine, outside the event loop and one after the other.

    It also remembers refused grammars. So a client that sends a bad grammar again and again does not delay others.
    """

    def __init__(self, link: EngineLink):
        self._link = link
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # digest -> reason; sources may be too long to be kept
        self._waiting = 0

    async def check(self, grammar: Grammar, param: str) -> None:
        """Return once the engine has the grammar.

        Raises:
            ApiError: 400, the grammar is invalid or too complex, or llguidance is not installed; 429, too many grammars wait;
                503, the engine has stopped.
        """
        key = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode(errors="surrogatepass")).digest()
        if key in self._refused:
            raise bad_request(f"{param}: {self._refused[key]}", param)
        if self._waiting >= MAX_WAITING:
            raise overloaded(f"{MAX_WAITING} grammars are waiting to be compiled; try again in 1 s", 1.0)
        self._waiting += 1
        try:
            await self._link.compile_grammar(grammar)
        except GrammarError as error:
            self._refused[key] = str(error)
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
            raise bad_request(f"{param}: {error}", param) from None
        except EngineStopped as error:
            raise unavailable(str(error)) from None
        finally:
            self._waiting -= 1
