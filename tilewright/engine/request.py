"""Requests to the engine and their results: sampling parameters, the state of one request, and its deltas.

Pure Python: no tensors. A prompt with `n` samples is `n` requests; they share the pages of the prompt through the prefix cache.
Parameters are checked and converted to the device's number types when a request is made, so no later step can fail on them.
Not supported: beam search.
"""

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from tilewright.engine.grammar import Grammar
from tilewright.engine.logit_edits import MAX_LOGIT_ENTRIES, LogitEdits, Settings
from tilewright.engine.values import integer, real, sample_seed, shown

__all__ = [
    "RANGES", "Delta", "QueueFull", "Request", "RequestTooLong", "SamplingParams", "State", "TokenLogprobs", "sample_seed",
    "shown",
]  # fmt: skip

RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "n": (1, 65536),
    "seed": (-(2**63), 2**63 - 1),
    "priority": (0, 100),
}
"""Smallest and largest value of every numeric sampling parameter; `top_p` 0 is refused as well. All values fit the types that a
device uses: int32 (seeds int64), and float32 without overflow or underflow."""
MAX_BIAS = 100.0
"""Largest absolute value in `logit_bias`; OpenAI's bound."""


class QueueFull(RuntimeError):
    """The waiting line is full, or (`by_time`) the wait would be too long. `retry_after_s`: when a place should be free."""

    def __init__(self, message: str, retry_after_s: float, *, by_time: bool = False):
        super().__init__(message)
        self.retry_after_s, self.by_time = retry_after_s, by_time


class RequestTooLong(ValueError):
    """A prompt and its `max_tokens` can never fit the model or the page pool."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Raises ValueError for a value out of range; the message begins with the field's name.

    All numbers are bounded on both sides (`RANGES`). Sample i of a prompt draws with `seed + i` (wrapped to int64); if `seed`
    is None, each sample gets a random seed. The filters are applied in the order of `ops.sample`: temperature, top-k, top-p,
    min-p; temperature 0 is greedy and ignores them.
    """

    max_tokens: int = 16
    """Most tokens to generate. A prompt whose length plus this exceeds the model's length is refused; it is never reduced."""
    min_tokens: int = 0
    """Number of tokens to generate before the end-of-text token, a stop token or a stop string may end the text."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 are off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be generated (the end-of-text token must be listed, too); None: all tokens."""
    grammar: Grammar | None = None
    """Constrains the text. The end-of-text token comes where the grammar allows it, and always ends the text. Cannot be
    combined with `min_tokens` or `allowed_token_ids`, because this could leave no possible token."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings that it completes."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text; like the end-of-text token they are in `token_ids`, but not in the text."""
    ignore_eos: bool = False
    special_tokens: bool = False
    """Include special tokens in the text, such as the marks around a tool call; otherwise they are left out."""
    logprobs: int | None = None
    """How many of the most likely tokens to report with every generated token (0: only the token itself); None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from the second on. Such a request does not use the prefix cache."""
    speculate: bool = True
    """Whether the engine may guess tokens ahead, if it supports it. This changes when tokens come, not which ones."""
    n: int = 1
    seed: int | None = None
    priority: int = 0
    """Which requests start first, and which keep their pages if memory runs out: lower numbers first, then by arrival. A
    request can lower its own precedence, but it can never go ahead of requests without a priority."""
    adapter: str | None = None
    """The name of the LoRA adapter to use; None: the model without an adapter."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "n", "priority"):
            integer(name, getattr(self, name), *RANGES[name])
        for name in ("logprobs", "prompt_logprobs", "seed"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), *RANGES[name])
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            real(name, getattr(self, name), *RANGES[name])
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, wanted 0 to {self.max_tokens}, which is max_tokens")
        if self.top_p == 0:
            raise ValueError("top_p is 0, wanted above 0 and at most 1; for the likeliest token set temperature=0")
        if not isinstance(self.speculate, bool):
            raise ValueError(f"speculate is {shown(self.speculate)}, wanted True or False")
        self._check_stops()
        self._check_grammar()
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is {shown(self.logit_bias)}, wanted a mapping of token id to bias")
        for token, bias in self.logit_bias.items():
            integer("logit_bias key", token, 0, 2**31 - 1)
            real(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
        banned = len(self.stop_token_ids) if self.min_tokens else 0
        if len(self.logit_bias) + banned > MAX_LOGIT_ENTRIES:
            got = f"logit_bias has {len(self.logit_bias)} entries, and min_tokens bans {banned} stop tokens"
            raise ValueError(f"{got}; wanted at most {MAX_LOGIT_ENTRIES} together")

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar is {shown(self.grammar)}, wanted a Grammar, such as Grammar.json_schema({{...}})")
        if self.min_tokens:
            raise ValueError("min_tokens is set with a grammar, wanted one of them; a grammar can ask for a length itself")
        if self.allowed_token_ids is not None:
            raise ValueError("allowed_token_ids is set with a grammar, wanted one of them")

    def _check_stops(self) -> None:
        for name, kind in (("stop", str), ("stop_token_ids", int), ("allowed_token_ids", int)):
            value = getattr(self, name)
            if value is None and name == "allowed_token_ids":
                continue
            if isinstance(value, list):
                object.__setattr__(self, name, value := tuple(value))
            if not isinstance(value, tuple) or not all(type(item) is kind for item in value):
                raise ValueError(f"{name} is {shown(value)}, wanted a tuple of {kind.__name__}, such as {name}=({kind(1)!r},)")
        if "" in self.stop:
            raise ValueError(f"stop is {shown(self.stop)}, wanted strings with at least one character")
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty, wanted at least one token id, or None for all of them")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                integer(name, token, 0, 2**31 - 1)


class Decoders(Protocol):
    """Arrays by slot that hold the part of a request's state that changes in every step."""

    computed: Any
    pending: Any
    known: Any

    def flush(self, request: "Request") -> None:
        """Pass a request its newest tokens."""
        ...


class State(Enum):
    """The stage of a request. A preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sample being generated. Only the scheduler changes it; a runner reads it only while it launches a step.

    Compared and hashed by identity. Its attributes:
        prompt_ids, output_ids   the tokens known so far, in two parts; `len(request)` counts both
        adapter, salt            number of its adapter, 0 for none; the start value of the digests of its pages
        seed                     int64, never None: the same seed, tokens and position draw the same sample
        settings, edits          settings for the sampler, and changes of the logits before sampling (None: no changes)
        order                    (priority, number of arrival): the order in which requests start
        max_wait_s               how long it may wait for its start; None: no limit
        stop_ids                 tokens that end the text: the model's end-of-text tokens unless ignored, and the caller's
        pages                    the block table: physical page of every `page_size` tokens; [] unless RUNNING
        window_pages, behind     the block table for layers with their own window pages; index of its first used entry
        computed                 tokens whose keys and values are in the cache, or will be after launched steps have run; drafts
                                 do not count before they are accepted
        pending                  launched rows whose samples are not known yet: 0 or 1 between two steps of the engine
        drafted, accepted        how many tokens were guessed for it, and how many of the guesses were right
        cached                   prompt tokens that were in the prefix cache when it was first started
        slot                     stable row 0..max_seqs-1 while RUNNING, else None
        lease                    number of its stay in that slot, unique over all requests and stays
        decoders                 while it decodes: holds `computed`, `pending` and the newest tokens; otherwise None
        digests, registered      chain hashes of its first full pages; how many of its pages the prefix cache contains
        arrival_s ...            times by the scheduler's clock
    """

    __slots__ = (
        "_computed",
        "_output_ids",
        "_pending",
        "_unread",
        "accepted",
        "adapter",
        "arrival_s",
        "behind",
        "cached",
        "decoders",
        "digests",
        "drafted",
        "edits",
        "error",
        "finish_reason",
        "finished_s",
        "first_token_s",
        "id",
        "index",
        "lease",
        "max_tokens",
        "max_wait_s",
        "order",
        "pages",
        "params",
        "preemptions",
        "prompt_ids",
        "registered",
        "salt",
        "seed",
        "settings",
        "slot",
        "started_s",
        "state",
        "stop_ids",
        "stop_reason",
        "window_pages",
    )

    def __init__(
        self,
        id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        index: int = 0,
        eos_ids: Sequence[int] = (),
        max_wait_s: float | None = None,
        adapter: tuple[int, bytes] = (0, b""),
    ):
        self.id, (self.adapter, self.salt) = id, adapter
        self.index = index
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = sample_seed(params.seed, index)
        # At the end of a grammar, only the end-of-text token is left.
        ignore_eos = params.ignore_eos and params.grammar is None
        self.stop_ids = frozenset(params.stop_token_ids if ignore_eos else (*eos_ids, *params.stop_token_ids))
        self.max_tokens = params.max_tokens  # read for every request in every step
        self.settings = Settings(float(params.temperature), max(0, params.top_k), float(params.top_p), float(params.min_p))
        self.edits = LogitEdits.of(
            repetition=params.repetition_penalty, presence=params.presence_penalty, frequency=params.frequency_penalty,
            biases=params.logit_bias, banned=self.stop_ids if params.min_tokens else (),
            until=len(prompt_ids) + params.min_tokens, allowed=params.allowed_token_ids,
        )  # fmt: skip
        self.order: tuple[int, int] = (params.priority, 0)
        self.max_wait_s = max_wait_s
        self._output_ids, self._unread = list[int](), array("q")
        self.pages: list[int] = []
        self.window_pages, self.behind = list[int](), 0
        self.decoders: Decoders | None = None
        self.lease = -1
        self._computed = 0
        self._pending = 0
        self.cached = 0
        self.drafted = self.accepted = 0
        self.slot: int | None = None
        self.digests: list[bytes] = []
        self.registered = 0
        self.state = State.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.preemptions = 0
        self.arrival_s = self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

    def __len__(self) -> int:
        if self.decoders is not None:
            return int(self.decoders.known[self.slot])
        return len(self.prompt_ids) + len(self._output_ids) + len(self._unread)

    def __repr__(self) -> str:
        return f"<Request {self.id}/{self.index} {self.state.value} {len(self.prompt_ids)}+{self.generated} tokens>"

    @property
    def generated(self) -> int:
        """How many tokens have been generated; costs less than `len(output_ids)`."""
        return len(self) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far, always the same list. Numbers are converted to Python's only when it is read."""
        if self.decoders is not None:
            self.decoders.flush(self)
        if self._unread:
            self._output_ids.extend(self._unread)
            del self._unread[:]
        return self._output_ids

    @output_ids.setter
    def output_ids(self, token_ids: list[int]) -> None:
        self._output_ids = token_ids

    def append_tokens(self, tokens: bytes) -> None:
        """Append tokens, int64; called by `Tails.flush`."""
        self._unread.frombytes(tokens)

    @property
    def computed(self) -> int:
        """See the class."""
        return self._computed if self.decoders is None else int(self.decoders.computed[self.slot])

    @computed.setter
    def computed(self, count: int) -> None:
        if self.decoders is None:
            self._computed = count
        else:
            self.decoders.computed[self.slot] = count

    @property
    def pending(self) -> int:
        """See the class."""
        return self._pending if self.decoders is None else int(self.decoders.pending[self.slot])

    @pending.setter
    def pending(self, count: int) -> None:
        if self.decoders is None:
            self._pending = count
        else:
            self.decoders.pending[self.slot] = count

    @property
    def total(self) -> int:
        """The number of tokens known and pending."""
        return len(self) + self.pending

    def tokens(self, start: int, stop: int) -> list[int]:
        """The known tokens at positions [start, stop); fewer if `stop` is beyond them."""
        split = len(self.prompt_ids)
        if stop <= split:
            return self.prompt_ids[start:stop]
        if start >= split:
            return self.output_ids[start - split : stop - split]
        return self.prompt_ids[start:] + self.output_ids[: stop - split]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability (natural, of the model's own distribution: before temperature and filters) of one token."""

    token_id: int
    logprob: float
    rank: int
    """1 is the likeliest token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, best first, as many as requested."""
    drawn: float | None = None
    """Logprob in the distribution it was drawn from: after temperature and filters, which kept `kept` tokens; None: unknown."""
    kept: int = 0


@dataclass(slots=True)  # not frozen, because that would cost three times as much per token
class Delta:
    """The additions of one step to one sample. All deltas of a sample, concatenated, are its output; the last has a reason."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """May lag behind `token_ids`: an incomplete character, or the possible beginning of a stop string, is held back."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    """stop, length, abort, error, or expired (it had waited too long for its start)."""
    stop_reason: str | int | None = None
    """The stop string or the stop token id that ended the text; None for the end-of-text token."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Logprobs of the prompt's tokens from the second on; in the first delta only, if requested."""
    error: str | None = None
    """The error message if `finish_reason` is error or expired."""
    retry_after_s: float | None = None
    """When to try again, in seconds, if `finish_reason` is expired."""
    cached_tokens: int = 0
    """Number of prompt tokens that were in the prefix cache when the sample started; the same in each delta."""
