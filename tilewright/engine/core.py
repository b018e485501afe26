"""The engine: token ids in, token ids out, one step of the model at a time, over any `Runner`.

`advance` gives out arrays, one value a step (deltas.py); whoever reads them makes the text (reader.py). `step` is both, for a
program that has the engine in its own process.

Not safe for threads: one thread submits, steps and aborts. One bad request never stops it. What goes wrong ends as few requests
as possible (finish_reason "error", with its message), and the others go on: a `RowFault` the request of that row, any other
error of the runner those of the step. Only a lost device ends them all, and the engine (`lost`).
"""

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.engine.accepting import Accepted
from tilewright.engine.adapter_names import place_of
from tilewright.engine.deltas import OutputState, StepDeltas, StepRows
from tilewright.engine.grammar_masks import Constraint, GrammarError, Grammars
from tilewright.engine.outputs import EngineStats
from tilewright.engine.reader import Reader
from tilewright.engine.request import Delta, Request, SamplingParams
from tilewright.engine.rules import Rules
from tilewright.engine.schedule import Scheduler
from tilewright.engine.speculation import Proposer, Speculator
from tilewright.engine.step import HOST_ERRORS, DeviceLost, RowFault, Runner, Step, StepResult
from tilewright.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tilewright.engine.adapters import Adapters  # imports torch

__all__ = ["GRAMMAR_FAILED", "Engine"]

logger = logging.getLogger(__name__)

RUNNER_ERRORS = (*HOST_ERRORS, RuntimeError)
"""What a runner may raise: a fault of its own, or of the device (RuntimeError: out of memory, a kernel). Not here: interrupts
and exits."""


GRAMMAR_FAILED = "its grammar cannot be followed any further"
NOT_NUMBERS = "the model's logits are not numbers (NaN): look at its weights"


class Engine:
    """Steps a scheduler and a runner.

    Args:
        tokenizer: makes the text of `step`, and bounds the token ids that are taken; None: deltas have ids and no text.
        eos_ids: tokens that end a text, unless a request ignores them.
        vocab_size: token ids are below this; the tokenizer's, unless the model has fewer. Needed without a tokenizer.
        adapters: those that the model has room for; None: requests may have none.
        proposer: guesses tokens ahead, `draft_tokens` of a request in a step at most; None: every row brings one token.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        eos_ids: Sequence[int],
        scheduler: Scheduler,
        *,
        vocab_size: int | None = None,
        adapters: "Adapters | None" = None,
        proposer: Proposer | None = None,
        draft_tokens: int = 8,
    ):
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.scheduler = scheduler
        self.adapters = adapters
        bounds = [size for size in (vocab_size, tokenizer and tokenizer.vocab_size) if size is not None]
        if not bounds:
            raise ValueError("Engine: give a tokenizer, or the vocab_size of the model")
        self.vocab_size = min(bounds)
        self._names = itertools.count()
        self._numbers = itertools.count()
        self._outputs: dict[Request, OutputState] = {}
        self._streams: dict[int, Request] = {}  # of the same requests
        self._reader = Reader(tokenizer)
        self._constraints: dict[Request, Constraint] = {}
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._in_flight: deque[tuple[Step, Any]] = deque()  # steps with their tickets
        self._rows = StepRows()  # not handed out yet
        self._stream_of = np.zeros(scheduler.max_seqs, np.int64)  # by slot, from the first sample in it on
        self._speculator: Speculator | None = None
        if proposer is not None:
            self._speculator = Speculator(proposer, scheduler, longest=draft_tokens, rules=Rules(self._constraints))
        self.failed_steps = 0
        """Steps that failed since one brought a token."""
        self.lost: DeviceLost | None = None
        """Why the engine can do nothing any more."""

    @property
    def has_work(self) -> bool:
        """True while a step has something to do or to hand out."""
        return bool(self._outputs or self._in_flight or self._rows)

    @property
    def grammars(self) -> Grammars:
        """The grammars of this engine's vocabulary; made at the first call, which may come from any thread.

        Raises:
            GrammarError: there can be none: no llguidance, no tokenizer, or no end-of-text token.
        """
        if self.tokenizer is None:
            raise GrammarError("a grammar needs an engine with a tokenizer; this one takes and gives token ids alone")
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer.to_json(), self.eos_ids)
            return self._grammars

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        max_wait_s: float | None = None,
        streams: Sequence[int] | None = None,
        whole: bool = False,
    ) -> str:
        """Queue a prompt: one request for each of its `params.n` samples, all or none. Returns their id.

        streams: the numbers of the samples, for a caller that reads `advance` itself and finds the stop strings. None:
            `step` reads them.
        whole: nobody wants to hear of each token: `step` tells many at once, the last ones at the end.
        max_wait_s: how long the first sample may wait to be started; then all end with finish_reason "expired". The others
            wait as long as it takes. None: so does the first.

        Raises:
            ValueError: a token id is not the model's, the id or a stream is in use, (UnknownAdapter) there is no such adapter,
                (GrammarError) the grammar cannot be followed, or (RequestTooLong) prompt and max_tokens do not fit.
            QueueFull: too many requests wait, or it would wait for longer than `max_wait_s`.
            DeviceLost: the engine has ended.
        """
        if self.lost is not None:
            raise self.lost
        params = params or SamplingParams()
        name = f"request-{next(self._names)}" if request_id is None else request_id
        if self.scheduler.live(name):
            raise ValueError(f"request_id {name!r} is in use, wanted one that no unfinished request has")
        taken = [stream for stream in streams or () if stream in self._streams]
        if taken or (streams is not None and len(set(streams)) != params.n):
            raise ValueError(f"streams are {list(streams or ())}, wanted {params.n} that are not in use")
        self._check_ids("the prompt", prompt_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", list(params.logit_bias))
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if params.stop and self.tokenizer is None and streams is None:
            raise ValueError(f"stop is {params.stop!r}, but this engine has no tokenizer to find text with; use stop_token_ids")
        adapter = place_of(self.adapters, params.adapter)
        constraints = [] if params.grammar is None else [self.grammars.start(params.grammar) for _ in range(params.n)]
        prompt_ids = list(prompt_ids)  # the caller's may change
        waits = (max_wait_s, *[None] * (params.n - 1))
        samples = [
            Request(name, prompt_ids, params, index=i, eos_ids=self.eos_ids, max_wait_s=wait, adapter=adapter)
            for i, wait in enumerate(waits)
        ]
        self.scheduler.add(*samples)
        self._constraints.update(zip(samples, constraints))
        if streams is None:
            streams = [-1 - next(self._numbers) for _ in samples]  # beside those of callers, which count from 0
            self._reader.open(streams, name, prompt_ids, params, whole=whole)
        for stream, request in zip(streams, samples, strict=True):
            self._outputs[request] = OutputState(stream)
            self._streams[stream] = request
        return name

    def abort(self, request_id: str) -> None:
        """End what is unfinished of a request; the next `step` hands out its last deltas. An unknown id is nothing to do."""
        for request in self.scheduler.abort(request_id):
            self._end(request)

    def stop(self, stream: int) -> None:
        """End a stream that its reader has found a stop string in; no row of it comes any more. An unknown one is nothing."""
        request = self._streams.get(stream)
        if request is not None:
            self.scheduler.finish(request, "stop")
            self._forget(request)

    def reset(self) -> None:
        """Abort everything and free all pages, from whatever state an interrupt has left. Hands out nothing more."""
        self.scheduler.reset()
        self._in_flight.clear()
        self._outputs.clear()
        self._streams.clear()
        self._constraints.clear()
        self._reader.clear()
        self._rows.clear()

    def step(self) -> list[Delta]:
        """One round, as `advance` does it, with the text of all streams that were submitted without numbers."""
        deltas = self._reader.read(self.advance())
        for stream in self._reader.stopped:
            self.stop(stream)
        self._reader.stopped.clear()
        return deltas

    def advance(self) -> StepDeltas:
        """One round: schedule and launch a step, collect a step. Asynchronous runners keep one in flight behind the other."""
        for request, retry_s in self.scheduler.expire():
            waited_s = (request.finished_s or request.arrival_s) - request.arrival_s
            request.error = f"it has waited for {waited_s:.1f} s and was not started; try again in {retry_s:.0f} s"
            self._end(request, retry_s)
        self._speculate()
        step = self.scheduler.schedule()
        # A step that is not launched keeps none in flight: who was preempted for it starts again with all its samples known.
        launched = step is not None and self._launch(step)
        stays = 1 if launched and self.runner.asynchronous else 0
        while len(self._in_flight) > stays:
            self._collect()
        return self._rows.take()

    def hold_adapter(self, name: str, adapter: Any, folder: str) -> None:
        """Hold what `adapters.read` gave under a name, for requests from now on. Raises ValueError, as `Adapters.put`."""
        assert self.adapters is not None
        unfinished = (*self.scheduler.running, *self.scheduler.waiting)
        self.adapters.put(name, adapter, folder, lambda: {request.adapter for request in unfinished})

    def stats(self) -> EngineStats:
        """Queues, pages and counters, now."""
        return self.scheduler.stats()

    def _check_ids(self, what: str, token_ids: Sequence[int]) -> None:
        # One id beyond the embedding is a device fault, which would end every request.
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise ValueError(f"{what} has the token id {wrong}, wanted 0 to {self.vocab_size - 1}")

    def _launch(self, step: Step) -> bool:
        """Whether any row of a step was launched."""
        rest: Step | None = step
        while rest is not None:
            if self._constraints:
                rest = self._masked(rest)
            try:
                self._in_flight.append((rest, self.runner.launch(rest)))
            except RowFault as fault:
                rest = self.scheduler.withdraw(rest, fault.request)
                self._fail_request(fault.request, f"it could not be run: {fault}")
            except DeviceLost as error:
                self._lose(error)
                return False
            except RUNNER_ERRORS as error:
                while self._in_flight:  # what was launched before is not touched by it
                    self._collect()
                self._fail([rest], error)
                return False
            else:
                if rest.masked:
                    self._sample()
                return True
        return False

    def _speculate(self) -> None:
        """Drafts for the next step. Whoever guesses may fail: everything goes on without."""
        if self._speculator is not None:
            try:
                self._speculator.prepare()
            except DeviceLost as error:
                self._lose(error)
            except RUNNER_ERRORS as error:
                logger.warning("no tokens are guessed ahead any more: %s: %s", type(error).__name__, error)
                self._speculator.give_up()

    def _masked(self, step: Step) -> Step:
        constraints = self._constraints
        rows = enumerate(zip(step.requests, step.samples.tolist()))
        return replace(step, masked=tuple(i for i, (request, samples) in rows if samples and request in constraints))

    def _sample(self) -> None:
        """Sample the step that was launched last. Its masks need the tokens of those before it; the device is busy with it."""
        while len(self._in_flight) > 1:
            self._collect()
        if not self._in_flight:  # one before it failed, and has taken it along
            return
        step, ticket = self._in_flight[0]
        failed: list[tuple[Request, str]] = []

        def fill(bits: np.ndarray) -> None:
            requests = [step.requests[i] for i in step.masked]
            drafts = [step.drafts.get(i, ()) for i in step.masked]
            # One that has ended meanwhile has no constraint; its sample will be dropped.
            constraints = [self._constraints.get(request) for request in requests]
            failed.extend(self.grammars.fill(requests, constraints, bits, drafts))

        try:
            self.runner.sample(ticket, self.grammars.words, fill)
        except DeviceLost as error:
            self._lose(error)
        except RUNNER_ERRORS as error:
            self._in_flight.clear()
            self._fail([step], error)
        for request, why in failed:
            self._fail_request(request, f"{GRAMMAR_FAILED}: {why}")

    def _collect(self) -> None:
        step, ticket = self._in_flight.popleft()
        try:
            result = self.runner.collect(ticket)
        except DeviceLost as error:
            self._lose(error)
        except RUNNER_ERRORS as error:
            # Steps launched after it have read what it should have written.
            steps = [step, *(later for later, _ in self._in_flight)]
            self._in_flight.clear()
            self._fail(steps, error)
        else:
            self._accept(step, result)

    def _fail(self, steps: Sequence[Step], error: BaseException) -> None:
        self.failed_steps += 1
        self.scheduler.distrust(steps)
        for step in steps:
            for row in step.rows:
                self._fail_request(row.request, f"the step failed: {type(error).__name__}: {error}")

    def _fail_request(self, request: Request, why: str) -> None:
        if request in self._outputs:
            request.error = why
            self.scheduler.finish(request, "error")
            self._end(request)

    def _lose(self, error: DeviceLost) -> None:
        self.lost = error
        self._in_flight.clear()
        for request in list(self._outputs):
            self._fail_request(request, str(error))

    def _accept(self, step: Step, result: StepResult) -> None:
        self.failed_steps = 0
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(step, result)
        found, wrong = self.scheduler.complete(step, result), list[Request]()
        if found.logprobs or found.columns is not None:
            found, wrong = found.without_nan()
        if found.requests:
            self._publish(found)
        for request in wrong:
            self.scheduler.finish(request, "error")
            request.finish_reason, request.error = "error", NOT_NUMBERS
            self._end(request)

    def _publish(self, found: Accepted) -> None:
        """Hand out what counts of a step. Nobody looks at a request that has got one more token and nothing else."""
        streams = self._stream_of.take(found.slots)
        first = self._rows.extend(streams, found.counts, found.ids, found.columns)
        explained = found.explained()
        if not (explained or found.looks):
            return
        for i in sorted({*found.looks, *explained}):
            request = found.requests[i]
            output = self._outputs[request]
            streams[i] = output.stream
            if request.slot is not None:
                self._stream_of[request.slot] = output.stream
            ended = request.finish_reason is not None
            if ended or i in explained or not output.published:
                self._rows.note(output.note(first + i, request, explained.get(i, ())))
            if ended:
                self._forget(request)

    def _keep_prompt_logprobs(self, step: Step, result: StepResult) -> None:
        for row, entries in zip(step.rows, result.prompt_logprobs):
            output = self._outputs.get(row.request)
            if entries is not None and output is not None:
                # Entry i is of token i + 1. A request that was preempted comes by here again.
                output.prompt_logprobs[row.start :] = entries
                if any(math.isnan(entry.logprob) for entry in entries):
                    self._fail_request(row.request, NOT_NUMBERS)

    def _end(self, request: Request, retry_s: float | None = None) -> None:
        output = self._outputs[request]
        self._rows.note(output.note(self._rows.add(output.stream), request, retry_after_s=retry_s))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self._constraints.pop(request, None)
        del self._streams[self._outputs.pop(request).stream]
