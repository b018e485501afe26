"""Converts the input of a response, a text or a list of items, to the messages of a chat.

The items of one earlier answer (its reasoning, its text, its calls) become one turn of the assistant.
"""

from typing import Any

from tilewright.engine.request import shown
from tilewright.server.errors import bad_request, not_supported

__all__ = ["messages_of"]

TEXTS = ("input_text", "output_text", "text")
KINDS = "a message, a function_call, a function_call_output or a reasoning item"


def messages_of(value: Any, instructions: str | None, most: int) -> tuple[list[dict[str, Any]], list[str]]:
    """(messages of a chat, the place in the body from which each comes). Raises `ApiError` with the place of a wrong item."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []

    def add(place: str, **message: Any) -> None:
        messages.append(message)
        places.append(place)

    def answer(place: str) -> dict[str, Any]:
        """The assistant's turn that is being assembled."""
        if not messages or messages[-1]["role"] != "assistant":
            add(place, role="assistant", content=None)
        return messages[-1]

    if instructions:
        add("instructions", role="system", content=instructions)
    if isinstance(value, str):
        add("input", role="user", content=value)
        return messages, places
    if not isinstance(value, list) or not value:
        raise bad_request(f"input is {shown(value, 60)}, wanted a text or a list of items, not empty", "input")
    if len(value) > most:
        raise bad_request(f"input has {len(value)} items, wanted at most {most}", "input")
    for at, item in enumerate(value):
        where = f"input.{at}"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and item.get("role") == "assistant":
            turn, text = answer(where), _text(item.get("content"), f"{where}.content")
            if turn.get("tool_calls") or turn["content"] is not None:
                add(where, role="assistant", content=text)
            else:
                turn["content"] = text
        elif kind == "message":
            add(where, role=item.get("role"), content=_text(item.get("content"), f"{where}.content"))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls = answer(where).setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            text = _text(item.get("output"), f"{where}.output")
            add(where, role="tool", tool_call_id=item.get("call_id"), content=text)
        elif kind == "reasoning":
            if thoughts := _thoughts(item, where):
                if messages and messages[-1]["role"] == "assistant":
                    add(where, role="assistant", content=None)
                answer(where)["reasoning_content"] = thoughts
        elif kind == "item_reference":
            raise not_supported(where, f"this server does not store items, wanted {KINDS} in full")
        else:
            raise not_supported(where, f"got {shown(item if kind is None else kind, 60)}, wanted {KINDS}")
    for message in messages:
        if message["role"] == "assistant" and message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages, places


def _text(content: Any, where: str) -> Any:
    """Content in the format of a chat: a text or text parts. Anything else is returned unchanged; the chat refuses it."""
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXTS:
            raise not_supported(f"{where}.{at}", f"got a part of type {shown(kind, 60)}, wanted {' or '.join(TEXTS)}")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _thoughts(item: dict[str, Any], where: str) -> str:
    if item.get("encrypted_content") is not None:
        raise not_supported(f"{where}.encrypted_content", "reasoning encrypted by another server, wanted content as text")
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise bad_request(f"{where}.content is {shown(parts, 60)}, wanted parts {{type: 'reasoning_text', text}}", where)
    return "".join(part["text"] for part in parts)
