"""The interface between the scheduler and the runner of the model: a step of rows goes out, samples come back.

There are no tensors here, only plain values and numpy arrays with one entry per row. `Scheduler.schedule()` makes a `Step`, a
`Runner` runs it, and `Scheduler.complete()` accepts the samples.
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
"""Writes the masks of a step's masked rows into a numpy array [lines, words] int32: one bit per token, the lowest bit first."""
HOST_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, TypeError, ValueError)
"""What Python raises if a program or its input is wrong. Errors of the device (RuntimeError), interrupts and exits are not
included."""


class RowFault(RuntimeError):
    """A runner cannot launch one row of a step because of that row's request. No row of the step was launched."""

    def __init__(self, request: Request, error: BaseException):
        super().__init__(f"{type(error).__name__}: {error}")
        self.request = request


class DeviceLost(RuntimeError):
    """The device no longer responds: every later launch will fail, and the content of its memory is lost."""


class Row(NamedTuple):
    """Tokens [start, start + count) of one request go through the model."""

    request: Request
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] (nobody counts the items of a row)
    samples: bool
    """The logits of the last token are sampled: the result is the token at position start + count."""
    drafts: tuple[int, ...] = ()
    """The last tokens of the row, which are guesses and not yet part of the request. The logits of the token before them and of
    each draft are sampled. The row brings the samples up to and including the first that differs from the draft at its
    position."""


class Grown(NamedTuple):
    """The rows of a step that have one page more than in an earlier step with the same rows."""

    before: np.ndarray
    """`Step.pages` of the earlier step, the same array object; it identifies that step."""
    rows: np.ndarray
    """Indices of the rows."""
    pages: np.ndarray
    """int32 [kinds, rows]: their new pages."""


@dataclass(frozen=True, eq=False)
class Step:
    """One pass of the model, as arrays with one entry per row. `Step.of` makes a step from rows; `rows` converts it back.

    Rows of decoding requests come first, then chunks of prompts. A row may read pages that an *earlier* row of the same step
    writes: in every layer, the keys and values of all rows are written before attention runs for any row.
    """

    requests: Sequence[Request]
    slots: np.ndarray
    """int64: the requests' slots. No slot occurs twice."""
    starts: np.ndarray
    counts: np.ndarray
    """int64: tokens [start, start + count) of the request go through the model, including drafts."""
    samples: np.ndarray
    """int64: for how many of the row's last tokens the logits are sampled: 0, 1, or 1 plus the number of drafts."""
    fed: np.ndarray
    """bool: the row's last token is a sample that the host does not know yet: the latest sample in the row's slot. A row with
    drafts is never fed, and does not leave a sample for a later step: its request waits for the result."""
    leases: np.ndarray
    """int64: `Request.lease`, which distinguishes the stays of requests in a slot."""
    pages: np.ndarray
    """int64: number of pages in the request's block table."""
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Row index -> drafts, for the rows that have any."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) pages, copied in all layers before the pass. No destination is a source, so any order works."""
    out: Moves = ()
    """(page, host page) pairs, copied to host memory before anything else."""
    back: Moves = ()
    """(host page, page) pairs, copied from host memory in all layers, after `out` and before `copies`. The step reads no host
    page that it writes."""
    fills: frozenset[int] = frozenset()
    """Pages that are registered in the prefix cache and must be full once the step has run."""
    after: np.ndarray | None = None
    """`starts` of an earlier step, the same array object: this step has the same rows, each one token further. Or None."""
    grown: Grown | None = None
    """The only changes in the block tables since an earlier step; None: unknown."""
    masked: tuple[int, ...] = ()
    """Indices of rows whose samples are restricted by masks, one mask per sample in order. The masks depend on the tokens of
    the step before, so no row of the step is sampled before `Runner.sample`; everything up to the logits runs meanwhile."""

    @classmethod
    def of(cls, rows: Sequence[Row], **others: Any) -> "Step":
        """A step of these rows. `others`: further fields, such as copies, moves, fills and masked."""
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
        """One step with the rows of both; `other` has no drafts. `others`: further fields, such as copies, moves and fills."""
        both = np.concatenate
        return Step(
            [*self.requests, *other.requests], both((self.slots, other.slots)), both((self.starts, other.starts)),
            both((self.counts, other.counts)), both((self.samples, other.samples)), both((self.fed, other.fed)),
            both((self.leases, other.leases)), both((self.pages, other.pages)), drafts=self.drafts, **others,
        )  # fmt: skip

    @property
    def alike(self) -> bool:
        """Whether every row has one token and samples it."""
        if self.drafts or not self.slots.size:
            return False
        return bool((self.counts == 1).all() and self.samples.all())

    @property
    def masked_samples(self) -> list[int]:
        """The indices of the samples of masked rows, among all samples of the step."""
        if self.samples.size == len(self.masked) == int(self.samples.sum()):
            return list(self.masked)
        counts, ends = self.samples.tolist(), np.cumsum(self.samples).tolist()
        return [at for i in self.masked for at in range(ends[i] - counts[i], ends[i])]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The step's rows as `Row` values; slower than the arrays."""
        drafts = self.drafts
        columns = zip(self.requests, self.starts.tolist(), self.counts.tolist(), self.samples.tolist())
        return tuple(Row(r, start, count, n > 0, drafts.get(i, ())) for i, (r, start, count, n) in enumerate(columns))


def agreed_rows(step: Step, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [rows]: how many samples of each row count, bool [samples]: which samples these are)."""
    counts, stays, ends = step.samples.copy(), np.ones(samples.size, bool), np.cumsum(step.samples)
    for i, drafts in step.drafts.items():
        first = int(ends[i]) - len(drafts) - 1
        counts[i] = agreed(drafts, samples[first : ends[i]].tolist())
        stays[first + counts[i] : ends[i]] = False
    return counts, stays


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def agreed(drafts: Sequence[int], samples: Sequence[int]) -> int:
    """How many of a row's samples [1 + drafts] count: up to and including the first that differs from the draft there."""
    return next((i + 1 for i, draft in enumerate(drafts) if draft != samples[i]), len(drafts) + 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: the samples that count, row after row."""

    tokens: np.ndarray
    """[N] int64"""
    counts: np.ndarray
    """[rows] int64 with sum N: 0 for a row that does not sample, otherwise 1; for a row with drafts, the result of `agreed`."""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """[] if no row requests them; otherwise one entry per token, which is None for rows that do not request them."""
    columns: LogprobColumns | None = None
    """Replaces `logprobs`, with one entry per token, if the runner was configured for it."""
    prompt_logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)
    """[] if no row requests them; otherwise one entry per row, which is None for rows that do not request them. The entry of a
    row covers the prompt's tokens at positions start + 1 ... start + count, as far as the prompt extends."""

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], **others: Any) -> "StepResult":
        """A result from lists: the tokens of each row."""
        return cls(_integers([t for row in tokens for t in row]), _integers([len(row) for row in tokens]), **others)


class Runner(Protocol):
    """Runs steps in the order in which they were launched.

    `launch` reads everything it needs from the requests (tokens, pages, slot) before it returns. By the time the step runs, the
    requests may have finished or been preempted, and a later step may have given their pages and slots to others. If `launch`
    raises `RowFault`, the engine launches the other rows again without that row. `DeviceLost` ends the engine. Any other
    exception from a method fails the requests of that step and of all steps launched after it; the tickets of those steps are
    dropped and never collected.
    """

    @property
    def asynchronous(self) -> bool:
        """True if `launch` returns before the step has run. The engine then keeps one step in flight and launches the next."""
        ...

    def launch(self, step: Step) -> Any:
        """Enqueues the step, without waiting; returns a ticket for `collect`."""
        ...

    def sample(self, ticket: Any, words: int, fill: FillMasks) -> None:
        """Enqueues the sampling of a step with masked rows, once every earlier step has been collected.

        `fill` is called with an array [samples of the masked rows, words], in the order of `Step.masked`. Requests may have
        lost their slots since the launch. A step that was launched but not sampled is never collected.
        """
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Waits for a launched step. Steps are collected in the order of their launches."""
        ...
