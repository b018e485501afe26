"""Converts the prompts of requests to token ids: text, lists of text, token ids, lists of those, and chat messages."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from tilewright.engine.chat import ChatTemplateError
from tilewright.engine.core import Engine
from tilewright.engine.pooling import Pooled
from tilewright.engine.request import shown
from tilewright.engine.tokenizer import Tokenizer, TokenizerError
from tilewright.server.errors import ApiError, bad_request, not_supported
from tilewright.server.spelling import Spellings

__all__ = ["Served", "chat_prompt", "check_length", "encode", "read_prompts"]

LONG_CHARS = 1 << 16
"""Longer texts are first tokenized in pieces of this length, so that a text that is far too long is refused early."""
MAX_CALLS = 256
"""Most tool calls in one message."""
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "documents")
"""Variables of a chat template that have fields of their own."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The served model's name, tokenizer and limits. Requests are checked against them."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    """Token ids below this are valid."""
    max_model_len: int
    """Most tokens of prompt and answer together."""
    max_samples: int
    """Most samples (prompts times n) in one request: the length of the queue, because all of them wait at first."""
    has_chat: bool
    """Whether the model has a chat template."""
    has_adapters: bool
    """Whether the engine has room for LoRA adapters. A request selects an adapter by its name in the `model` field."""
    spellings: Spellings
    generates: bool = True
    """False for an encoder."""
    pooled: Pooled | None = None
    """How the model computes embeddings and scores; None if it has none."""

    @classmethod
    def of(cls, engine: Engine, name: str, *, pooled: Pooled | None = None, generates: bool = True) -> "Served":
        """What `engine` serves, under this name. Raises ValueError if it has no tokenizer, or an adapter has the same name."""
        scheduler, tokenizer = engine.scheduler, engine.tokenizer
        if tokenizer is None:
            raise ValueError(f"{name!r} has no tokenizer, but clients send and read text; use a model with a tokenizer")
        if engine.adapters is not None and name in engine.adapters.names:
            raise ValueError(f"an adapter and the model are both named {name!r}; rename one of them (--served-name)")
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
            has_chat = True
        except ValueError:
            has_chat = False
        # The keys and values of the last token are never needed, so one token more than the pool's capacity fits.
        pool_tokens = scheduler.blocks.num_pages * scheduler.blocks.page_size + 1
        return cls(
            name=name,
            tokenizer=tokenizer,
            vocab_size=engine.vocab_size,
            max_model_len=min(scheduler.max_model_len, pool_tokens),
            max_samples=scheduler.max_waiting,
            has_chat=has_chat,
            has_adapters=engine.adapters is not None,
            spellings=Spellings(tokenizer),
            generates=generates,
            pooled=pooled,
        )

    def description(self) -> dict[str, Any]:
        """This object as plain values, for another process."""
        tokenizer = self.tokenizer
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "max_model_len": self.max_model_len,
            "max_samples": self.max_samples,
            "has_chat": self.has_chat,
            "has_adapters": self.has_adapters,
            "generates": self.generates,
            "pooled": None if self.pooled is None else dataclasses.asdict(self.pooled),
            "tokenizer": tokenizer.to_json(),
            "eos_ids": list(tokenizer.eos_ids),
            "special_tokens": tokenizer.special_tokens,
            "chat_template": tokenizer.chat_template,
        }

    @classmethod
    def described(cls, values: Mapping[str, Any]) -> "Served":
        """The inverse of `description`. Raises ValueError if `values` is not a valid description."""
        fields = dict(values)
        try:
            if (pooled := fields.pop("pooled")) is not None:
                sizes = pooled.pop("dimensions")
                fields["pooled"] = Pooled(**pooled, dimensions=None if sizes is None else tuple(sizes))
            tokenizer = Tokenizer(
                tokenizers.Tokenizer.from_str(fields.pop("tokenizer")),
                eos_ids=fields.pop("eos_ids"),
                special_tokens=fields.pop("special_tokens"),
                chat_template=fields.pop("chat_template"),
            )
            return cls(tokenizer=tokenizer, spellings=Spellings(tokenizer), **fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the description sent by the engine process is not valid: {error}") from None

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request names as its model; None for the model itself or no name.

        The engine may not have that adapter. If it has no room for adapters, raises a 404 for any other name."""
        if name is None or name == self.name:
            return None
        if not self.has_adapters:
            self.check_name(name)
        return name

    def check_name(self, name: str | None) -> None:
        """Raise a 404 unless `name` is the served model itself or None, which means that model."""
        if name is not None and name != self.name:
            raise self.no_model(name, f"this server has {self.name!r}")

    def no_model(self, name: str, known: str) -> ApiError:
        """A 404."""
        message = f"The model {name[:200]!r} does not exist here; {known}"
        return ApiError(404, message, param="model", code="model_not_found")

    def check_generates(self) -> None:
        """Raise a 400 for an encoder."""
        if not self.generates:
            message = f"{self.name!r} is an encoder, which generates no text; use /v1/embeddings, /v1/score or /v1/rerank"
            raise bad_request(message, "model", "not_supported")

    def check_ids(self, ids: list[int], param: str) -> list[int]:
        """Return `ids` unchanged. Raises a 400 if one of them is not a token of the model."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise bad_request(f"{param} has the token id {str(wrong)[:40]}, wanted 0 to {self.vocab_size - 1}", param)
        return ids

    def check_fit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """How many tokens fit after a prompt. Raises a 400 with the numbers if fewer fit than `max_tokens` (None: 1)."""
        asked = 1 if max_tokens is None else max_tokens
        room = self.max_model_len - prompt_tokens
        if asked <= room:
            return room
        message = (
            f"This model's maximum context length is {self.max_model_len} tokens, but {prompt_tokens + asked} were "
            f"requested ({prompt_tokens} in the prompt, {asked} for the completion). Shorten the prompt or lower max_tokens"
        )
        raise bad_request(message, "prompt" if max_tokens is None else "max_tokens", "context_length_exceeded")


def encode(text: str, served: Served, param: str = "prompt", *, add_special: bool = True) -> list[int]:
    """Token ids of a prompt. An empty text becomes the model's BOS token.

    Raises:
        ApiError: 400; the text is not valid Unicode, is far too long for the model, or is empty and there is no BOS token.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(f"{param} has a lone surrogate at character {error.start}, wanted valid Unicode", param) from None
    try:
        check_length(text, served, param)
        ids = served.tokenizer.encode(text, add_special=add_special)
    except TokenizerError as error:
        raise bad_request(f"{param}: {error}", param) from None
    if ids:
        return ids
    if served.tokenizer.bos_id is None:
        raise bad_request(f"{param} is empty, but the model has no BOS token to begin with; give some text", param)
    return [served.tokenizer.bos_id]


def check_length(text: str, served: Served, param: str) -> None:
    """Raise a 400 for a text that has far too many tokens. Encodes the text in pieces and stops once there are too many."""
    if len(text) <= LONG_CHARS:
        return
    tokens = 0
    for start in range(0, len(text), LONG_CHARS):
        tokens += len(served.tokenizer.encode(text[start : start + LONG_CHARS], add_special=False))
        # A cut changes only the tokens next to it, and a piece has thousands. So the text has more than half of this sum.
        if tokens > 2 * served.max_model_len:
            message = (
                f"This model's maximum context length is {served.max_model_len} tokens, and {param} has far more: "
                f"its first {start + LONG_CHARS} of {len(text)} characters are about {tokens} tokens. Shorten it"
            )
            raise bad_request(message, param, "context_length_exceeded")


def read_prompts(
    prompt: Any, served: Served, max_prompts: int, *, add_special: bool = True, field: str = "prompt"
) -> list[list[int]]:
    """Token ids of every prompt in a completion request, or of every input for an embedding.

    `prompt` is a string, a list of strings, a list of token ids or a list of lists of token ids. `field` is its name in the
    messages of the `ApiError` that this function raises.
    """
    if prompt is None:
        raise bad_request(f"{field} is missing, wanted text or token ids", field)
    if isinstance(prompt, str) or _is_ids(prompt):
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(p, str) or _is_ids(p) for p in prompt):
        prompts = prompt
    else:
        wanted = "a string, a list of strings, a list of token ids or a list of lists of token ids, none of them empty"
        raise bad_request(f"{field} is {_kind(prompt)}, wanted {wanted}", field)
    if len(prompts) > max_prompts:
        raise bad_request(f"{field} has {len(prompts)} {field}s, wanted at most {max_prompts}", field)
    return [
        encode(p, served, field, add_special=add_special) if isinstance(p, str) else served.check_ids(p, field) for p in prompts
    ]


def _is_ids(value: Any) -> bool:
    # `type(i) is int`: JSON's true is not a token id.
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a list of {' and '.join(kinds)}" if kinds else "an empty list"
    return f"of type {type(value).__name__}"


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in a request -> role in chat templates, which do not know `developer`, OpenAI's newer name for `system`."""


def chat_prompt(
    messages: Any, served: Served, max_messages: int, *, allow_special: bool = False, variables: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of a chat, through the model's chat template.

    Args:
        allow_special: control tokens that are written out in the messages become these tokens; otherwise they are text.
        variables: further variables of the template, such as add_generation_prompt.

    Raises:
        ApiError: 400; the messages are malformed, or the template or the model does not accept them.
    """
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages is missing or empty, wanted a list of {role, content}", "messages")
    if len(messages) > max_messages:
        raise bad_request(f"messages has {len(messages)} entries, wanted at most {max_messages}", "messages")
    tools = "tool" in (served.tokenizer.chat_template or "")
    turns = [_turn(message, f"messages.{index}", tools=tools) for index, message in enumerate(messages)]
    for index, turn in enumerate(turns):
        check_length(turn["content"], served, f"messages.{index}.content")
        for call in turn.get("tool_calls", ()):
            check_length(json.dumps(call["function"]), served, f"messages.{index}.tool_calls")
    try:
        ids = served.tokenizer.chat_ids(turns, allow_special=allow_special, **(variables or {}))
    except (ChatTemplateError, TokenizerError) as error:
        # There is no template, or it rejects turns that the model was not trained on, such as two user turns in a row.
        raise bad_request(str(error), "messages") from None
    if not ids:
        raise bad_request("the model's chat template makes an empty prompt of these messages; give some text", "messages")
    return ids


def _turn(message: Any, where: str, *, tools: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(f"{where} is of type {type(message).__name__}, wanted {{role, content}}", where)
    role = message.get("role")
    if role == "function" or message.get("function_call"):
        raise not_supported(where, "this is the older function format; use tool_calls and the role tool")
    if not tools and (role == "tool" or message.get("tool_calls")):
        raise not_supported(where, "tool calls and their results with this model; use system, user and assistant text")
    if role == "tool":
        return _result(message, where)
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{where}.role is {str(role)[:60]!r}, wanted one of {', '.join(ROLES)}", f"{where}.role")
    calls = _calls(message.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else []
    content = "" if calls and message.get("content") is None else _content(message.get("content"), f"{where}.content")
    turn: dict[str, Any] = {"role": ROLES[role], "content": content}
    if calls:
        turn["tool_calls"] = calls
    thoughts = message.get("reasoning_content")
    if role == "assistant" and isinstance(thoughts, str):
        turn["reasoning_content"] = _content(thoughts, f"{where}.reasoning_content")
    name = message.get("name")
    return {**turn, "name": name} if isinstance(name, str) else turn


def _result(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A turn with the result of a tool."""
    turn = {"role": "tool", "content": _content(message.get("content"), f"{where}.content")}
    return turn | {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The tool calls of an earlier answer. Their arguments become values, because templates write the JSON themselves."""
    if calls is None:
        return []
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise bad_request(f"{where} is of type {type(calls).__name__}, wanted a list of at most {MAX_CALLS} calls", where)
    made: list[dict[str, Any]] = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str):
            raise bad_request(
                f"{where}.{at} is not a tool call, wanted {{id, type, function: {{name, arguments}}}}", f"{where}.{at}"
            )
        arguments = arguments_of(function.get("arguments"), f"{where}.{at}.function.arguments")
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        made.append({**identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    return made


def arguments_of(text: Any, where: str) -> dict[str, Any]:
    """The arguments of an earlier call, parsed from their JSON. Raises `ApiError`."""
    value = text
    if isinstance(text, str):
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise bad_request(f"{where} is {shown(text, 60)}, wanted a JSON object, as text", where)
    return value


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "\n".join(_part(part, f"{where}.{index}") for index, part in enumerate(content))
    else:
        raise bad_request(f"{where} is of type {type(content).__name__}, wanted text or a list of text parts", where)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise bad_request(f"{where} has a lone surrogate, wanted valid Unicode", where)
    return text


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image_url", "input_audio", "file", "video_url", "refusal"):
        raise not_supported(where, f"got a part of type {kind!r}, wanted text only")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise bad_request(f"{where} is not a text part, wanted {{type: 'text', text}}", where)
    return part["text"]
