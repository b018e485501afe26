"""Chooses which of several replicas answers a request, from the content of their prefix caches and their load.

    cost(replica) = (1 + externality) * prefill time of the part of the prompt that is not in its prefix cache
                  + prefill time of the prompts that wait there
                  + the delay of both by its running answers

The unit is seconds; `Costs` has the parameters. The externality is the cost for later requests of computing a prefix again.

The router keeps a mirror of each replica's cache, from the events of its page pool (`known`, `forgotten`). The mirror contains
digests of whole pages; each digest also covers all pages before it. Pages that a replica is about to compute count as known. So
if two requests begin alike, the second goes to the replica of the first even before the first has been computed.

If no replica has any part of the prompt in its cache, two replicas are drawn at random and the cheaper one is chosen (power of
two choices). This is as good as comparing all replicas. It also keeps several routers, which decide on the same stale numbers,
from all choosing the same replica.

This module does no I/O and reads no clock: the caller reports events (`started`, `first_token`, `finished`, `lost`).
"""

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["Costs", "Decision", "Router"]

Digest = bytes
"""The first `DIGEST_BYTES` of a page's digest. A collision costs time, but never makes an answer wrong."""
DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of work on a replica, in seconds. Only the ratios affect a decision.

    The defaults are for a model of eight billion parameters on one H100-class card: 2 FLOPs per parameter and token at half the
    peak rate, plus attention, plus the share of a decoding row in a step.
    """

    prefill_token_s: float = 4e-5
    """Cost per prompt token, without attention."""
    attention_token_s: float = 1.3e-9
    """Additional cost per prompt token for each token before it."""
    decode_row_s: float = 2e-3
    """How much one running answer delays a prompt that is computed on the same replica."""
    externality: float = 3.0
    """The best of 0, 1 and 3 on a public conversation trace: the caches serve a larger part of the prompts, and no request
    waits longer. With 10 the caches serve slightly more. But if all prompts share a beginning, only the replica that has it
    works, and another replica stays idle."""

    def prefill_s(self, begin: int, end: int) -> float:
        """Seconds to compute the tokens `begin` to `end` (exclusive) of a prompt."""
        tokens = end - begin
        return tokens * (self.prefill_token_s + self.attention_token_s * (begin + end) / 2)


@dataclass(frozen=True, slots=True)
class Decision:
    """The replica that gets a request, and the reason."""

    replica: int
    cached_tokens: int
    """Prompt tokens in the replica's cache, according to the mirror."""
    prefill_s: float
    """Time to compute the rest of the prompt there."""
    cost_s: float
    reason: str
    """"prefix": a replica has a part of the prompt; "load": none has, and two were drawn; "only": there was one replica."""


@dataclass(slots=True)
class _Replica:
    known: set[Digest] = field(default_factory=set)
    promised: Counter[Digest] = field(default_factory=Counter)
    """Pages that requests in flight will compute there, with the number of those requests."""
    prefill_s: float = 0.0
    """Prefill time of the prompts whose answer has no first token yet."""
    waiting: int = 0
    """The number of these prompts."""
    decoding: int = 0
    """The number of answers in the decode phase."""


@dataclass(slots=True)
class _Ticket:
    replica: int
    prefill_s: float
    digests: tuple[Digest, ...]
    decoding: bool = False


class Router:
    """Chooses among `replicas` replicas of one model.

    Args:
        page_tokens: tokens per page of the replicas' KV cache.
        costs: the cost of work.
        seed: seed of the random draws.
    """

    def __init__(self, replicas: int, page_tokens: int, costs: Costs | None = None, seed: int = 0):
        if replicas < 1 or page_tokens < 1:
            raise ValueError(
                f"a router needs at least one replica and at least one token per page, got {replicas} replicas and pages "
                f"of {page_tokens} tokens"
            )
        self.costs = costs or Costs()
        self.page_tokens = page_tokens
        self._replicas = [_Replica() for _ in range(replicas)]
        self._tickets: dict[str, _Ticket] = {}
        self._rng = random.Random(seed)
        self.decisions: Counter[tuple[int, str]] = Counter()
        """(replica, reason) -> number of requests."""

    # Content of the caches -------------------------------------------------------------------------------------------

    def known(self, replica: int, digests: Collection[Digest]) -> None:
        """Record that a replica's cache now contains these pages."""
        self._replicas[replica].known.update(digests)

    def forgotten(self, replica: int, digests: Collection[Digest]) -> None:
        """Record that a replica's cache no longer contains these pages."""
        self._replicas[replica].known.difference_update(digests)

    def emptied(self, replica: int) -> None:
        """Record that a replica's cache is empty. Its requests continue."""
        self._replicas[replica].known.clear()

    def lost(self, replica: int) -> list[str]:
        """Record that a replica has gone, with its cache and its requests. Returns the names of those requests."""
        gone = [name for name, ticket in self._tickets.items() if ticket.replica == replica]
        for name in gone:
            del self._tickets[name]
        self._replicas[replica] = _Replica()
        return gone

    def pages_known(self, replica: int) -> int:
        """Number of pages in the mirror of a replica's cache."""
        return len(self._replicas[replica].known)

    def load_of(self, replica: int) -> tuple[float, int]:
        """(seconds of prefill that wait on a replica, number of answers in the decode phase)."""
        one = self._replicas[replica]
        return one.prefill_s, one.decoding

    # Decisions -------------------------------------------------------------------------------------------------------

    def choose(self, digests: Sequence[Digest], tokens: int, among: Collection[int]) -> Decision:
        """Choose the replica for a prompt. Changes no state except the random number generator.

        Args:
            digests: digests of the whole pages of the prompt, in order.
            tokens: length of the prompt.
            among: the replicas that accept requests.

        Raises:
            ValueError: `among` is empty.
        """
        if not among:
            raise ValueError("there is no replica to choose from")
        hits = {index: self._hit(self._replicas[index], digests) for index in among}
        best = max(hits.values())
        if len(hits) == 1:
            reason, candidates = "only", list(hits)
        elif best:
            reason, candidates = "prefix", list(hits)
        else:
            reason, candidates = "load", self._rng.sample(sorted(hits), 2)
        found = [self._weigh(index, hits[index], tokens, reason) for index in candidates]
        return min(found, key=lambda one: (one.cost_s, -one.cached_tokens))

    def _weigh(self, index: int, hit: int, tokens: int, reason: str) -> Decision:
        one = self._replicas[index]
        cached = min(hit * self.page_tokens, tokens - 1)  # the last token is always computed, for its logits
        prefill_s = self.costs.prefill_s(cached, tokens)
        cost_s = prefill_s * (1 + self.costs.externality) + one.prefill_s + one.decoding * self.costs.decode_row_s
        return Decision(index, cached, prefill_s, cost_s, reason)

    @staticmethod
    def _hit(one: _Replica, digests: Sequence[Digest]) -> int:
        """How many of the first pages a replica has or will have.

        A cache evicts the end of a prefix before its beginning. So the pages that it has are always the first pages of the
        prompt, and a binary search finds their number.
        """
        known, promised = one.known, one.promised
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            digest = digests[middle]
            if digest in known or digest in promised:
                low = middle + 1
            else:
                high = middle
        return low

    # Progress of requests --------------------------------------------------------------------------------------------

    def started(self, name: str, decision: Decision, digests: Sequence[Digest]) -> None:
        """Record that a request was sent to the replica of `decision`. `name` identifies it until `finished`."""
        one = self._replicas[decision.replica]
        promised = tuple(digest for digest in digests if digest not in one.known)
        one.promised.update(promised)
        one.prefill_s += decision.prefill_s
        one.waiting += 1
        self._tickets[name] = _Ticket(decision.replica, decision.prefill_s, promised)
        self.decisions[decision.replica, decision.reason] += 1

    def first_token(self, name: str) -> None:
        """Record that the prompt of a request has been computed; its answer is in the decode phase now."""
        ticket = self._tickets.get(name)
        if ticket is not None and not ticket.decoding:
            self._computed(ticket)
            ticket.decoding = True
            self._replicas[ticket.replica].decoding += 1

    def finished(self, name: str) -> None:
        """Record that a request has ended, for whatever reason. An unknown name is ignored."""
        ticket = self._tickets.pop(name, None)
        if ticket is None:
            return
        if ticket.decoding:
            self._replicas[ticket.replica].decoding -= 1
        else:
            self._computed(ticket)

    def _computed(self, ticket: _Ticket) -> None:
        """Remove a request from the waiting ones. Its promised pages are known by now, or will not be computed any more."""
        one = self._replicas[ticket.replica]
        one.waiting -= 1
        one.prefill_s = one.prefill_s - ticket.prefill_s if one.waiting else 0.0  # avoids accumulated rounding errors
        for digest in ticket.digests:
            if one.promised[digest] > 1:
                one.promised[digest] -= 1
            else:
                del one.promised[digest]
