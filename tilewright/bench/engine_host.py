"""What a decode step of the engine costs the host: everything but the device, for requests that only decode.

A runner without a device makes what a real one sends to it, one copy short, and answers with the same token for everybody.
Times are medians over steps, in microseconds of the processor, so that other programs do not count. Every 16th token of a
request crosses into a new page, and requests are staggered, so that a step has its share of that. A step ends with the arrays
that it hands out ("all"); what a reader makes of them, a value a request, is "read", in the same process or another.
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

__all__ = ["host_times"]

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
        """Writes what a device would have to be told."""
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
        counts = np.minimum(ticket.samples, 1)
        return StepResult(np.full(int(counts.sum()), 7, np.int64), counts)


def host_times(*, running: int, context: int, steps: int, speculate: bool) -> dict[str, float]:
    """Median microseconds of each part of a step, "all" of it, and of reading it.

    Args:
        running: requests that decode.
        context: tokens of each prompt; they differ by up to a page.
        speculate: look in each text for what may come next, as `--speculate ngram` does.
    """
    pages = (context + steps) // _PAGE + 4
    scheduler = Scheduler(
        blocks=BlockPool(running * pages, _PAGE), max_seqs=running, max_tokens_per_step=max(8192, running),
        max_model_len=pages * _PAGE, max_waiting=running,
    )  # fmt: skip
    engine = Engine(
        _Hostly(running, pages), None, (), scheduler, vocab_size=_VOCAB, proposer=FromText(running) if speculate else None
    )
    reader, rng = Reader(None), np.random.default_rng(0)
    for i in range(running):
        prompt = rng.integers(0, _VOCAB, context - i % _PAGE).tolist()
        params = SamplingParams(max_tokens=steps + 20, ignore_eos=True)
        reader.open([i], engine.submit(prompt, params, streams=[i]), prompt, params)
    while len(scheduler.running) < running or scheduler.stats().generated_tokens < running:
        reader.read(engine.advance())
        if scheduler.stats().failed:
            raise RuntimeError("a step failed: look at the messages of its requests")
    return _timed(engine, reader, steps)


def _timed(engine: Any, reader: Reader, steps: int) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)

    def watch(owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args)
            finally:
                spent[part] += time.thread_time() - start

        setattr(owner, name, timed)

    watch(engine, "_speculate", "guesses")
    watch(engine.scheduler, "schedule", "schedule")
    watch(engine.runner, "launch", "pack")
    watch(engine.scheduler, "complete", "complete")
    rows: list[dict[str, float]] = []
    for _ in range(steps):
        spent.clear()
        start = time.thread_time()
        made = engine.advance()
        end = time.thread_time()
        whole = end - start
        rows.append({**spent, "hand out": whole - sum(spent.values()), "all": whole})
        reader.read(made)
        rows[-1]["read"] = time.thread_time() - end
    return {part: round(1e6 * statistics.median(row[part] for row in rows), 1) for part in rows[0]}
