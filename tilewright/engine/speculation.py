"""Speculative decoding: several tokens of a request are guessed, and one pass of the model says how many of them are right.

Nothing is lost by it: at each drafted position the sampler draws what it would have drawn without (its noise depends on seed,
position and token alone), and a draft counts as long as it is what was drawn. Who guesses is a `Proposer`; how much is guessed
for whom is decided here.

A proposer sees tokens, so a request that speculates has to wait for the samples of its last row, and has a row in every other
step where the runner keeps one in flight. All that speculate wait together, so that they share a step; everybody else goes on
as before. That must pay:

    - Where guessing costs nothing, as looking in the text does, it is done in silence first: only a request whose next tokens
      would have been guessed right begins to wait.
    - The length follows what is accepted: it doubles while all is, and is one more than what was accepted otherwise.
    - Where too little is accepted a request stops waiting, for four times as many tokens after each such attempt.
    - Nobody speculates while more requests decode than a quarter of the samples that a step may have.

What a grammar forces is known without guessing (rules.py), and comes before whatever a proposer says.
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
"""Drafts of a request's first row that has any."""
SILENT = 4
"""Tokens that are guessed in silence, and compared once they are known."""
REST = 32
"""Tokens that a request goes on without drafts after its first attempt that did not pay; then four times as many."""
LONGEST_REST = 1 << 20
CAUGHT_UP = 4096
"""Tokens that are read at a time of a text that has not been read yet: a long prompt must not hold up a step."""
PAYS_ALONE, PAYS_BESIDE_OTHERS = 0.3, 1.0
"""Accepted drafts a row, on the average, from which on waiting pays: where nobody else decodes a step more or less costs
little, and else a request has a row in every other step."""
WORTH_WAITING = 4
"""Forced tokens for which a request waits that has a sample in flight: waiting costs it two steps."""
_NEVER = 1 << 62


class Proposer(Protocol):
    """Guesses the next tokens of requests. All tokens that they have are known, unless it is `free`."""

    @property
    def free(self) -> bool:
        """Guessing costs next to nothing, and can be done without the last tokens."""
        ...

    def propose(self, asked: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """For each request up to so many tokens; it may have none."""
        ...


class FromText:
    """Proposes what followed the last time that the end of the text stood in the prompt or in the output before."""

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
    """How one request fares with its drafts."""

    __slots__ = ("accepted", "attempts", "drafted", "length", "mean", "silent", "silent_at", "sure")

    def __init__(self, request: Request):
        self.length = FIRST
        self.mean = 2 * PAYS_BESIDE_OTHERS
        self.attempts = 0  # that did not pay
        self.drafted, self.accepted = request.drafted, request.accepted
        self.silent: Sequence[int] = ()
        self.silent_at = 0
        self.sure = False  # its last drafts were forced: they tell nothing about guesses

    def learn(self, request: Request, longest: int) -> bool:
        """Take in what has been accepted since the last call; whether anything was drafted."""
        drafted, accepted = request.drafted - self.drafted, request.accepted - self.accepted
        self.drafted, self.accepted = request.drafted, request.accepted
        if not drafted:
            return False
        self.mean += (accepted - self.mean) / 3
        self.length = min(longest, 2 * self.length if accepted == drafted else accepted + 1)
        return True

    def rest(self) -> int:
        """An attempt did not pay: how many tokens to go on without."""
        self.attempts += 1
        self.length, self.mean = FIRST, 2 * PAYS_BESIDE_OTHERS
        return min(LONGEST_REST, REST << 2 * (self.attempts - 1))


class Speculator:
    """Decides before each step who waits, and who has drafts.

    Args:
        tenants: the requests; their `drafts` are set, and `decoders.held`.
        longest: drafts of one request in one step at most.
        rules: what the grammars of requests allow and force.
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
        self._due = np.zeros(tenants.max_seqs, np.int64)  # known tokens from which on a request is looked at
        self._paces: list[_Pace | None] = [None] * tenants.max_seqs
        self._ruled = np.zeros(tenants.max_seqs, bool)  # has a grammar

    def prepare(self) -> None:
        """Before `Scheduler.schedule`."""
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
        """Nobody speculates from now on. Whoever has drafts in flight still waits for them: only they tell where its next row
        begins."""
        decoders = self._tenants.decoders
        self._tenants.drafts = {}
        slots = decoders.members()[1]
        waiting = slots[decoders.held[slots] & (decoders.pending[slots] > 0)]
        decoders.held[:] = False
        decoders.held[waiting], decoders.together = True, bool(waiting.size)

    def give_up(self) -> None:
        """The proposer has failed: nobody speculates any more."""
        self._failed = True
        self.release()

    def _pace(self, request: Request, slot: int) -> _Pace:
        pace = self._paces[slot]
        if pace is None:
            self._paces[slot] = pace = _Pace(request)
        return pace

    def _consider(self, request: Request, slot: int) -> None:
        """Whether a request begins to wait for its samples."""
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
        """Drafts of the requests that wait, whose tokens are all known; those with which it does not pay wait no longer."""
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
            elif self.proposer.free or not asked[request]:  # else a grammar has cut them: the next may do
                slot = request.slot
                decoders.held[slot], self._due[slot] = False, len(request) + (0 if self.proposer.free else REST)
        self._tenants.drafts = kept
        stay = {request for request in self._tenants.forced if request.state is State.RUNNING}
        self._tenants.forced = (stay - asked.keys()) | forced.keys()

    def _room(self, request: Request, slot: int, most: int) -> int:
        """How many drafts of a request fit its `max_tokens` and its pages, `most` at most."""
        most = min(most, int(self._tenants.decoders.left[slot]) - 1)
        return max(0, min(most, self._tenants.reserve(request, most + 1) - 1))
