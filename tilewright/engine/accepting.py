"""Which samples of a step count: those whose requests have not ended."""

from collections.abc import Iterator, Sequence
from itertools import compress
from math import isnan
from typing import NamedTuple

import numpy as np

from tilewright.engine.columns import LogprobColumns
from tilewright.engine.request import Request, State, TokenLogprobs
from tilewright.engine.step import Step, StepResult

__all__ = ["Accepted", "accepted", "without"]


class Accepted(NamedTuple):
    """The samples of a step that count, with one entry per request that has any."""

    requests: Sequence[Request]
    slots: np.ndarray
    """[N] int64: the requests' slots when the step was made."""
    counts: np.ndarray
    """[N] int64: number of tokens of each request."""
    ids: np.ndarray
    """int64: the tokens of all requests, concatenated."""
    logprobs: list[TokenLogprobs | None]
    """[], or one entry per token."""
    columns: LogprobColumns | None
    """None, or the log-probabilities as columns; `logprobs` is then empty."""
    here: np.ndarray | None
    """[N] bool: whether the request is still in its slot; None: all are."""
    looks: list[int]
    """Indices of the requests that need attention, because more happened than one further token: the first token in a slot, the
    last token, or several tokens at once."""

    def explained(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Index of a request -> its log-probabilities, for the requests that have any."""
        if not self.logprobs:
            return {}
        entries = ((i, tuple(one for one in logprobs if one is not None)) for i, (_, _, logprobs) in enumerate(self.each()))
        return {i: found for i, found in entries if found}

    def without_nan(self) -> tuple["Accepted", list[Request]]:
        """(the samples of requests without NaN in their log-probabilities, the other requests)"""
        wrong = np.zeros(len(self.requests), bool)
        if self.columns is not None and np.count_nonzero(nan := np.isnan(self.columns.logprob)):
            wrong[np.repeat(np.arange(wrong.size), self.counts)[nan]] = True
        for i, found in self.explained().items():
            wrong[i] = any(isnan(one.logprob) for one in found)
        if not wrong.any():
            return self, []
        looks = [i - int(wrong[:i].sum()) for i in self.looks if not wrong[i]]
        return self.only(~wrong)._replace(looks=looks), list(compress(self.requests, wrong.tolist()))

    def append(self) -> None:
        """Add the tokens to the requests that have left their slots; for the others `Decoders` stores them by slot."""
        if self.here is not None and not self.here.all():
            for here, (request, tokens, _) in zip(self.here.tolist(), self.each()):
                if not here:
                    request.output_ids.extend(tokens)

    def each(self) -> Iterator[tuple[Request, list[int], list[TokenLogprobs | None]]]:
        """(request, its tokens, their log-probabilities or []) for each request"""
        begin, ids = 0, self.ids.tolist()
        for request, count in zip(self.requests, self.counts.tolist()):
            end = begin + count
            yield request, ids[begin:end], self.logprobs[begin:end]
            begin = end

    def only(self, stays: np.ndarray) -> "Accepted":
        """The samples of the requests for which `stays` [N] bool is True."""
        lines = stays if self.ids.size == stays.size and (self.counts == 1).all() else np.repeat(stays, self.counts)
        return Accepted(
            without(self.requests, stays),
            self.slots[stays],
            self.counts[stays],
            self.ids[lines],
            list(compress(self.logprobs, lines)) if self.logprobs else [],
            None if self.columns is None else self.columns.take(lines),
            None if self.here is None else self.here[stays],
            [],
        )


def without(requests: Sequence[Request], stays: np.ndarray) -> list[Request]:
    """A new list of the requests for which `stays` is True; fast if these are nearly all."""
    gone = (~stays).nonzero()[0]
    if 4 * gone.size > stays.size:
        return list(compress(requests, stays.tolist()))
    left = list(requests)
    for i in reversed(gone.tolist()):
        del left[i]
    return left


def accepted(step: Step, result: StepResult, here: np.ndarray | None) -> Accepted:
    """The samples of a result that count.

    `here` [rows] bool: the row's request is still in its slot. None: this is true for each row, and each row has a sample. Of
    the requests that have left their slots, those that were preempted keep their samples; those that have ended do not.
    """
    if here is None:
        ids = result.tokens
        return Accepted(step.requests, step.slots, result.counts, ids, result.logprobs, result.columns, None, [])
    rows = np.flatnonzero(result.counts)
    requests = step.requests if rows.size == result.counts.size else [step.requests[i] for i in rows.tolist()]
    here = here[rows]
    ids = result.tokens
    found = Accepted(
        requests, step.slots[rows], result.counts[rows], ids, result.logprobs, result.columns, here, []
    )  # fmt: skip
    if here.all():
        return found
    stays = here.copy()
    for i in np.flatnonzero(~here).tolist():
        request = requests[i]
        request.pending -= 1
        stays[i] = request.state is not State.FINISHED
    return found.only(stays)
