"""Builds the message of one sample from its text: content, reasoning and tool calls in the format of OpenAI's API."""

from typing import Any

from tilewright.server.tools import Event
from tilewright.server.tools.asked import Answering

__all__ = ["Message"]


class Message:
    """Parses the text of a sample. Use `parts` for a stream, or `add` and `whole` for a whole message."""

    def __init__(self, answering: Answering):
        self._answering = answering
        self._parser = answering.parser()
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[tuple[str, str, list[str]]] = []

    def parts(self, text: str, *, last: bool) -> dict[str, Any]:
        """The fields that this text adds to a stream's `delta`; {} if the text is held back."""
        events = self._events(text, last)
        made: dict[str, Any] = {}
        content = "".join(event.text for event in events if event.kind == "content")
        reasoning = "".join(event.text for event in events if event.kind == "reasoning")
        if content:
            made["content"] = content
        if reasoning:
            made["reasoning_content"] = reasoning
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if event.kind == "call":
                function = {"name": event.text, "arguments": ""}
                calls[event.call] = {
                    "index": event.call, "id": self._answering.call_id(), "type": "function", "function": function
                }  # fmt: skip
            elif event.kind == "arguments":
                call = calls.setdefault(event.call, {"index": event.call, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        if calls:
            made["tool_calls"] = list(calls.values())
        return made

    def add(self, text: str, *, last: bool) -> None:
        """Parse this text and keep the result for `whole`."""
        for event in self._events(text, last):
            if event.kind == "call":
                self._calls.append((self._answering.call_id(), event.text, []))
            elif event.kind == "arguments":
                self._calls[event.call][2].append(event.text)
            else:
                self._texts[event.kind].append(event.text)

    def whole(self, echo: str = "") -> dict[str, Any]:
        """The fields of the message. `echo` is put before its content."""
        content = echo + "".join(self._texts["content"])
        made: dict[str, Any] = {"content": content if content or not self._calls else None}
        if self._texts["reasoning"]:
            made["reasoning_content"] = "".join(self._texts["reasoning"])
        if self._calls:
            made["tool_calls"] = [
                {"id": identity, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for identity, name, arguments in self._calls
            ]
        return made

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason of the answer; see `Answering.finish_reason`."""
        return self._answering.finish_reason(reason, self._parser.calls)

    def _events(self, text: str, last: bool) -> list[Event]:
        return self._parser.push(text) + (self._parser.finish() if last else [])
