"""Log-probabilities in the formats of OpenAI's two endpoints and of `prompt_logprobs`.

Completions have four parallel lists; chats have a list of tokens with their bytes. A stream writes them chunk by chunk (`of`).
A whole answer keeps them as JSON until its end (`keep`, `kept`).
"""

import codecs
import json
from collections.abc import Sequence
from typing import Any

from tilewright.engine.request import Delta, TokenLogprobs
from tilewright.server.prompts import Served

__all__ = ["Logprobs"]

NO_LOGPROB = -9999.0
"""OpenAI's value for a token with probability 0, because JSON has no infinity."""

_UTF8 = codecs.getincrementaldecoder("utf-8")
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Logprobs:
    """The log-probabilities of one choice. `echoed`: token ids of the prompt, if the choice's text begins with the prompt."""

    def __init__(self, chat: bool, served: Served, echoed: Sequence[int]):
        self._chat = chat
        self._served = served
        self._first = None if chat or not echoed else echoed[0]
        self._echoes = self._first is not None
        self._characters = 0  # length of the text of the tokens so far, without incomplete characters
        self._decoder = _UTF8(errors="replace")
        self._kept: dict[str, list[str]] = {"content": []} if chat else {name: [] for name in _COLUMNS}
        self._prompt = ["null"]  # nothing comes before the first token of a prompt, so it was not predicted

    def of(self, delta: Delta) -> dict[str, Any]:
        """The log-probabilities of a delta."""
        if self._chat:
            return {"content": [self._chat_entry(entry) for entry in delta.logprobs], "refusal": None}
        entries: list[TokenLogprobs | int] = [*(delta.prompt_logprobs or () if self._echoes else ()), *delta.logprobs]
        if self._first is not None and (entries or delta.finish_reason is not None):
            entries.insert(0, self._first)
            self._first = None
        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for entry in entries:
            token = entry if isinstance(entry, int) else entry.token_id
            text = _text(self._spelling(token))
            columns["tokens"].append(text)
            columns["token_logprobs"].append(None if isinstance(entry, int) else finite(entry.logprob))
            columns["top_logprobs"].append(None if isinstance(entry, int) else self._alternatives(text, entry))
            columns["text_offset"].append(self._characters)
            self._characters += len(self._decoder.decode(self._written(token)))
        return columns

    def keep(self, delta: Delta) -> None:
        """Keep the log-probabilities of a delta for `kept`."""
        added = self.of(delta)
        for name, parts in self._kept.items():
            if added[name]:
                parts.append(json.dumps(added[name], ensure_ascii=False, allow_nan=False)[1:-1])

    def kept(self) -> str:
        """All kept log-probabilities as JSON."""
        columns = [f'"{name}": [{", ".join(parts)}]' for name, parts in self._kept.items()]
        if self._chat:
            columns.append('"refusal": null')
        return "{" + ", ".join(columns) + "}"

    def keep_prompt(self, entries: Sequence[TokenLogprobs]) -> None:
        """Keep log-probabilities of prompt tokens for `kept_prompt`."""
        for entry in entries:
            tokens = {entry.token_id: (entry.logprob, entry.rank)}
            tokens |= {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
            shape = {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": _text(self._spelling(token))}
                for token, (logprob, rank) in tokens.items()
            }
            self._prompt.append(json.dumps(shape, ensure_ascii=False, allow_nan=False))

    def kept_prompt(self) -> str:
        """The prompt's log-probabilities as JSON: null for the first token, then {token id: {logprob, rank, decoded_token}}."""
        return f"[{', '.join(self._prompt)}]"

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._spelling(token_id)
        return {"token": _text(raw), "logprob": finite(logprob), "bytes": list(raw)}

    def _written(self, token: int) -> bytes:
        """The bytes that a token adds to the text: none if it is special, no leading space if it is the first of an echo."""
        if not self._served.tokenizer.visible([token]):
            return b""
        starts = self._echoes and self._characters == 0
        return self._served.tokenizer.decode([token]).encode() if starts else self._spelling(token)

    def _spelling(self, token_id: int) -> bytes:
        return self._served.spellings.of(token_id)

    def _alternatives(self, text: str, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the chosen one. If two have the same text, the more likely one counts."""
        found = {text: finite(entry.logprob)}
        for token, logprob in entry.top:
            key = _text(self._spelling(token))
            found[key] = max(finite(logprob), found.get(key, NO_LOGPROB))
        return found


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def finite(logprob: float) -> float:
    """A number that JSON can represent. (`max(logprob, NO_LOGPROB)` would be NaN for a NaN.)"""
    return logprob if logprob > NO_LOGPROB else NO_LOGPROB
