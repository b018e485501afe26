"""What crosses the border between the scheduler and whatever runs the model: a step of rows out, samples back.

No tensors: plain values, and numpy arrays with an entry a row. `Scheduler.schedule()` makes a `Step`, a `Runner` runs it,
`Scheduler.complete()` takes the samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from tilewright.engine.columns import LogprobColumns
from tilewright.engine.host_pages import Moves
from tilewright.engine.request import Request, TokenLogprobs

__all__ = [
    "HOST_ERRORS", "DeviceLost", "FillMasks", "Grown", "Row", "RowFault", "Runner", "Step", "StepResult", "agreed",
    "agreed_rows",
]  # fmt: skip

FillMasks = Callable[[Any], None]
"""Writes the masks of a step's masked rows into a numpy array [lines, words] int32: a bit a token, the lowest first."""
HOST_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, TypeError, ValueError)
"""What Python raises where a program, or the numbers that it was given, are wrong. Not here: what a device says
(RuntimeError), interrupts and exits."""


class RowFault(RuntimeError):
    """A runner cannot launch one row of a step, for a reason that lies in its request. Nothing of the step was launched."""

    def __init__(self, request: Request, error: BaseException):
        super().__init__(f"{type(error).__name__}: {error}")
        self.request = request


class DeviceLost(RuntimeError):
    """The device answers no more: every launch from now on will fail, and what its memory held is gone."""


class Row(NamedTuple):
    """Tokens [start, start + count) of one request go through the model."""

    request: Request
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] (nobody counts the items of a row)
    samples: bool
    """The logits of the last token are sampled: the result is the token at position start + count."""
    drafts: tuple[int, ...] = ()
    """The row's last tokens, guessed and not yet the request's. The logits of the token before them and of each of them are
    sampled, and the row brings the samples up to the first that differs from the draft at its position."""


class Grown(NamedTuple):
    """Rows of a step that have a page more than in another one, which had the same rows."""

    before: np.ndarray
    """`Step.pages` of that one, which is known by this very array."""
    rows: np.ndarray
    """Their indices."""
    pages: np.ndarray
    """int32 [kinds, rows]: the pages."""


@dataclass(frozen=True, eq=False)
class Step:
    """One pass of the model, as arrays with an entry a row. `Step.of` makes one of rows, and `rows` shows it so.

    Rows of decoding requests come first, then chunks of prompts. A row may read pages that an *earlier* row of the same step
    writes: in every layer the keys and values of all rows are written before the first row attends.
    """

    requests: Sequence[Request]
    slots: np.ndarray
    """int64: the requests' slots. No slot is there twice."""
    starts: np.ndarray
    counts: np.ndarray
    """int64: tokens [start, start + count) of the request go through the model, its drafts among them."""
    samples: np.ndarray
    """int64: how many of the row's last tokens have their logits sampled: 0, 1, or 1 and its drafts."""
    fed: np.ndarray
    """bool: the row's last token is a sample not known on the host yet: the latest that was made in the row's slot. A row
    with drafts is never fed, nor does it leave a sample for a later step: its request waits for the result."""
    leases: np.ndarray
    """int64: `Request.lease`, which tells one stay of a request in its slot from the next."""
    pages: np.ndarray
    """int64: pages in the request's block table."""
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Drafts of the rows that have any, by the rows' indices."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) pages, copied in all layers before the pass. No destination is a source, so their order is free."""
    out: Moves = ()
    """(page, host page): copied to host memory before anything else."""
    back: Moves = ()
    """(host page, page): copied from host memory, in all layers, behind that and before the copies. The step reads no host page
    that it writes."""
    fills: frozenset[int] = frozenset()
    """Pages that the prefix cache counts on: full once the step has run."""
    after: np.ndarray | None = None
    """`starts` of another step, known by this very array: this one has the same rows, each a token further."""
    grown: Grown | None = None
    """What alone is new in the block tables, where it is known."""
    masked: tuple[int, ...] = ()
    """Rows, by their indices, whose samples a mask restricts: each of a row's samples has its own, in their order. They depend
    on the tokens of the step before, so none of the step's rows is sampled before `Runner.sample`; what stands before the
    samples runs meanwhile."""

    @classmethod
    def of(cls, rows: Sequence[Row], **others: Any) -> "Step":
        """A step of these rows. `others`: its copies, moves, fills, masked."""
        requests = [row.request for row in rows]
        return cls(
            requests,
            *(
                _integers(values)
                for values in (
                    [request.slot or 0 for request in requests],
                    [row.start for row in rows],
                    [row.count for row in rows],
                    [row.samples and 1 + len(row.drafts) for row in rows],
                )
            ),
            fed=np.array([row.start + row.count - len(row.drafts) > len(row.request) for row in rows], bool),
            leases=_integers([request.lease for request in requests]),
            pages=_integers([len(request.pages) for request in requests]),
            drafts={i: row.drafts for i, row in enumerate(rows) if row.drafts},
            **others,
        )

    def followed_by(self, other: "Step", **others: Any) -> "Step":
        """Both steps' rows in one; `other` has no drafts. `others`: its copies, moves, fills."""
        both = np.concatenate
        return Step(
            [*self.requests, *other.requests], both((self.slots, other.slots)), both((self.starts, other.starts)),
            both((self.counts, other.counts)), both((self.samples, other.samples)), both((self.fed, other.fed)),
            both((self.leases, other.leases)), both((self.pages, other.pages)), drafts=self.drafts, **others,
        )  # fmt: skip

    @property
    def alike(self) -> bool:
        """All rows bring one token, and sample it."""
        if self.drafts or not self.slots.size:
            return False
        return bool((self.counts == 1).all() and self.samples.all())

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The step's rows, as values of their own: for whoever is in no hurry."""
        drafts = self.drafts
        columns = zip(self.requests, self.starts.tolist(), self.counts.tolist(), self.samples.tolist())
        return tuple(Row(r, start, count, n > 0, drafts.get(i, ())) for i, (r, start, count, n) in enumerate(columns))


def agreed_rows(step: Step, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many of each row's samples count, and which of all samples that are."""
    counts, stays, ends = step.samples.copy(), np.ones(samples.size, bool), np.cumsum(step.samples)
    for i, drafts in step.drafts.items():
        first = int(ends[i]) - len(drafts) - 1
        counts[i] = agreed(drafts, samples[first : ends[i]].tolist())
        stays[first + counts[i] : ends[i]] = False
    return counts, stays


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def agreed(drafts: Sequence[int], samples: Sequence[int]) -> int:
    """How many of a row's samples [1 + drafts] count: up to the first that differs from the draft at its position."""
    return next((i + 1 for i, draft in enumerate(drafts) if draft != samples[i]), len(drafts) + 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: the samples that count, row after row."""

    tokens: np.ndarray
    """[N] int64"""
    counts: np.ndarray
    """[rows] int64, N together: 0 for a row that does not sample, else 1, or as many as `agreed` says of its drafts."""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """[] where no row asks for them; else an entry a token, None of the rows that do not."""
    columns: LogprobColumns | None = None
    """Instead of `logprobs`, an entry a token, where the runner was made to give them so."""
    prompt_logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)
    """[] where no row asks for them; else an entry a row, None of those that do not. Of a row that asks: the prompt's tokens at
    positions start + 1 ... start + count, as far as there are any."""

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], **others: Any) -> "StepResult":
        """A result of lists, one of each row's tokens."""
        return cls(_integers([t for row in tokens for t in row]), _integers([len(row) for row in tokens]), **others)


class Runner(Protocol):
    """Runs steps in the order in which they were launched.

    `launch` reads all it needs of the requests (tokens, pages, slot) before it returns: by the time the step runs they may
    have been finished or preempted, and their pages and slots given to others in a later step. `RowFault` out of `launch` is
    about one row, and the others are launched again without it. `DeviceLost` ends the engine. Any other exception out of either
    method fails the requests of that step and of those launched after it, whose tickets are then dropped, never collected.
    """

    @property
    def asynchronous(self) -> bool:
        """True if `launch` returns before the step has run: the engine then keeps one step in flight behind the next."""
        ...

    def launch(self, step: Step) -> Any:
        """Enqueues the step, without waiting; returns a ticket for `collect`."""
        ...

    def sample(self, ticket: Any, words: int, fill: FillMasks) -> None:
        """Enqueues the samples of a step with masked rows, once every step before it has been collected.

        `fill` is called with an array [samples of the masked rows, words], in the order of `Step.masked`. Requests may have
        lost their slots since the launch. A step that is launched and never sampled is never collected either.
        """
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Waits for a launched step. Steps are collected in the order of their launches."""
        ...
