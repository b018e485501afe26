"""Continuous batching: which tokens of which requests go through the model in the next step.

Scheduling depends only on the queues: no tensors, no model. `schedule()` makes a step and updates all counts as if the step had
run; `complete()` adds the resulting samples. One step may be in flight while the next is scheduled, so a request may have a
`pending` sample: a token that is counted but whose value is not known yet.

Rules:
    - Requests start by priority, then first come, first served. `running` followed by `waiting` is in this order.
    - Each step contains one token for every decoding request, then chunks of prompts, up to `max_tokens_per_step`. Half of the
      tokens left for prompts go to the oldest prompt, so it never starves. The other half goes to the other prompts, shortest
      first, so that a short prompt does not wait for long ones. Tokens that one half does not need go to the other.
    - Pages are allocated on demand. If none are left, the last running request in this order gives up its pages and starts
      again later, at its place in the queue (preemption by recompute). The first request always progresses.
    - A waiting request starts when there are pages for all its known tokens, for the rest of the prompts already started,
      and one more page for each running request. Otherwise it would be preempted soon after its start.
    - If there are not enough slots or pages for all waiting requests, they start in groups, a few steps apart (`groups.py`).
    - When a cached page is given to another request, its content moves to host memory if there is room there. It still counts
      as cached: a step that needs it begins by copying it back.
    - Pages in the prefix cache are shared instead of computed, when a request starts and at each page boundary while its
      prompt is computed. This includes pages that an earlier row of the same step fills. At least one token is always computed,
      for its logits: if the cache contains all pages, the last page is copied and its last token is written into the copy.

A text may end (end-of-text token, stop string) while its next row is in flight. The result of that row is then dropped. The
request's pages and slot are free at once, because the device runs steps in order.
"""

import itertools
from dataclasses import replace
from typing import Any

from tilewright.engine.accepting import Accepted, accepted
from tilewright.engine.decoding import Crossing, Turn
from tilewright.engine.prefixes import StepPlan
from tilewright.engine.request import Request, State
from tilewright.engine.step import Row, Step, StepResult
from tilewright.engine.tenants import Tenants

__all__ = ["Row", "Scheduler", "Step"]


class Scheduler(Tenants):
    """Makes steps from the requests in `Tenants`, and accepts the results of these steps."""

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run now or everything has to wait for the result of the step in flight."""
        plan = StepPlan(self.max_tokens_per_step)
        preemptions = self.preemptions
        turn, crossing = self.decoders.turn()
        if self.windows is not None:
            for request in crossing.requests:
                self._leave_behind(request)
        if self._roomy(len(crossing.requests)):
            self._decode(turn, crossing, plan)
        else:
            turn = self._one_by_one(plan)
        if self.preemptions == preemptions:
            self._start_waiting(plan)
        self._share_rest(plan)
        self.waiting.left_over(len(self.running))
        self.blocks.release(page for page in plan.sources if page >= 0)
        if self.windows is not None:
            self.windows.pool.release(~page for page in plan.sources if page < 0)
        return self._step(turn, plan) if turn.requests or plan.prefill else None

    def _roomy(self, pages: int) -> bool:
        """Whether the pages suffice without preemption: `pages` for the decoding requests, and those of the oldest prompt."""
        first, windowed = next(iter(self._prompts), None), pages
        if first is not None:
            more = self.blocks.pages_for(len(first)) - len(first.pages) + 1
            pages, windowed = pages + more, windowed + self._windowed(more)
        return pages <= self.blocks.available and self._windows_have(windowed)

    def _windowed(self, pages: int) -> int:
        """How many windowed pages a prompt must have in order to continue, if it will need `pages` of them in all."""
        return 0 if self.windows is None else min(pages, self.windows.most)

    def _windows_have(self, pages: int) -> bool:
        return self.windows is None or pages <= self.windows.pool.available

    def _decode(self, turn: Turn, crossing: Crossing, plan: StepPlan) -> None:
        requests = crossing.requests
        if requests:
            pages = [self.blocks.allocate_many(len(requests))]
            for request, page in zip(requests, pages[0]):
                request.pages.append(page)
            if self.windows is not None:
                pages.append(self.windows.pool.allocate_many(len(requests)))
                for request, page in zip(requests, pages[1]):
                    request.window_pages.append(page)
            self.decoders.crossed(turn, crossing, pages)
        self.decoders.book(turn)
        plan.budget -= len(turn.requests)
        if self.drafts:
            starting = min(len(self.waiting), len(self._slots))
            samples = self.max_samples - len(self.running) - starting
            plan.budget -= self.decoders.add_drafts(turn, self.drafts, min(plan.budget - len(self._prompts), samples))
        prompts = tuple(self._prompts)
        for younger, request in zip(range(len(prompts) - 1, -1, -1), prompts):
            self._continue_prompt(request, plan, reserved=younger)

    def _one_by_one(self, plan: StepPlan) -> Turn:
        """Schedule the running requests in order; an older one may take the pages of a younger one."""
        decoding: list[Request] = []
        for younger, request in zip(range(len(self.running) - 1, -1, -1), tuple(self.running)):
            if request.state is not State.RUNNING:
                continue  # preempted for an older one in this step
            if request.decoders is None:
                self._continue_prompt(request, plan, reserved=younger)
            elif self.decoders.goes(request) and self._make_room(request, 1):
                decoding.append(request)
                plan.budget -= 1
        return self.decoders.booked(decoding)

    def _step(self, turn: Turn, plan: StepPlan) -> Step:
        step = self.decoders.step(turn)
        out, back = self.blocks.host.moves()
        others: dict[str, Any] = {}
        if plan.copies or plan.fresh or out or back:
            fills = plan.fresh.union(page for _, page in back) if back else plan.fresh
            others = {"copies": tuple(plan.copies), "fills": frozenset(fills), "out": out, "back": back}
        if plan.prefill:
            return step.followed_by(Step.of(plan.prefill), **others)
        return replace(step, **others) if others else step

    def complete(self, step: Step, result: StepResult) -> Accepted:
        """Add the samples of a step to their requests; returns those that count.

        Samples of requests that have ended meanwhile are dropped. Ends requests at their stop tokens and length limits.
        """
        for i, drafts in step.drafts.items():
            request, right = step.requests[i], int(result.counts[i]) - 1
            request.drafted += len(drafts)
            request.accepted += right
            self.drafted_tokens += len(drafts)
            self.accepted_tokens += right
            self.forced_tokens += right if request in self.forced else 0
        found = accepted(step, result, self.decoders.take(step, result))
        found.append()
        looks, full = self.decoders.eventful(found)
        if full is not None and full.requests:
            self.prefixes.register_next(full.requests, self.decoders.filled(full.slots))
        for i in looks:
            self._look(found.requests[i])
        found.looks.extend(looks)
        self.generated_tokens += found.ids.size
        return found

    def _look(self, request: Request) -> None:
        """Check whether a request ends with its newest tokens, has its first token, or has filled a page."""
        outputs = request.output_ids
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        token = outputs[-1]
        if token in request.stop_ids and len(outputs) > request.params.min_tokens:
            request.stop_reason = token if token in request.params.stop_token_ids else None
            self.finish(request, "stop")
        elif len(outputs) >= request.max_tokens:
            self.finish(request, "length")
        elif request.computed // self.blocks.page_size > request.registered:
            self.prefixes.register(request)
            if request.decoders is not None:
                self.decoders.registered(request)

    def _continue_prompt(self, request: Request, plan: StepPlan, *, reserved: int) -> None:
        if plan.first is None:
            plan.first = request
            self._take(request, plan)
            budget = plan.budget - reserved
            count = self._make_room(request, self._chunk(request, budget - self._asked_by_others(request, budget // 2)))
            if count:
                self._add_chunk(request, count, plan)
        else:
            plan.others.append(request)
        more = self.blocks.pages_for(len(request)) - len(request.pages)
        plan.promised += more
        plan.promised_windows += self._windowed(more)

    def _asked_by_others(self, first: Request, most: int) -> int:
        """Prompt tokens that other requests than `first` could use in this step, at most `most`."""
        running = (request.total - request.computed for request in self._prompts if request is not first)
        waiting = (len(request) for request in itertools.islice(self.waiting, len(self._slots)))
        asked = 0
        for left in itertools.chain((left for left in running if left > 1), waiting):
            asked += left
            if asked >= most:
                return most
        return asked

    def _start_waiting(self, plan: StepPlan) -> None:
        first = self.waiting.first if self.waiting else None
        if self._groups.holds(first, len(self.running), prompts=bool(plan.prefill or self._prompts)):
            return
        before = len(self.running)
        self._start_fitting(plan)
        no_place = self.waiting and (not self._slots or plan.budget > len(plan.others))
        self._groups.started(len(self.running) - before, len(self.running), self.waiting.first if no_place else None)

    def _start_fitting(self, plan: StepPlan) -> None:
        blocks = self.blocks
        while self.waiting and self._slots and plan.budget > len(plan.others):
            request = self.waiting.first
            assert request.pending == 0
            hits = self.prefixes.hits(request, plan)
            copied = len(hits) * blocks.page_size == len(request)
            needed = blocks.pages_for(len(request)) - len(hits) + copied + self.prefixes.unowned(hits)
            if needed + plan.promised + len(self.running) > blocks.available:
                return
            windowed = self._windowed(blocks.pages_for(len(request)) + 1)
            if not self._windows_have(windowed + plan.promised_windows + len(self.running)):
                return
            self.waiting.pop()
            self._enter(request)
            self._take(request, plan)
            if not request.preemptions:
                self.prefix_query_tokens += len(request.prompt_ids)
            self._continue_prompt(request, plan, reserved=0)

    def _share_rest(self, plan: StepPlan) -> None:
        """Add chunks of the other prompts, the shortest first. Requests that come before `plan.first` in order precede them.
        They only take free pages, so that no request in the step is preempted."""
        first = plan.first.order if plan.first is not None else (0, 0)
        for request in sorted(plan.others, key=lambda r: (r.order > first, len(r) - r.computed)):
            if request.state is not State.RUNNING:
                continue
            self._take(request, plan)
            self._add_what_fits(request, plan)
        # The tokens saved by pages that were shared in this step go to the first prompt: its row becomes longer.
        row = plan.prefill[0] if plan.prefill else None
        if row is not None and row.request is plan.first and not row.samples and self.prefill_chunk is None:
            del plan.prefill[0]
            self._add_what_fits(row.request, plan, before=row)

    def _add_what_fits(self, request: Request, plan: StepPlan, before: Row | None = None) -> None:
        if before is None:
            self._leave_behind(request)
        fits = self._fitting(request, self.available)
        count = max(0, min(self._chunk(request, plan.budget), fits))
        if count or before is not None:
            self._allocate(request, count)
            self._add_chunk(request, count, plan, before)

    def _chunk(self, request: Request, budget: int) -> int:
        todo = len(request) - request.computed
        return min(todo, budget, self.prefill_chunk or todo)

    def _add_chunk(self, request: Request, count: int, plan: StepPlan, before: Row | None = None) -> None:
        """Adds `count` more tokens of a prompt to the step. `before`: the first row of the step, which they extend."""
        start = request.computed if before is None else before.start
        request.computed += count
        samples = request.computed == len(request)
        request.pending += samples
        at = len(plan.prefill) if before is None else 0
        plan.prefill.insert(at, Row(request, start, request.computed - start, samples))
        plan.budget -= count
        plan.fresh.update(self.prefixes.register(request))
        if samples:
            del self._prompts[request]
            self.decoders.join(request)

    def _take(self, request: Request, plan: StepPlan) -> None:
        found = self.prefixes.take(request, self.prefixes.hits(request, plan), plan)
        if not request.preemptions:
            request.cached += found
            self.prefix_hit_tokens += found
