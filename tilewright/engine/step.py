"""What crosses the border between the scheduler and whatever runs the model: a step of rows out, samples back.

Pure Python: no tensors. `Scheduler.schedule()` makes a `Step`, a `Runner` runs it, `Scheduler.complete()` takes the samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tilewright.engine.request import Request, TokenLogprobs

__all__ = ["HOST_ERRORS", "DeviceLost", "FillMasks", "Row", "RowFault", "Runner", "Step", "StepResult"]

FillMasks = Callable[[Any], None]
"""Writes the masks of a step's masked rows into a numpy array [rows, words] int32: a bit a token, the lowest first."""
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
    """Tokens [start, start + count) of one request go through the model. (A NamedTuple: 256 are made in every step.)"""

    request: Request
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] (nobody counts the items of a row)
    samples: bool
    """The logits of the last token are sampled: the result is the token at position start + count."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the model.

    Rows of one new token come first, then chunks of prompts. A row may read pages that an *earlier* row of the same step
    writes: in every layer the keys and values of all rows are written before the first row attends.

    If `start + count > len(request)` when the step is launched, the last input token is the sample of the step before, not
    known on the host yet: it is the latest sample made in row `request.slot`.
    """

    rows: tuple[Row, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) pages, copied in all layers before the pass. No destination is a source, so their order is free."""
    fills: frozenset[int] = frozenset()
    """Pages that the prefix cache counts on: full once the step has run."""
    masked: tuple[int, ...] = ()
    """Rows, by their indices, whose samples a mask restricts. It depends on the tokens of the step before, so none of the
    step's rows is sampled before `Runner.sample`; what stands before the samples runs meanwhile."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, one entry a row."""

    tokens: list[int | None]
    """None for a row that does not sample."""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """[] where no row asks for them; else None for the rows that do not."""
    prompt_logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)
    """The same. Of a row that asks: the prompt's tokens at positions start + 1 ... start + count, as far as there are any."""


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

        `fill` is called with an array [masked rows, words], in the order of `Step.masked`. Requests may have lost their slots
        since the launch. A step that is launched and never sampled is never collected either.
        """
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Waits for a launched step. Steps are collected in the order of their launches."""
        ...
