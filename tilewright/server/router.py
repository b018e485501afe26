"""Which of several replicas answers a request: a pure decision, from what each has in its prefix cache and has to do.

    cost(replica) = prefill of the part of the prompt that it does not have, times (1 + externality)
                  + prefill of the prompts that wait there
                  + what its running answers slow both down by

in seconds by `Costs`. The externality is what computing a prefix once more costs those who come behind.

A replica's cache is mirrored here from the events of its page pool (`known`, `forgotten`): digests of whole pages, each of
which stands for everything before it too. What a replica is about to compute counts as known, so that the second of two
requests that begin alike follows the first before that has been computed.

Where no replica has anything of the prompt, two of them are drawn and the cheaper one is taken (power of two choices): as good
as looking at all, and of several routers that decide on the same stale numbers not all choose the same replica.

No input, no output and no clock: the caller says what happened (`started`, `first_token`, `finished`, `lost`).
"""

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["Costs", "Decision", "Router"]

Digest = bytes
"""Beginning of a page's digest: wrong ones (a collision) cost time, never an answer."""
DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What work costs a replica, in seconds. Only ratios matter to a decision.

    The defaults are those of a model of eight billion parameters on one H100-class card: 2 FLOPs a parameter and token at half
    of the peak rate, attention on top, a decoding row's share of a step.
    """

    prefill_token_s: float = 4e-5
    """A prompt's token."""
    attention_token_s: float = 1.3e-9
    """The same for each token before it."""
    decode_row_s: float = 2e-3
    """By how much one running answer delays a prompt that is computed beside it."""
    externality: float = 3.0
    """Of 0, 1 and 3 the best on a public conversation trace: more of the prompts is found, nobody waits longer. 10 finds a bit
    more there, and leaves a replica idle beside one that has a beginning which all share."""

    def prefill_s(self, begin: int, end: int) -> float:
        """Computing tokens `begin` to `end` of a prompt."""
        tokens = end - begin
        return tokens * (self.prefill_token_s + self.attention_token_s * (begin + end) / 2)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why."""

    replica: int
    cached_tokens: int
    """Of its prompt, as far as the mirror knows."""
    prefill_s: float
    """What is left to compute there."""
    cost_s: float
    reason: str
    """"prefix": a replica has a part of it; "load": none has, two were drawn; "only": there was no choice."""


@dataclass(slots=True)
class _Replica:
    known: set[Digest] = field(default_factory=set)
    promised: Counter[Digest] = field(default_factory=Counter)
    """Pages that requests on their way will compute there."""
    prefill_s: float = 0.0
    """Of prompts that have not had their first token."""
    waiting: int = 0
    """How many these are."""
    decoding: int = 0
    """Answers that are being written."""


@dataclass(slots=True)
class _Ticket:
    replica: int
    prefill_s: float
    digests: tuple[Digest, ...]
    decoding: bool = False


class Router:
    """Decides for `replicas` of one model.

    Args:
        page_tokens: tokens of a page, as the replicas have them.
        costs: of work.
        seed: of the draws.
    """

    def __init__(self, replicas: int, page_tokens: int, costs: Costs | None = None, seed: int = 0):
        if replicas < 1 or page_tokens < 1:
            raise ValueError(f"a router for {replicas} replicas and pages of {page_tokens} tokens, wanted at least one of each")
        self.costs = costs or Costs()
        self.page_tokens = page_tokens
        self._replicas = [_Replica() for _ in range(replicas)]
        self._tickets: dict[str, _Ticket] = {}
        self._rng = random.Random(seed)
        self.decisions: Counter[tuple[int, str]] = Counter()
        """(replica, reason) -> requests."""

    # What the caches hold --------------------------------------------------------------------------------------------

    def known(self, replica: int, digests: Collection[Digest]) -> None:
        """These pages can be found in a replica's cache."""
        self._replicas[replica].known.update(digests)

    def forgotten(self, replica: int, digests: Collection[Digest]) -> None:
        """These no longer can."""
        self._replicas[replica].known.difference_update(digests)

    def emptied(self, replica: int) -> None:
        """None can be found any more; its requests go on."""
        self._replicas[replica].known.clear()

    def lost(self, replica: int) -> list[str]:
        """A replica has gone, with its cache and all that it was doing: the requests that were there."""
        gone = [name for name, ticket in self._tickets.items() if ticket.replica == replica]
        for name in gone:
            del self._tickets[name]
        self._replicas[replica] = _Replica()
        return gone

    def pages_known(self, replica: int) -> int:
        """Pages in the mirror of a cache."""
        return len(self._replicas[replica].known)

    def load_of(self, replica: int) -> tuple[float, int]:
        """(seconds of prefill that wait there, answers that are being written)."""
        one = self._replicas[replica]
        return one.prefill_s, one.decoding

    # Decisions -------------------------------------------------------------------------------------------------------

    def choose(self, digests: Sequence[Digest], tokens: int, among: Collection[int]) -> Decision:
        """The replica for a prompt of `tokens` whose whole pages have these digests, in order. Changes nothing.

        Raises ValueError where `among`, the replicas that take requests, is empty.
        """
        if not among:
            raise ValueError("there is no replica to choose")
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
        """Pages from the first on that a replica has or will have.

        A cache gives up the end of a prefix before its beginning, so the pages that it has of a prompt are its first ones, and
        their number can be searched for by halves.
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

    # What becomes of requests ----------------------------------------------------------------------------------------

    def started(self, name: str, decision: Decision, digests: Sequence[Digest]) -> None:
        """A request has been sent to where a decision says. `name` is its own until `finished`."""
        one = self._replicas[decision.replica]
        promised = tuple(digest for digest in digests if digest not in one.known)
        one.promised.update(promised)
        one.prefill_s += decision.prefill_s
        one.waiting += 1
        self._tickets[name] = _Ticket(decision.replica, decision.prefill_s, promised)
        self.decisions[decision.replica, decision.reason] += 1

    def first_token(self, name: str) -> None:
        """Its prompt has been computed: the answer is being written."""
        ticket = self._tickets.get(name)
        if ticket is not None and not ticket.decoding:
            self._computed(ticket)
            ticket.decoding = True
            self._replicas[ticket.replica].decoding += 1

    def finished(self, name: str) -> None:
        """It has ended, however; an unknown name is nothing to do."""
        ticket = self._tickets.pop(name, None)
        if ticket is None:
            return
        if ticket.decoding:
            self._replicas[ticket.replica].decoding -= 1
        else:
            self._computed(ticket)

    def _computed(self, ticket: _Ticket) -> None:
        """What was promised is either known by now or will not come."""
        one = self._replicas[ticket.replica]
        one.waiting -= 1
        one.prefill_s = one.prefill_s - ticket.prefill_s if one.waiting else 0.0  # sums of floats drift
        for digest in ticket.digests:
            if one.promised[digest] > 1:
                one.promised[digest] -= 1
            else:
                del one.promised[digest]
