"""`Pair` drives a scheduler and a fake runner as the engine does, and checks each step.

No page is lost or owned twice, the queues stay in the order of arrival, the bounds hold, and the oldest request always goes on.
"""

from collections import Counter

from tests.engine.fake_runner import FakeRunner, expected
from tilewright.engine.blocks import page_digest
from tilewright.engine.request import Request, SamplingParams, State
from tilewright.engine.schedule import Scheduler
from tilewright.engine.step import Step

VOCAB = 50


def request(name: str, prompt: list[int], max_tokens: int = 4, *, eos: tuple[int, ...] = (), **params) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, seed=1, **params), eos_ids=eos)


def check(scheduler: Scheduler) -> None:
    """The page and queue invariants."""
    blocks = scheduler.blocks
    owners = Counter(page for r in scheduler.running for page in r.pages)
    assert [blocks.owners(page) for page in range(blocks.num_pages)] == [owners[p] for p in range(blocks.num_pages)]
    assert blocks.available == blocks.num_pages - len(owners)
    slots = [r.slot for r in scheduler.running]
    assert len(set(slots)) == len(slots) <= scheduler.max_seqs
    for r in scheduler.running:
        assert r.state is State.RUNNING
        assert len(set(r.pages)) == len(r.pages) == blocks.pages_for(r.computed)
        assert r.computed < r.total <= r.computed + 1 or not r.pending
    for r in scheduler.waiting:
        assert (r.state, r.pages, r.slot, r.computed) == (State.WAITING, [], None, 0)


def check_digests(scheduler: Scheduler) -> None:
    """Pages are known to the prefix cache by the tokens that are in them, and all that are full are known."""
    size = scheduler.blocks.page_size
    for r in scheduler.running:
        tokens = r.prompt_ids + r.output_ids
        chain = [r.salt]
        for first in range(0, len(tokens) - size + 1, size):
            chain.append(page_digest(chain[-1], tokens[first : first + size]))
        assert r.digests == chain[1 : 1 + len(r.digests)]
        if scheduler.blocks.prefix_cache and r.decoders is not None:
            assert r.computed // size - r.registered <= (r.computed % size == 0), (r, r.computed, r.registered)


def start_again(scheduler: Scheduler) -> None:
    """Every running request gives up its pages, as for want of them. Nothing may be in flight."""
    for running in reversed(tuple(scheduler.running)):
        scheduler._preempt(running)


class Pair:
    """A scheduler and a runner, stepped as the engine steps them."""

    def __init__(self, scheduler: Scheduler, *, asynchronous: bool = False):
        blocks = scheduler.blocks
        self.scheduler = scheduler
        self.runner = FakeRunner(blocks.num_pages, blocks.page_size, vocab_size=VOCAB, asynchronous=asynchronous)
        self.in_flight: list[tuple[Step, int]] = []
        self.arrivals: list[Request] = []

    def add(self, *requests: Request) -> None:
        self.scheduler.add(*requests)
        self.arrivals += requests

    def step(self, fault: int | None = None) -> Step | None:
        """One round. `fault`: the runner refuses a row, that of this number, and the request of that row ends."""
        blocked = {r for r in self.scheduler.running if r.pending}
        step = self.scheduler.schedule()
        check(self.scheduler)
        if len(self.arrivals) % 2 == 0:  # not always: to read tokens moves them
            check_digests(self.scheduler)
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        wanted = sorted((r for r in self.arrivals if r.state is not State.FINISHED), key=lambda r: r.params.priority)
        assert sorted(queued, key=lambda r: r.params.priority) == wanted, "not in the order of arrival"
        if step is not None:
            self.check_step(step, blocked)
            if fault is not None:
                guilty = step.rows[fault % len(step.rows)].request
                step = self.scheduler.withdraw(step, guilty)
                self.scheduler.finish(guilty, "error")
                check(self.scheduler)
        if step is not None:
            self.in_flight.append((step, self.runner.launch(step)))
        else:
            assert blocked or not queued or fault is not None, "nothing is in flight and nothing is scheduled"
        while len(self.in_flight) > (step is not None and self.runner.asynchronous):
            done, ticket = self.in_flight.pop(0)
            self.scheduler.complete(done, self.runner.collect(ticket))
            check(self.scheduler)
        return step

    def check_step(self, step: Step, blocked: set[Request]) -> None:
        counts = [row.count for row in step.rows]
        assert sum(counts) <= self.scheduler.max_tokens_per_step
        assert min(counts) > 0
        assert len({row.request for row in step.rows}) == len(step.rows)
        if self.scheduler.prefill_chunk is not None:
            assert max(counts) <= self.scheduler.prefill_chunk
        oldest = min((r for r in self.arrivals if r.state is not State.FINISHED), key=lambda r: r.order)
        if oldest not in blocked and oldest.state is State.RUNNING:
            assert oldest in {row.request for row in step.rows}, "the oldest does not progress"

    def finish(self, most_steps: int = 3000) -> None:
        for _ in range(most_steps):
            if self.step() is None and not self.in_flight and not self.scheduler.running and not self.scheduler.waiting:
                break
        else:
            raise AssertionError(f"not finished after {most_steps} steps")
        assert self.scheduler.blocks.available == self.scheduler.blocks.num_pages

    def check_outputs(self, eos: tuple[int, ...] = ()) -> None:
        for r in self.arrivals:
            tokens = expected(r.prompt_ids, r.params, r.seed, vocab_size=VOCAB, eos_ids=eos)
            if r.finish_reason in ("abort", "error"):
                assert r.output_ids == tokens[: len(r.output_ids)]
            else:
                assert r.output_ids == tokens, r
                assert r.finish_reason == (
                    "stop" if tokens[-1] in r.stop_ids and len(tokens) > r.params.min_tokens else "length"
                )


def rows(step: Step | None) -> list[tuple[str, int, int, bool]]:
    assert step is not None
    return [(row.request.id, row.start, row.count, row.samples) for row in step.rows]
