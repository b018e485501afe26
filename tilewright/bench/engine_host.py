"""Measures the host time of a decode step of the engine: everything except the device, for requests that only decode.

A runner without a device prepares what a real one would send, except for one copy, and returns the same token for every
request. Times are medians over steps, in microseconds of processor time, so that other programs do not count. Every 16th token
of a request needs a new page, and requests are staggered, so each step includes a share of that. A step ("all") ends with the
arrays that it returns; converting them to one value per request is "read", in the same process or another.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.engine.batch import Packer
from tilewright.engine.blocks import BlockPool
from tilewright.engine.core import Engine
from tilewright.engine.layout import Layout
from tilewright.engine.reader import Reader
from tilewright.engine.request import SamplingParams
from tilewright.engine.schedule import Scheduler
from tilewright.engine.slots import SlotState, put
from tilewright.engine.speculation import FromText
from tilewright.engine.step import FillMasks, Step, StepResult

__all__ = ["HostSteps", "host_times"]

_PAGE = 16
_VOCAB = 32_000


class _Hostly:
    """A runner without a device, that keeps one step in flight."""

    asynchronous = True

    def __init__(self, requests: int, pages: int):
        self._packer = Packer(page_size=_PAGE, max_seqs=requests, max_pages=pages)
        room = max(Layout(1 << 14, requests, requests).nbytes, SlotState.nbytes(requests, pages))
        self._buffer, self._slots = np.zeros(room, np.uint8), np.zeros(0, np.int64)

    def launch(self, step: Step) -> Step:
        """Write the inputs that would be sent to a device."""
        self._packer.refresh(step)
        if step.counts is step.samples and not step.drafts:
            rows = np.zeros(0, np.int64) if self._slots is step.slots else step.slots
            put(self._buffer, (rows, *self._packer.changes(step)))
            self._slots = step.slots
        else:
            sizes = (int(step.counts.sum()), step.slots.size, int(step.samples.sum()))
            self._packer.fill(Layout(*sizes).host(self._buffer), step)
        return step

    def sample(self, ticket: Step, words: int, fill: FillMasks) -> None:
        """No request has a grammar here."""

    def collect(self, ticket: Step) -> StepResult:
        """Token 7 for everybody."""
        counts = np.minimum(ticket.samples, 1) if ticket.drafts else ticket.samples
        return StepResult(np.full(int(np.count_nonzero(counts)), 7, np.int64), counts)


class HostSteps:
    """An engine whose requests all decode, for `steps` steps in all.

    Args:
        running: requests that decode.
        context: tokens of each prompt; they differ by up to a page.
        steps: the most that will be asked of `measure`.
        speculate: look up likely next tokens in each request's own text, as `--speculate ngram` does.
        joining: before each step the request that has run longest ends, and a new one joins, whose prompt the step computes.
    """

    def __init__(self, *, running: int, context: int, steps: int, speculate: bool = False, joining: bool = False):
        tokens_per_step = max(8192, running)
        longest = steps + 20 + 2 * running * context // tokens_per_step  # nobody ends while others still compute their prompts
        pages = (context + longest) // _PAGE + 4
        scheduler = Scheduler(
            blocks=BlockPool(running * pages, _PAGE), max_seqs=running, max_tokens_per_step=tokens_per_step,
            max_model_len=pages * _PAGE, max_waiting=running,
        )  # fmt: skip
        proposer = FromText(running) if speculate else None
        self.engine: Any = Engine(_Hostly(running, pages), None, (), scheduler, vocab_size=_VOCAB, proposer=proposer)
        self._reader, self._rng = Reader(None), np.random.default_rng(0)
        self._context, self._params = context, SamplingParams(max_tokens=longest, ignore_eos=True)
        self._first, self._next, self._joining = 0, 0, joining
        for _ in range(running):
            self._submit()
        while len(scheduler.running) < running or any(len(one) == len(one.prompt_ids) for one in scheduler.running):
            self._reader.read(self.engine.advance())
            if scheduler.stats().failed:
                raise RuntimeError("a step failed; see the messages of its requests")
        self._spent: dict[str, float] = defaultdict(float)
        self._watch(self.engine, "_speculate", "guesses")
        self._watch(scheduler, "schedule", "schedule")
        self._watch(self.engine.runner, "launch", "pack")
        self._watch(scheduler, "complete", "complete")

    def _submit(self) -> None:
        prompt = self._rng.integers(0, _VOCAB, self._context - self._next % _PAGE).tolist()
        name = self.engine.submit(prompt, self._params, streams=[self._next])
        self._reader.open([self._next], name, prompt, self._params)
        self._next += 1

    def _watch(self, owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)
        spent = self._spent

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args)
            finally:
                spent[part] += time.thread_time() - start

        setattr(owner, name, timed)

    def measure(self, steps: int) -> list[dict[str, float]]:
        """Run so many steps and return the seconds of each part: one dict for each step."""
        rows: list[dict[str, float]] = []
        for _ in range(steps):
            if self._joining:
                self.engine.stop(self._first)
                self._reader.close([self._first])
                self._first += 1
                self._submit()
            self._spent.clear()
            start = time.thread_time()
            made = self.engine.advance()
            end = time.thread_time()
            whole = end - start
            rows.append({**self._spent, "hand out": whole - sum(self._spent.values()), "all": whole})
            self._reader.read(made)
            rows[-1]["read"] = time.thread_time() - end
        return rows


def host_times(*, running: int, context: int, steps: int, speculate: bool) -> dict[str, float]:
    """Median microseconds of each part of a step, of the whole step ("all") and of reading its result ("read").

    "all p99" is the 99th percentile of "all". Arguments: see `HostSteps`.
    """
    rows = HostSteps(running=running, context=context, steps=steps, speculate=speculate).measure(steps)
    found = {part: round(1e6 * statistics.median(row[part] for row in rows), 1) for part in rows[0]}
    return found | {"all p99": round(1e6 * float(np.quantile([row["all"] for row in rows], 0.99)), 1)}
