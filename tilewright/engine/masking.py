"""The masks of a step: which of its rows have one, and filling them once the tokens of the step before are known."""

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tilewright.engine.decoding import Decoders
from tilewright.engine.grammar_masks import Constraint, Grammars
from tilewright.engine.mask_times import MaskTimes
from tilewright.engine.request import Request
from tilewright.engine.step import Step

__all__ = ["StepMasks", "with_masks"]


def with_masks(step: Step, constraints: Mapping[Request, Constraint]) -> Step:
    """The step with `Step.masked`: its rows that are sampled and have a grammar."""
    rows = enumerate(zip(step.requests, step.samples.tolist()))
    return replace(step, masked=tuple(i for i, (request, samples) in rows if samples and request in constraints))


class StepMasks:
    """Fills the masks of a step; a `FillMasks` for `Runner.sample`."""

    def __init__(
        self, step: Step, constraints: Mapping[Request, Constraint], grammars: Grammars, decoders: Decoders, times: MaskTimes
    ):
        self._step, self._constraints, self._grammars = step, constraints, grammars
        self._decoders, self._times = decoders, times
        self.failed: list[tuple[Request, str]] = []
        """(request, reason) for each request whose grammar has failed."""
        self.took_s = 0.0

    def __call__(self, bits: np.ndarray) -> None:
        """Write the masks into bits [masks, words] int32."""
        start_s, step, rows = time.perf_counter(), self._step, np.array(self._step.masked, np.int64)
        requests = [step.requests[i] for i in step.masked]
        # A request that has ended meanwhile has no constraint; its sample will be dropped.
        constraints = [self._constraints.get(request) for request in requests]
        drafts = [step.drafts.get(i, ()) for i in step.masked] if step.drafts else None
        newest = self._decoders.newest(step.slots[rows], step.leases[rows])
        self.failed += self._grammars.fill(requests, constraints, bits, drafts, newest=newest, times=self._times)
        self._times.steps += 1
        self.took_s = time.perf_counter() - start_s
