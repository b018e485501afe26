"""What the user-facing engine hands out beside deltas: whole completions and the engine's own numbers."""

from dataclasses import dataclass, field

from tilewright.engine.request import TokenLogprobs

__all__ = ["Completion", "CompletionOutput", "EngineStats"]


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
    """stop, length, abort or error."""
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
    finished: int
    """Ended by stop or length."""
    aborted: int
    failed: int
    """Ended by an error of the runner."""
