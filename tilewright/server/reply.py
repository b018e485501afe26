"""Converts the engine's deltas to the JSON that OpenAI's clients parse: whole answers, stream chunks and usage.

Both forms use `_pieces`. It cuts the output of many steps of a sample into pieces that can be written in a few milliseconds, so
that the caller can let other tasks run between two pieces. The log-probabilities of a whole answer are kept as parts of its
JSON and joined once, at its end. NaN and infinity do not exist in JSON; `logprobs.finite` and the engine make sure that none
reaches this module.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tilewright import __version__
from tilewright.engine.outputs import joined
from tilewright.engine.request import Delta
from tilewright.server.errors import ApiError
from tilewright.server.logprobs import Logprobs
from tilewright.server.prompts import Served
from tilewright.server.protocol import Job
from tilewright.server.tools.message import Message

__all__ = ["Reply", "Writer"]

_TEXT = "\ue000"
PIECE_ENTRIES = 64
"""Most tokens with log-probabilities in a piece. With 20 alternatives each they take some 5 ms."""


class Writer(Protocol):
    """The interface of objects that write an answer: `Reply`, or the class of another endpoint."""

    id: str

    @property
    def plain(self) -> bool:
        """Whether most events of this stream are a text and nothing else."""
        ...

    def chunks(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """The events for these deltas."""
        ...

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """The bytes before and after the text in a plain event of a sample; None before its first event."""
        ...

    def count(self, tokens: int) -> None:
        """Count tokens that went to the client without this object."""
        ...

    def end(self) -> bytes:
        """The last events of a stream."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that could not be finished."""
        ...

    def add(self, deltas: Sequence[Delta]) -> Iterator[None]:
        """Add deltas for `whole`."""
        ...

    def whole(self) -> bytes:
        """The complete answer."""
        ...


@dataclass
class _Sample:
    """The state of one choice."""

    echo: str
    logprobs: Logprobs
    started: bool = False
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    likelihood: float = 0.0
    """Sum of the tokens' log-probabilities, if they are known."""
    ends: dict[str, Any] = field(default_factory=dict)
    message: Message | None = None
    """Parses the text, if it may contain tool calls or reasoning."""


class Reply:
    """Writes the answer to one job. Feed it every delta once: to `chunks`, or to `add` before `whole`."""

    def __init__(self, name: str, created_s: int, job: Job, served: Served):
        self.id = name
        self._job = job
        self._completion_tokens = 0
        self._cached_tokens = [0] * len(job.prompts)
        self._samples = [
            _Sample(
                job.echo[i] if job.echo else "",
                Logprobs(job.chat, served, prompt if job.echo else ()),
                message=Message(job.answering) if job.answering is not None else None,
            )
            for i, prompt in enumerate(job.prompts)
            for _ in range(job.n)
        ]
        kind = "chat.completion" if job.chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": name,
            "object": f"{kind}.chunk" if job.chat and job.stream else kind,
            "created": created_s,
            "model": job.params[0].adapter or served.name,
            "system_fingerprint": f"tilewright-{__version__}",
        }
        # Chunks differ only in their choices, so the rest is encoded once.
        self._chunk_start = f'data: {_json(self._head)[:-1]}, "choices": ['.encode()

    # A stream ----------------------------------------------------------------------------------------------------------

    def chunks(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Server-sent events for these deltas, one for each piece of a sample that is not empty."""
        for index, delta in self._pieces(deltas):
            if self._samples[index].message is not None:
                yield from self._read_chunk(index, delta)
            elif (
                delta.text or delta.finish_reason or delta.logprobs or delta.prompt_logprobs or not self._samples[index].started
            ):
                yield self._chunk_start + _json(self._chunk(index, delta)).encode() + self._chunk_end()

    @property
    def plain(self) -> bool:
        """Whether most events of this stream are a text and nothing else."""
        job = self._job
        return not (job.logprobs or job.token_ids or job.continuous_usage or job.only_echo or job.answering is not None)

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """The bytes before and after the text in a plain event of a sample; None before its first event."""
        if not self._samples[index].started:
            return None
        event = self._chunk_start + _json(self._chunk(index, Delta(self.id, 0, text=_TEXT))).encode() + self._chunk_end()
        before, _, behind = event.partition(_json(_TEXT).encode())
        return before, behind

    def count(self, tokens: int) -> None:
        """Count tokens that went to the client without this object."""
        self._completion_tokens += tokens

    def end(self) -> bytes:
        """The last events: the usage, if the client requested it, and the end of the stream."""
        usage = f"data: {_json({**self._head, 'choices': [], 'usage': self._usage()})}\n\n" if self._job.include_usage else ""
        return usage.encode() + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that could not be finished."""
        return b"data: " + json.dumps(error.body).encode() + b"\n\n"

    def _read_chunk(self, index: int, delta: Delta) -> Iterator[bytes]:
        """The event of a sample whose text is parsed, unless the event would be empty."""
        sample = self._samples[index]
        message = sample.message
        assert message is not None
        parts = message.parts(delta.text, last=delta.finish_reason is not None)
        if not (parts or delta.finish_reason or delta.logprobs or delta.prompt_logprobs or not sample.started):
            return
        reason = message.finish_reason(delta.finish_reason)
        choice = self._chunk(index, replace(delta, text=parts.get("content", "")))
        choice["delta"] = {**({"role": "assistant"} if "role" in choice["delta"] else {}), **parts}
        if sample.echo and "role" in choice["delta"]:
            choice["delta"]["content"] = sample.echo + parts.get("content", "")
        yield self._chunk_start + _json({**choice, "finish_reason": reason}).encode() + self._chunk_end()

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        sample = self._samples[index]
        first, sample.started = not sample.started, True
        delta = self._shown(delta)
        text = (sample.echo if first else "") + delta.text
        choice: dict[str, Any] = {"index": index}
        if self._job.chat:
            choice["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = sample.logprobs.of(delta) if self._job.logprobs else None
        if self._job.token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if first:
                choice["prompt_token_ids"] = self._job.prompts[index // self._job.n]
        return {**choice, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def _chunk_end(self) -> bytes:
        if not self._job.include_usage:
            return b"]}\n\n"
        return f'], "usage": {_json(self._usage()) if self._job.continuous_usage else "null"}}}\n\n'.encode()

    # A whole answer ----------------------------------------------------------------------------------------------------

    def add(self, deltas: Sequence[Delta]) -> Iterator[None]:
        """Add deltas, one piece at a time."""
        for index, piece in self._pieces(deltas):
            sample, delta = self._samples[index], self._shown(piece)
            if self._job.logprobs:
                sample.logprobs.keep(delta)
            if self._job.prompt_logprobs and delta.prompt_logprobs is not None:
                sample.logprobs.keep_prompt(delta.prompt_logprobs)
            if sample.message is None:
                sample.text.append(delta.text)
            else:
                sample.message.add(delta.text, last=delta.finish_reason is not None)
            sample.token_ids += delta.token_ids
            sample.likelihood += sum(entry.logprob for entry in delta.logprobs)
            reason = delta.finish_reason if sample.message is None else sample.message.finish_reason(delta.finish_reason)
            sample.ends = {"finish_reason": reason, "stop_reason": delta.stop_reason}
            yield

    def whole(self) -> bytes:
        """The complete answer."""
        choices = ", ".join(self._choice(index, at) for index, at in enumerate(self._chosen()))
        return f'{_json(self._head)[:-1]}, "choices": [{choices}], "usage": {_json(self._usage())}}}'.encode()

    def _chosen(self) -> list[int]:
        """The indices of the samples in the answer, in this order."""
        best, n = self._job.best, self._job.n
        if best is None:
            return list(range(len(self._samples)))
        # Highest mean log-probability per token first, as in OpenAI's API.
        rank = [sample.likelihood / max(1, len(sample.token_ids)) for sample in self._samples]
        prompts = [range(at, at + n) for at in range(0, len(rank), n)]
        return [at for samples in prompts for at in sorted(samples, key=lambda i: -rank[i])[:best]]

    def _choice(self, index: int, at: int) -> str:
        """A choice as JSON. Its log-probabilities were already encoded in `add`."""
        sample, job = self._samples[at], self._job
        text = sample.echo + "".join(sample.text)
        choice: dict[str, Any] = {"index": index}
        if sample.message is not None:
            choice["message"] = {"role": "assistant", **sample.message.whole(sample.echo), "refusal": None}
        elif job.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice |= sample.ends
        if job.token_ids:
            choice |= {"token_ids": sample.token_ids, "prompt_token_ids": job.prompts[at // job.n]}
        parts = [_json(choice)[:-1], f'"logprobs": {sample.logprobs.kept() if job.logprobs else "null"}']
        if job.prompt_logprobs:
            parts.append(f'"prompt_logprobs": {sample.logprobs.kept_prompt()}')
        return ", ".join(parts) + "}"

    # Both --------------------------------------------------------------------------------------------------------------

    def _pieces(self, deltas: Sequence[Delta]) -> Iterator[tuple[int, Delta]]:
        """(choice index, its part of these deltas), in small pieces."""
        by_choice: dict[int, list[Delta]] = {}
        for delta in deltas:
            index = self._index(delta)
            by_choice.setdefault(index, []).append(delta)
            self._completion_tokens += 0 if self._job.only_echo else len(delta.token_ids)
            if delta.index == 0:  # a prompt counts once: further samples find the pages of the first in the cache
                self._cached_tokens[index // self._job.n] = delta.cached_tokens
        for index, several in by_choice.items():
            for piece in _cut(joined(several)):
                yield index, piece

    def _index(self, delta: Delta) -> int:
        prompt = 0 if delta.request_id == self.id else int(delta.request_id.rpartition("-")[2])
        return prompt * self._job.n + delta.index

    def _shown(self, delta: Delta) -> Delta:
        if not self._job.only_echo:
            return delta
        reason = delta.finish_reason and "length"
        return replace(delta, text="", token_ids=(), logprobs=(), finish_reason=reason, stop_reason=None)

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = sum(map(len, self._job.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }


def _cut(delta: Delta) -> Iterator[Delta]:
    """Cut a delta into pieces with at most `PIECE_ENTRIES` log-probabilities. The last has the text, the ids and the end."""
    prompt, own = delta.prompt_logprobs, delta.logprobs
    nothing = replace(delta, token_ids=(), text="", logprobs=(), prompt_logprobs=None, finish_reason=None, stop_reason=None)
    while prompt is not None and len(prompt) > PIECE_ENTRIES:
        yield replace(nothing, prompt_logprobs=prompt[:PIECE_ENTRIES])
        prompt = prompt[PIECE_ENTRIES:]
    if prompt is not None and own:
        yield replace(nothing, prompt_logprobs=prompt)
        prompt = None
    while len(own) > PIECE_ENTRIES:
        yield replace(nothing, logprobs=own[:PIECE_ENTRIES])
        own = own[PIECE_ENTRIES:]
    yield replace(delta, prompt_logprobs=prompt, logprobs=own)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
