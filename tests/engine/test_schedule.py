"""What the scheduler promises, over a fake model whose every token depends on every cell of the pages it was given."""

import random
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.fake_runner import expected, scheduler
from tests.engine.pair import VOCAB, Pair, check, request, rows, start_again
from tilewright.engine.blocks import page_digest
from tilewright.engine.request import QueueFull, Request, RequestTooLong, SamplingParams, State
from tilewright.engine.step import Step, StepResult


def test_decode_first_then_prompts_in_pieces():
    pair = Pair(scheduler(budget=10))
    pair.add(request("a", [1, 2]))
    assert rows(pair.step()) == [("a", 0, 2, True)]
    pair.add(request("b", list(range(12))), request("c", [7, 8, 9]))
    assert rows(pair.step()) == [("a", 2, 1, True), ("b", 0, 6, False), ("c", 0, 3, True)]
    assert rows(pair.step()) == [("a", 3, 1, True), ("c", 3, 1, True), ("b", 6, 6, True)]
    assert rows(pair.step()) == [("a", 4, 1, True), ("b", 12, 1, True), ("c", 4, 1, True)]
    assert pair.arrivals[0].finish_reason == "length"
    pair.finish()
    pair.check_outputs()


@pytest.mark.parametrize(("chunk", "counts"), [(16, [16, 16, 8, 1]), (64, [40, 1]), (None, [40, 1])])
def test_chunk_sizes(chunk, counts):
    pair = Pair(scheduler(budget=100, chunk=chunk))
    pair.add(request("a", list(range(40)), 2))
    assert [rows(pair.step())[0][2] for _ in counts] == counts
    pair.check_outputs()


def test_the_oldest_prompt_has_half_of_a_step_and_the_shortest_others_the_rest():
    pair = Pair(scheduler(budget=8, chunk=6))
    pair.add(request("a", list(range(30))), request("b", list(range(5, 25))), request("c", list(range(9, 18))))
    assert rows(pair.step()) == [("a", 0, 4, False), ("c", 0, 4, False)]
    assert rows(pair.step()) == [("a", 4, 3, False), ("c", 4, 5, True)]
    pair.finish()
    pair.check_outputs()


def test_a_short_prompt_does_not_wait_for_a_long_one():
    """131,000 tokens in steps of 8,192: the 20 behind it have their first token after one step, and so have late ones."""
    pair = Pair(scheduler(20_000, 16, max_seqs=8, budget=8192, model_len=200_000))
    long = [i % 7 for i in range(131_000)]
    pair.add(
        request("long", long, 1), request("long too", [1, *long], 1), request("short", [3] * 20, 1), request("tiny", [4], 1)
    )
    assert {name for name, *_, samples in rows(pair.step()) if samples} == {"short", "tiny"}
    pair.add(request("late", [5] * 20, 1))
    step = rows(pair.step())
    assert {name for name, *_, samples in step if samples} == {"late"}
    assert next(count for name, _, count, _ in step if name == "long") >= 4096, "half of the step stays with the oldest"


def test_priorities_order_the_queue_and_decide_who_gives_up_pages():
    pair = Pair(scheduler(8, 4, max_seqs=2, budget=32, cache=False))
    pair.add(request("a", list(range(10)), 14, priority=1), request("b", list(range(9)), 2, priority=3))
    pair.add(request("c", list(range(8)), 14), request("d", [1], 2, priority=3))
    pair.step()
    assert [r.id for r in pair.scheduler.running] == ["c", "a"]
    while not pair.scheduler.preemptions:
        pair.step()
    assert [r.id for r in pair.scheduler.running] == ["c"]
    assert [r.id for r in pair.scheduler.waiting] == ["a", "b", "d"]
    pair.finish()
    pair.check_outputs()


def test_the_budget_holds_when_a_request_comes_back_to_its_turn():
    """All decode but one, whose prompt has what they leave."""
    pair = Pair(scheduler(max_seqs=4, budget=4, chunk=2), asynchronous=True)
    pair.add(request("h", [1], 20), request("a", list(range(25)), 2))
    pair.add(request("b", [3, 4], 20), request("c", [5, 6], 20))
    names = [[name for name, *_ in rows(pair.step())] for _ in range(10)]
    assert names[-1] == ["h", "b", "c", "a"]
    pair.finish()
    pair.check_outputs()


def test_a_prompt_does_not_start_on_pages_that_another_will_need():
    pair = Pair(scheduler(10, 4, chunk=4))
    pair.add(request("a", list(range(32))), request("b", list(range(20, 40))))
    for _ in range(5):
        pair.step()
        assert [r.id for r in pair.scheduler.running] == ["a"]
    pair.finish()
    assert pair.scheduler.preemptions == 0


def test_preemption_takes_the_youngest_and_puts_it_first_in_line():
    pair = Pair(scheduler(8, 4, budget=32, cache=False))
    pair.add(request("a", list(range(10)), 14), request("b", list(range(10, 20)), 14), request("c", list(range(8)), 4))
    pair.step()
    assert [r.id for r in pair.scheduler.running] == ["a", "b"]
    while not pair.scheduler.preemptions:
        pair.step()
    assert [r.id for r in pair.scheduler.running] == ["a"]
    assert [r.id for r in pair.scheduler.waiting] == ["b", "c"]
    pair.finish()
    assert pair.arrivals[1].preemptions == 1
    pair.check_outputs()


REFUSED = [
    (list(range(5)), 6, RequestTooLong, "5 tokens and max_tokens is 6, together 11; the model takes 10"),
    ([], 1, ValueError, "no tokens"),
]


@pytest.mark.parametrize(("prompt", "max_tokens", "error", "words"), REFUSED)
def test_refused(prompt, max_tokens, error, words):
    with pytest.raises(error, match=words):
        scheduler(model_len=10).add(request("a", prompt, max_tokens))


def test_the_model_length_bounds_a_request_to_the_token():
    pair = Pair(scheduler(model_len=10))
    pair.add(request("a", list(range(5)), 5), request("b", list(range(9)), 1))
    pair.finish()
    pair.check_outputs()


def test_the_pool_bounds_a_request_to_the_token():
    pair = Pair(scheduler(3, 4, cache=False))
    with pytest.raises(RequestTooLong, match="together 14; the whole page pool holds 12"):
        pair.add(request("a", list(range(8)), 6))
    pair.add(request("a", list(range(8)), 5), request("b", list(range(12)), 1))
    pair.finish()
    pair.check_outputs()


def test_the_queue_is_bounded_and_takes_all_or_none():
    sched = scheduler(max_seqs=1, waiting=2)
    pair = Pair(sched)
    pair.add(request("a", [1]), request("b", [2]))
    with pytest.raises(QueueFull, match="2 requests wait, 1 more asked for, 2 may wait") as error:
        sched.add(request("c", [3]))
    assert error.value.retry_after_s == 1.0, "nothing is known yet"
    pair.finish()
    with pytest.raises(QueueFull):
        sched.add(*(request("d", [i]) for i in range(3)))
    assert not sched.waiting
    assert sched.live("d") == []


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("length", "copies", "computed"), [(7, 0, 3), (8, 1, 1), (9, 0, 1)])
def test_a_cached_prompt_computes_one_token_at_least(length, copies, computed, asynchronous):
    pair = Pair(scheduler(), asynchronous=asynchronous)
    prompt = list(range(length))
    pair.add(request("a", prompt))
    pair.finish()
    pair.add(request("b", prompt))
    step = pair.step()
    assert step is not None
    assert rows(step) == [("b", length - computed, computed, True)]
    assert len(step.copies) == copies
    pair.finish()
    assert pair.arrivals[1].cached == length - computed
    pair.check_outputs()


def test_the_last_page_is_computed_where_no_page_is_left_for_its_copy():
    pair = Pair(scheduler(2, 4))
    for name in "ab":
        pair.add(request(name, list(range(8)), 1))
        pair.finish()
    assert pair.arrivals[1].cached == 4
    pair.check_outputs()


@pytest.mark.parametrize("chunk", [None, 4, 6, 16])
@pytest.mark.parametrize("length", [31, 32, 33])
def test_samples_of_one_prompt_share_its_pages_from_the_first_step(length, chunk):
    pair = Pair(scheduler(200, 4, budget=64, chunk=chunk))
    prompt = list(range(length))
    samples = [Request("a", prompt, SamplingParams(max_tokens=6, seed=1, n=4), index=i) for i in range(4)]
    pair.add(*samples)
    while not samples[-1].output_ids:
        pair.step()
    own = {page for sample in samples for page in sample.pages}
    assert len(own) <= 7 + 4 * 3, "full pages of the prompt are held once, what follows by each"
    pair.finish()
    assert len({tuple(sample.output_ids) for sample in samples}) == 4
    pair.check_outputs()


def test_a_request_that_length_will_end_is_not_scheduled_again():
    pair = Pair(scheduler(), asynchronous=True)
    pair.add(request("a", [1, 2, 3], 2))
    assert rows(pair.step()) == [("a", 0, 3, True)]
    assert rows(pair.step()) == [("a", 3, 1, True)]
    assert pair.step() is None
    pair.check_outputs()


def test_penalties_do_not_wait_for_their_history():
    pair = Pair(scheduler(), asynchronous=True)
    pair.add(request("a", [1, 2, 3], 3, presence_penalty=0.5), request("b", [4, 5], 3))
    assert [[row.request.id for row in step.rows] for step in (pair.step(), pair.step(), pair.step()) if step] == [
        ["a", "b"]
    ] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("guilty", [0, 1, 2, 3])
def test_a_row_that_cannot_run_takes_only_those_along_that_read_its_pages(guilty, asynchronous):
    """Of three with one prefix, the second and third read the pages that the first fills in the same step; "z" is alone."""
    pair = Pair(scheduler(200, 4, max_seqs=8, budget=200), asynchronous=asynchronous)
    prefix = list(range(16))
    pair.add(*(request(name, [*prefix, i], 4) for i, name in enumerate("abc")), request("z", [40] * 9, 4))
    before = [r.preemptions for r in pair.arrivals]
    names = [row.request.id for row in pair.scheduler.schedule().rows]
    assert names == ["a", "b", "c", "z"]
    pair = Pair(scheduler(200, 4, max_seqs=8, budget=200), asynchronous=asynchronous)
    pair.add(*(request(name, [*prefix, i], 4) for i, name in enumerate("abc")), request("z", [40] * 9, 4))
    pair.step(fault=guilty)
    again = [r.preemptions for r in pair.arrivals]
    assert again == ([0, 1, 1, 0] if guilty == 0 else before)
    pair.finish()
    assert [r.finish_reason == "error" for r in pair.arrivals] == [i == guilty for i in range(4)]
    pair.check_outputs()


def test_what_flies_when_a_text_ends_is_dropped():
    pair = Pair(scheduler(), asynchronous=True)
    probe = expected([1, 2], SamplingParams(max_tokens=6), 1, vocab_size=VOCAB)
    eos = (probe[2],)
    pair.add(request("a", [1, 2], 6, eos=eos))
    for _ in range(4):
        pair.step()
    ended = pair.arrivals[0]
    assert (ended.finish_reason, ended.output_ids) == ("stop", probe[: probe.index(eos[0]) + 1])
    assert ended.pages == []
    assert pair.scheduler.blocks.available == 64, "its pages are free while its row is in flight"
    pair.add(request("b", [3, 4, 5]))
    pair.finish()
    pair.check_outputs(eos)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_abort_at_any_time(asynchronous):
    pair = Pair(scheduler(max_seqs=2), asynchronous=asynchronous)
    pair.add(*(request(name, list(range(i, i + 9)), 20) for i, name in enumerate("abcd")))
    pair.step()
    pair.step()
    assert [r.id for r in pair.scheduler.abort("a")] == ["a"]  # running, in flight where asynchronous
    assert [r.id for r in pair.scheduler.abort("d")] == ["d"]  # waiting
    assert pair.scheduler.abort("nobody") == []
    check(pair.scheduler)
    pair.finish()
    stats = pair.scheduler.stats()
    assert (stats.finished, stats.aborted, stats.pages_used) == (2, 2, 0)
    pair.check_outputs()


def test_pages_are_known_again_after_a_request_has_started_again():
    pair = Pair(scheduler())
    pair.add(request("a", list(range(10)), 4))
    pair.step()
    start_again(pair.scheduler)
    pair.finish()
    pair.add(request("b", list(range(10))))
    pair.finish()
    assert [r.cached for r in pair.arrivals] == [0, 8]
    pair.check_outputs()


def test_a_page_that_an_answer_fills_is_its_adapters_alone():
    """Also the first, of a prompt that is shorter than a page."""
    pair = Pair(scheduler(50, 4))
    salted = Request("a", [1, 2], SamplingParams(max_tokens=9, seed=1), adapter=(1, b"salt"))
    pair.add(salted)
    pair.finish()
    tokens, blocks = salted.tokens(0, 4), pair.scheduler.blocks
    assert blocks.find(page_digest(b"salt", tokens)) is not None
    assert blocks.find(page_digest(b"", tokens)) is None


def test_bounds_of_the_scheduler_are_checked():
    with pytest.raises(ValueError, match="max_tokens_per_step is 3, wanted at least max_seqs, 4"):
        scheduler(budget=3)
    with pytest.raises(ValueError, match="prefill_chunk=0"):
        scheduler(chunk=0)


class Life(RuleBasedStateMachine):
    """Random arrivals with common prefixes, aborts and steps, over a pool that is too small for what is asked."""

    @initialize(
        asynchronous=st.booleans(),
        chunk=st.sampled_from([None, 1, 3, 16]),
        pages=st.integers(7, 14),
        cache=st.booleans(),
        max_seqs=st.integers(1, 5),
        extra=st.integers(0, 20),
    )
    def begin(self, asynchronous, chunk, pages, cache, max_seqs, extra):
        sched = scheduler(pages, 3, max_seqs=max_seqs, budget=max_seqs + extra, chunk=chunk, cache=cache)
        self.pair = Pair(sched, asynchronous=asynchronous)
        self.eos = (3, 11, 19)

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(1, 12),
        tail=st.integers(0, 1),
        max_tokens=st.integers(1, 7),
        min_tokens=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, 1, 7]),
        n=st.integers(1, 3),
    )
    def add(self, prefix, length, tail, max_tokens, min_tokens, priority, n):
        prompt = [prefix + i % 5 for i in range(length)] + [tail]
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), seed=5, priority=priority, n=n)
        name = str(len(self.pair.arrivals))
        self.pair.add(*(Request(name, prompt, params, index=i, eos_ids=self.eos) for i in range(n)))

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.pair.step()

    @rule(row=st.integers(0, 5))
    def step_with_a_fault(self, row):
        self.pair.step(fault=row)

    @rule(data=st.data())
    def abort(self, data):
        alive = sorted({r.id for r in self.pair.arrivals if r.state is not State.FINISHED})
        if alive:
            self.pair.scheduler.abort(data.draw(st.sampled_from(alive)))

    @rule()
    def all_start_again(self):
        if not self.pair.in_flight:
            start_again(self.pair.scheduler)

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "pair"):
            check(self.pair.scheduler)

    def teardown(self):
        if hasattr(self, "pair"):
            self.pair.finish()
            self.pair.check_outputs(self.eos)


Life.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
test_life = Life.TestCase


def test_scheduling_256_requests_costs_well_under_a_millisecond(capsys):
    """The host's work of a decode step beside the device's. The bound is on the best of 200: the machine may be busy."""
    sched = scheduler(40_000, 16, max_seqs=256, budget=2048, model_len=4000)
    rng = random.Random(0)
    sched.add(*(request(str(i), [rng.randrange(VOCAB) for _ in range(500)], 2000) for i in range(256)))

    def complete(step: Step) -> None:
        sched.complete(step, StepResult.of([[7] * row.samples for row in step.rows]))

    while sched.waiting or any(r.total - r.computed > 1 for r in sched.running):
        step = sched.schedule()
        assert step is not None
        complete(step)
    costs = {}
    for depth, name in ((0, "sync"), (1, "async")):
        flying: list[Step] = []
        times = []
        for _ in range(200):
            start = time.thread_time()
            step = sched.schedule()
            assert step is not None
            assert len(step.requests) == 256
            flying.append(step)
            while len(flying) > depth:
                done = flying.pop(0)
                sched.complete(done, StepResult(np.full(256, 7), np.ones(256, np.int64)))
            times.append(time.thread_time() - start)
        for step in flying:
            complete(step)
        costs[name] = min(times[depth:]) * 1e6
    with capsys.disabled():
        print(f"\n256 decoding requests, schedule + complete: {costs['sync']:.0f} us, async {costs['async']:.0f} us")
    assert max(costs.values()) < 1000
