"""The requests in the engine and their resources: queues, slots and pages.

Pure Python and numpy: no tensors, no model. This module accepts requests, ends them, and decides which request gives up its
pages for another. When a request ends, its pages and slot are free at once, even if its row is still in flight, because the
device runs steps in order.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from tilewright.engine.blocks import BlockPool
from tilewright.engine.decoding import Decoders
from tilewright.engine.groups import StartGroups
from tilewright.engine.outputs import EngineStats
from tilewright.engine.prefixes import Prefixes
from tilewright.engine.request import Request, RequestTooLong, State
from tilewright.engine.step import Row, Step
from tilewright.engine.waiting import WaitingQueue
from tilewright.engine.windows import Windows

__all__ = ["Tenants"]

COUNTERS = ("preemptions", "finished", "aborted", "failed", "expired")
COUNTERS += ("prompt_tokens", "generated_tokens", "prefix_query_tokens", "prefix_hit_tokens")
COUNTERS += ("drafted_tokens", "accepted_tokens", "forced_tokens")
_LEASES = itertools.count()
"""Shared by all engines in the process, so that a runner never confuses the requests of two engines."""


class Tenants:
    """Queues, pages and slots of one engine.

    Args:
        max_seqs: most requests that run at once; the number of slots.
        max_tokens_per_step: most tokens of one step; at least `max_seqs`, so that every running request fits.
        max_model_len: most prompt and generated tokens together, per request.
        max_waiting: most requests that may wait at once.
        prefill_chunk: most prompt tokens of one request in one step; None: no limit.
        max_samples: most samples of one step, if this is more than `max_seqs`; the difference is for drafts.
        windows: the pages of windowed layers; None: all layers use the same pages.
        clock: returns the current time in seconds; for tests.

    The speculator sets `drafts` before `schedule`: guesses of the next samples; and `forced`: the requests whose drafts a
    grammar has made.
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
        max_samples: int | None = None,
        windows: Windows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if max_seqs < 1 or max_waiting < 1 or (prefill_chunk is not None and prefill_chunk < 1):
            got = f"max_seqs={max_seqs}, max_waiting={max_waiting}, prefill_chunk={prefill_chunk}"
            raise ValueError(f"{got}; wanted at least 1 each (prefill_chunk may be None)")
        if max_tokens_per_step < max_seqs:
            got = f"max_tokens_per_step is {max_tokens_per_step}, wanted at least max_seqs, {max_seqs}"
            raise ValueError(f"{got}: every running request gets a token each step")
        self.blocks = blocks
        self.windows = windows
        self.prefixes = Prefixes(blocks, windows)
        self.max_seqs = max_seqs
        self.max_tokens_per_step = max_tokens_per_step
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self.prefill_chunk = prefill_chunk
        self.max_samples = max(max_seqs, max_samples or 0)
        self._clock = clock
        self._arrivals = itertools.count()
        self.preemptions = self.finished = self.aborted = self.failed = self.expired = 0
        self.prompt_tokens = self.generated_tokens = self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self.drafted_tokens = self.accepted_tokens = self.forced_tokens = 0
        self._clear()

    def _clear(self) -> None:
        self.running: dict[Request, None] = {}  # a set, by `Request.order`
        self.waiting = WaitingQueue(self.max_waiting, self._clock)
        self._groups = StartGroups()
        self._prompts: dict[Request, None] = {}  # the running requests whose prompts are being computed, in the same order
        self.decoders = Decoders(self.max_seqs, self.blocks.page_size, registers=self.blocks.prefix_cache)
        self.drafts: Mapping[Request, Sequence[int]] = {}
        self.forced: set[Request] = set()
        self._slots = list(range(self.max_seqs - 1, -1, -1))
        self._by_id: dict[str, list[Request]] = {}

    # In and out ------------------------------------------------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Add requests to the waiting queue, all of them or none.

        Raises:
            RequestTooLong: a request can never run: its prompt and max_tokens exceed the model's length or the whole pool.
            QueueFull: too many requests wait already, or the first would wait for longer than its limit.
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
        # The keys and values of the last sample are never needed.
        if self.blocks.pages_for(prompt + asked - 1) > self.blocks.num_pages:
            holds = self.blocks.num_pages * self.blocks.page_size
            raise RequestTooLong(f"{got}; the whole page pool holds {holds}. Lower them, or give the cache more memory")

    def live(self, request_id: str) -> list[Request]:
        """The unfinished requests with this id."""
        return list(self._by_id.get(request_id, ()))

    def abort(self, request_id: str) -> list[Request]:
        """End the unfinished requests with this id, including those in flight; returns them: none for an unknown id."""
        requests = self.live(request_id)
        for request in requests:
            self.finish(request, "abort")
        return requests

    def expire(self) -> list[tuple[Request, float]]:
        """End the requests that have waited too long, and all other samples with their ids.

        Returns (request, after how many seconds to try again).
        """
        late = [(sample, retry_s) for request, retry_s in self.waiting.overdue() for sample in self.live(request.id)]
        for request, _ in late:
            self.finish(request, "expired")
        return late

    def finish(self, request: Request, reason: str) -> None:
        """End a request: "stop", "length", "abort", "error" or "expired". Its pages and slot are free at once."""
        if request.state is State.RUNNING:
            self._leave(request)
            self.waiting.ended(self._clock() - request.started_s)
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
        """Abort all requests and free all pages and slots, whatever state an interrupt has left. Returns the requests."""
        requests = [request for siblings in self._by_id.values() for request in siblings]
        for request in requests:
            if request.decoders is not None:
                self.decoders.leave(request)
            request.state, request.finish_reason, request.slot = State.FINISHED, "abort", None
            request.pages.clear()
            request.window_pages, request.behind = [], 0
        self.aborted += len(requests)
        self._clear()
        self.blocks.reset()
        if self.windows is not None:
            self.windows.pool.reset()
        return requests

    def distrust(self, steps: Sequence[Step]) -> None:
        """Discard the content of the pages of steps that failed. Other requests that share such a page start again; none of
        these may be in flight."""
        rows = [row for step in steps for row in step.rows]
        spoiled = {page for row in rows for page in self._written(row)}.union(*(step.fills for step in steps))
        self.blocks.host.forget(host for step in steps for _, host in step.out)
        self._spoil(spoiled, {row.request for row in rows})

    def withdraw(self, step: Step, request: Request) -> Step | None:
        """Remove the row of `request` from a step that was not launched; the caller ends the request. Rows that would have read
        pages written by that row are also removed, and their requests start again. Returns the rest; None if no row is left."""
        out, spoiled = {request}, {page for row in step.rows if row.request is request for page in self._written(row)}
        found = True
        while found:
            readers = [r for r in step.rows if r.request not in out and self._holds(r.request, spoiled)]
            found = bool(readers)
            out.update(row.request for row in readers)
            spoiled.update(page for row in readers for page in self._written(row))
        for row in step.rows:
            row.request.pending -= row.request in out and row.samples
        self._spoil(spoiled, {request})
        kept = tuple(row for row in step.rows if row.request not in out)
        if not kept:
            self.blocks.host.give_back(step.out, step.back)
            return None
        return Step.of(kept, copies=step.copies, fills=step.fills - spoiled, out=step.out, back=step.back)

    def _written(self, row: Row) -> list[int]:
        """The pages that a row writes to; windowed pages as ~page, as in all sets of pages here."""
        windowed = () if self.windows is None else self.windows.written(row.request, row.start)
        return [*row.request.pages[row.start // self.blocks.page_size :], *windowed]

    def _holds(self, request: Request, pages: set[int]) -> bool:
        shares = self.windows is not None and self.windows.shares(request, pages)
        return shares or not pages.isdisjoint(request.pages)

    def _spoil(self, pages: set[int], ended: set[Request]) -> None:
        self.blocks.forget(page for page in pages if page >= 0)
        if self.windows is not None:
            self.windows.pool.forget(~page for page in pages if page < 0)
        for request in reversed(tuple(self.running)):
            if request not in ended and self._holds(request, pages):
                self._preempt(request)

    @property
    def available(self) -> int:
        """Number of pages that can be allocated of each kind."""
        pages = self.blocks.available
        return pages if self.windows is None else min(pages, self.windows.pool.available)

    def page_map(self, per_cell: int = 1) -> list[tuple[str | int, int]]:
        """(state, owners) for each cell of `per_cell` pages; state is "free", "cached" or the slot of the first owner."""
        return self.blocks.page_map(((request.slot, request.pages) for request in self.running), per_cell)

    def stats(self) -> EngineStats:
        """Queues, pages and counters, now."""
        blocks = self.blocks
        windowed = {} if self.windows is None else self.windows.stats()
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages_total=blocks.num_pages,
            pages_used=blocks.num_pages - blocks.available,
            pages_cached=blocks.cached,
            host_pages_total=blocks.host.num_pages,
            host_pages_used=len(blocks.host),
            pages_out=blocks.host.pages_out,
            pages_in=blocks.host.pages_in,
            **windowed,
            **{name: getattr(self, name) for name in COUNTERS},
        )

    # Slots and pages -------------------------------------------------------------------------------------------------

    def _enter(self, request: Request) -> None:
        behind = bool(self.running) and next(reversed(self.running)).order > request.order
        self.running[request] = None
        self._prompts[request] = None
        if behind:
            self.running = dict.fromkeys(sorted(self.running, key=lambda r: r.order))
            self._prompts = dict.fromkeys(sorted(self._prompts, key=lambda r: r.order))
        request.state = State.RUNNING
        request.slot, request.lease = self._slots.pop(), next(_LEASES)
        self.decoders.lease[request.slot] = request.lease

    def _make_room(self, request: Request, count: int) -> int:
        """Allocate pages for up to `count` more tokens; while none fits, preempt later requests. Returns how many fit."""
        self._leave_behind(request)
        while (fits := self._fitting(request, self.available)) <= 0:
            youngest = next(reversed(self.running))
            if youngest is request:
                return 0  # it keeps its pages; older requests can take them and always progress
            self._preempt(youngest)
        count = min(count, fits)
        self._allocate(request, count)
        return count

    def reserve(self, request: Request, count: int) -> int:
        """Give a decoding request pages for up to `count` more tokens, but leave one page for each running request for the next
        step. Returns how many tokens fit."""
        self._leave_behind(request)
        count = min(count, self._fitting(request, max(0, self.available - len(self.running))))
        if count > 0:
            self._allocate(request, count)
        return max(0, count)

    def _fitting(self, request: Request, pages: int) -> int:
        """For how many more tokens a request has room if it gets this many pages more."""
        return (len(request.pages) + pages) * self.blocks.page_size - request.computed

    def _leave_behind(self, request: Request) -> None:
        """Release the windowed pages that the request's next row does not need; call this before it gets more pages."""
        if self.windows is not None:
            self.windows.leave_behind(request, request.computed)

    def _allocate(self, request: Request, count: int) -> None:
        pages, blocks = request.pages, self.blocks
        more = blocks.pages_for(request.computed + count) - len(pages)
        if more > 0:
            pages += blocks.allocate_many(more)
        if self.windows is not None:
            request.window_pages += self.windows.pool.allocate_many(more)
        if request.decoders is not None:
            self.decoders.grown(request)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.state = State.WAITING
        request.computed = request.registered = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.push(request)

    def _leave(self, request: Request) -> None:
        del self.running[request]
        self._prompts.pop(request, None)
        assert request.slot is not None
        self.decoders.leave(request)
        self._slots.append(request.slot)
        request.slot = None
        self.blocks.release(request.pages)
        request.pages = []
        if self.windows is not None:
            self.windows.leave(request)
