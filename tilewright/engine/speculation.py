"""Speculative decoding: several tokens of a request are guessed, and one pass of the model checks how many of them are right.

The samples stay the same. At each drafted position the sampler draws the token that it would have drawn without drafts (its
noise depends only on seed, position and token), and a draft is accepted while it equals this token. A `Proposer` makes the
guesses; this module decides for which requests it guesses, and how many tokens.

A proposer needs to know all tokens. So a request that speculates waits for the samples of its last row. If the runner keeps one
step in flight, the request has a row only in every other step. All speculating requests wait together, so that they share a
step; other requests continue as before. The waiting must pay:

    - If guessing costs nothing, as with a search in the text, guesses are first only compared, not used. A request begins to
      wait only if its next tokens would have been guessed right.
    - The number of drafts adapts: it doubles while all are accepted; otherwise it is the number of accepted ones plus one.
    - If too few are accepted, the request stops waiting for some tokens: four times as many after each such attempt.
    - No request speculates while more requests decode than a quarter of the samples that a step may have.

Tokens that a grammar forces are known without guessing (rules.py), and take precedence over those of a proposer.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from tilewright.engine.lookup import WINDOW, Lookup
from tilewright.engine.request import Request, State
from tilewright.engine.rules import Rules
from tilewright.engine.tenants import Tenants

__all__ = ["SILENT", "FromText", "Proposer", "Speculator"]

FIRST = 4
"""Number of drafts in the first row of a request that has drafts."""
SILENT = 4
"""Number of tokens that are guessed without use, and compared once the true tokens are known."""
REST = 32
"""Tokens that a request generates without drafts after its first attempt that did not pay; after each further one four times
as many."""
LONGEST_REST = 1 << 20
CAUGHT_UP = 4096
"""Most tokens of an unread text that are read at a time, so that a long prompt does not delay a step."""
PAYS_ALONE, PAYS_BESIDE_OTHERS = 0.3, 1.0
"""Average number of accepted drafts per row from which on waiting pays. If no other request decodes, an additional step costs
little; otherwise a waiting request loses every other step."""
WORTH_WAITING = 4
"""A request with a sample in flight waits only for at least this many forced tokens, because waiting costs it two steps."""
_NEVER = 1 << 62


class Proposer(Protocol):
    """Guesses the next tokens of requests. All tokens of the requests are known, except if the proposer is `free`."""

    @property
    def free(self) -> bool:
        """Whether guessing costs almost nothing and is possible without the last tokens."""
        ...

    def propose(self, asked: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """Up to the given number of tokens for each request; a request may have none."""
        ...


class FromText:
    """Proposes the tokens that followed an earlier occurrence of the last tokens, in the prompt or in the output."""

    free = True

    def __init__(self, max_seqs: int):
        self._known: list[tuple[int, Lookup] | None] = [None] * max_seqs

    def propose(self, asked: Mapping[Request, int]) -> dict[Request, list[int]]:
        """See `Proposer`."""
        return {request: self._text(request).continuation(most) for request, most in asked.items()}

    def _text(self, request: Request) -> Lookup:
        slot = request.slot
        assert slot is not None
        known = self._known[slot]
        if known is None or known[0] != request.lease:
            self._known[slot] = known = (request.lease, Lookup(max(0, len(request) - WINDOW)))
        text = known[1]
        text.extend(request.tokens(text.seen, min(len(request), text.seen + CAUGHT_UP)))
        return text if text.seen == len(request) else _EMPTY


_EMPTY = Lookup()


class _Pace:
    """How well drafts work for one request."""

    __slots__ = ("accepted", "attempts", "drafted", "length", "mean", "silent", "silent_at", "sure")

    def __init__(self, request: Request):
        self.length = FIRST
        self.mean = 2 * PAYS_BESIDE_OTHERS
        self.attempts = 0  # number of those that did not pay
        self.drafted, self.accepted = request.drafted, request.accepted
        self.silent: Sequence[int] = ()
        self.silent_at = 0
        self.sure = False  # the last drafts were forced, so their acceptance does not tell how good the guesses are

    def learn(self, request: Request, longest: int) -> bool:
        """Update from the drafts that were accepted since the last call. Returns whether there were any drafts."""
        drafted, accepted = request.drafted - self.drafted, request.accepted - self.accepted
        self.drafted, self.accepted = request.drafted, request.accepted
        if not drafted:
            return False
        self.mean += (accepted - self.mean) / 3
        self.length = min(longest, 2 * self.length if accepted == drafted else accepted + 1)
        return True

    def rest(self) -> int:
        """An attempt did not pay: returns how many tokens to generate without drafts."""
        self.attempts += 1
        self.length, self.mean = FIRST, 2 * PAYS_BESIDE_OTHERS
        return min(LONGEST_REST, REST << 2 * (self.attempts - 1))


class Speculator:
    """Decides before each step which requests wait, and which have drafts.

    Args:
        tenants: the requests; this class sets `drafts`, `forced`, `decoders.held` and `decoders.together`.
        longest: most drafts of one request in one step.
        rules: which tokens the grammars of requests allow and force.
    """

    def __init__(
        self,
        proposer: Proposer,
        tenants: Tenants,
        *,
        longest: int,
        rules: Rules,
    ):
        self.proposer, self._tenants, self._longest, self._rules = proposer, tenants, longest, rules
        self._most_requests = max(1, tenants.max_samples // 4)
        self._failed = False
        self._leases = np.full(tenants.max_seqs, -1, np.int64)
        self._due = np.zeros(tenants.max_seqs, np.int64)  # number of known tokens from which on a request is considered
        self._paces: list[_Pace | None] = [None] * tenants.max_seqs
        self._ruled = np.zeros(tenants.max_seqs, bool)  # whether the request has a grammar

    def prepare(self) -> None:
        """Set the drafts of the next step. Call it before `Scheduler.schedule`."""
        tenants, decoders = self._tenants, self._tenants.decoders
        tenants.drafts = {}
        requests, slots = decoders.members()
        moved = decoders.lease[slots] != self._leases[slots]
        for i in np.flatnonzero(moved).tolist():
            slot = slots[i]
            self._leases[slot], self._paces[slot] = decoders.lease[slot], None
            params = requests[i].params
            self._due[slot] = 0 if params.speculate else _NEVER
            self._ruled[slot] = params.speculate and params.grammar is not None
        if slots.size > self._most_requests or self._failed:
            self.release()
            return
        for i in np.flatnonzero(decoders.known[slots] >= self._due[slots]).tolist():
            if not decoders.held[slots[i]]:
                self._consider(requests[i], int(slots[i]))
        for i in np.flatnonzero(self._ruled[slots] & ~decoders.held[slots]).tolist():
            most = int(min(self._longest, decoders.left[slots[i]] - 1))
            worth = WORTH_WAITING if decoders.pending[slots[i]] else 1
            decoders.held[slots[i]] = len(self._rules.forced(requests[i], most)) >= worth
        held = decoders.held[slots]
        decoders.together = bool((decoders.pending[slots[held]] > 0).any())
        if held.any() and not decoders.together:
            self._draft([requests[i] for i in np.flatnonzero(held)], alone=bool(held.all()))

    def release(self) -> None:
        """Stop speculation for all requests. A request with drafts in flight still waits for their result, because its next row
        begins after the accepted ones."""
        decoders = self._tenants.decoders
        self._tenants.drafts = {}
        slots = decoders.members()[1]
        waiting = slots[decoders.held[slots] & (decoders.pending[slots] > 0)]
        decoders.held[:] = False
        decoders.held[waiting], decoders.together = True, bool(waiting.size)

    def give_up(self) -> None:
        """The proposer has failed: stop speculation for good."""
        self._failed = True
        self.release()

    def _pace(self, request: Request, slot: int) -> _Pace:
        pace = self._paces[slot]
        if pace is None:
            self._paces[slot] = pace = _Pace(request)
        return pace

    def _consider(self, request: Request, slot: int) -> None:
        """Decide whether a request begins to wait for its samples."""
        pace, known, held = self._pace(request, slot), len(request), self._tenants.decoders.held
        if not self.proposer.free:
            held[slot] = True
            return
        if pace.silent:
            came = request.tokens(pace.silent_at, known)
            held[slot] = len(came) >= SILENT and list(pace.silent) == came[:SILENT]
            pace.silent = ()
            if held[slot]:
                return
        pace.silent, pace.silent_at = self.proposer.propose({request: SILENT}).get(request, ()), known
        self._due[slot] = known + SILENT

    def _draft(self, requests: Sequence[Request], *, alone: bool) -> None:
        """Make drafts for the waiting requests, whose tokens are all known. Requests for which it does not pay stop waiting."""
        decoders, asked, forced = self._tenants.decoders, dict[Request, int](), dict[Request, Sequence[int]]()
        for request in requests:
            slot = request.slot
            assert slot is not None
            pace = self._pace(request, slot)
            learnt, sure, pace.sure = pace.learn(request, self._longest), pace.sure, False
            if self._ruled[slot] and (found := self._rules.forced(request, self._room(request, slot, self._longest))):
                forced[request], pace.sure = found, True
            elif learnt and not sure and pace.mean < (PAYS_ALONE if alone else PAYS_BESIDE_OTHERS):
                decoders.held[slot], self._due[slot] = False, len(request) + pace.rest()
            else:
                asked[request] = self._room(request, slot, pace.length)
        drafts = self.proposer.propose({request: most for request, most in asked.items() if most})
        kept = forced.copy()
        for request in asked:
            found = drafts.get(request, ())
            found = found[: self._rules.allowed(request, found)] if found else found
            if found:
                kept[request] = found
            elif self.proposer.free or not asked[request]:  # otherwise a grammar has cut the drafts; the next ones may fit
                slot = request.slot
                decoders.held[slot], self._due[slot] = False, len(request) + (0 if self.proposer.free else REST)
        self._tenants.drafts = kept
        stay = {request for request in self._tenants.forced if request.state is State.RUNNING}
        self._tenants.forced = (stay - asked.keys()) | forced.keys()

    def _room(self, request: Request, slot: int, most: int) -> int:
        """How many drafts, at most `most`, fit the `max_tokens` and the pages of a request."""
        most = min(most, int(self._tenants.decoders.left[slot]) - 1)
        return max(0, min(most, self._tenants.reserve(request, most + 1) - 1))
