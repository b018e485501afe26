"""Deltas of the engine -> the JSON that OpenAI's clients parse: whole answers, stream chunks, logprobs, usage."""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright import __version__
from tilewright.engine.request import Delta, TokenLogprobs
from tilewright.server.prompts import Served
from tilewright.server.protocol import Job

__all__ = ["Reply"]

NO_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that could not be drawn."""

_UTF8 = codecs.getincrementaldecoder("utf-8")


@dataclass
class _Sample:
    """What has been written of one choice."""

    echo: str
    started: bool = False
    characters: int = 0
    """Length of the text that the tokens so far have completed."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _UTF8(errors="replace"))


class Reply:
    """Writes the answer to one job. Feed it every delta once, to `chunks` or, all together, to `whole`."""

    def __init__(self, name: str, created_s: int, job: Job, served: Served):
        self.id = name
        self._job = job
        self._served = served
        self._completion_tokens = 0
        self._cached_tokens = [0] * len(job.prompts)
        self._samples = [
            _Sample(job.echo[prompt] if job.echo else "") for prompt in range(len(job.prompts)) for _ in range(job.n)
        ]
        kind = "chat.completion" if job.chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": name,
            "object": f"{kind}.chunk" if job.chat and job.stream else kind,
            "created": created_s,
            "model": served.name,
            "system_fingerprint": f"tilewright-{__version__}",
        }
        # A chunk differs from the next only in its choices: the rest is written once.
        head = json.dumps(self._head, ensure_ascii=False)
        self._chunk_start = f'data: {head[:-1]}, "choices": ['.encode()
        self._chunk_end = b'], "usage": null}\n\n' if job.include_usage else b"]}\n\n"

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The complete answer."""
        choices = [self._choice(index, delta) for index, delta in sorted(self._merge(deltas).items())]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def chunks(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Server-sent events for these deltas, one for each sample that has something to say."""
        for index, delta in self._merge(deltas).items():
            if delta.text or delta.finish_reason or delta.logprobs or not self._samples[index].started:
                choice = json.dumps(self._choice(index, delta), ensure_ascii=False)
                yield self._chunk_start + choice.encode() + self._chunk_end

    def last_chunk(self) -> bytes:
        """The event with the usage, where the client asked for it."""
        if not self._job.include_usage:
            return b""
        body = json.dumps({**self._head, "choices": [], "usage": self._usage()}, ensure_ascii=False)
        return f"data: {body}\n\n".encode()

    def _merge(self, deltas: Sequence[Delta]) -> dict[int, Delta]:
        """Choice index -> all that these deltas say of it."""
        merged: dict[int, Delta] = {}
        for delta in deltas:
            index = self._index(delta)
            before = merged.get(index)
            merged[index] = delta if before is None else _joined(before, delta)
            self._completion_tokens += 0 if self._job.only_echo else len(delta.token_ids)
            if delta.index == 0:  # a prompt counts once; further samples find in the cache what the first has put there
                self._cached_tokens[index // self._job.n] = delta.cached_tokens
        return merged

    def _index(self, delta: Delta) -> int:
        prompt = 0 if delta.request_id == self.id else int(delta.request_id.rpartition("-")[2])
        return prompt * self._job.n + delta.index

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = sum(map(len, self._job.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        sample = self._samples[index]
        first, sample.started = not sample.started, True
        if self._job.only_echo:
            delta = replace(delta, text="", logprobs=(), finish_reason=delta.finish_reason and "length", stop_reason=None)
        ends = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._job.chat:
            said: dict[str, Any] = {"role": "assistant"} if first else {}
            said["content"] = delta.text
            kind = "delta" if self._job.stream else "message"
            return {"index": index, kind: said, "logprobs": self._chat_logprobs(delta), **ends}
        text = (sample.echo if first else "") + delta.text
        return {"index": index, "text": text, "logprobs": self._completion_logprobs(index, delta), **ends}

    def _chat_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._job.params[0].logprobs is None:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
            }
            for entry in delta.logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._spelling(token_id)
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    def _completion_logprobs(self, index: int, delta: Delta) -> dict[str, Any] | None:
        if self._job.params[0].logprobs is None:
            return None
        entries: list[TokenLogprobs | int] = [*delta.logprobs]
        if delta.prompt_logprobs is not None:
            # Nothing comes before the first token of the prompt, so it was not predicted.
            entries = [self._job.prompts[index // self._job.n][0], *delta.prompt_logprobs, *entries]
        sample = self._samples[index]
        shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            token = entry if isinstance(entry, int) else entry.token_id
            text = _text(self._spelling(token))
            shape["tokens"].append(text)
            shape["token_logprobs"].append(None if isinstance(entry, int) else _finite(entry.logprob))
            shape["top_logprobs"].append(None if isinstance(entry, int) else self._alternatives(text, entry))
            shape["text_offset"].append(sample.characters)
            sample.characters += len(sample.decoder.decode(self._written(token, sample)))
        return shape

    def _written(self, token: int, sample: _Sample) -> bytes:
        """What a token adds to the text: special ones nothing, and the first one of a text no leading space of its own."""
        if not self._served.tokenizer.visible([token]):
            return b""
        starts = sample.echo and sample.characters == 0
        return self._served.tokenizer.decode([token]).encode() if starts else self._spelling(token)

    def _spelling(self, token_id: int) -> bytes:
        return self._served.spellings.of(token_id)

    def _alternatives(self, text: str, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one; where two have the same text, the likelier counts."""
        found = {text: _finite(entry.logprob)}
        for token, logprob in entry.top:
            key = _text(self._spelling(token))
            found[key] = max(_finite(logprob), found.get(key, NO_LOGPROB))
        return found


def _joined(first: Delta, second: Delta) -> Delta:
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs,
    )


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, NO_LOGPROB)
