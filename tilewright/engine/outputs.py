"""Results of the engine besides deltas: whole completions, and statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.engine.request import Delta, TokenLogprobs

__all__ = ["Completion", "CompletionOutput", "EngineStats", "Transcript", "joined"]


@dataclass(kw_only=True)
class CompletionOutput:
    """One complete sample of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """All generated tokens, including the one that ended the text."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if requested."""
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
    """Of the prompt's tokens from the second on, if requested."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join the deltas of one sample, in order, into one. The time is linear in their total content."""
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
    """Collects the deltas of one prompt's samples for a `Completion`."""

    def __init__(self, prompt_ids: list[int], samples: int):
        self._prompt_ids = prompt_ids
        self._deltas: list[list[Delta]] = [[] for _ in range(samples)]

    def add(self, delta: Delta) -> None:
        """Add the delta of a step to its sample."""
        self._deltas[delta.index].append(delta)

    def completion(self) -> Completion:
        """The completion. Every sample must have ended."""
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
    """Gauges (current values) and counters (since the start). Each sample counts as a request: a prompt with n=2 is two."""

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    """Owned by running requests."""
    pages_cached: int
    """Owned by no request and kept for the prefix cache; they can be allocated like free pages."""
    prefix_query_tokens: int
    """Prompt tokens of all started requests."""
    prefix_hit_tokens: int
    """How many of these were in the prefix cache."""
    preemptions: int
    prompt_tokens: int
    """Prompt tokens of all accepted requests."""
    generated_tokens: int
    drafted_tokens: int
    """Tokens that were guessed ahead and tried."""
    accepted_tokens: int
    """How many of these were right."""
    forced_tokens: int
    """How many of the right ones were forced by a grammar."""
    finished: int
    """Ended by stop or length."""
    aborted: int
    failed: int
    """Ended by an error of the runner."""
    expired: int
    """Ended because they had waited too long for their start."""
    host_pages_total: int = 0
    host_pages_used: int = 0
    """Pages of host memory with content that was evicted from the KV cache on the device."""
    pages_out: int = 0
    """Copied to host memory."""
    pages_in: int = 0
    """Copied back."""
    window_pages_total: int = 0
    """Pages of layers with a window, if these have pages of their own."""
    window_pages_used: int = 0
    window_pages_returned: int = 0
    """Released by running requests because the pages were no longer in the window."""
