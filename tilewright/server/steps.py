"""A log of the engine's last steps for the web page: the duration of each, and how many tokens of which kind it computed.

The time of a step starts at its launch or at the end of the previous step, whichever is later, and ends when its results are
there. The log costs two clock readings and one entry per step. The runner is not aware of it.
"""

import time
from collections import deque
from typing import Any

from tilewright.engine.core import Engine
from tilewright.engine.step import Step, StepResult

__all__ = ["StepLog"]

KEPT = 120
_OWN = ("_runner", "_steps", "_launched", "_ended_s", "_count")


class StepLog:
    """A wrapper around a runner that logs its steps. `of` replaces an engine's runner by such a wrapper."""

    def __init__(self, runner: Any):
        self._runner = runner
        self._steps: deque[tuple[int, float, int, int, int]] = deque(maxlen=KEPT)
        self._launched: deque[tuple[Any, float, Step]] = deque(maxlen=8)
        self._ended_s = 0.0
        self._count = 0

    @classmethod
    def of(cls, engine: Engine) -> "StepLog":
        """Start to log the steps of an engine, or return its existing log."""
        runner: Any = engine.runner
        log = runner if isinstance(runner, cls) else cls(runner)
        engine.runner = log
        return log

    @property
    def asynchronous(self) -> bool:
        """See `Runner`."""
        return self._runner.asynchronous

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._runner, name, value)

    def launch(self, step: Step) -> Any:
        """See `Runner`."""
        started_s = time.perf_counter()
        ticket = self._runner.launch(step)
        self._launched.append((ticket, started_s, step))
        return ticket

    def sample(self, ticket: Any, words: int, fill: Any) -> None:
        """See `Runner`."""
        self._runner.sample(ticket, words, fill)

    def collect(self, ticket: Any) -> StepResult:
        """See `Runner`."""
        result = self._runner.collect(ticket)
        while self._launched:  # steps launched before this one were dropped
            found, started_s, step = self._launched.popleft()
            if found is ticket:
                self._note(step, started_s)
                break
        return result

    def _note(self, step: Step, started_s: float) -> None:
        now_s = time.perf_counter()
        sampled, drafts = int(step.samples.sum()), sum(map(len, step.drafts.values()))
        decoding = int(((step.counts == step.samples) & (step.samples > 0)).sum())
        prompts = int(step.counts[step.counts != step.samples].sum())
        self._count += 1
        took_ms = 1e3 * (now_s - max(started_s, self._ended_s))
        self._steps.append((self._count, round(took_ms, 3), prompts, decoding, min(drafts, sampled)))
        self._ended_s = now_s

    def last(self) -> list[tuple[int, float, int, int, int]]:
        """(number, milliseconds, prompt tokens, decoding rows, draft tokens) of each of the last steps."""
        return list(self._steps)
