"""What the user-facing engine hands out beside deltas: whole completions and the engine's own numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.engine.request import Delta, TokenLogprobs

__all__ = ["Completion", "CompletionOutput", "EngineStats", "Transcript", "joined"]


@dataclass(kw_only=True)
class CompletionOutput:
    """One sample of a prompt, whole."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """All generated tokens, with the one that ended the text."""
    logprobs: list[TokenLogprobs] | None = None
    """One a token, where asked for."""
    finish_reason: str | None = None
    """stop, length, abort, error or expired."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the text; None for the end-of-text token."""
    error: str | None = None


@dataclass(kw_only=True)
class Completion:
    """A prompt and its `n` samples, by index."""

    prompt_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on, where asked for."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """Deltas of one sample, in their order, as one; in time that grows with what they hold, however many they are."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return Delta(
        request_id=last.request_id,
        index=last.index,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=deltas[0].prompt_logprobs,
        error=last.error,
        retry_after_s=last.retry_after_s,
        cached_tokens=last.cached_tokens,
    )


class Transcript:
    """The deltas of one prompt's samples, until they are a `Completion`."""

    def __init__(self, prompt_ids: list[int], samples: int):
        self._prompt_ids = prompt_ids
        self._deltas: list[list[Delta]] = [[] for _ in range(samples)]

    def add(self, delta: Delta) -> None:
        """What a step has added to one of the samples."""
        self._deltas[delta.index].append(delta)

    def completion(self) -> Completion:
        """All of it. Every sample has come to its end."""
        whole = [joined(deltas) for deltas in self._deltas]
        outputs = [
            CompletionOutput(
                index=delta.index,
                text=delta.text,
                token_ids=list(delta.token_ids),
                logprobs=list(delta.logprobs) or None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                error=delta.error,
            )
            for delta in whole
        ]
        prompt = next((delta.prompt_logprobs for delta in whole if delta.prompt_logprobs is not None), None)
        return Completion(
            prompt_ids=self._prompt_ids, outputs=outputs, prompt_logprobs=None if prompt is None else list(prompt)
        )


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Gauges (now) and counters (since the start). Requests are samples: a prompt with n=2 is two."""

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    """Held by running requests."""
    pages_cached: int
    """Held by nobody, kept for the prefix cache; as good as free."""
    prefix_query_tokens: int
    """Prompt tokens of all requests started."""
    prefix_hit_tokens: int
    """Those of them that the prefix cache had."""
    preemptions: int
    prompt_tokens: int
    """Of all requests accepted."""
    generated_tokens: int
    drafted_tokens: int
    """Guessed ahead, and tried."""
    accepted_tokens: int
    """Those of them that were right."""
    forced_tokens: int
    """Those of these that a grammar left no choice about."""
    finished: int
    """Ended by stop or length."""
    aborted: int
    failed: int
    """Ended by an error of the runner."""
    expired: int
    """Given up: they had waited too long to be started."""
    host_pages_total: int = 0
    host_pages_used: int = 0
    """Pages of host memory that hold what the prefix cache had to give up."""
    pages_out: int = 0
    """Copied to host memory."""
    pages_in: int = 0
    """Copied back."""
    window_pages_total: int = 0
    """Pages of windowed layers, where these have their own."""
    window_pages_used: int = 0
    window_pages_returned: int = 0
    """Given back by requests while they ran: behind the window."""
