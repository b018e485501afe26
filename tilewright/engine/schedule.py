"""Continuous batching: which tokens of which requests go through the model in the next step.

A pure function of its queues: no tensors, no model. `schedule()` decides and books a step as if it had run; `complete()` adds
the samples that it brought. One step may be in flight while the next is scheduled, so a request may have a `pending` sample:
a token that counts everywhere but whose value is not known yet.

Who goes when:
    - Strictly first come, first served. `running`, then `waiting`, read in order, is the order of arrival, always.
    - Each step: one token for every decoding request, then pieces of prompts, oldest first, up to `max_tokens_per_step`.
      Every running request gets at least one token a step, so nobody starves.
    - Pages are allocated on demand. Without any left, the youngest running request gives up its pages and starts again
      later (preemption by recompute), ahead of all that wait. The oldest always progresses.
    - A waiting request starts when there are pages for all its known tokens, for the rest of the prompts already started,
      and for one more page for each running request; otherwise it would be preempted as soon as it had begun.
    - Pages in the prefix cache are shared instead of computed, when a request starts and at each page boundary while its
      prompt is computed, also those that an earlier row of the same step fills. At least one token is always computed, for its
      logits: where the cache has everything, the last page is copied and its last token written into the copy.

What it cannot know: that a text ends (end-of-text token, stop string) while its next row is in flight. The row's result is
then dropped; the request's pages and slot are free at once, because the device runs steps in order.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from tilewright.engine.blocks import BlockPool, page_digest
from tilewright.engine.outputs import EngineStats
from tilewright.engine.request import QueueFull, Request, RequestTooLong, State
from tilewright.engine.step import Row, Step

__all__ = ["Row", "Scheduler", "Step"]

FINISHES_REMEMBERED = 32
"""Latest finish times from which `QueueFull.retry_after_s` is made: enough to smooth, few enough to follow the load."""


class _Draft:
    """A step in the making."""

    __slots__ = ("budget", "copies", "decode", "fresh", "prefill", "promised", "sources")

    def __init__(self, budget: int):
        self.budget = budget  # tokens that may still be added
        self.decode: list[Row] = []
        self.prefill: list[Row] = []
        self.copies: list[tuple[int, int]] = []
        self.sources: list[int] = []  # pages to copy from; owned while the step is made, so that none is given away in it
        self.fresh: set[int] = set()  # pages that this step fills: to be read in it, but not to be copied before it
        self.promised = 0  # pages that prompts already started will still need


class Scheduler:
    """Queues, pages and slots of one engine.

    Args:
        max_seqs: requests that run at once, and slots.
        max_tokens_per_step: bound on the tokens of one step; at least `max_seqs`, so that every running request fits.
        max_model_len: bound on prompt and generated tokens together, per request.
        max_waiting: requests that `add` lets wait at once.
        prefill_chunk: most prompt tokens of one request in one step; None is no such bound.
        clock: the present in seconds; for tests.
    """

    def __init__(
        self,
        *,
        blocks: BlockPool,
        max_seqs: int,
        max_tokens_per_step: int,
        max_model_len: int,
        max_waiting: int,
        prefill_chunk: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if max_seqs < 1 or max_waiting < 1 or (prefill_chunk is not None and prefill_chunk < 1):
            got = f"max_seqs={max_seqs}, max_waiting={max_waiting}, prefill_chunk={prefill_chunk}"
            raise ValueError(f"{got}; wanted at least 1 each (prefill_chunk may be None)")
        if max_tokens_per_step < max_seqs:
            got = f"max_tokens_per_step is {max_tokens_per_step}, wanted at least max_seqs, {max_seqs}"
            raise ValueError(f"{got}: every running request gets a token each step")
        self.blocks = blocks
        self.max_seqs = max_seqs
        self.max_tokens_per_step = max_tokens_per_step
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self.prefill_chunk = prefill_chunk
        self._clock = clock
        self._finish_times: deque[float] = deque(maxlen=FINISHES_REMEMBERED)
        self.preemptions = self.finished = self.aborted = self.failed = 0
        self.prompt_tokens = self.generated_tokens = self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self._clear()

    def _clear(self) -> None:
        self.running: dict[Request, None] = {}  # an ordered set
        self.waiting: deque[Request] = deque()
        self._slots = list(range(self.max_seqs - 1, -1, -1))
        self._by_id: dict[str, list[Request]] = {}

    # In and out ------------------------------------------------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Let requests wait, all of them or none.

        Raises:
            RequestTooLong: one can never run: its prompt and max_tokens exceed the model's length or the whole pool.
            QueueFull: too many wait already.
        """
        for request in requests:
            self._check_length(request)
        if len(self.waiting) + len(requests) > self.max_waiting:
            retry_s = self._retry_after_s()
            got = f"{len(self.waiting)} requests wait, {len(requests)} more asked for, {self.max_waiting} may wait"
            raise QueueFull(f"{got}; try again in {retry_s:.1f} s", retry_s)
        for request in requests:
            self.waiting.append(request)
            self._by_id.setdefault(request.id, []).append(request)
            self.prompt_tokens += len(request.prompt_ids)

    def _check_length(self, request: Request) -> None:
        prompt, asked = len(request.prompt_ids), request.max_tokens
        got = f"the prompt has {prompt} tokens and max_tokens is {asked}, together {prompt + asked}"
        if not prompt:
            raise ValueError("the prompt has no tokens, wanted at least one; begin with the model's BOS token")
        if prompt + asked > self.max_model_len:
            raise RequestTooLong(f"{got}; the model takes {self.max_model_len}. Shorten the prompt or lower max_tokens")
        # Keys and values of the last sample are never needed.
        if self.blocks.pages_for(prompt + asked - 1) > self.blocks.num_pages:
            holds = self.blocks.num_pages * self.blocks.page_size
            raise RequestTooLong(f"{got}; the whole page pool holds {holds}. Lower them, or give the cache more memory")

    def _retry_after_s(self) -> float:
        times = self._finish_times
        if len(times) < 2:
            return 1.0
        return min(60.0, max(0.1, (times[-1] - times[0]) / (len(times) - 1)))

    def live(self, request_id: str) -> list[Request]:
        """The unfinished requests of this id."""
        return list(self._by_id.get(request_id, ()))

    def abort(self, request_id: str) -> list[Request]:
        """End the unfinished requests of this id, also those in flight; returns them. An unknown id is none."""
        requests = self.live(request_id)
        for request in requests:
            self.finish(request, "abort")
        return requests

    def finish(self, request: Request, reason: str) -> None:
        """End a request: "stop", "length", "abort" or "error". Its pages and slot are free at once."""
        if request.state is State.RUNNING:
            self._leave(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        else:
            return
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finished_s = self._clock()
        self._finish_times.append(request.finished_s)
        siblings = self._by_id[request.id]
        siblings.remove(request)
        if not siblings:
            del self._by_id[request.id]
        self.aborted += reason == "abort"
        self.failed += reason == "error"
        self.finished += reason in ("stop", "length")

    def reset(self) -> list[Request]:
        """Abort all requests and free all pages and slots, whatever half-done state an interrupt left; returns them."""
        requests = [request for siblings in self._by_id.values() for request in siblings]
        for request in requests:
            request.state, request.finish_reason, request.slot = State.FINISHED, "abort", None
            request.pages.clear()
        self.aborted += len(requests)
        self._clear()
        self.blocks.reset()
        return requests

    def distrust_pages(self) -> None:
        """Forget the content of all pages, after a step that may not have written what it should: running requests, none of
        them in flight any more, start again."""
        for request in reversed(tuple(self.running)):
            self._preempt(request)
        self.blocks.reset_cache()

    def page_map(self, per_cell: int = 1) -> list[tuple[str | int, int]]:
        """(state, owners) of cells of `per_cell` pages: "free", "cached" or the slot of the first request that owns it."""
        return self.blocks.page_map(((request.slot, request.pages) for request in self.running), per_cell)

    def stats(self) -> EngineStats:
        """Queues, pages and counters, now."""
        blocks = self.blocks
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages_total=blocks.num_pages,
            pages_used=blocks.num_pages - blocks.available,
            pages_cached=blocks.cached,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            finished=self.finished,
            aborted=self.aborted,
            failed=self.failed,
        )

    # The next step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can run, or not before the step in flight is known."""
        draft = _Draft(self.max_tokens_per_step)
        preemptions = self.preemptions
        self._continue_running(draft)
        if self.preemptions == preemptions:
            self._start_waiting(draft)
        self.blocks.release(draft.sources)
        rows = (*draft.decode, *draft.prefill)
        return Step(rows, tuple(draft.copies)) if rows else None

    def complete(self, step: Step, samples: Sequence[int | None]) -> list[tuple[Request, int]]:
        """Add the samples that a step brought, one entry a row; returns those that count, with their requests.

        Samples of requests that ended meanwhile are dropped. Ends requests by their stop tokens and by length.
        """
        accepted: list[tuple[Request, int]] = []
        page_size, finished = self.blocks.page_size, State.FINISHED
        for row, token in zip(step.rows, samples, strict=True):
            if not row.samples:
                continue
            request = row.request
            request.pending -= 1
            if request.state is finished:
                continue
            assert token is not None
            outputs = request.output_ids
            outputs.append(token)
            accepted.append((request, token))
            if request.first_token_s is None:
                request.first_token_s = self._clock()
            if token in request.stop_ids and len(outputs) > request.params.min_tokens:
                request.stop_reason = token if token in request.params.stop_token_ids else None
                self.finish(request, "stop")
            elif len(outputs) >= request.max_tokens:
                self.finish(request, "length")
            elif request.computed // page_size > request.registered:
                self._register(request)
        self.generated_tokens += len(accepted)
        return accepted

    def _continue_running(self, draft: _Draft) -> None:
        page_size, running = self.blocks.page_size, State.RUNNING
        decode, younger = draft.decode, len(self.running)
        for request in tuple(self.running):
            younger -= 1
            if request.state is not running:
                continue  # preempted for an older one in this very step
            outputs, pending, start = len(request.output_ids), request.pending, request.computed
            if pending and (request.needs_history or outputs + pending >= request.max_tokens):
                continue  # it must wait for the sample, or will end with it
            if len(request.prompt_ids) + outputs + pending - start > 1:
                self._continue_prompt(request, draft, reserved=younger)
            elif start < len(request.pages) * page_size or self._make_room(request, 1):
                request.computed = start + 1
                request.pending = pending + 1
                decode.append(Row(request, start, 1, True))
                draft.budget -= 1

    def _continue_prompt(self, request: Request, draft: _Draft, *, reserved: int) -> None:
        self._take(request, self._hits(request, draft), draft)
        count = self._make_room(request, self._chunk(request, draft.budget - reserved))
        if count:
            self._add_chunk(request, count, draft)
        draft.promised += self.blocks.pages_for(len(request)) - len(request.pages)

    def _start_waiting(self, draft: _Draft) -> None:
        blocks = self.blocks
        while self.waiting and self._slots and draft.budget > 0:
            request = self.waiting[0]
            assert request.pending == 0
            hits = self._hits(request, draft)
            copied = len(hits) * blocks.page_size == len(request)
            needed = blocks.pages_for(len(request)) - len(hits) + copied + self._unowned(hits)
            if needed + draft.promised + len(self.running) > blocks.available:
                return
            self.waiting.popleft()
            self.running[request] = None
            request.state = State.RUNNING
            request.slot = self._slots.pop()
            self._take(request, hits, draft)
            if not request.preemptions:
                self.prefix_query_tokens += len(request.prompt_ids)
            count = self._make_room(request, self._chunk(request, draft.budget))
            self._add_chunk(request, count, draft)
            draft.promised += blocks.pages_for(len(request)) - len(request.pages)

    def _chunk(self, request: Request, budget: int) -> int:
        todo = len(request) - request.computed
        return min(todo, budget, self.prefill_chunk or todo)

    def _add_chunk(self, request: Request, count: int, draft: _Draft) -> None:
        start = request.computed
        request.computed += count
        samples = request.computed == len(request)
        request.pending += samples
        draft.prefill.append(Row(request, start, count, samples))
        draft.budget -= count
        draft.fresh.update(self._register(request))

    # Pages -----------------------------------------------------------------------------------------------------------

    def _make_room(self, request: Request, count: int) -> int:
        """Allocates pages for up to `count` more tokens; preempts younger requests while not one fits. Returns how many fit."""
        blocks, pages = self.blocks, request.pages
        while (fits := (len(pages) + blocks.available) * blocks.page_size - request.computed) <= 0:
            youngest = next(reversed(self.running))
            if youngest is request:
                return 0  # it keeps its pages: the older ones take them if they need to, and go on in any case
            self._preempt(youngest)
        count = min(count, fits)
        for _ in range(blocks.pages_for(request.computed + count) - len(pages)):
            pages.append(blocks.allocate())
        return count

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.state = State.WAITING
        request.computed = request.registered = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        del self.running[request]
        assert request.slot is not None
        self._slots.append(request.slot)
        request.slot = None
        self.blocks.release(request.pages)
        request.pages = []

    def _hits(self, request: Request, draft: _Draft) -> list[int]:
        """Pages of the prefix cache that continue what the request has computed. Owns nothing yet."""
        size = self.blocks.page_size
        first = len(request.pages)
        hits: list[int] = []
        if request.computed != first * size or request.params.prompt_logprobs is not None:
            return hits
        for index in range(first, len(request) // size):
            page = self.blocks.find(self._digest(request, index))
            if page is None:
                return hits
            hits.append(page)
        everything = hits and (first + len(hits)) * size == len(request)
        # The last page is to be copied. If it is filled in this very step, or there is no page for the copy, it is computed.
        if everything and (hits[-1] in draft.fresh or self.blocks.available <= self._unowned(hits)):
            hits.pop()
        return hits

    def _unowned(self, pages: list[int]) -> int:
        return sum(self.blocks.owners(page) == 0 for page in pages)

    def _take(self, request: Request, hits: list[int], draft: _Draft) -> None:
        """Puts pages that `_hits` found at the end of the request's block table."""
        if not hits:
            return
        blocks, before = self.blocks, request.computed
        for page in hits:
            blocks.share(page)
        request.pages += hits
        request.registered = len(request.pages)
        request.computed = len(request.pages) * blocks.page_size
        if request.computed == len(request):
            draft.sources.append(hits[-1])
            request.pages[-1] = blocks.allocate()
            draft.copies.append((hits[-1], request.pages[-1]))
            request.computed -= 1
        if not request.preemptions:
            request.cached += request.computed - before
            self.prefix_hit_tokens += request.computed - before

    def _digest(self, request: Request, index: int) -> bytes:
        """Of the request's page `index`, whose tokens are all known. Digests are kept, and made only when first needed."""
        digests, size = request.digests, self.blocks.page_size
        while len(digests) <= index:
            start = len(digests) * size
            digests.append(page_digest(digests[-1] if digests else b"", request.tokens(start, start + size)))
        return digests[index]

    def _register(self, request: Request) -> list[int]:
        """Makes known to the prefix cache the pages that are full and whose tokens are known; returns them."""
        if not self.blocks.prefix_cache:
            return []
        full = request.computed // self.blocks.page_size  # no token before `computed` is pending here
        pages = request.pages[request.registered : full]
        for index, page in enumerate(pages, start=request.registered):
            self.blocks.register(page, self._digest(request, index))
        request.registered = max(request.registered, full)
        return pages
