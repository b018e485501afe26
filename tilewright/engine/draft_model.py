"""A small draft model that guesses tokens for a large model. It reads the same tokens and stores its keys and values in pages
with the same numbers. It draws with each request's own settings and noise, so that the samples are equal where the two models
agree.

Its cache has as many pages as that of the large model, and a request's block table is used for both: the owner of a page owns
it in both caches. In a page, it only relies on content that it has written for the same request. A wrong guess only costs time.
The draft model runs only for requests that wait for drafts. If a request had no drafts for a while, or starts again after a
preemption, the draft model first reads all tokens that it has missed.

A draft head (models/draft_heads.py) works in the same way. It reads the hidden states that the large model has kept, each with
the token after it, so its view of a request is one token shorter. While it guesses, it uses its own states in their place; once
the tokens are known, it reads these positions again, with the states of the large model.
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
        """The known tokens at positions [start + 1, stop + 1) of the whole request."""
        return super().tokens(start + 1, stop + 1)


class _Guest:
    """The draft model's view of a request: no penalties, no log-probabilities."""

    __slots__ = ("computed", "guessed", "known", "seen")
    kind = Request

    def __init__(self, request: Request):
        self.seen = self.kind("draft", request.prompt_ids, SamplingParams())
        self.seen.seed, self.seen.settings = request.seed, request.settings
        self.computed = 0
        self.known = 0
        self.guessed: Sequence[int] = ()

    def meet(self, request: Request) -> Request:
        """Update the view with the request's new tokens, and with its slot and pages."""
        self.seen.output_ids = request.output_ids
        self.computed = min(self._stands(request), len(self.seen) - 1)
        self.seen.slot, self.seen.lease, self.seen.pages = request.slot, request.lease, request.pages
        self.known = len(self.seen)
        return self.seen

    def _stands(self, request: Request) -> int:
        """Up to which token the computed keys and values are still right. The last guess was never read by the model."""
        came = self.seen.tokens(self.known, self.known + len(self.guessed))
        right = next((i for i, (a, b) in enumerate(zip(self.guessed, came)) if a != b), min(len(self.guessed), len(came)))
        return self.known + min(right, max(0, len(self.guessed) - 1))


class _HeadsGuest(_Guest):
    """The draft head's view of a request."""

    __slots__ = ()
    kind = _Behind

    def _stands(self, request: Request) -> int:
        return self.known


class DraftModel:
    """Proposes the samples of its own runner. `most_tokens`: limit of one pass. `head`: the runner runs a draft head."""

    free = False

    def __init__(self, runner: Runner, *, max_seqs: int, most_tokens: int, head: bool = False):
        self.runner = runner
        self._most = most_tokens
        self._kind = _HeadsGuest if head else _Guest
        self._guests: list[tuple[int, _Guest] | None] = [None] * max_seqs

    def propose(self, asked: Mapping[Request, int]) -> dict[Request, list[int]]:
        """See `Proposer`. One pass reads the new tokens of each request; each further guessed token needs another pass."""
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
        """Read all tokens of each request, long ones in pieces; returns the sampled next token of each."""
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
