"""Records and tokenizers that parser tests of vLLM import, as far as those tests look at them."""

import re
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "ChatCompletionRequest",
    "ChatCompletionToolsParam",
    "DeltaFunctionCall",
    "DeltaMessage",
    "DeltaToolCall",
    "ExtractedToolCallInformation",
    "FunctionCall",
    "FunctionDefinition",
    "MistralTokenizer",
    "Tokenizer",
    "ToolCall",
    "detokenize_incrementally",
    "get_tokenizer",
]

CONTROL = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|constrain|>"),
    *("<|python_start|>", "<|python_end|>", "<s>", "</s>", "<|im_end|>", "<|eot_id|>"),
    *(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("calls\u2581begin", "call\u2581begin", "sep")),
    *(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581end", "calls\u2581end")),
)


class Loose(BaseModel):
    """A record that takes any further field."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)


class FunctionCall(Loose):
    """A name and its arguments."""

    name: str | None = None
    arguments: str = ""


class ToolCall(Loose):
    """A call."""

    id: str = Field(default_factory=lambda: f"call_{token_hex(12)}")
    type: str = "function"
    function: FunctionCall


class DeltaFunctionCall(Loose):
    """What a piece of the stream adds to a call."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(Loose):
    """A call, or what is added to it."""

    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunctionCall | None = None


class DeltaMessage(Loose):
    """What a piece of the stream adds."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ExtractedToolCallInformation(Loose):
    """What a whole answer is."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class FunctionDefinition(Loose):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatCompletionToolsParam(Loose):
    """A tool."""

    type: str = "function"
    function: FunctionDefinition


class ChatCompletionRequest(Loose):
    """A request for a chat."""

    messages: list[Any] = Field(default_factory=list)
    model: str | None = None
    tools: list[Any] | None = None


class Tokenizer:
    """Control tokens whole, other text in pieces of up to four characters; every id has its text."""

    version = 3
    is_fast = True

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: dict[str, int] = {}
        self.control: list[str] = []
        self.add_tokens(CONTROL)

    @classmethod
    def from_pretrained(cls, *name: str, **more: Any) -> "Tokenizer":
        """Any model's."""
        return cls()

    def add_tokens(self, tokens: Iterable[str], special_tokens: bool = False) -> None:
        """Further control tokens."""
        self.control += [token for token in tokens if token not in self.control]
        for token in self.control:
            self._id(token)

    def _id(self, token: str) -> int:
        if token not in self.ids:
            self.ids[token] = len(self.texts)
            self.texts.append(token)
        return self.ids[token]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Texts of the tokens."""
        marks = "|".join(re.escape(mark) for mark in sorted(self.control, key=len, reverse=True))
        pieces = re.findall(rf"{marks}|(?:(?!{marks})\s)?(?:(?!{marks})\w){{1,4}}|(?s:.)", text)
        for piece in pieces:
            self._id(piece)
        return pieces

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids."""
        return [self.ids[token] for token in self.tokenize(text)]

    def __call__(self, text: str, **more: Any) -> Any:
        return {"input_ids": self.encode(text)}

    def decode(self, ids: int | Sequence[int | str], skip_special_tokens: bool = False) -> str:
        """Text of ids, or of tokens that are texts already."""
        return "".join(one if isinstance(one, str) else self.texts[one] for one in ([ids] if isinstance(ids, int) else ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Ids of texts."""
        return self._id(tokens) if isinstance(tokens, str) else [self._id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Texts of ids."""
        return [self.decode(one) for one in ids]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Text."""
        return "".join(tokens)

    def get_vocab(self) -> dict[str, int]:
        """Text -> id of all tokens that came."""
        return self.ids


class Tokens(Loose):
    """An encoded conversation."""

    tokens: list[int]


class MistralTokenizer(Tokenizer):
    """The same; its `instruct` writes calls as version 13 of Mistral's format does."""

    version = 13

    @property
    def instruct(self) -> "MistralTokenizer":
        """What encodes messages."""
        return self

    def encode_instruct(self, request: Any) -> Any:
        """The calls of the last message."""
        calls = request.messages[-1].tool_calls
        text = "".join(f"[TOOL_CALLS]{call.function.name}[ARGS]{call.function.arguments}" for call in calls)
        return Tokens(tokens=self.encode(text))


def get_tokenizer(*name: str, tokenizer_mode: str = "auto", **more: Any) -> Tokenizer:
    """Any model's."""
    return MistralTokenizer() if tokenizer_mode == "mistral" else Tokenizer()


def detokenize_incrementally(*, tokenizer: Tokenizer, all_input_ids: list[int], **more: Any) -> tuple[list[str], str, int, int]:
    """The text of the last token."""
    text = tokenizer.decode(all_input_ids[-1])
    return [text], text, 0, len(all_input_ids)
