"""Faults planted into the scheduler, the pool, the engine and the worker: each must break a promise that the simulation checks.

A simulation that finds nothing proves something only if it finds these.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.engine import fake_runner
from tilewright.engine import prefixes
from tilewright.engine.blocks import BlockPool
from tilewright.engine.core import Engine
from tilewright.engine.decoding import Decoders
from tilewright.engine.groups import StartGroups
from tilewright.engine.host_pages import HostPages
from tilewright.engine.schedule import Scheduler
from tilewright.engine.waiting import WaitingQueue
from tilewright.engine.windows import Windows
from tilewright.server.link import Channel
from tilewright.server.worker import EngineWorker

__all__ = ["MUTANTS"]


def _wrapped(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[Any]:
    return patch.object(owner, name, make(getattr(owner, name)))


def _release_forgets_the_last_page() -> AbstractContextManager[Any]:
    return _wrapped(BlockPool, "release", lambda old: lambda self, pages: old(self, list(pages)[:-1]))


def _release_frees_what_others_share() -> AbstractContextManager[Any]:
    def release(self: BlockPool, pages: Any) -> None:
        for page in pages:
            if self._owners[page]:
                self._owners[page] = 0
                self._free.append(page)

    return patch.object(BlockPool, "release", release)


def _evicted_pages_can_still_be_found() -> AbstractContextManager[Any]:
    return patch.object(BlockPool, "_forget", lambda self, page: None)


def _digest_ignores_what_came_before() -> AbstractContextManager[Any]:
    return patch.object(prefixes, "page_digest", lambda parent, tokens, real=prefixes.page_digest: real(b"", tokens))


def _preempted_requests_keep_their_place() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def preempt(self: Scheduler, request: Any) -> None:
            computed = request.computed
            old(self, request)
            request.computed = max(0, computed - 1)

        return preempt

    return _wrapped(Scheduler, "_preempt", make)


def _a_slot_is_not_given_back() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def leave(self: Scheduler, request: Any) -> None:
            old(self, request)
            if request.preemptions:
                self._slots.pop()

        return leave

    return _wrapped(Scheduler, "_leave", make)


def _copies_are_dropped() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def planned(self: Scheduler) -> Any:
            step = old(self)
            return step and replace(step, copies=())

        return planned

    return _wrapped(Scheduler, "schedule", make)


def _pages_do_not_reach_the_host() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def planned(self: Scheduler) -> Any:
            step = old(self)
            return step and replace(step, out=step.out[1:])

        return planned

    return _wrapped(Scheduler, "schedule", make)


def _pages_do_not_come_back() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def planned(self: Scheduler) -> Any:
            step = old(self)
            return step and replace(step, back=step.back[1:])

        return planned

    return _wrapped(Scheduler, "schedule", make)


def _pages_of_the_host_are_not_pinned() -> AbstractContextManager[Any]:
    return patch.object(HostPages, "pin", lambda self, digests: None)


def _pages_of_the_host_are_trusted_after_a_fault() -> AbstractContextManager[Any]:
    return patch.object(HostPages, "forget", lambda self, hosts: None)


def _pages_are_trusted_after_a_fault() -> AbstractContextManager[Any]:
    return patch.object(Scheduler, "distrust", lambda self, steps: None)


def _stop_tokens_count_one_token_early() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def complete(self: Scheduler, step: Any, samples: Any) -> Any:
            found = old(self, step, samples)
            for request, (*_, token), _ in found.each():
                early = token in request.stop_ids and len(request.output_ids) == request.params.min_tokens
                if early and request.finish_reason is None:
                    self.finish(request, "stop")
            return found

        return complete

    return _wrapped(Scheduler, "complete", make)


def _prefix_hits_skip_a_page() -> AbstractContextManager[Any]:
    return _wrapped(prefixes.Prefixes, "hits", lambda old: lambda self, *args: old(self, *args)[1:])


def _aborts_are_forgotten() -> AbstractContextManager[Any]:
    return patch.object(EngineWorker, "_abort", lambda self, ids: self._keep_stepping())


def _the_engine_stops_before_its_work_is_done() -> AbstractContextManager[Any]:
    return patch.object(Engine, "has_work", property(lambda self: len(self._outputs) > 1 or bool(self._rows)))


def _last_deltas_are_lost() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def deliver(self: EngineWorker, deltas: Any, *rest: Any) -> None:
            old(self, [d for d in deltas if d.finish_reason != "length"], *rest)

        return deliver

    return _wrapped(EngineWorker, "_deliver", make)


def _deltas_come_out_of_order() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        async def take(self: Channel) -> Any:
            return list(reversed(await old(self)))

        return take

    return _wrapped(Channel, "take", make)


def _newest_first() -> AbstractContextManager[Any]:
    """The oldest may starve, and the order of arrival is lost; answers stay right."""

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def planned(self: Scheduler) -> Any:
            self.waiting._requests.reverse()
            return old(self)

        return planned

    return _wrapped(Scheduler, "schedule", make)


def _deadlines_are_forgotten() -> AbstractContextManager[Any]:
    return patch.object(WaitingQueue, "overdue", lambda self: [])


def _everybody_is_given_up_at_once() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def overdue(self: WaitingQueue) -> Any:
            return [(request, 1.0) for request in self if request.max_wait_s is not None and not request.preemptions]

        return overdue

    return _wrapped(WaitingQueue, "overdue", make)


def _priorities_are_ignored() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def add(self: Scheduler, *requests: Any) -> None:
            for request in requests:
                request.order = (0, request.order[1])
            old(self, *requests)

        return add

    return _wrapped(Scheduler, "add", make)


def _a_faulty_row_fails_its_neighbours() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def withdraw(self: Scheduler, step: Any, request: Any) -> Any:
            kept = old(self, step, request)
            if kept is not None:
                kept.rows[0].request.stop_ids = range(257)
            return kept

        return withdraw

    return _wrapped(Scheduler, "withdraw", make)


def _pages_of_a_withdrawn_row_are_trusted() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def withdraw(self: Scheduler, *given: Any) -> Any:
            with patch.object(self, "_spoil", lambda pages, ended: None):
                return old(self, *given)

        return withdraw

    return _wrapped(Scheduler, "withdraw", make)


def _accepted_drafts_are_not_counted_as_computed() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def take(self: Decoders, step: Any, counts: Any) -> Any:
            here = old(self, step, counts)
            self.computed[step.slots[here]] -= counts[here] - 1
            return here

        return take

    return _wrapped(Decoders, "take", make)


def _drafts_are_written_beyond_the_pages() -> AbstractContextManager[Any]:
    def reserve(self: Scheduler, request: Any, count: int) -> int:
        self.decoders.cells[request.slot] += count
        return count

    return patch.object(Scheduler, "reserve", reserve)


def _a_wrong_draft_is_believed() -> AbstractContextManager[Any]:
    return patch.object(fake_runner, "agreed", lambda drafts, samples: len(drafts) + 1)


def _windows_are_left_a_page_early() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, position: old(self, position) + 1

    return _wrapped(Windows, "first", make)


def _a_windowed_page_is_not_given_back() -> AbstractContextManager[Any]:
    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, request: old(self, request)[1:]

    return _wrapped(Windows, "held", make)


def _a_group_waits_until_nobody_runs() -> AbstractContextManager[Any]:
    return patch.object(StartGroups, "holds", lambda self, first, running, *, prompts: self._left is not None and running > 0)


@contextmanager
def _a_stopped_engine_tells_nobody() -> Iterator[None]:
    with patch.object(EngineWorker, "_fail", lambda self, error: None):
        yield


MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    make.__name__.strip("_").replace("_", " "): make
    for make in (
        _release_forgets_the_last_page, _release_frees_what_others_share, _evicted_pages_can_still_be_found,
        _digest_ignores_what_came_before, _preempted_requests_keep_their_place, _a_slot_is_not_given_back,
        _copies_are_dropped, _pages_do_not_reach_the_host, _pages_do_not_come_back, _pages_of_the_host_are_not_pinned,
        _pages_of_the_host_are_trusted_after_a_fault, _pages_are_trusted_after_a_fault, _stop_tokens_count_one_token_early,
        _prefix_hits_skip_a_page, _aborts_are_forgotten, _the_engine_stops_before_its_work_is_done, _last_deltas_are_lost,
        _deltas_come_out_of_order, _newest_first, _deadlines_are_forgotten, _everybody_is_given_up_at_once,
        _priorities_are_ignored, _a_faulty_row_fails_its_neighbours, _pages_of_a_withdrawn_row_are_trusted,
        _accepted_drafts_are_not_counted_as_computed, _drafts_are_written_beyond_the_pages, _a_wrong_draft_is_believed,
        _a_stopped_engine_tells_nobody, _windows_are_left_a_page_early, _a_windowed_page_is_not_given_back,
        _a_group_waits_until_nobody_runs,
    )
}  # fmt: skip
"""What is wrong -> a context in which it is."""
