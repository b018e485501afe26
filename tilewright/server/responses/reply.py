"""Converts the engine's deltas to a response: a sequence of output items, and the events that report how they grow.

The items are one reasoning item, then messages and calls in the order in which the model wrote them. Every event of a stream
has a sequence number, so no event can use the direct path of plain events (direct.py).
"""

import json
from collections.abc import Iterator, Sequence
from secrets import token_hex
from typing import Any

from tilewright.engine.request import Delta
from tilewright.server.errors import ApiError
from tilewright.server.logprobs import Logprobs
from tilewright.server.prompts import Served
from tilewright.server.responses.job import ResponsesJob
from tilewright.server.tools import Event

__all__ = ["ResponsesReply"]

_Told = tuple[str, dict[str, Any]]
"""An event: its type and its fields."""
_PARTS = {"content": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


class _Item:
    """An output item as it grows."""

    def __init__(self, kind: str, index: int, *, call: tuple[str, str] | None = None):
        self.kind, self.index, self.call = kind, index, call
        self.id = f"{_PREFIXES[kind]}_{token_hex(12)}"
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    def shown(self, status: str) -> dict[str, Any]:
        """The item as JSON values, with this status."""
        if self.call is not None:
            made = {"type": "function_call", "call_id": self.call[0], "name": self.call[1], "arguments": "".join(self.texts)}
        elif self.kind == "reasoning":
            made = {"type": "reasoning", "summary": [], "content": [self.part()] if self.texts else []}
        else:
            made = {"type": "message", "role": "assistant", "content": [self.part()] if self.texts else []}
        return {"id": self.id, "status": status, **made}

    def part(self) -> dict[str, Any]:
        """The only content part of the item."""
        made: dict[str, Any] = {"type": _PARTS[self.kind], "text": "".join(self.texts)}
        return made if self.kind == "reasoning" else {**made, "annotations": [], "logprobs": self.logprobs}

    @property
    def _at(self) -> dict[str, Any]:
        where = {"item_id": self.id, "output_index": self.index}
        return where if self.call is not None else {**where, "content_index": 0}

    def opened(self) -> Iterator[_Told]:
        """The events of the beginning of the item."""
        yield "response.output_item.added", {"output_index": self.index, "item": self.shown("in_progress")}
        if self.call is None:
            yield "response.content_part.added", {**self._at, "part": self.part()}

    def grown(self, text: str, logprobs: list[dict[str, Any]]) -> _Told:
        """Add text to the item. Returns the event."""
        self.texts.append(text)
        self.logprobs += logprobs
        more = {"logprobs": logprobs} if self.kind == "content" else {}
        return f"response.{self._word}.delta", {**self._at, "delta": text, **more}

    def closed(self, status: str) -> Iterator[_Told]:
        """The events of the end of the item."""
        whole = "".join(self.texts)
        if self.call is not None:
            yield f"response.{self._word}.done", {**self._at, "name": self.call[1], "arguments": whole}
        else:
            more = {"logprobs": self.logprobs} if self.kind == "content" else {}
            yield f"response.{self._word}.done", {**self._at, "text": whole, **more}
            yield "response.content_part.done", {**self._at, "part": self.part()}
        yield "response.output_item.done", {"output_index": self.index, "item": self.shown(status)}

    @property
    def _word(self) -> str:
        return "function_call_arguments" if self.call is not None else _PARTS[self.kind]


class ResponsesReply:
    """Writes the response to one job. Feed it every delta once: to `chunks`, or to `add` before `whole`."""

    plain = False

    def __init__(self, name: str, created_s: int, job: ResponsesJob, served: Served):
        self.id = name
        self._created_s, self._job = created_s, job
        self._model = job.params[0].adapter or served.name
        self._parser = None if job.answering is None else job.answering.parser()
        self._logprobs = Logprobs(True, served, ())
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._finish: str | None = None
        self._number = 0
        self._tokens = self._thought = self._cached = 0

    def chunks(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Server-sent events for these deltas."""
        if self._number == 0:
            yield self._written("response.created", {"response": self._response("in_progress")})
            yield self._written("response.in_progress", {"response": self._response("in_progress")})
        for delta in deltas:
            for kind, fields in self._read(delta):
                yield self._written(kind, fields)

    def frame(self, index: int) -> None:
        """Returns None: there are no plain events."""

    def count(self, tokens: int) -> None:
        """Count tokens that went to the client without this object."""
        self._tokens += tokens

    def end(self) -> bytes:
        """The last event."""
        status = self._status
        return self._written(f"response.{status}", {"response": self._response(status)})

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that could not be finished."""
        told = {"code": "server_error", "message": error.body["error"]["message"]}
        return self._written("response.failed", {"response": {**self._response("failed"), "error": told}})

    def add(self, deltas: Sequence[Delta]) -> Iterator[None]:
        """Add deltas, one at a time."""
        for delta in deltas:
            for _ in self._read(delta):
                pass
            yield

    def whole(self) -> bytes:
        """The complete response."""
        return _json(self._response(self._status)).encode()

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _read(self, delta: Delta) -> Iterator[_Told]:
        """Add a delta. Yields its events."""
        self._tokens += len(delta.token_ids)
        self._cached = max(self._cached, delta.cached_tokens)
        last = delta.finish_reason is not None
        if self._parser is None:
            parts = [Event("content", delta.text)] if delta.text or delta.logprobs else []
        else:
            parts = self._parser.push(delta.text) + (self._parser.finish() if last else [])
        logprobs = self._logprobs.of(delta)["content"] if self._job.logprobs else []
        for part in parts:
            yield from self._take(part, logprobs)
        if self._open is not None and self._open.kind == "reasoning":
            self._thought = self._tokens
        if last:
            self._finish = delta.finish_reason
            yield from self._close(self._status)

    def _take(self, part: Event, logprobs: list[dict[str, Any]]) -> Iterator[_Told]:
        kind = "call" if part.kind == "arguments" else part.kind
        if self._open is None or part.kind == "call" or self._open.kind != kind:
            yield from self._close("completed")
            call = (self._job.answering.call_id(), part.text) if part.kind == "call" and self._job.answering else None
            self._open = _Item(kind, len(self._items), call=call)
            self._items.append(self._open)
            yield from self._open.opened()
        if part.kind != "call":
            yield self._open.grown(part.text, logprobs)

    def _close(self, status: str) -> Iterator[_Told]:
        if self._open is not None:
            yield from self._open.closed(status)
        self._open = None

    def _response(self, status: str) -> dict[str, Any]:
        ended = status in ("completed", "incomplete")
        # All items except the last are complete. The last has the response's status, or is incomplete if that has not ended.
        states = ["completed"] * (len(self._items) - 1) + [status if ended else "incomplete"]
        prompt = len(self._job.prompts[0])
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": prompt + self._tokens,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            **self._job.repeated,
            "output": [item.shown(state) for item, state in zip(self._items, states)],
            "usage": usage if ended else None,
        }

    def _written(self, kind: str, fields: dict[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {_json(event)}\n\n".encode()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
