"""The engine: token ids in, token ids out, one step of the model at a time, over any `Runner`.

`advance` returns the results of a step as arrays (deltas.py), and a reader turns them into text (reader.py). `step` does both,
for a program that runs the engine in its own process.

The engine is not thread-safe: one thread submits, steps and aborts. A bad request never stops it. An error ends as few requests
as possible (with finish_reason "error" and the error message), and the others continue: a `RowFault` ends the request of that
row, and any other error of the runner ends the requests of the step. Only a lost device ends all requests and the engine
(`lost`).
"""

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.engine.accepting import Accepted
from tilewright.engine.adapter_names import place_of
from tilewright.engine.deltas import OutputState, StepDeltas, StepRows
from tilewright.engine.grammar_masks import Constraint, GrammarError, Grammars
from tilewright.engine.mask_times import MaskTimes
from tilewright.engine.masking import StepMasks, with_masks
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
"""Exceptions that a runner may raise: its own errors, or errors of the device (RuntimeError: out of memory, a failed kernel).
Interrupts and exits are not included."""


GRAMMAR_FAILED = "its grammar cannot be followed any further"
NOT_NUMBERS = "the model's logits are not numbers (NaN): look at its weights"


class Engine:
    """Runs the steps that a scheduler makes on a runner.

    Args:
        tokenizer: makes the text that `step` returns, and limits the accepted token ids; None: deltas contain ids and no text.
        eos_ids: tokens that end a text, unless a request ignores them.
        vocab_size: the model's; token ids must be below it and below the tokenizer's. Required without a tokenizer.
        adapters: the LoRA adapters that requests may use; None: none.
        proposer: guesses tokens ahead, at most `draft_tokens` per request and step; None: every row brings one token.
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
        self._streams: dict[int, Request] = {}  # the same requests by stream
        self._reader = Reader(tokenizer)
        self._constraints: dict[Request, Constraint] = {}
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._in_flight: deque[tuple[Step, Any]] = deque()  # launched steps with their tickets
        self._unsampled: Step | None = None  # of these, the last one if it waits for its masks
        self._waited_s = 0.0
        self.mask_times = MaskTimes()
        self._rows = StepRows()  # not returned yet
        self._stream_of = np.zeros(scheduler.max_seqs, np.int64)  # by slot, set when the request's first sample arrives
        self._speculator: Speculator | None = None
        if proposer is not None:
            self._speculator = Speculator(proposer, scheduler, longest=draft_tokens, rules=Rules(self._constraints))
        self.failed_steps = 0
        """Number of failures since the last step that succeeded."""
        self.lost: DeviceLost | None = None
        """Why the engine has ended; None while it works."""

    @property
    def has_work(self) -> bool:
        """True while a call of `step` has something to run or to return."""
        return bool(self._outputs or self._in_flight or self._rows)

    @property
    def grammars(self) -> Grammars:
        """The grammars of this engine's vocabulary; made at the first access, which may be in any thread.

        Raises:
            GrammarError: grammars are impossible: there is no llguidance, no tokenizer, or no end-of-text token.
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

        streams: stream numbers of the samples, for a caller that reads the results of `advance` itself and finds the stop
            strings. None: `step` reads them.
        whole: the caller does not need each token at once: `step` may return many in one delta, the last ones at the end.
        max_wait_s: how long the first sample may wait for its start; after that, all samples end with finish_reason "expired".
            The other samples have no limit. None: neither has the first.

        Raises:
            ValueError: a token id is out of range; the id or a stream is in use; there is no such adapter (UnknownAdapter);
                the grammar cannot be followed (GrammarError); or prompt and max_tokens do not fit (RequestTooLong).
            QueueFull: too many requests wait, or this one would wait for longer than `max_wait_s`.
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
        prompt_ids = list(prompt_ids)  # the caller may change its list
        waits = (max_wait_s, *[None] * (params.n - 1))
        samples = [
            Request(name, prompt_ids, params, index=i, eos_ids=self.eos_ids, max_wait_s=wait, adapter=adapter)
            for i, wait in enumerate(waits)
        ]
        self.scheduler.add(*samples)
        self._constraints.update(zip(samples, constraints))
        if streams is None:
            streams = [-1 - next(self._numbers) for _ in samples]  # negative: those of callers count from 0
            self._reader.open(streams, name, prompt_ids, params, whole=whole)
        for stream, request in zip(streams, samples, strict=True):
            self._outputs[request] = OutputState(stream)
            self._streams[stream] = request
        return name

    def abort(self, request_id: str) -> None:
        """End the unfinished samples of a request; the next `step` returns their last deltas. An unknown id is ignored."""
        for request in self.scheduler.abort(request_id):
            self._end(request)

    def stop(self, stream: int) -> None:
        """End a stream in which its reader has found a stop string; it gets no more rows. An unknown stream is ignored."""
        request = self._streams.get(stream)
        if request is not None:
            self.scheduler.finish(request, "stop")
            self._forget(request)

    def reset(self) -> None:
        """Abort everything and free all pages, whatever state an interrupt has left. No more deltas are returned."""
        self.scheduler.reset()
        self._in_flight.clear()
        self._outputs.clear()
        self._streams.clear()
        self._constraints.clear()
        self._reader.clear()
        self._rows.clear()

    def step(self) -> list[Delta]:
        """Like `advance`, but returns the text of all streams that were submitted without stream numbers."""
        deltas = self._reader.read(self.advance())
        for stream in self._reader.stopped:
            self.stop(stream)
        self._reader.stopped.clear()
        return deltas

    def advance(self) -> StepDeltas:
        """Schedule and launch a step, then collect all steps in flight; with an asynchronous runner, all except the new one.

        With masks and an asynchronous runner, the new step is sampled in the next call, which collects the step before it,
        fills the masks, and launches a further step right behind the samples. So while the host waits, reads results and fills
        masks, the device has work.
        """
        for request, retry_s in self.scheduler.expire():
            waited_s = (request.finished_s or request.arrival_s) - request.arrival_s
            request.error = f"it has waited for {waited_s:.1f} s and was not started; try again in {retry_s:.0f} s"
            self._end(request, retry_s)
        if self._in_flight and self._in_flight[-1][0] is self._unsampled:
            self._sample()
        self._speculate()
        step = self.scheduler.schedule()
        # Without a launch, every step in flight is collected. Otherwise a request that was preempted for a step that could not
        # be launched might start again before all its samples are known.
        launched = step is not None and self._launch(step)
        stays = 0 if not launched or not self.runner.asynchronous else 1 if self._unsampled is None else 2
        while len(self._in_flight) > stays:
            self._collect()
        return self._rows.take()

    def hold_adapter(self, name: str, adapter: Any, folder: str) -> None:
        """Register an adapter that `adapters.read` returned, under a name for later requests. Raises like `Adapters.put`."""
        assert self.adapters is not None
        unfinished = (*self.scheduler.running, *self.scheduler.waiting)
        self.adapters.put(name, adapter, folder, lambda: {request.adapter for request in unfinished})

    def stats(self) -> EngineStats:
        """Queues, pages and counters, now."""
        return self.scheduler.stats()

    def _check_ids(self, what: str, token_ids: Sequence[int]) -> None:
        # An id outside the embedding table would cause a device fault, which ends every request.
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise ValueError(f"{what} has the token id {wrong}, wanted 0 to {self.vocab_size - 1}")

    def _launch(self, step: Step) -> bool:
        """Launch a step, without the rows that have a fault. Returns whether any row was launched."""
        rest: Step | None = step
        while rest is not None:
            if self._constraints:
                rest = with_masks(rest, self._constraints)
            try:
                self._in_flight.append((rest, self.runner.launch(rest)))
            except RowFault as fault:
                rest = self.scheduler.withdraw(rest, fault.request)
                self._fail_request(fault.request, f"it could not be run: {fault}")
            except DeviceLost as error:
                self._lose(error)
                return False
            except RUNNER_ERRORS as error:
                while self._in_flight:  # earlier steps are not affected
                    self._collect()
                self._fail([rest], error)
                return False
            else:
                self._unsampled = rest if rest.masked else None
                if rest.masked and len(self._in_flight) == 1:  # all tokens before it are known
                    self._sample()
                return True
        return False

    def _speculate(self) -> None:
        """Prepare the drafts of the next step. If the proposer fails, the engine continues without speculation."""
        if self._speculator is not None:
            try:
                self._speculator.prepare()
            except DeviceLost as error:
                self._lose(error)
            except RUNNER_ERRORS as error:
                logger.warning("no tokens are guessed ahead any more: %s: %s", type(error).__name__, error)
                self._speculator.give_up()

    def _sample(self) -> None:
        """Sample the step that was launched last. Its masks depend on the tokens of earlier steps, so collect these first.
        Meanwhile the device runs the model's pass of this step."""
        self._unsampled, times, waited_s, start_s = None, self.mask_times, self._waited_s, time.perf_counter()
        while len(self._in_flight) > 1:
            self._collect()
        waited_s, collected_s = self._waited_s - waited_s, time.perf_counter()
        times.wait_s += waited_s
        times.accept_s += collected_s - start_s - waited_s
        if not self._in_flight:  # an earlier step failed, and this one with it
            return
        step, ticket = self._in_flight[0]
        masks = StepMasks(step, self._constraints, self.grammars, self.scheduler.decoders, times)
        try:
            self.runner.sample(ticket, self.grammars.words, masks)
        except DeviceLost as error:
            self._lose(error)
        except RUNNER_ERRORS as error:
            self._in_flight.clear()
            self._fail([step], error)
        times.send_s += time.perf_counter() - collected_s - masks.took_s
        for request, why in masks.failed:
            self._fail_request(request, f"{GRAMMAR_FAILED}: {why}")

    def _collect(self) -> None:
        step, ticket = self._in_flight.popleft()
        start_s = time.perf_counter()
        try:
            result = self.runner.collect(ticket)
            self._waited_s += time.perf_counter() - start_s
        except DeviceLost as error:
            self._lose(error)
        except RUNNER_ERRORS as error:
            # Later steps have read what this step should have written, so they fail, too.
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
        """Add accepted samples to the rows to return. A request that only got one more token is not handled individually."""
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
                # Entry i belongs to token i + 1. A preempted request computes its prompt again and overwrites its entries.
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
