"""A small model that guesses for a large one: it reads the same tokens, keeps its keys and values in pages of the same numbers,
and draws with each request's own settings and noise, so that where the two models agree their samples do.

Its cache has as many pages as the large model's, and a request's block table serves both: whoever owns a page owns it here too.
What stands in a page is never trusted beyond what this request has written itself, and a wrong guess costs time alone. It runs
only for requests that wait for drafts, so a request that has none for a while, or starts again, is read up to its end first.

A draft head (models/draft_heads.py) goes the same way. It reads the states that the large model has kept, each with the token
behind it, so its request is one token shorter; where it guessed, it had its own streams for states, and reads them anew.
"""

from collections.abc import Mapping, Sequence

from tilewright.engine.request import Request, SamplingParams
from tilewright.engine.step import Row, Runner, Step, StepResult

__all__ = ["DraftModel"]


class _Behind(Request):
    """A request without its first token."""

    __slots__ = ()

    def __len__(self) -> int:
        return super().__len__() - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """The known tokens behind positions [start, stop)."""
        return super().tokens(start + 1, stop + 1)


class _Guest:
    """A request as the small model sees it: no penalties, no log-probabilities."""

    __slots__ = ("computed", "guessed", "known", "seen")
    kind = Request

    def __init__(self, request: Request):
        self.seen = self.kind("draft", request.prompt_ids, SamplingParams())
        self.seen.seed, self.seen.settings = request.seed, request.settings
        self.computed = 0
        self.known = 0
        self.guessed: Sequence[int] = ()

    def meet(self, request: Request) -> Request:
        """Bring it up to date: which of the guesses came true, and where the request is now."""
        self.seen.output_ids = request.output_ids
        self.computed = min(self._stands(request), len(self.seen) - 1)
        self.seen.slot, self.seen.lease, self.seen.pages = request.slot, request.lease, request.pages
        self.known = len(self.seen)
        return self.seen

    def _stands(self, request: Request) -> int:
        """Up to where what was computed is right still. The last guess was never read."""
        came = self.seen.tokens(self.known, self.known + len(self.guessed))
        right = next((i for i, (a, b) in enumerate(zip(self.guessed, came)) if a != b), min(len(self.guessed), len(came)))
        return self.known + min(right, max(0, len(self.guessed) - 1))


class _HeadsGuest(_Guest):
    """The same for a draft head."""

    __slots__ = ()
    kind = _Behind

    def _stands(self, request: Request) -> int:
        return self.known


class DraftModel:
    """Proposes what a runner of its own samples. `most_tokens`: of one pass. `head`: it runs a draft head."""

    free = False

    def __init__(self, runner: Runner, *, max_seqs: int, most_tokens: int, head: bool = False):
        self.runner = runner
        self._most = most_tokens
        self._kind = _HeadsGuest if head else _Guest
        self._guests: list[tuple[int, _Guest] | None] = [None] * max_seqs

    def propose(self, asked: Mapping[Request, int]) -> dict[Request, list[int]]:
        """See `Proposer`: one pass over what is new of each request, then one for each further token."""
        guests = {request: self._guest(request) for request in asked}
        rows = {request: guest.meet(request) for request, guest in guests.items()}
        tokens = self._read(list(asked), guests, rows)
        found = {request: [token] for request, token in zip(asked, tokens)}
        for more in range(1, max(asked.values(), default=1)):
            going = [request for request, most in asked.items() if most > more]
            step = Step.of([Row(rows[r], len(rows[r]) + more - 1, 1, True) for r in going])
            for request, token in zip(going, self._run(step).tokens.tolist()):
                found[request].append(token)
        for request, guest in guests.items():
            guest.guessed = found[request]
        return found

    def _guest(self, request: Request) -> _Guest:
        slot = request.slot
        assert slot is not None
        known = self._guests[slot]
        if known is None or known[0] != request.lease:
            self._guests[slot] = known = (request.lease, self._kind(request))
        return known[1]

    def _read(
        self, requests: Sequence[Request], guests: Mapping[Request, _Guest], rows: Mapping[Request, Request]
    ) -> list[int]:
        """The token behind each request, once all of its tokens have been read; long ones in pieces."""
        tokens: dict[Request, int] = {}
        while len(tokens) < len(requests):
            room, step = self._most, list[Row]()
            served: list[Request] = []
            for request in requests:
                guest, known = guests[request], len(rows[request])
                count = min(room, known - guest.computed)
                if request not in tokens and count:
                    room -= count
                    guest.computed += count
                    step.append(Row(rows[request], guest.computed - count, count, guest.computed == known))
                    served.append(request)
            samples = iter(self._run(Step.of(step)).tokens.tolist())
            tokens.update((request, next(samples)) for request, row in zip(served, step) if row.samples)
        return [tokens[request] for request in requests]

    def _run(self, step: Step) -> StepResult:
        return self.runner.collect(self.runner.launch(step))
