"""Continuous batching: which tokens of which requests go through the model in the next step.

A pure function of its queues: no tensors, no model. `schedule()` decides and books a step as if it had run; `complete()` adds
the samples that it brought. One step may be in flight while the next is scheduled, so a request may have a `pending` sample:
a token that counts everywhere but whose value is not known yet.

Who goes when:
    - By priority, then first come, first served: `running`, then `waiting`, are in the order in which requests start.
    - Each step: one token for every decoding request, then pieces of prompts, up to `max_tokens_per_step`. Half of what is left
      for prompts is the oldest prompt's, so it is never starved; the rest goes to the others, the shortest first, so that a
      short prompt does not wait for long ones. What one half does not need the other gets.
    - Pages are allocated on demand. Without any left, the last running request in that order gives up its pages and starts
      again later (preemption by recompute), at its place in the queue. The first always progresses.
    - A waiting request starts when there are pages for all its known tokens, for the rest of the prompts already started,
      and for one more page for each running request; otherwise it would be preempted as soon as it had begun.
    - Pages in the prefix cache are shared instead of computed, when a request starts and at each page boundary while its
      prompt is computed, also those that an earlier row of the same step fills. At least one token is always computed, for its
      logits: where the cache has everything, the last page is copied and its last token written into the copy.

A text may end (end-of-text token, stop string) while its next row is in flight. The row's result is then dropped; the request's
pages and slot are free at once, because the device runs steps in order.
"""

import itertools
import time
from collections.abc import Callable, Sequence

from tilewright.engine.blocks import BlockPool
from tilewright.engine.outputs import EngineStats
from tilewright.engine.prefixes import Draft, Prefixes
from tilewright.engine.request import Request, RequestTooLong, State
from tilewright.engine.step import Row, Step
from tilewright.engine.waiting import WaitingQueue

__all__ = ["Row", "Scheduler", "Step"]

COUNTERS = ("preemptions", "finished", "aborted", "failed", "expired")
COUNTERS += ("prompt_tokens", "generated_tokens", "prefix_query_tokens", "prefix_hit_tokens")


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
        self.prefixes = Prefixes(blocks)
        self.max_seqs = max_seqs
        self.max_tokens_per_step = max_tokens_per_step
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self.prefill_chunk = prefill_chunk
        self._clock = clock
        self._arrivals = itertools.count()
        self.preemptions = self.finished = self.aborted = self.failed = self.expired = 0
        self.prompt_tokens = self.generated_tokens = self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self._clear()

    def _clear(self) -> None:
        self.running: dict[Request, None] = {}  # a set, by `Request.order`
        self.waiting = WaitingQueue(self.max_waiting, self._clock)
        self._slots = list(range(self.max_seqs - 1, -1, -1))
        self._by_id: dict[str, list[Request]] = {}

    # In and out ------------------------------------------------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Let requests wait, all of them or none.

        Raises:
            RequestTooLong: one can never run: its prompt and max_tokens exceed the model's length or the whole pool.
            QueueFull: too many wait already, or the first would wait for longer than it may.
        """
        for request in requests:
            self._check_length(request)
        self.waiting.check_room(len(requests), (requests[0].order[0], next(self._arrivals)), requests[0].max_wait_s)
        now_s = self._clock()
        for request in requests:
            request.order, request.arrival_s = (request.order[0], next(self._arrivals)), now_s
            self.waiting.push(request)
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

    def live(self, request_id: str) -> list[Request]:
        """The unfinished requests of this id."""
        return list(self._by_id.get(request_id, ()))

    def abort(self, request_id: str) -> list[Request]:
        """End the unfinished requests of this id, also those in flight; returns them. An unknown id is none."""
        requests = self.live(request_id)
        for request in requests:
            self.finish(request, "abort")
        return requests

    def expire(self) -> list[tuple[Request, float]]:
        """End the requests that have waited too long, with all samples of their ids; returns (request, when to ask again)."""
        late = [(sample, retry_s) for request, retry_s in self.waiting.overdue() for sample in self.live(request.id)]
        for request, _ in late:
            self.finish(request, "expired")
        return late

    def finish(self, request: Request, reason: str) -> None:
        """End a request: "stop", "length", "abort", "error" or "expired". Its pages and slot are free at once."""
        if request.state is State.RUNNING:
            self._leave(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        else:
            return
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finished_s = self._clock()
        self._by_id[request.id].remove(request)
        if not self._by_id[request.id]:
            del self._by_id[request.id]
        self.aborted += reason == "abort"
        self.failed += reason == "error"
        self.expired += reason == "expired"
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

    def distrust(self, steps: Sequence[Step]) -> None:
        """Steps have not written what they should: forget the content of their pages. Requests beside theirs that share one
        start again; none of these may be in flight."""
        rows = [row for step in steps for row in step.rows]
        spoiled = {page for row in rows for page in self._written(row)}.union(*(step.fills for step in steps))
        self._spoil(spoiled, {row.request for row in rows})

    def withdraw(self, step: Step, request: Request) -> Step | None:
        """A step that was not launched, without the row of `request`, which is to be ended, and without those that would have
        read what it writes: these start again. None where no row is left."""
        out, spoiled = {request}, {page for row in step.rows if row.request is request for page in self._written(row)}
        found = True
        while found:
            readers = [r for r in step.rows if r.request not in out and not spoiled.isdisjoint(r.request.pages)]
            found = bool(readers)
            out.update(row.request for row in readers)
            spoiled.update(page for row in readers for page in self._written(row))
        for row in step.rows:
            row.request.pending -= row.request in out and row.samples
        self._spoil(spoiled, {request})
        kept = tuple(row for row in step.rows if row.request not in out)
        return Step(kept, step.copies, step.fills - spoiled) if kept else None

    def _written(self, row: Row) -> list[int]:
        return row.request.pages[row.start // self.blocks.page_size :]

    def _spoil(self, pages: set[int], ended: set[Request]) -> None:
        self.blocks.forget(pages)
        for request in reversed(tuple(self.running)):
            if request not in ended and not pages.isdisjoint(request.pages):
                self._preempt(request)

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
            **{name: getattr(self, name) for name in COUNTERS},
        )

    # The next step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can run, or not before the step in flight is known."""
        draft = Draft(self.max_tokens_per_step)
        preemptions = self.preemptions
        self._continue_running(draft)
        if self.preemptions == preemptions:
            self._start_waiting(draft)
        self._share_rest(draft)
        self.waiting.left_over()
        self.blocks.release(draft.sources)
        rows = (*draft.decode, *draft.prefill)
        return Step(rows, tuple(draft.copies), frozenset(draft.fresh)) if rows else None

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
                self.prefixes.register(request)
        self.generated_tokens += len(accepted)
        return accepted

    def _continue_running(self, draft: Draft) -> None:
        page_size, running = self.blocks.page_size, State.RUNNING
        decode = draft.decode
        for younger, request in zip(range(len(self.running) - 1, -1, -1), tuple(self.running)):
            if request.state is not running:
                continue  # preempted for an older one in this very step
            outputs, pending, start = len(request.output_ids), request.pending, request.computed
            if pending and outputs + pending >= request.max_tokens:
                continue  # it will end with the sample
            if len(request.prompt_ids) + outputs + pending - start > 1:
                self._continue_prompt(request, draft, reserved=younger)
            elif start < len(request.pages) * page_size or self._make_room(request, 1):
                request.computed = start + 1
                request.pending = pending + 1
                decode.append(Row(request, start, 1, True))
                draft.budget -= 1

    def _continue_prompt(self, request: Request, draft: Draft, *, reserved: int) -> None:
        if draft.first is None:
            draft.first = request
            self._take(request, draft)
            budget = draft.budget - reserved
            count = self._make_room(request, self._chunk(request, budget - self._asked_by_others(request, budget // 2)))
            if count:
                self._add_chunk(request, count, draft)
        else:
            draft.others.append(request)
        draft.promised += self.blocks.pages_for(len(request)) - len(request.pages)

    def _asked_by_others(self, first: Request, most: int) -> int:
        """Prompt tokens that others than `first` would like to have in this step, but no more than `most`."""
        running = (request.total - request.computed for request in self.running if request is not first)
        waiting = (len(request) for request in itertools.islice(self.waiting, len(self._slots)))
        asked = 0
        for left in itertools.chain((left for left in running if left > 1), waiting):
            asked += left
            if asked >= most:
                return most
        return asked

    def _start_waiting(self, draft: Draft) -> None:
        blocks = self.blocks
        while self.waiting and self._slots and draft.budget > len(draft.others):
            request = self.waiting.first
            assert request.pending == 0
            hits = self.prefixes.hits(request, draft)
            copied = len(hits) * blocks.page_size == len(request)
            needed = blocks.pages_for(len(request)) - len(hits) + copied + self.prefixes.unowned(hits)
            if needed + draft.promised + len(self.running) > blocks.available:
                return
            self.waiting.pop()
            self._enter(request)
            self._take(request, draft)
            if not request.preemptions:
                self.prefix_query_tokens += len(request.prompt_ids)
            self._continue_prompt(request, draft, reserved=0)

    def _enter(self, request: Request) -> None:
        behind = bool(self.running) and next(reversed(self.running)).order > request.order
        self.running[request] = None
        if behind:
            self.running = dict.fromkeys(sorted(self.running, key=lambda r: r.order))
        request.state = State.RUNNING
        request.slot = self._slots.pop()

    def _share_rest(self, draft: Draft) -> None:
        """Pieces of the other prompts, the shortest first. They take free pages only: nobody in the step may lose its own."""
        for request in sorted(draft.others, key=lambda r: len(r) - r.computed):
            if request.state is not State.RUNNING:
                continue
            self._take(request, draft)
            self._add_what_fits(request, draft)
        # What pages shared in this step have saved goes to the first, whose row becomes longer.
        row = draft.prefill[0] if draft.prefill else None
        if row is not None and row.request is draft.first and not row.samples and self.prefill_chunk is None:
            del draft.prefill[0]
            self._add_what_fits(row.request, draft, before=row)

    def _add_what_fits(self, request: Request, draft: Draft, before: Row | None = None) -> None:
        fits = (len(request.pages) + self.blocks.available) * self.blocks.page_size - request.computed
        count = max(0, min(self._chunk(request, draft.budget), fits))
        if count or before is not None:
            self._allocate(request, count)
            self._add_chunk(request, count, draft, before)

    def _chunk(self, request: Request, budget: int) -> int:
        todo = len(request) - request.computed
        return min(todo, budget, self.prefill_chunk or todo)

    def _add_chunk(self, request: Request, count: int, draft: Draft, before: Row | None = None) -> None:
        """Books `count` tokens more of a prompt; `before`: the row of the same step that they make longer, the first."""
        start = request.computed if before is None else before.start
        request.computed += count
        samples = request.computed == len(request)
        request.pending += samples
        at = len(draft.prefill) if before is None else 0
        draft.prefill.insert(at, Row(request, start, request.computed - start, samples))
        draft.budget -= count
        draft.fresh.update(self.prefixes.register(request))

    # Pages -----------------------------------------------------------------------------------------------------------

    def _take(self, request: Request, draft: Draft) -> None:
        found = self.prefixes.take(request, self.prefixes.hits(request, draft), draft)
        if not request.preemptions:
            request.cached += found
            self.prefix_hit_tokens += found

    def _make_room(self, request: Request, count: int) -> int:
        """Allocates pages for up to `count` more tokens; preempts those behind while not one fits. Returns how many fit."""
        blocks, pages = self.blocks, request.pages
        while (fits := (len(pages) + blocks.available) * blocks.page_size - request.computed) <= 0:
            youngest = next(reversed(self.running))
            if youngest is request:
                return 0  # it keeps its pages: the older ones take them if they need to, and go on in any case
            self._preempt(youngest)
        count = min(count, fits)
        self._allocate(request, count)
        return count

    def _allocate(self, request: Request, count: int) -> None:
        pages, blocks = request.pages, self.blocks
        for _ in range(blocks.pages_for(request.computed + count) - len(pages)):
            pages.append(blocks.allocate())

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.state = State.WAITING
        request.computed = request.registered = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.push(request)

    def _leave(self, request: Request) -> None:
        del self.running[request]
        assert request.slot is not None
        self._slots.append(request.slot)
        request.slot = None
        self.blocks.release(request.pages)
        request.pages = []
