"""A grammar that an answer has to follow, as a plain value. grammar_masks.py compiles it.

Pure Python: no tensors and no other library, so that a request can be read or sent without them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "MAX_SOURCE_CHARS", "Grammar"]

KINDS = ("json_schema", "regex", "lark")
MAX_SOURCE_CHARS = 1 << 18
"""The longest schemas in use have about 100 thousand characters."""
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar for the whole text of an answer, from its first token to its end. Make one with the methods below.

    Raises:
        ValueError: the kind is not in `KINDS`, or the source is empty or longer than `MAX_SOURCE_CHARS`. An invalid source is
            only noticed when it is compiled.
    """

    kind: str
    source: str
    """A JSON schema as JSON, a regular expression (Rust's syntax), or a grammar in llguidance's Lark or in GBNF."""
    after: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids, such as the end of a chain of thought. The grammar begins after the first of them that is
    generated; the text before is free. (): it begins at once."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"grammar kind is {self.kind!r}, wanted one of {', '.join(KINDS)}")
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(f"the {self.kind} is {self.source!r:.60}, wanted a text that is not empty")
        if len(self.source) > MAX_SOURCE_CHARS:
            raise ValueError(f"the {self.kind} has {len(self.source)} characters, wanted at most {MAX_SOURCE_CHARS}")

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Grammar":
        """JSON that matches a schema; `schema` is a value or JSON text. Raises ValueError."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the JSON schema is not valid JSON: {error}") from None
        if not isinstance(schema, (Mapping, bool)):
            raise ValueError(f"the JSON schema is of type {type(schema).__name__}, wanted an object or a boolean")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            if str(error).startswith("the json_schema"):
                raise
            raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from None

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """A text that a regular expression matches completely."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Exactly one of several texts. Raises ValueError."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("choice wants a list of texts, none of them empty")
        if len(texts) > MAX_CHOICES:
            raise ValueError(f"choice has {len(texts)} texts, wanted at most {MAX_CHOICES}")
        return cls("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    @classmethod
    def lark(cls, source: str) -> "Grammar":
        """A context-free grammar, in the Lark dialect of llguidance or in GBNF."""
        return cls("lark", source)
