"""What is asked of the engine, and what comes back: sampling parameters, one request's state, and its deltas.

Pure Python: no tensors. A prompt with `n` samples is `n` requests; they share the pages of the prompt through the prefix cache.
Not supported: beam search, `best_of`, grammars and other constrained decoding.
"""

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Delta", "QueueFull", "Request", "RequestTooLong", "SamplingParams", "State", "TokenLogprobs", "sample_seed"]

MAX_LOGPROBS = 20
"""Alternatives reported for a token at most; OpenAI's bound."""


class QueueFull(RuntimeError):
    """The waiting queue is at its bound. `retry_after_s`: when a place should be free, from the latest finish times."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTooLong(ValueError):
    """A prompt and its `max_tokens` do not fit the model or the page pool, and never will."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is to be continued. Raises ValueError, its first word the field's name, for a value out of range.

    Seeds: sample i of a prompt draws with `seed + i` (wrapped to int64), or with one random seed each where `seed` is None.
    The order of the filters is that of `ops.sample`: temperature, top-k, top-p, min-p; 0 is greedy and ignores all of them.
    """

    max_tokens: int = 16
    """Most tokens generated. A prompt whose length plus this exceeds the model's is refused; this is never cut down."""
    min_tokens: int = 0
    """Tokens before the end-of-text token, a stop token or a stop string may end the text."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    """The text ends before the first of these that it completes."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text; like the end-of-text token they are in `token_ids`, but not in the text."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Likeliest alternatives reported with every generated token (0: only the token's own); None: no logprobs at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from its second on. Such a request does not use the prefix cache."""
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _real("temperature", self.temperature, 0.0)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError("top_p is 0, wanted above 0 and at most 1; for the likeliest token set temperature=0")
        _integer("top_k", self.top_k, 0)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty is 0, wanted above 0; 1 is off")
        _integer("n", self.n, 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        self._check_stops()
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is {self.logit_bias!r}, wanted a mapping of token id to bias")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias key", token, 0)
            _real(f"logit_bias of token {token}", bias, -100.0, 100.0)

    def _check_stops(self) -> None:
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, value := tuple(value))
            if not isinstance(value, tuple) or not all(type(item) is kind for item in value):
                raise ValueError(f"{name} is {value!r}, wanted a tuple of {kind.__name__}, such as {name}=({kind(1)!r},)")
        if "" in self.stop:
            raise ValueError(f"stop is {self.stop!r}, wanted strings with at least one character")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)

    @property
    def needs_history(self) -> bool:
        """True if a step needs the tokens of all steps before it, so none of them may be still unknown."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, wanted an integer")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value}, wanted {low} {'or more' if high is None else f'to {high}'}")


def _real(name: str, value: Any, low: float, high: float = math.inf) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, wanted a number")
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name} is {value}, wanted {low:g} {'or more, finite' if high == math.inf else f'to {high:g}'}")


def sample_seed(seed: int | None, index: int) -> int:
    """The int64 seed of sample `index`: given seeds count up and wrap, None is drawn from the system's entropy."""
    if seed is None:
        return secrets.randbits(63)
    return (seed + index + 2**63) % 2**64 - 2**63


class State(Enum):
    """Where a request stands. A preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sample being generated. Written by the scheduler only; a runner reads it while it launches a step, not later.

    Compared and hashed by identity. The texts of its attributes:
        prompt_ids, output_ids   the tokens known so far, in two parts; `len(request)` counts both
        seed                     int64, resolved: the same seed, tokens and position draw the same sample
        stop_ids                 tokens that end the text: the model's end-of-text tokens unless ignored, and the caller's
        pages                    the block table: physical page of every `page_size` tokens; [] unless RUNNING
        computed                 tokens whose keys and values are in the cache, or will be once launched steps have run
        pending                  samples launched whose value is not known yet: 0 or 1 between two steps of the engine
        cached                   prompt tokens that the prefix cache had, when first started
        slot                     stable row 0..max_seqs-1 while RUNNING, else None
        digests, registered      chain hashes of its first full pages; how many pages the prefix cache knows about
        arrival_s ...            `time.monotonic()`
    """

    __slots__ = (
        "arrival_s",
        "cached",
        "computed",
        "digests",
        "error",
        "finish_reason",
        "finished_s",
        "first_token_s",
        "id",
        "index",
        "max_tokens",
        "needs_history",
        "output_ids",
        "pages",
        "params",
        "pending",
        "preemptions",
        "prompt_ids",
        "registered",
        "seed",
        "slot",
        "state",
        "stop_ids",
        "stop_reason",
    )

    def __init__(self, id: str, prompt_ids: list[int], params: SamplingParams, *, index: int = 0, eos_ids: Sequence[int] = ()):
        self.id = id
        self.index = index
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = sample_seed(params.seed, index)
        self.stop_ids = frozenset(params.stop_token_ids if params.ignore_eos else (*eos_ids, *params.stop_token_ids))
        # Read for every request in every step, so not through the properties of `params`.
        self.max_tokens = params.max_tokens
        self.needs_history = params.needs_history
        self.output_ids: list[int] = []
        self.pages: list[int] = []
        self.computed = 0
        self.pending = 0
        self.cached = 0
        self.slot: int | None = None
        self.digests: list[bytes] = []
        self.registered = 0
        self.state = State.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.preemptions = 0
        self.arrival_s = time.monotonic()
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def __repr__(self) -> str:
        return f"<Request {self.id}/{self.index} {self.state.value} {len(self.prompt_ids)}+{len(self.output_ids)} tokens>"

    @property
    def total(self) -> int:
        """Tokens known and pending."""
        return len(self.prompt_ids) + len(self.output_ids) + self.pending

    def tokens(self, start: int, stop: int) -> list[int]:
        """The known tokens at positions [start, stop); fewer where `stop` is beyond them."""
        split = len(self.prompt_ids)
        if stop <= split:
            return self.prompt_ids[start:stop]
        if start >= split:
            return self.output_ids[start - split : stop - split]
        return self.prompt_ids[start:] + self.output_ids[: stop - split]

    def stop_banned(self, position: int) -> bool:
        """True if the token at `position` may not be one of `stop_ids`, because `min_tokens` have not been generated."""
        return position - len(self.prompt_ids) < self.params.min_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability (natural, of the model's own distribution: before temperature and filters) of one token."""

    token_id: int
    logprob: float
    rank: int
    """1 is the likeliest token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest tokens, best first, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one sample. The deltas of a sample, concatenated, are its output; the last has a reason."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """May lag behind `token_ids`: an unfinished character, or what may become a stop string, is held back."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    """stop, length, abort or error."""
    stop_reason: str | int | None = None
    """The stop string or the stop token id that ended the text; None for the end-of-text token."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt's tokens from the second on; in the first delta only, where asked for."""
    error: str | None = None
    """What went wrong, where `finish_reason` is error."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had when the sample started, in each delta the same."""
